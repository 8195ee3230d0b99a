"""W3C trace context: which trace a request belongs to, and which span caused it. Pure.

``traceparent`` is ``<version>-<trace id>-<span id>-<flags>`` in lower-case hexadecimal. A later version may append
more, of which the known part is taken; what does not follow the form is as good as not there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

SAMPLED = 1
MAX_STATE = 512
"""Characters of ``tracestate`` that are passed on; longer ones are left out whole."""
_MAX_PARENT = 256
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-[\x21-\x7e]*)?")
_STATE = re.compile(r"[\x20-\x7e]*")


class TraceContext(NamedTuple):
    """Where in a trace a request is.

    Attributes:
        trace_id: 32 hexadecimal digits.
        span_id: 16 hexadecimal digits; the span that is the parent of what comes.
        flags: Bit 0: the trace is recorded.
        state: ``tracestate`` of other systems, as it came.
        parent_span_id: The parent of that span, if this process knows it.
    """

    trace_id: str
    span_id: str
    flags: int
    state: str = ""
    parent_span_id: str | None = None

    @property
    def traceparent(self) -> str:
        """The header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"

    def headers(self) -> dict[str, str]:
        """W3C's headers for who is called next."""
        parent = {"traceparent": self.traceparent}
        return parent | {"tracestate": self.state} if self.state else parent


def parse_trace(parent: str, state: str = "") -> TraceContext | None:
    """The context that the headers ``traceparent`` and ``tracestate`` give; None if the first is none."""
    found = _PARENT.fullmatch(parent) if len(parent) <= _MAX_PARENT else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more is not None) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    kept = state if len(state) <= MAX_STATE and _STATE.fullmatch(state) else ""
    return TraceContext(trace_id, span_id, int(flags, 16) & SAMPLED, kept)
