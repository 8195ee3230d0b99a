"""What of a request is told to a trace, and by whom: contracts. No I/O here.

Who owns a request puts a ``HopTracer`` into its ``Context``; routers tell it of each decision and what came of it. A
worker's request server has a ``HandlerTracer``. Everything belongs to one event loop, never blocks and never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from dynamo_es.runtime.trace_context import TraceContext

Attribute = str | bool | int | float | list[str]
"""Whole numbers must fit into 64 bits with a sign: ids of workers, which do not, are text."""
Facts = Callable[[], Mapping[str, Attribute]]
"""Asked for only where the trace is recorded. Never text of a prompt or an answer, never a key."""


class Hop(Protocol):
    """One attempt to have a request answered by a worker. ``dispatched`` at most once, ``ended`` once, last."""

    def dispatched(self, facts: Facts) -> TraceContext:
        """The decision is made, by these facts; the request goes out now, with what is returned."""

    def answered(self) -> None:
        """The worker sent its first items."""

    def ended(self, outcome: str, detail: str) -> None:
        """``outcome``: as in the event ``Finished``; ``detail``: its class, if it is an error."""


class HopTracer(Protocol):
    """Told of the ways that a request takes."""

    def deciding(self, stage: str, attempt: int) -> Hop:
        """A router looks for a worker from now on. ``stage``: ``prefill``, ``decode`` or empty: both."""


class Handling(Protocol):
    """A request at a worker. ``ended`` once.

    Attributes:
        context: For what the handler calls.
    """

    context: TraceContext

    def ended(self, error: str | None) -> None:
        """The handler is over; ``error``: the kind of what it failed with."""


class HandlerTracer(Protocol):
    """Told of the requests that a worker takes."""

    def handling(self, endpoint: str, request_id: str, caller: TraceContext | None) -> Handling:
        """``endpoint``'s handler begins; ``caller``: who sent the request, if it said so."""


class TraceCounts(Protocol):
    """What became of the spans of a process, for metrics."""

    @property
    def exported(self) -> int:
        """The collector took them."""

    @property
    def dropped_full(self) -> int:
        """They found no room while they waited."""

    @property
    def failed(self) -> int:
        """The collector did not take them."""
