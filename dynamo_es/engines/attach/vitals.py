"""Whether an upstream is well, judged from what it was asked. Pure."""

from __future__ import annotations

from enum import Enum, auto

FAILURES_TO_DOWN = 2
"""An upstream that is slow once is not given up; one that nobody can connect to is."""


class Change(Enum):
    """What a look at the upstream changed."""

    NONE = auto()
    DOWN = auto()
    UP = auto()


class Vitals:
    """The state of one upstream; well at the beginning. Tell it every look.

    Attributes:
        up: It is well.
        gone: While it is down: nobody took a connection, so its process is not there and its cache neither.
        reason: Why it is down.
    """

    def __init__(self) -> None:
        self.up = True
        self.gone = False
        self.reason = ""
        self._failures = 0
        self._started_at: float | None = None

    def saw_well(self) -> Change:
        """It answered that it is well."""
        self._failures, self.gone, self.reason = 0, False, ""
        if self.up:
            return Change.NONE
        self.up = True
        return Change.UP

    def saw_failure(self, reason: str, *, refused: bool) -> Change:
        """It did not. ``refused``: nobody took the connection."""
        self._failures += 1
        self.reason = reason
        self.gone |= refused
        if not self.up or (self._failures < FAILURES_TO_DOWN and not refused):
            return Change.NONE
        self.up = False
        return Change.DOWN

    def saw_start(self, started_at: float | None) -> bool | None:
        """When its process began, by its metrics: True if that is another process than before, None: not known."""
        if started_at is None:
            return None
        before, self._started_at = self._started_at, started_at
        return None if before is None else before != started_at
