"""What the frontend tells a trace of its requests: a contract. Nothing of it blocks or raises."""

from __future__ import annotations

from typing import Protocol

from dynamo_es.frontend.access_log import AccessEntry
from dynamo_es.runtime.trace_context import TraceContext
from dynamo_es.runtime.tracing import HopTracer


class RequestTrace(HopTracer, Protocol):
    """One request. ``ended`` once, last.

    Attributes:
        context: Its place in the trace.
    """

    context: TraceContext

    def body_read(self) -> None:
        """The whole request is here."""

    def preprocessed(self, prompt_tokens: int) -> None:
        """It is checked, rendered and tokenized, all since ``body_read``."""

    def ended(self, entry: AccessEntry) -> None:
        """It is over, and came to this."""


class RequestTracer(Protocol):
    """Begins the traces of requests. Belongs to one event loop."""

    def request(self, method: str, route: str, caller: TraceContext | None) -> RequestTrace:
        """A request came. ``caller``: who sent it, if it said so; its sampling decision is kept."""
