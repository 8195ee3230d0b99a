"""Engines made of Python: Dynamo's ``PythonAsyncEngine`` and ``RoutedEngine`` (spec: services j.1)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol

from dynamo_es.frontend.contracts import TokenEngine
from dynamo_es.runtime.client import Annotated
from dynamo_es.runtime.context import Context


class RoutedEngine(Protocol):
    """Takes worker requests to workers."""

    def generate(self, request: Any, **kwargs: Any) -> Any:
        """An async iterator over annotated frames, or an awaitable of one.

        ``context`` among ``kwargs`` is the request's; closing the iterator ends the request at its worker.
        """


class TokenRoutedEngine:
    """A ``RoutedEngine`` over a ``TokenEngine``."""

    def __init__(self, engine: TokenEngine) -> None:
        self._engine = engine

    async def generate(self, request: Any, **kwargs: Any) -> AsyncGenerator[Annotated, None]:
        """Frames one by one, each annotated. Errors are raised, see ``TokenEngine``."""
        context: Context | None = kwargs.get("context")
        child = Context() if context is None else context.child()
        frames = self._engine.generate(request, child)
        try:
            async for batch in frames:
                for frame in batch:
                    yield Annotated(frame)
        except GeneratorExit:
            child.stop_generating()
            raise
        finally:
            await frames.aclose()
            if context is not None:
                context.release(child)


class PythonAsyncEngine:
    """An async generator function as an engine.

    Args:
        generator: Called with a request, and with ``context=`` if it has a parameter of that name; returns an async
            iterator.
        event_loop: Where it runs; the caller's.
    """

    def __init__(self, generator: Callable[..., AsyncIterator[Any]], event_loop: asyncio.AbstractEventLoop) -> None:
        self._generator = generator
        self._takes_context = "context" in inspect.signature(generator).parameters
        self.event_loop = event_loop

    def generate(self, request: Any, *, context: Context | None = None) -> AsyncIterator[Any]:
        """What the generator yields for a request."""
        if self._takes_context:
            return self._generator(request, context=context)
        return self._generator(request)
