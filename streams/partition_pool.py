"""The partitions that one worker of the group owns: opened, fed, suspended at a rebalance, handed over. A supervisor.

A consumer group says which partitions are this worker's, and delivers records. Nothing here relies on what it
delivers; see ``PartitionProcessor``. Opening goes on beside everything else, so a partition whose store another
process still holds keeps nobody waiting.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_es.clock import Clock
from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError, LogUnavailable
from dynamo_es.store.errors import StoreError
from streams.partition_processor import PartitionGivenUp, PartitionProcessor, ProcessorClosing, ProcessorStatus

logger = logging.getLogger(__name__)
# Restoring reads much at once; so many partitions do it at a time.
_OPENING = 4
# Deliveries of a partition that is not live yet are acknowledged when it is; of more records the oldest are let go,
# which costs nothing but a group offset that runs ahead of the state.
_MAX_HELD = 4096


class PartitionSnapshots(Protocol):
    """Writes snapshots of one partition (``SnapshotWriter``)."""

    async def write(self, partition: int) -> object | None:
        """Write one; None if nothing came in since the last. Raises ``LogError`` and ``StoreError``."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Times in seconds.

    Attributes:
        flush_interval_s: Longest time between commits of state and positions.
        publish_interval_s: Between publications of windows.
        snapshot_interval_s: Between snapshots of a partition.
        check_interval_s: Between looks at where the log ends.
        stall_timeout_s: A partition that does not get on for so long although there are records is told, and the
            group's consumer is made anew.
        retry_s: After which a partition that was given up is tried again.
        handover_s: How long the commit at a rebalance, and the last snapshot, may take.
        heartbeat_s, session_timeout_s: Of the group.
    """

    flush_interval_s: float = 5.0
    publish_interval_s: float = 10.0
    snapshot_interval_s: float = 60.0
    check_interval_s: float = 5.0
    stall_timeout_s: float = 30.0
    retry_s: float = 30.0
    handover_s: float = 10.0
    heartbeat_s: float = 3.0
    session_timeout_s: float = 10.0


@dataclass(slots=True)
class PoolCounters:
    """For metrics."""

    rebalances: int = 0
    given_up: int = 0
    stalls: int = 0
    snapshots: int = 0
    failed_publications: int = 0
    failed_snapshots: int = 0


@dataclass(slots=True)
class Member:
    """A partition that is this worker's, with what is due when (monotonic seconds)."""

    processor: PartitionProcessor[Any]
    snapshots: PartitionSnapshots | None
    opening: asyncio.Task[None] | None = None
    snapshot: asyncio.Task[None] | None = None
    snapshot_failed: bool = False
    given_up: bool = False
    held: deque[tuple[int, int, Callable[[], None]]] = field(default_factory=deque)
    held_records: int = 0
    commit_at: float = 0.0
    publish_at: float = 0.0
    snapshot_at: float = 0.0
    delivered_at: float = 0.0
    end_at_check: int = 0
    starved_since: float | None = None

    @property
    def live(self) -> bool:
        return self.processor.status is ProcessorStatus.LIVE

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.processor.place.topic}[{self.processor.place.partition}]"


MakeMember = Callable[[TopicPartition], Member]


class PartitionPool:
    """Owned partitions. Belongs to one event loop; ``assign`` and ``suspend`` are the rebalance's callbacks."""

    def __init__(
        self,
        make_member: MakeMember,
        expected: Mapping[str, int],
        *,
        settings: PoolSettings,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """``expected``: partition count of each topic (qualified) at the start; it never changes."""
        self.members: dict[TopicPartition, Member] = {}
        self.counters = PoolCounters()
        self.settings = settings
        self.expected = expected
        self.log_error: LogError | None = None
        self.assigned_once = False
        self.suspended_since: float | None = None
        self._make_member = make_member
        self._clock = clock
        self._rng = rng
        self._gate = asyncio.Semaphore(_OPENING)
        self._leaving: set[asyncio.Task[None]] = set()
        self._closed = False

    def assign(self, places: Collection[TopicPartition]) -> None:
        """These partitions are this worker's from now on, and no others. Returns at once."""
        if self._closed:
            return
        self.assigned_once = True
        self.suspended_since = None
        self.counters.rebalances += 1
        for place in [place for place in self.members if place not in places]:
            self._start_leaving(self.members.pop(place))
        for place in sorted(places):
            member = self.members.get(place)
            if member is not None:
                member.processor.resume()
            elif place.partition >= self.expected.get(place.topic, 0):
                logger.error(
                    "%s[%d] is refused: the topic had %d partitions when this worker started, and the order of a key's "
                    "records broke when it got more; set the count back, or use another namespace",
                    place.topic, place.partition, self.expected.get(place.topic, 0),
                )  # fmt: skip
            else:
                self._enter(place)

    async def suspend(self) -> None:
        """The group rebalances: fold nothing, commit and publish what is folded. Takes ``handover_s`` at most."""
        self.suspended_since = self._clock.monotonic()
        members = [member for member in self.members.values() if member.live]
        for member in self.members.values():
            member.processor.suspend()
            member.held.clear()
            member.held_records = 0
        await self._all([self._settle(member) for member in members], self.settings.handover_s)

    async def take(self, place: TopicPartition, records: Sequence[Record], ack: Callable[[], None]) -> None:
        """Fold delivered records of one partition. ``ack`` is called once the state covers them, or never."""
        member = self.members.get(place)
        if member is None or not records:
            return
        member.delivered_at = self._clock.monotonic()
        if await member.processor.take(records):
            ack()
        elif self.members.get(place) is member and self.suspended_since is None:
            self._hold(member, records, ack)
        self.release(member)

    def release(self, member: Member) -> None:
        """Acknowledge held deliveries that the state covers by now."""
        while member.held and member.held[0][0] < member.processor.position and member.live:
            _, count, ack = member.held.popleft()
            member.held_records -= count
            ack()

    def reopen(self, member: Member) -> None:
        """Make the state of a VOID processor anew, beside everything else."""
        if member.opening is None or member.opening.done():
            member.opening = asyncio.get_running_loop().create_task(self._open(member))

    async def close(self) -> None:
        """Hand everything over: commit, publish, last snapshots, close the stores. Safe to call twice."""
        if not self._closed:
            await self.suspend()
            self._closed = True
            while self.members:
                self._start_leaving(self.members.popitem()[1], last=True)
        if self._leaving:
            await asyncio.wait(set(self._leaving))

    def _enter(self, place: TopicPartition) -> None:
        member = self._make_member(place)
        now = self._clock.monotonic()
        member.delivered_at = member.commit_at = now
        member.publish_at = now + self.settings.publish_interval_s * self._rng.uniform(0.2, 1.0)
        member.snapshot_at = now + self.settings.snapshot_interval_s * self._rng.uniform(0.2, 1.0)
        self.members[place] = member
        self.reopen(member)

    async def _open(self, member: Member) -> None:
        processor, backoff = member.processor, BackoffPolicy(initial_s=0.2, maximum_s=10.0)
        began, failures = self._clock.monotonic(), 0
        while True:
            try:
                await processor.acquire()
                member.given_up = False
                async with self._gate:
                    void = processor.status is ProcessorStatus.VOID
                    await (processor.rebuild() if void else processor.open())
            except ProcessorClosing:
                return
            except PartitionGivenUp as error:
                member.given_up = True
                self.counters.given_up += 1
                logger.error("%s", error)
                await processor.rest(self.settings.retry_s)
                continue
            except (LogError, StoreError) as error:
                self.note_failure(f"{member.name} not opened", error)
            except Exception:  # supervisor: a partition that cannot be opened must not go unnoticed, nor end the others
                logger.exception("%s not opened, will try again", member.name)
            else:
                if processor.status is not ProcessorStatus.VOID:
                    break
            await processor.rest(backoff.wait_s(failures, self._rng))
            failures += 1
        if self.suspended_since is not None:
            processor.suspend()
        logger.info(
            "%s: live at offset %d, opened in %.1f s", member.name, processor.position, self._clock.monotonic() - began
        )

    def _start_leaving(self, member: Member, *, last: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(self._leave(member, last=last))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, member: Member, *, last: bool) -> None:
        """``last``: the worker ends. Otherwise the new owner may wait for the store, so a snapshot must be due."""
        processor = member.processor
        due = last or self._clock.monotonic() >= member.snapshot_at
        if processor.status is ProcessorStatus.SUSPENDED and member.snapshots is not None and due:
            if member.snapshot is not None:
                await asyncio.wait({member.snapshot}, timeout=self.settings.handover_s)
            await self._all([self.write_snapshot(member)], self.settings.handover_s)
        if member.snapshot is not None:
            member.snapshot.cancel()
        await processor.close()
        if member.opening is not None:
            await asyncio.wait({member.opening})

    async def write_snapshot(self, member: Member) -> None:
        """One snapshot; a failure is told and counted."""
        assert member.snapshots is not None
        try:
            written = await member.snapshots.write(member.processor.place.partition)
        except (LogError, StoreError) as error:
            self.counters.failed_snapshots += 1
            self.note_failure(f"no snapshot of {member.name}", error)
        else:
            self.counters.snapshots += written is not None

    async def publish(self, member: Member) -> None:
        """Publish windows; a failure is told and counted."""
        try:
            await member.processor.publish()
        except LogError as error:
            self.counters.failed_publications += 1
            self.note_failure(f"windows of {member.name} not published", error)

    def note_failure(self, what: str, error: LogError | StoreError) -> None:
        """Tell it; of a log that is away, which all partitions notice, once until ``note_back``."""
        if not isinstance(error, LogUnavailable):
            logger.warning("%s, will try again: %s", what, error)
        elif self.log_error is None:
            self.log_error = error
            logger.warning("the log is away, state stays as it is: %s", error)

    def note_back(self) -> None:
        """The log answers."""
        if self.log_error is not None:
            self.log_error = None
            logger.info("the log is back")

    async def _settle(self, member: Member) -> None:
        await member.processor.commit()
        await self.publish(member)

    @staticmethod
    async def _all(jobs: Sequence[Awaitable[None]], timeout_s: float) -> None:
        if jobs:
            tasks = {asyncio.ensure_future(job) for job in jobs}
            done, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)
            for task in done:
                task.result()

    def _hold(self, member: Member, records: Sequence[Record], ack: Callable[[], None]) -> None:
        member.held.append((records[-1].offset, len(records), ack))
        member.held_records += len(records)
        while member.held_records > _MAX_HELD and len(member.held) > 1:
            _, count, oldest = member.held.popleft()
            member.held_records -= count
            oldest()
