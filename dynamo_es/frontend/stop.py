"""Stop strings over a stream of text. Pure.

The result does not depend on how the text is cut into pieces: the stop string whose end comes first wins, and of two
that end together the longer one. Text is held back only while it is a real beginning of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Matched(NamedTuple):
    """Text to deliver now, and the stop string that ends it (None: go on)."""

    text: str
    stop: str | None


def held_length(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of a marker."""
    longest = min(len(text), max(map(len, markers), default=1) - 1)
    for length in range(longest, 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0


def first_marker(text: str, markers: Sequence[str]) -> tuple[int, int, str] | None:
    """Start, end and text of the marker that ends first in ``text`` (the longest, if several do), or None."""
    best: tuple[int, int, str] | None = None
    for marker in markers:
        start = text.find(marker)
        if start >= 0:
            end = start + len(marker)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end, marker)
    return best


class StopMatcher:
    """Looks for stop strings in one choice's text.

    Args:
        stops: Not empty, none of them empty.
        include: Deliver the stop string too; then nothing needs to be held back.
    """

    __slots__ = ("_include", "_pending", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._pending = ""

    def push(self, text: str) -> Matched:
        """More text. After a match the matcher is done."""
        window = self._pending + text
        found = first_marker(window, self._stops)
        if found is not None:
            start, end, stop = found
            delivered = window[len(self._pending) : end] if self._include else window[:start]
            self._pending = ""
            return Matched(delivered, stop)
        keep = held_length(window, self._stops)
        self._pending = window[len(window) - keep :]
        return Matched(text if self._include else window[: len(window) - keep], None)

    def finish(self) -> str:
        """The text that is held back, at the end of the output."""
        pending, self._pending = self._pending, ""
        return "" if self._include else pending
