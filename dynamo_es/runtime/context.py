"""The life of one request: its id, its metadata, and whether its caller still wants it (Dynamo's ``Context``)."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, MutableMapping


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
    A child (``child``) is stopped with its parent, not the other way round.
    """

    def __init__(self, id: str | None = None, metadata: dict[str, str] | None = None) -> None:  # noqa: A002
        if id is not None and not isinstance(id, str):
            raise TypeError(f"argument 'id': '{type(id).__name__}' object cannot be converted to 'PyString'")
        self._id = id if id is not None else str(uuid.uuid4())
        self.metadata = Metadata(dict(metadata) if metadata else None)
        self._stopped = asyncio.Event()
        self._killed = False
        self._children: list[Context] = []
        self.trace_id: str | None = None
        self.span_id: str | None = None
        self.parent_span_id: str | None = None

    def id(self) -> str:
        """The request's id; a random UUID if none was given."""
        return self._id

    def stop_generating(self) -> None:
        """The caller wants no more. Idempotent."""
        self._stopped.set()
        for child in self._children:
            child.stop_generating()

    def kill(self) -> None:
        """End at once, without the producer's own ending."""
        self._killed = True
        for child in self._children:
            child.kill()
        self.stop_generating()

    def is_stopped(self) -> bool:
        """After ``stop_generating`` or ``kill``."""
        return self._stopped.is_set()

    def is_killed(self) -> bool:
        """After ``kill``."""
        return self._killed

    async def async_killed_or_stopped(self) -> bool:
        """Wait until the caller wants no more; returns True."""
        return await self._stopped.wait()

    def child(self, id: str | None = None) -> Context:  # noqa: A002
        """A context that is stopped with this one; same id and metadata unless given."""
        child = Context(id if id is not None else self._id, dict(self.metadata))
        if self._stopped.is_set():
            child._stopped.set()
            child._killed = self._killed
        self._children.append(child)
        return child

    def release(self, child: Context) -> None:
        """Forget a child that is over."""
        if child in self._children:
            self._children.remove(child)

    def detached(self, id: str) -> Context:  # noqa: A002
        """A context of its own, with this metadata."""
        return Context(id, dict(self.metadata))

    def trace_headers(self) -> dict[str, str] | None:
        """W3C trace headers, or None without a trace."""
        return None
