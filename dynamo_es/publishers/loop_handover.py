"""Handing items from any thread to an event loop, in order and within a bound."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class LoopHandover(Generic[Item]):
    """Items for one loop. ``put`` from any thread; ``take`` on the loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop, max_items: int, on_items: Callable[[], None]) -> None:
        """``on_items`` is called on the loop when something waits; it calls ``take``."""
        self._loop = loop
        self._max_items = max_items
        self._on_items = on_items
        self._lock = threading.Lock()
        self._items: list[Item] = []
        self._dropped = 0

    def is_on_loop(self) -> bool:
        """Whether the caller runs on the loop, and need not hand over at all."""
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def call(self, function: Callable[[], None]) -> None:
        """Call now if on the loop, else soon, there."""
        if self.is_on_loop():
            function()
        else:
            self._loop.call_soon_threadsafe(function)

    def put(self, item: Item) -> None:
        """Hand over; beyond the bound the item is dropped and counted. Never blocks for long."""
        with self._lock:
            if len(self._items) >= self._max_items:
                self._dropped += 1
                return
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            self._loop.call_soon_threadsafe(self._on_items)

    def take(self) -> tuple[list[Item], int]:
        """What waits, and how many items were dropped since the last call."""
        if not self._items and not self._dropped:
            return [], 0
        with self._lock:
            items, self._items = self._items, []
            dropped, self._dropped = self._dropped, 0
        return items, dropped
