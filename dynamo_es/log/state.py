"""How the log is doing, as the appends and readers of one process see it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import count

from dynamo_es.clock import Clock
from dynamo_es.log.errors import LogClosed, LogError, LogReplaced, RecordTooLarge

# An append that takes longer than this hangs, whatever will become of it; usually it takes milliseconds.
SLOW_APPEND_S = 5.0


class LogCondition(Enum):
    """What of the log can be used.

    Attributes:
        OK: Everything.
        DEGRADED: It can be read, but appends fail or hang, or events are dropped for want of room.
        AWAY: It cannot be read either; views stay as they are.
        REPLACED: There is another log, or another topic of the same name, in its place; the process starts over on it.
    """

    OK = "ok"
    DEGRADED = "degraded"
    AWAY = "away"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class LogState:
    """The log at one moment. ``reason``: what is wrong and what to do; None if nothing is."""

    state: LogCondition
    reason: str | None = None

    @property
    def ok(self) -> bool:
        """Whether appends and readers work."""
        return self.state is LogCondition.OK


class AppendWatch:
    """Keeps what became of the newest append to each topic. Belongs to one event loop.

    All appends of a process go through ``appending``. A topic that failed counts as failing until an append to it
    works again: what is retried, and the lease that every process renews, see to it that this is noticed.
    """

    def __init__(self, clock: Clock, on_replaced: Callable[[LogReplaced], None] | None = None) -> None:
        """``on_replaced`` is called whenever an append finds another log or topic in place; it must not raise."""
        self._clock = clock
        self._on_replaced = on_replaced
        self._failures: dict[str, LogError] = {}
        self._under_way: dict[int, tuple[str, float]] = {}
        self._numbers = count()

    @contextmanager
    def appending(self, topic: str) -> Iterator[None]:
        """Around one append to ``topic`` (qualified name): raises what the append raises."""
        number = next(self._numbers)
        self._under_way[number] = (topic, self._clock.monotonic())
        try:
            yield
        except (RecordTooLarge, LogClosed):
            # The one says nothing against the log, the other is the process's own doing.
            raise
        except LogError as error:
            self._failures[topic] = error
            if isinstance(error, LogReplaced) and self._on_replaced is not None:
                self._on_replaced(error)
            raise
        else:
            self._failures.pop(topic, None)
        finally:
            del self._under_way[number]

    def state(self) -> LogState:
        """OK, DEGRADED or REPLACED."""
        for error in self._failures.values():
            if isinstance(error, LogReplaced):
                return LogState(LogCondition.REPLACED, str(error))
        for topic, error in self._failures.items():
            return LogState(LogCondition.DEGRADED, f"append to {topic}: {error}")
        for topic, begun in self._under_way.values():
            waited_s = self._clock.monotonic() - begun
            if waited_s > SLOW_APPEND_S:
                return LogState(LogCondition.DEGRADED, f"an append to {topic} is not done after {waited_s:.0f} s")
            break  # They began in this order.
        return LogState(LogCondition.OK)
