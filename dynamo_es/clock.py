"""Time as a dependency: everything that needs it gets a ``Clock``, so that tests own it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for records, monotonic time for durations; never mix the two."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never runs backwards."""


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests and replay."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now_ms += int(seconds * 1000)
        self._monotonic += seconds
