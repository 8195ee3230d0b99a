"""The short way of a stream's items: from the connection to who reads them, past the generators in between.

An item that is iterated wakes a task, and every coroutine and generator on its way is resumed and suspended again: that
costs several times as much as all that is done with the item. In the middle of a stream there is mostly nothing for
them to do: then the reader takes the item at once, and they are told of it. Begin, end, failures and whatever the
reader cannot take in that moment go through the iteration as ever, in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Items = list[Any]


class Lane:
    """From one stream to its reader. Belongs to one event loop.

    Who iterates a stream makes one and hands it down with the request. A layer hands it on only if it passes items on
    unchanged; it calls ``watch`` if it counts them. Items come by the lane after the first batch was iterated, and
    only while the iteration waits for more.
    """

    __slots__ = ("_take", "_watchers")

    def __init__(self, take: Callable[[Items], bool]) -> None:
        """``take``: takes a batch whole and returns True, or does nothing and returns False: then it is iterated. It
        neither waits nor raises.
        """
        self._take = take
        self._watchers: list[Callable[[Items], object]] = []

    def watch(self, seen: Callable[[Items], object]) -> None:
        """Call ``seen`` with each batch that was taken, until ``unwatch``. It must not raise."""
        self._watchers.append(seen)

    def unwatch(self, seen: Callable[[Items], object]) -> None:
        """Not any more. No error if it does not watch."""
        if seen in self._watchers:
            self._watchers.remove(seen)

    def offer(self, batch: Items) -> bool:
        """Whether the reader took the batch. Called by the stream."""
        if not self._take(batch):
            return False
        for seen in self._watchers:
            seen(batch)
        return True
