"""Loads and unloads come one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_es.engines.lora.errors import TooManyOperations

# Those that wait for the one that is under way; a further one is refused.
MAX_WAITING = 64


class Turns:
    """In the order in which they come. Belongs to one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.waiting = 0
        """With the one that is under way."""

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        """Be the only one. Raises ``TooManyOperations``."""
        if self.waiting >= MAX_WAITING:
            raise TooManyOperations(f"{MAX_WAITING} loads and unloads wait already; try again later")
        self.waiting += 1
        try:
            async with self._lock:
                yield
        finally:
            self.waiting -= 1
