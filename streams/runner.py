"""The runner: feeds a fold from the log, commits rows with positions, and tells how far it is.

One of the three supervisors: whatever a fold does with a record, the next record is still folded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, TypeVar

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.log.base import Bounds, EventLog, LogReader, Position, Record, TopicPartition
from dynamo_es.log.errors import LogError, LogReplaced, OffsetOutOfRange
from dynamo_es.store.base import StateStore
from dynamo_es.store.errors import StoreError
from schemas.codec import TopicCodec
from schemas.topic import TopicSpec
from streams.apply import apply_record
from streams.dead_letters import DeadLetterSink, dead_letter_for
from streams.fold import Fold
from streams.restoring import SnapshotSource
from streams.start import StartPoint, find_start
from streams.state_writer import MAX_UNWRITTEN_BYTES, StateWriter, StoreCondition

logger = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")

_SLICE_S = 0.002
_SLICE_RECORDS = 16
_RETRY_FIRST_S = 0.1
# Kept short: when the log is back, views are stale for as long as this at most.
_RETRY_MAX_S = 2.0
_POLL_RECORDS = 4096
# How often a long start says how far it is.
PROGRESS_S = 5.0


class RunnerStatus(Enum):
    """Where a runner is in its life."""

    NEW = "new"
    LOADING = "loading"
    CATCHING_UP = "catching-up"
    LIVE = "live"
    LOG_AWAY = "log-away"
    STOPPED = "stopped"


@dataclass(slots=True)
class RunnerCounters:
    """Since the start of this runner. ``let_go``: how often too many changes waited for the store (``StateWriter``)."""

    records: int = 0
    dead_letters: int = 0
    commits: int = 0
    failed_commits: int = 0
    let_go: int = 0
    rebuilds: int = 0


class FoldRunner(Generic[S]):
    """Runs one fold over its topics. Belongs to one event loop; ``state`` may be read on that loop at any time.

    Order of calls: ``start``, then anything, then ``stop``. After SIGKILL at any instant the committed rows are the
    fold of the log up to the committed positions, and ``start`` goes on from there. A store that refuses or hangs holds
    up neither the fold nor who reads ``state``.
    """

    def __init__(
        self,
        fold: Fold[S],
        log: EventLog,
        store: StateStore,
        namespace: str,
        *,
        clock: Clock,
        dead_letters: DeadLetterSink,
        flush_interval_s: float = 5.0,
        pace_s: float = 0.0,
        snapshots: SnapshotSource | None = None,
        partitions: Collection[int] | None = None,
        max_unwritten_bytes: int = MAX_UNWRITTEN_BYTES,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """Does nothing yet.

        ``store`` is shared with runners of other folds; rows and positions are kept apart by ``fold.name``.
        ``flush_interval_s``: longest time between commits. ``pace_s``: shortest time between two reads of the log
        once it was caught up; records that come in between are folded together. ``snapshots``: where a fold starts
        from that has no state of its own; without it, from the beginning of the log. ``partitions``: the part of each
        topic that is folded; None: all of it. ``max_unwritten_bytes``: see ``StateWriter``.
        ``tasks``: is told if the fold dies.
        """
        self.fold = fold
        self.state: S = fold.new_state()
        self.status = RunnerStatus.NEW
        self.counters = RunnerCounters()
        self.restoring: tuple[int, int] | None = None
        # Where reading began, for progress.
        self.began: Mapping[TopicPartition, int] = {}
        # Why the log is away, while ``status`` says so.
        self.last_error: LogError | None = None
        self._log = log
        self._store = store
        self._namespace = namespace
        self._clock = clock
        self._dead_letters = dead_letters
        self._flush_interval_s = flush_interval_s
        self._pace_s = pace_s
        self._snapshots = snapshots
        self._partitions = partitions
        self._tasks = tasks or BackgroundTasks()
        self._codecs: dict[str, TopicCodec] = {spec.qualified(namespace): TopicCodec(spec) for spec in fold.topics}
        self._positions: dict[TopicPartition, int] = {}
        self._ends: dict[TopicPartition, int] = {}
        self._uncommitted = False
        self._housework = False
        self._last_commit = 0.0
        self._told_at = 0.0
        self._reader: LogReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._committing: asyncio.Task[None] | None = None
        self._stopping = False
        self._waiters: list[tuple[TopicPartition, int, asyncio.Future[None]]] = []
        self._listeners: list[Callable[[], None]] = []
        self._writer = StateWriter(
            fold, store, self.label, clock=clock, counters=self.counters, max_unwritten_bytes=max_unwritten_bytes
        )

    @property
    def store_condition(self) -> StoreCondition:
        """How the store does, as of the last commit."""
        return self._writer.condition

    @property
    def unwritten_bytes(self) -> int:
        """Changes that are in memory and not in the store."""
        return self._writer.unwritten_bytes

    @property
    def label(self) -> str:
        """The fold's name, with the partitions if it is given only some."""
        if self._partitions is None:
            return self.fold.name
        return f"{self.fold.name}[{','.join(map(str, sorted(self._partitions)))}]"

    @property
    def topics(self) -> Sequence[TopicSpec]:
        """What is folded."""
        return self.fold.topics

    def positions(self) -> Mapping[TopicPartition, int]:
        """Next offset to fold for each partition: ``state`` has everything below."""
        return self._positions

    def ends(self) -> Mapping[TopicPartition, int]:
        """End of each partition as last seen (at start, and by ``measure_lag``)."""
        return self._ends

    def lag(self) -> int:
        """Records between the state and the end of the log as last seen (at start, and by ``measure_lag``)."""
        return sum(max(0, end - self._positions.get(position, 0)) for position, end in self._ends.items())

    async def measure_lag(self) -> int:
        """Ask the log for its end and return the lag in records. Raises ``LogError`` if the log is away."""
        for spec in self.fold.topics:
            topic = spec.qualified(self._namespace)
            for partition, bounds in (await self._log.bounds(topic)).items():
                if self._partitions is None or partition in self._partitions:
                    self._ends[TopicPartition(topic, partition)] = bounds.end
        return self.lag()

    def add_listener(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` after each batch that was applied. It must be quick and must not raise."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[], None]) -> None:
        """Call it no more; it was added."""
        self._listeners.remove(listener)

    async def start(self) -> None:
        """Load the committed state, then follow the log in a task. The topics must exist.

        State of another log, another topic of the same name, another fold version, or from beyond the end of the log
        is wiped and folded anew.

        Raises:
            LogError: The log is away.
            StoreError: The store cannot be read.
        """
        self.status = RunnerStatus.LOADING
        await self._load()
        self._task = self._tasks.spawn(self._run(), f"fold-{self.fold.name}")

    async def stop(self) -> None:
        """Commit and end. Safe to call twice."""
        self._stopping = True
        if self._reader is not None:
            await self._reader.close()
        if self._task is not None:
            await asyncio.wait((self._task,))
            self._task = None
        if self._committing is not None:
            await self._committing
        if self.status is not RunnerStatus.STOPPED:
            await self._commit()
            self._writer.close()
            self.status = RunnerStatus.STOPPED
        for _, _, future in self._waiters:
            future.cancel()
        self._waiters.clear()

    async def wait_applied(self, position: Position, timeout_s: float) -> None:
        """Wait until the record at ``position`` is in ``state`` (read your own writes).

        Raises:
            TimeoutError: Not within ``timeout_s`` seconds.
        """
        target = TopicPartition(position.topic, position.partition)
        await self._wait_for({target: position.offset + 1}, timeout_s)

    async def wait_caught_up(self, timeout_s: float) -> None:
        """Wait until everything is applied that is in the log now.

        Raises:
            TimeoutError: Not within ``timeout_s`` seconds.
            LogError: The log is away.
        """
        async with asyncio.timeout(timeout_s):
            await self.measure_lag()
            await self._wait_for(dict(self._ends), timeout_s)

    async def read_store(self, job: Callable[[StateStore], T]) -> T:
        """Run ``job`` on another thread between two commits: the rows and positions that it reads belong together.

        Raises ``StoreError``.
        """
        return await self._writer.read(job)

    async def commit(self) -> None:
        """Commit rows and positions now; used by tools and tests."""
        await self._commit()

    async def _wait_for(self, targets: Mapping[TopicPartition, int], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(timeout_s):
            for position, offset in targets.items():
                if self._positions.get(position, 0) < offset:
                    future: asyncio.Future[None] = loop.create_future()
                    waiter = (position, offset, future)
                    self._waiters.append(waiter)
                    try:
                        await future
                    finally:
                        if waiter in self._waiters:
                            self._waiters.remove(waiter)

    async def _load(self) -> None:
        start = await self._find_start()
        if start.wipe_reason:
            logger.warning(
                "%s: state in %s is not used: %s; folding anew", self.fold.name, self._store.path, start.wipe_reason
            )
            await self._writer.wipe()
        await self._adopt(start)

    async def _find_start(self) -> StartPoint:
        return await find_start(
            self._log, self._store, self.fold, self._namespace, self._clock.now_ms(), self._partitions
        )

    async def _adopt(self, start: StartPoint) -> None:
        start, state = await self._prepare(start)
        self._become(state, dict(start.positions), self._log.reader(start.positions))
        self._uncommitted = bool(start.wipe_reason)

    async def _prepare(self, start: StartPoint) -> tuple[StartPoint, S]:
        """Rows to begin with, and the state that they make."""
        self._writer.identity = start.identity
        if start.fresh and self._snapshots is not None:
            start = await self._restore(start, self._snapshots)
        self.began = dict(start.positions)
        self._ends = dict(start.ends)
        return start, await self._writer.load()

    def _become(self, state: S, positions: dict[TopicPartition, int], reader: LogReader) -> None:
        self.fold.adopt(self.state, state)
        self.state = state
        self._positions = positions
        self._reader = reader
        self._last_commit = self._told_at = self._clock.monotonic()

    async def _restore(self, start: StartPoint, snapshots: SnapshotSource) -> StartPoint:
        """Fill the empty store from snapshots; rows and positions in one batch, so a crash leaves all or nothing."""
        began = self._clock.monotonic()
        bounds = {position: Bounds(offset, start.ends[position]) for position, offset in start.positions.items()}
        self.restoring, self._told_at = (0, len(bounds)), began
        restored = await snapshots.restore(bounds, self._note_restored)
        self.restoring = None
        if not restored.positions:
            return start
        positions = {**start.positions, **restored.positions}
        await self._writer.fill(restored.changes, positions)
        logger.info(
            "%s: %d blocks of %d sources restored from snapshots of %d partitions in %.1f s, %d records to read",
            self.fold.name, restored.blocks, restored.sources, len(restored.positions),
            self._clock.monotonic() - began, sum(start.ends[place] - offset for place, offset in positions.items()),
        )  # fmt: skip
        return replace(start, positions=positions)

    def _note_restored(self, done: int, partitions: int) -> None:
        self.restoring = (done, partitions)
        self._tell("snapshots of %d of %d partitions read", done, partitions)

    def _tell(self, progress: str, *counts: int) -> None:
        """On the command line, every few seconds of a long way."""
        now = self._clock.monotonic()
        if now - self._told_at >= PROGRESS_S:
            self._told_at = now
            logger.info(f"%s: {progress}", self.fold.name, *counts)

    async def _run(self) -> None:
        retry_s = _RETRY_FIRST_S
        self.status = RunnerStatus.CATCHING_UP
        lost: LogError | None = None
        while not self._stopping:
            try:
                if lost is not None:
                    await self._rebuild(lost)
                    lost = None
                await self._step()
                retry_s = _RETRY_FIRST_S
            except OffsetOutOfRange as error:
                lost = error
            except StoreError as error:
                # What begins anew begins in the store; until it does, the old view is all there is.
                logger.error("%s: state not begun anew, will try again: %s", self.fold.name, error)
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, _RETRY_MAX_S)
            except LogError as error:
                if self._reader_closed():
                    return
                if lost is None and isinstance(error, LogReplaced):
                    # The log is there again, however long it was away.
                    lost, retry_s = error, _RETRY_FIRST_S
                if self.status is not RunnerStatus.LOG_AWAY:
                    logger.warning("%s: the log is away, serving with the last view: %s", self.fold.name, error)
                self.status, self.last_error = RunnerStatus.LOG_AWAY, error
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, _RETRY_MAX_S)

    def _reader_closed(self) -> bool:
        return self._stopping

    async def _step(self) -> None:
        assert self._reader is not None
        due = self._last_commit + self._flush_interval_s - self._clock.monotonic()
        if due <= 0:
            self._begin_commit()
            due = self._flush_interval_s
        batches = await self._reader.poll(max_records=_POLL_RECORDS, timeout_s=0 if self._housework else min(due, 1.0))
        if self.status is RunnerStatus.LOG_AWAY:
            logger.info("%s: the log is back", self.fold.name)
            self.status, self.last_error = RunnerStatus.CATCHING_UP, None
        for position, records in batches.items():
            await self._apply(position, records)
        for position, offset in self._reader.positions().items():
            # Not every offset has a record to return: compaction, and the marks of transactions.
            if offset > self._positions[position]:
                self._advance(position, offset)
                self._uncommitted = True
        self._housework = self.fold.housekeep(self.state)
        if batches:
            self._uncommitted = True
            self._tell_listeners()
            if self._pace_s and not self._waiters and sum(map(len, batches.values())) < _POLL_RECORDS:
                await asyncio.sleep(self._pace_s)
        elif self._housework:
            await asyncio.sleep(0)
        if self.status is RunnerStatus.CATCHING_UP:
            if (lag := self.lag()) == 0:
                self.status = RunnerStatus.LIVE
            else:
                way = sum(max(0, end - self.began.get(place, 0)) for place, end in self._ends.items())
                self._tell("%d of %d records read", way - lag, way)

    async def _apply(self, position: TopicPartition, records: Sequence[Record]) -> None:
        """Apply in slices of a few milliseconds, so that requests on the same loop are not held up."""
        codec = self._codecs[position.topic]
        slice_end = self._clock.monotonic() + _SLICE_S
        for number, record in enumerate(records, 1):
            self._apply_one(self.state, codec, record)
            if number % _SLICE_RECORDS == 0 and self._clock.monotonic() > slice_end:
                self._advance(position, record.offset + 1)
                await asyncio.sleep(0)
                slice_end = self._clock.monotonic() + _SLICE_S
        if records:
            self._advance(position, records[-1].offset + 1)

    def _apply_one(self, state: S, codec: TopicCodec, record: Record) -> None:
        self.counters.records += 1
        refusal = apply_record(self.fold, state, codec, record)
        if refusal is not None:
            self.counters.dead_letters += 1
            letter = dead_letter_for(record, self.fold.name, refusal.reason, refusal.detail)
            self._dead_letters.offer_dead_letter(letter)

    def _advance(self, position: TopicPartition, offset: int) -> None:
        self._positions[position] = offset
        if offset > self._ends.get(position, 0):
            self._ends[position] = offset
        if self._waiters:
            for waiter in [waiter for waiter in self._waiters if waiter[0] == position and waiter[1] <= offset]:
                self._waiters.remove(waiter)
                if not waiter[2].done():
                    waiter[2].set_result(None)

    def _begin_commit(self) -> None:
        """Beside the fold, which does not wait for a disk that is slow. Raises what the commit before it raised."""
        self._last_commit = self._clock.monotonic()
        if self._committing is not None and not self._committing.done():
            if self._uncommitted:
                self._writer.collect(self.state, self._positions)
            return
        if self._committing is not None:
            self._committing.result()
        commit = self._commit(patient=True)
        self._committing = asyncio.get_running_loop().create_task(commit, name=f"commit-{self.fold.name}")

    async def _commit(self, *, patient: bool = False) -> None:
        """Write what changed, with the positions. ``patient``: as ``StateWriter.commit``."""
        self._last_commit = self._clock.monotonic()
        if self._uncommitted or self._writer.has_unwritten:
            self._uncommitted = False
            await self._writer.commit(self.state, self._positions, patient=patient)

    async def _rebuild(self, error: LogError) -> None:
        """The log no longer has what comes next: what was missed is unknown, so all of it is folded anew.

        The old view is kept until the new one has what the log has now: a registry that is half read would look like
        a fleet that is half gone. Its positions are void, so nobody takes it for current. Both are in memory
        meanwhile. Raises ``LogError`` while the log cannot be read.
        """
        if self._reader is not None:
            await self._reader.close()
        self._uncommitted = False
        await self._writer.wipe()
        self._uncommitted = False
        start = await self._find_start()
        logger.warning("%s: %s; state is folded anew", self.fold.name, error)
        self.counters.rebuilds += 1
        # Not "catching up": positions stand still until the new state is the view, which is no stall.
        self.status, self.last_error = RunnerStatus.LOADING, None
        self._positions = {}
        start, state = await self._prepare(start)
        reader = self._log.reader(start.positions)
        try:
            while not self._stopping and any(reader.positions()[place] < end for place, end in start.ends.items()):
                await self._read_aside(state, reader)
        except BaseException:
            await reader.close()
            raise
        if self._stopping:
            await reader.close()
            return
        self._become(state, dict(reader.positions()), reader)
        self.status = RunnerStatus.CATCHING_UP
        for place, offset in reader.positions().items():
            self._advance(place, offset)
        self._uncommitted = True
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        # One that is told may take itself, or others, off the list.
        for listener in tuple(self._listeners):
            listener()

    async def _read_aside(self, state: S, reader: LogReader) -> None:
        """Fold the next records into a state that is no view yet."""
        batches = await reader.poll(max_records=_POLL_RECORDS, timeout_s=1.0)
        slice_end = self._clock.monotonic() + _SLICE_S
        for position, records in batches.items():
            for number, record in enumerate(records, 1):
                self._apply_one(state, self._codecs[position.topic], record)
                if number % _SLICE_RECORDS == 0 and self._clock.monotonic() > slice_end:
                    await asyncio.sleep(0)
                    slice_end = self._clock.monotonic() + _SLICE_S
