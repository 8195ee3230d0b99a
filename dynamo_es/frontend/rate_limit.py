"""A token bucket. Pure: time is passed in."""

from __future__ import annotations


class TokenBucket:
    """Holds up to ``burst`` tokens and gains ``per_minute`` a minute; each request takes one. Not thread-safe.

    Args:
        per_minute: Tokens a minute, at least 1.
        burst: What it holds at most, at least 1; it begins full.
        now: Monotonic seconds.
    """

    def __init__(self, per_minute: int, burst: int, now: float) -> None:
        self._per_second = per_minute / 60
        self._burst = burst
        self._tokens = float(burst)
        self._at = now

    def take(self, now: float) -> float:
        """Take a token. 0 if there was one, else the seconds until there is (and none was taken)."""
        self._fill(now)
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second

    def change(self, per_minute: int, burst: int, now: float) -> None:
        """From now on other limits; what was taken stays taken."""
        self._fill(now)
        self._per_second = per_minute / 60
        self._burst = burst
        self._tokens = min(self._tokens, float(burst))

    def _fill(self, now: float) -> None:
        self._tokens = min(float(self._burst), self._tokens + max(0.0, now - self._at) * self._per_second)
        self._at = now
