"""The life of one request: its id, its metadata, and whether its caller still wants it (Dynamo's ``Context``)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, MutableMapping

from dynamo_es.runtime.placement import Placement
from dynamo_es.runtime.trace_context import TraceContext
from dynamo_es.runtime.tracing import HopTracer
from schemas.requests import Outcome


class Metadata(MutableMapping[str, str]):
    """Text to text. ``pop`` of a missing key without a default raises KeyError, as in Dynamo."""

    def __init__(self, items: dict[str, str] | None = None) -> None:
        self._items: dict[str, str] = {}
        for key, value in (items or {}).items():
            self[key] = value

    def __getitem__(self, key: str) -> str:
        return self._items[key]

    def __setitem__(self, key: str, value: str) -> None:
        for part in (key, value):
            if not isinstance(part, str):
                raise TypeError(
                    f"argument 'metadata': '{type(part).__name__}' object cannot be converted to 'PyString'"
                )
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Context:
    """Handed to every handler and taken by every call. Belongs to one event loop.

    ``stop_generating`` asks the producer to end its stream in order; ``kill`` ends it at once. Both reach the worker.
    A child (``child``) is stopped with its parent, not the other way round. Who wants to know where the request goes
    sets ``placement``; its children share it. ``trace``: where in a trace the request is, None: in none; ``hops`` is
    told of its ways, and ``hop_trace`` goes to the worker in place of ``trace``.
    """

    def __init__(self, id: str | None = None, metadata: dict[str, str] | None = None) -> None:  # noqa: A002
        if id is not None and not isinstance(id, str):
            raise TypeError(f"argument 'id': '{type(id).__name__}' object cannot be converted to 'PyString'")
        self._id = id if id is not None else str(uuid.uuid4())
        self.metadata = Metadata(dict(metadata) if metadata else None)
        self._stopped = False
        self._killed = False
        self.conclusion: tuple[Outcome, str] | None = None
        self.placement: Placement | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._waiters: list[asyncio.Future[bool]] = []
        self._parent_callback: Callable[[], None] | None = None
        self.trace: TraceContext | None = None
        self.hop_trace: TraceContext | None = None
        self.hops: HopTracer | None = None

    def id(self) -> str:
        """The request's id; a random UUID if none was given."""
        return self._id

    def stop_generating(self) -> None:
        """The caller wants no more. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)
        self._waiters = []

    def conclude(self, outcome: Outcome, detail: str = "") -> None:
        """As ``stop_generating``, by a caller that knows how the request ended: it has all it wanted, or the worker
        failed it. The end is recorded so, not as a cancellation; a context that was stopped before keeps its end.
        """
        if not self._stopped:
            self.conclusion = (outcome, detail)
        self.stop_generating()

    def kill(self) -> None:
        """End at once, without the producer's own ending."""
        self._killed = True
        self.stop_generating()

    def is_stopped(self) -> bool:
        """After ``stop_generating`` or ``kill``."""
        return self._stopped

    def is_killed(self) -> bool:
        """After ``kill``."""
        return self._killed

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the caller wants no more; returns True."""
        if self._stopped:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            return await waiter
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)

    def add_stop_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the context stops; at once if it has. It must not raise."""
        if self._stopped:
            callback()
        else:
            self._callbacks.append(callback)

    def remove_stop_callback(self, callback: Callable[[], None]) -> None:
        """Forget a callback; no error if it is not there."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def child(self, id: str | None = None) -> Context:  # noqa: A002
        """A context that is stopped with this one; same id and metadata unless given. ``release`` it at its end."""
        child = Context(id if id is not None else self._id, dict(self.metadata))
        child.placement = self.placement
        child.trace, child.hop_trace, child.hops = self.trace, self.hop_trace, self.hops
        child._parent_callback = lambda: child.kill() if self._killed else child.stop_generating()
        self.add_stop_callback(child._parent_callback)
        return child

    def release(self, child: Context) -> None:
        """Forget a child that is over."""
        if child._parent_callback is not None:
            self.remove_stop_callback(child._parent_callback)

    def detached(self, id: str) -> Context:  # noqa: A002
        """A context of its own, with this metadata."""
        context = Context(id, dict(self.metadata))
        context.trace = self.trace
        return context

    @property
    def trace_id(self) -> str | None:
        """W3C trace id, 32 hexadecimal digits; None without a trace."""
        return None if self.trace is None else self.trace.trace_id

    @property
    def span_id(self) -> str | None:
        """The span that this is done for, 16 hexadecimal digits."""
        return None if self.trace is None else self.trace.span_id

    @property
    def parent_span_id(self) -> str | None:
        """Its parent, if this process knows it."""
        return None if self.trace is None else self.trace.parent_span_id

    def trace_headers(self) -> dict[str, str] | None:
        """W3C trace headers for what a handler calls, or None without a trace."""
        return None if self.trace is None else self.trace.headers()
