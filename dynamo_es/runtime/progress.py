"""Whether the folds of a process get on: how far they are behind, and which stand still although there is more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.errors import LogError
from streams.runner import FoldRunner, RunnerStatus

logger = logging.getLogger(__name__)
LOOK_INTERVAL_S = 5.0
# A log that takes longer than this to say where it ends says nothing; Kafka's own limit for a request is longer.
_ANSWER_LIMIT_S = 10.0
_FOLDING = (RunnerStatus.CATCHING_UP, RunnerStatus.LIVE)


@dataclass(frozen=True, slots=True)
class Stall:
    """A partition that is not folded on although it has more.

    Attributes:
        fold: Name of the fold.
        topic, partition: Where.
        offset: Next offset to fold.
        lag_records: Records from there to the end.
        seconds: For how long nothing was folded.
    """

    fold: str
    topic: str
    partition: int
    offset: int
    lag_records: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.fold} stands at {self.topic}[{self.partition}]@{self.offset} for {self.seconds:.0f} s, "
            f"{self.lag_records} records behind"
        )


@dataclass(slots=True)
class Standing:
    """A partition that has more to fold: next offset, records behind, and since when (monotonic) it is there."""

    offset: int
    lag: int
    since: float


class StallWatch:
    """Which partitions stand still. Pure: positions, ends and time are handed in.

    An idle partition (nothing to fold) never stands still, however long it is idle.
    """

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: how long a position may stay where it is while there is more; 0: for ever."""
        self._timeout_s = timeout_s
        self._standing: dict[int, dict[TopicPartition, Standing]] = {}

    def note(
        self,
        fold: int,
        positions: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        now: float,
    ) -> None:
        """Where the fold of this number is, and where its partitions end, at monotonic ``now`` (seconds)."""
        before = self._standing.get(fold, {})
        standing: dict[TopicPartition, Standing] = {}
        for place, end in ends.items():
            offset = positions.get(place, 0)
            if offset < end:
                known = before.get(place)
                since = known.since if known is not None and known.offset == offset else now
                standing[place] = Standing(offset, end - offset, since)
        self._standing[fold] = standing

    def excuse(self, fold: int) -> None:
        """Nothing can be said of the fold now (the log is away, its state is being loaded): its clocks start anew."""
        self._standing.pop(fold, None)

    def retain(self, folds: Collection[int]) -> None:
        """Forget all folds but these."""
        self._standing = {fold: places for fold, places in self._standing.items() if fold in folds}

    def stalls(self, now: float) -> list[tuple[int, TopicPartition, Standing]]:
        """What has stood still for longer than the limit, the longest first."""
        if not self._timeout_s:
            return []
        found = [
            (fold, place, state)
            for fold, places in self._standing.items()
            for place, state in places.items()
            if now - state.since > self._timeout_s
        ]
        return sorted(found, key=lambda item: (item[2].since, item[1]))


class ProgressWatch:
    """Measures the lag of a process's folds now and then, and tells which stand still. Belongs to one event loop.

    It only tells: a reader that is stuck is replaced by the log's backend, and whoever runs the process sees it in
    ``/health``, which is not ready meanwhile.
    """

    def __init__(
        self,
        runners: Callable[[], Sequence[FoldRunner[Any]]],
        *,
        timeout_s: float,
        clock: Clock,
        interval_s: float = LOOK_INTERVAL_S,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """``timeout_s``: see ``StallWatch``. ``interval_s``: between two looks at the ends of the log."""
        self._runners = runners
        self._tasks = tasks or BackgroundTasks()
        self._clock = clock
        self._interval_s = min(interval_s, timeout_s / 4) if timeout_s else interval_s
        self._watch = StallWatch(timeout_s)
        self._told: set[tuple[str, TopicPartition]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to look."""
        self._task = self._tasks.spawn(self._run(), "fold-progress")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    def stalls(self) -> list[Stall]:
        """Partitions that stand still, as last seen; the longest first. Cheap."""
        now = self._clock.monotonic()
        names = {id(runner): runner.fold.name for runner in self._runners()}
        return [
            Stall(names[fold], place.topic, place.partition, state.offset, state.lag, now - state.since)
            for fold, place, state in self._watch.stalls(now)
            if fold in names
        ]

    async def look(self) -> None:
        """Ask the log for its ends once. A log that is away is no stall: then nothing can be said."""
        runners = list(self._runners())
        self._watch.retain({id(runner) for runner in runners})
        for runner in runners:
            number = id(runner)
            if runner.status not in _FOLDING:
                self._watch.excuse(number)
                continue
            try:
                async with asyncio.timeout(_ANSWER_LIMIT_S):
                    await runner.measure_lag()
            except (LogError, TimeoutError):
                self._watch.excuse(number)
            else:
                self._watch.note(number, runner.positions(), runner.ends(), self._clock.monotonic())
        self._tell()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.look()

    def _tell(self) -> None:
        """One line when a partition begins to stand still, one when it gets on."""
        stalls = {(stall.fold, TopicPartition(stall.topic, stall.partition)): stall for stall in self.stalls()}
        for key, stall in stalls.items():
            if key not in self._told:
                logger.error("%s; this process is not ready until it gets on", stall)
        for fold, place in self._told - stalls.keys():
            logger.warning("%s gets on at %s[%d]", fold, place.topic, place.partition)
        self._told = set(stalls)
