"""One partition of a topic, folded exactly, whoever delivers its records and however often.

Whoever delivers (a consumer group) may repeat records, skip some, or begin anywhere: after a rebalance, a crash, or
on another machine. The position that is committed in one batch with the rows is the truth. A record below it is
skipped; if one is missing before a record, the processor reads the log itself up to there. So the state is always the
fold of the log from its start up to the position, and nothing is lost or counted twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Generic, Protocol, TypeVar

from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import Bounds, EventLog, Record, TopicPartition
from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError, LogReplaced, OffsetOutOfRange
from dynamo_es.store.base import StateStore
from dynamo_es.store.errors import StoreClosed, StoreLocked
from schemas.codec import TopicCodec
from streams.apply import apply_record
from streams.dead_letters import DeadLetterSink, dead_letter_for
from streams.fold import Fold
from streams.restoring import SnapshotSource
from streams.start import StartPoint, find_start
from streams.state_writer import MAX_UNWRITTEN_BYTES, StateWriter, StoreCondition, in_thread

logger = logging.getLogger(__name__)
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
T = TypeVar("T")

_SLICE_S = 0.002
_SLICE_RECORDS = 16
_POLL_RECORDS = 4096
_POLL_S = 1.0
_PROGRESS_S = 5.0
# Reading that brings nothing for so many polls is at its end: what is missing there does not exist, or not yet for
# readers of committed records.
_EMPTY_POLLS = 2


class PartitionGivenUp(DynamoException):
    """Another process did not let go of the partition's store in time."""

    retriable = True

    def __init__(self, place: TopicPartition, path: str, waited_s: float) -> None:
        super().__init__(
            f"{place.topic}[{place.partition}] is given up by this worker: {path} is held by another process for "
            f"{waited_s:g} s; stop that process, or give this worker its own --state-dir (it tries again later)"
        )
        self.place = place
        self.path = path


class ProcessorClosing(DynamoException):
    """The processor was closed while it opened."""


class ProcessorStatus(Enum):
    """Where a processor is in its life. Records are folded while it is LIVE, and read from the log before."""

    NEW = "new"
    WAITING = "waiting"
    RESTORING = "restoring"
    CATCHING_UP = "catching-up"
    LIVE = "live"
    SUSPENDED = "suspended"
    VOID = "void"
    CLOSED = "closed"


@dataclass(slots=True)
class ProcessorCounters:
    """Since the processor was made.

    Attributes:
        delivered, repeated: Records that were handed in; those that were below the position.
        folded: Records that were applied, delivered or read.
        gaps, read: How often something was missing before a delivered record; records that the processor read itself.
        refused: Records that went to dead letters.
        commits, failed_commits, rebuilds: Of the state.
        let_go: How often too many changes waited for the store (``StateWriter``).
    """

    delivered: int = 0
    repeated: int = 0
    folded: int = 0
    gaps: int = 0
    read: int = 0
    refused: int = 0
    commits: int = 0
    failed_commits: int = 0
    let_go: int = 0
    rebuilds: int = 0


class Outlet(Protocol[S_contra]):
    """Where results go that others read. Called between two records, never concurrently."""

    def note_refused(self, state: S_contra, record: Record, reason: str) -> None:
        """A record went to dead letters."""

    async def publish(self, state: S_contra, position: int) -> None:
        """Append what changed since the last call; ``position``: first offset that the state does not cover.

        Raises ``LogError``: the next call tries it again.
        """


class PartitionProcessor(Generic[S]):
    """Folds one partition into a store of its own. Belongs to one event loop.

    Order of calls: ``open``, then ``take``, ``commit``, ``publish``, ``catch_up``, ``suspend`` and ``resume`` in any
    order and from several tasks, then ``close``. After SIGKILL at any instant the committed rows are the fold of the
    partition up to the committed position, and ``open`` goes on from there.
    """

    def __init__(
        self,
        fold: Fold[S],
        place: TopicPartition,
        log: EventLog,
        namespace: str,
        *,
        make_store: Callable[[], StateStore],
        clock: Clock,
        rng: random.Random,
        dead_letters: DeadLetterSink,
        outlet: Outlet[S] | None = None,
        snapshots: SnapshotSource | None = None,
        lock_timeout_s: float = 60.0,
        max_unwritten_bytes: int = MAX_UNWRITTEN_BYTES,
    ) -> None:
        """Does nothing yet.

        ``fold``: of the one topic that ``place`` (qualified) is of. ``make_store``: opens the store of this partition,
        on another thread; ``StoreLocked`` is waited out for ``lock_timeout_s``. ``snapshots``: where a state without
        rows starts from; without it, or if there is none, from the start of the log. ``max_unwritten_bytes``: see
        ``StateWriter``.
        """
        self.fold = fold
        self.place = place
        self.state: S = fold.new_state()
        self.status = ProcessorStatus.NEW
        self.counters = ProcessorCounters()
        self.position = 0
        self.end = 0
        self.void_reason = ""
        self.topic_id = ""
        self.busy_since: float | None = None
        self._name = f"{place.topic}[{place.partition}]"
        self._log = log
        self._namespace = namespace
        self._make_store = make_store
        self._clock = clock
        self._rng = rng
        self._dead_letters = dead_letters
        self._outlet = outlet
        self._snapshots = snapshots
        self._lock_timeout_s = lock_timeout_s
        self._codec = TopicCodec(fold.topics[0])
        self._store: StateStore | None = None
        self._max_unwritten_bytes = max_unwritten_bytes
        self._writer: StateWriter[S] | None = None
        self._uncommitted = False
        self._closing = asyncio.Event()
        self._lock = asyncio.Lock()

    def lag(self) -> int:
        """Records between the state and the end of the partition as last seen."""
        return max(0, self.end - self.position)

    @property
    def store_condition(self) -> StoreCondition:
        """How the store does, as of the last commit."""
        return self._writer.condition if self._writer is not None else StoreCondition.WRITTEN

    @property
    def unwritten_bytes(self) -> int:
        """Changes that are in memory and not in the store."""
        return self._writer.unwritten_bytes if self._writer is not None else 0

    async def acquire(self) -> None:
        """Open the store; the first step of ``open``, that may wait long for another process.

        Raises:
            PartitionGivenUp: Another process holds the store.
            ProcessorClosing: ``close`` was called meanwhile.
            StoreError: Call it again later.
        """
        async with self._lock:
            if self._store is None:
                self._store = await self._open_store()
                self._writer = StateWriter(
                    self.fold, self._store, self._name,
                    clock=self._clock, counters=self.counters, max_unwritten_bytes=self._max_unwritten_bytes,
                )  # fmt: skip

    async def open(self) -> None:
        """Open the store, restore what it lacks, and read the log up to its present end.

        If the log turns out to have lost what the state needs, the status is VOID after it.

        Raises:
            PartitionGivenUp, ProcessorClosing: As ``acquire``.
            LogError, StoreError: Call it again later.
        """
        await self.acquire()
        async with self._lock:
            self._check_open()
            await self._start()
            if self.status is ProcessorStatus.CATCHING_UP:
                self.status = ProcessorStatus.LIVE

    async def take(self, records: Sequence[Record]) -> bool:
        """Fold delivered records, in offset order; True if the state covers them now.

        False: the processor is not live, or could not read what is missing before them. It reads them later itself,
        so they need not be handed in again.
        """
        self.counters.delivered += len(records)
        async with self._lock:
            if self.status is not ProcessorStatus.LIVE or not records:
                return False
            last = records[-1].offset
            self.end = max(self.end, last + 1)
            new = [record for record in records if record.offset >= self.position]
            self.counters.repeated += len(records) - len(new)
            if not new:
                return True
            self.busy_since = self._clock.monotonic()
            try:
                if new[0].offset == self.position and last - new[0].offset == len(new) - 1:
                    await self._apply(new)
                else:
                    self.counters.gaps += 1
                    await self._read_until(last + 1)
            except LogError as error:
                logger.warning(
                    "%s: cannot read what is missing from offset %d on: %s", self._name, self.position, error
                )
            finally:
                self.busy_since = None
            return self.position > last

    async def catch_up(self, end: int) -> None:
        """Read the log up to ``end`` if nobody delivers it. Raises ``LogError``."""
        async with self._lock:
            if self.status is ProcessorStatus.LIVE:
                self.end = max(self.end, end)
                await self._read_until(end)

    async def commit(self, *, patient: bool = False) -> None:
        """Write what changed, with the position. A failed write keeps its changes for the next time.

        ``patient``: as ``StateWriter.commit``, for whoever calls it again and again.
        """
        async with self._lock:
            await self._commit(patient=patient)

    async def publish(self) -> None:
        """Append results. Raises ``LogError``."""
        async with self._lock:
            if self._outlet is not None and self.status in (ProcessorStatus.LIVE, ProcessorStatus.SUSPENDED):
                await self._outlet.publish(self.state, self.position)

    async def read_store(self, job: Callable[[StateStore], T]) -> T:
        """Run ``job`` on another thread between two commits. Raises ``StoreError``."""
        async with self._lock:
            if self._writer is None:
                raise StoreClosed(self._name, "is not this worker's any more")
            return await self._writer.read(job)

    def suspend(self) -> None:
        """Fold nothing more after the record in hand, until ``resume``: the partition may be another worker's."""
        if self.status is ProcessorStatus.LIVE:
            self.status = ProcessorStatus.SUSPENDED

    def resume(self) -> None:
        """It stayed with this worker."""
        if self.status is ProcessorStatus.SUSPENDED:
            self.status = ProcessorStatus.LIVE

    def invalidate(self, reason: str) -> None:
        """The state does not fit the log any more: ``rebuild`` it."""
        if self.status is not ProcessorStatus.CLOSED:
            self.status, self.void_reason = ProcessorStatus.VOID, reason

    async def rebuild(self) -> None:
        """Drop the state and begin as with an empty store. Raises as ``open``."""
        await self.acquire()
        async with self._lock:
            self._check_open()
            assert self._writer is not None
            logger.warning("%s: %s; state is folded anew", self._name, self.void_reason)
            self.counters.rebuilds += 1
            self._uncommitted = False
            await self._writer.wipe()
            await self._start()
            if self.status is ProcessorStatus.CATCHING_UP:
                self.status, self.void_reason = ProcessorStatus.LIVE, ""

    async def rest(self, seconds: float) -> None:
        """Sleep, but no longer than until ``close``."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Commit and let go of the store. Safe to call twice, and while it opens."""
        self._closing.set()
        async with self._lock:
            if self.status is ProcessorStatus.CLOSED:
                return
            if self._store is not None:
                if self.status is not ProcessorStatus.VOID:
                    await self._commit()
                if self._writer is not None:
                    self._writer.close()
                await in_thread(self._store.close)
                self._store = self._writer = None
            self.status = ProcessorStatus.CLOSED

    async def _open_store(self) -> StateStore:
        began = self._clock.monotonic()
        backoff = BackoffPolicy(initial_s=0.05, maximum_s=1.0)
        for attempt in itertools.count():
            self._check_open()
            try:
                return await in_thread(self._make_store)
            except StoreLocked as error:
                waited_s = self._clock.monotonic() - began
                if waited_s >= self._lock_timeout_s:
                    raise PartitionGivenUp(self.place, error.path, self._lock_timeout_s) from error
                if attempt == 0:
                    logger.info("%s: waits for the worker that has its store: %s", self._name, error)
                self.status = ProcessorStatus.WAITING
                wait_s = min(backoff.wait_s(attempt, self._rng), self._lock_timeout_s - waited_s)
            await self.rest(wait_s)
        raise AssertionError

    async def _start(self) -> None:
        """From the rows, or a snapshot, or the start of the log, to the log's present end."""
        assert self._store is not None
        assert self._writer is not None
        self.status = ProcessorStatus.RESTORING
        start = await find_start(self._log, self._store, self.fold, self._namespace)
        if start.wipe_reason:
            logger.warning("%s: state in %s is not used: %s", self._name, self._store.path, start.wipe_reason)
            await self._writer.wipe()
        self._writer.identity = start.identity
        if start.fresh and self._snapshots is not None:
            start = await self._restore(start, self._snapshots, self._writer)
        self._check_open()
        state = await self._writer.load()
        self._writer.forget()
        self.fold.adopt(self.state, state)
        self.state = state
        self.topic_id = start.identity.get(f"topic_id:{self.place.topic}", "")
        self.position, self.end = start.positions[self.place], start.ends[self.place]
        self._uncommitted = True
        self.status = ProcessorStatus.CATCHING_UP
        await self._read_until(self.end)

    async def _restore(self, start: StartPoint, snapshots: SnapshotSource, writer: StateWriter[S]) -> StartPoint:
        """Fill the empty store from what was published; rows and position in one batch."""
        began = self._clock.monotonic()
        bounds = {self.place: Bounds(start.positions[self.place], start.ends[self.place])}
        restored = await snapshots.restore(bounds, lambda done, partitions: None)
        if not restored.positions:
            return start
        positions = {self.place: restored.positions[self.place]}
        await writer.fill(restored.changes, positions)
        logger.info(
            "%s: restored at offset %d in %.1f s (%d sources, %d blocks), %d records to read",
            self._name, positions[self.place], self._clock.monotonic() - began, restored.sources, restored.blocks,
            start.ends[self.place] - positions[self.place],
        )  # fmt: skip
        return replace(start, positions={**start.positions, **positions})

    async def _read_until(self, end: int) -> None:
        """Read and fold the log from the position up to ``end``, or as far as there is something."""
        if self.position >= end or self._closing.is_set():
            return
        began = told = self._clock.monotonic()
        first, empty = self.position, 0
        reader = self._log.reader({self.place: self.position})
        try:
            while self.position < end and empty < _EMPTY_POLLS and self.status is not ProcessorStatus.SUSPENDED:
                self._check_open()
                before = self.position
                for records in (await reader.poll(max_records=_POLL_RECORDS, timeout_s=_POLL_S)).values():
                    self.counters.read += len(records)
                    await self._apply(records)
                # Also past what compaction or transactions left empty.
                self.position = max(self.position, reader.positions()[self.place])
                empty = empty + 1 if self.position == before else 0
                now = self._clock.monotonic()
                if now - told >= _PROGRESS_S:
                    told = now
                    done, all_of = self.position - first, end - first
                    logger.info("%s: %d of %d records read in %.0f s", self._name, done, all_of, now - began)
                    await self._commit(patient=True)
        except (OffsetOutOfRange, LogReplaced) as error:
            self.invalidate(str(error))
        finally:
            await reader.close()

    async def _apply(self, records: Sequence[Record]) -> None:
        """Fold in slices of a few milliseconds, so that nothing else on the loop is held up."""
        slice_end = self._clock.monotonic() + _SLICE_S
        self._uncommitted = True
        for number, record in enumerate(records, 1):
            self.counters.folded += 1
            refusal = apply_record(self.fold, self.state, self._codec, record)
            if refusal is not None:
                self._refuse(record, refusal.reason, refusal.detail)
            self.position = record.offset + 1
            if number % _SLICE_RECORDS == 0 and self._clock.monotonic() > slice_end:
                await asyncio.sleep(0)
                slice_end = self._clock.monotonic() + _SLICE_S
        self.fold.housekeep(self.state)

    def _refuse(self, record: Record, reason: str, detail: str) -> None:
        self.counters.refused += 1
        if self._outlet is not None:
            self._outlet.note_refused(self.state, record, reason)
        self._dead_letters.offer_dead_letter(dead_letter_for(record, self.fold.name, reason, detail))

    async def _commit(self, *, patient: bool = False) -> None:
        if self._writer is not None and (self._uncommitted or self._writer.has_unwritten):
            self._uncommitted = False
            await self._writer.commit(self.state, {self.place: self.position}, patient=patient)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise ProcessorClosing(f"{self._name} is being closed")
