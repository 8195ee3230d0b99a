"""The request headers that inference routes read (spec/frontend.md 0.4, 2.8). Pure."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable
from typing import Any, NamedTuple

from dynamo_es.frontend.agent_context import AGENT_HEADERS, agent_context
from dynamo_es.frontend.api_keys import Caller
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.routing_headers import ROUTING_HEADERS
from dynamo_es.runtime.trace_context import TraceContext, parse_trace

MAX_METADATA_ENTRIES = 64
MAX_METADATA_BYTES = 65_536
METADATA_PREFIX = b"x-dynamo-meta-"
_PLAIN = (b"", b"identity")
_PRINTABLE = re.compile(rb"[\x20-\x7e\x80-\xff\t]{0,1024}")


class RequestHeaders(NamedTuple):
    """What counts.

    Attributes:
        content_type: Or None.
        content_length: Or None if missing or no number.
        echoed: ``x-request-id``, to be sent back; None if missing or not fit for a header.
        request_id: A UUID from ``x-dynamo-request-id``, or None.
        metadata: Entries of ``x-dynamo-meta-<key>``.
        metadata_error: 431 if there are too many; raised after the body was decoded.
        agent: The agent's session, as workers get it; None: of none.
        routing: ``ROUTING_HEADERS`` that came; None: none did.
        caller: Whose API key it was; None: there are no API keys.
        encoded: The body is compressed, or encoded in another way.
        trace: The trace that the client is in (``traceparent``, ``tracestate``); None: in none.
    """

    content_type: bytes | None
    content_length: int | None
    echoed: bytes | None
    request_id: str | None
    metadata: dict[str, str] | None
    metadata_error: ApiError | None
    agent: dict[str, Any] | None = None
    routing: dict[bytes, bytes] | None = None
    caller: Caller | None = None
    encoded: bool = False
    trace: TraceContext | None = None


def read_headers(
    headers: Iterable[tuple[bytes, bytes]], caller: Caller | None = None, metadata_prefix: bytes = METADATA_PREFIX
) -> RequestHeaders:
    """One pass over ASGI's headers (names are lower case)."""
    encoded, traced, state = False, b"", b""
    content_type = content_length = echoed = request_id = None
    metadata: dict[str, str] | None = None
    agent: dict[bytes, bytes] = {}
    routing: dict[bytes, bytes] = {}
    for name, value in headers:
        if name == b"content-type":
            content_type = value
        elif name == b"content-length":
            content_length = int(value) if value.isdigit() else None
        elif name == b"content-encoding":
            encoded = encoded or value.strip().lower() not in _PLAIN
        elif name in AGENT_HEADERS:
            agent[name] = value
        elif name.startswith(metadata_prefix):
            metadata = metadata if metadata is not None else {}
            metadata[name[len(metadata_prefix) :].decode("latin-1")] = value.decode("latin-1")
        elif not name.startswith(b"x-"):
            if name == b"traceparent":
                traced = b"twice" if traced else value  # two of them are none, says W3C
            elif name == b"tracestate":
                state = b",".join((state, value)) if state else value
        elif name == b"x-request-id":
            echoed = value if _PRINTABLE.fullmatch(value) else None
        elif name in ROUTING_HEADERS:
            routing[name] = value
        elif name == b"x-dynamo-request-id":
            request_id = _uuid(value)
    return RequestHeaders(
        content_type,
        content_length,
        echoed,
        request_id,
        metadata,
        _metadata_error(metadata),
        agent_context(agent) if agent else None,
        routing or None,
        caller,
        encoded,
        parse_trace(traced.decode("latin-1"), state.decode("latin-1")) if traced else None,
    )


def _uuid(value: bytes) -> str | None:
    try:
        return str(uuid.UUID(value.decode("ascii")))
    except ValueError:
        return None


def _metadata_error(metadata: dict[str, str] | None) -> ApiError | None:
    if metadata is None:
        return None
    if len(metadata) > MAX_METADATA_ENTRIES:
        return ApiError(431, f"metadata headers exceed the limit of {MAX_METADATA_ENTRIES} entries")
    if sum(len(key) + len(value) for key, value in metadata.items()) > MAX_METADATA_BYTES:
        return ApiError(431, f"metadata headers exceed the limit of {MAX_METADATA_BYTES} bytes")
    return None
