"""What a pool of partitions needs from time to time: commits, publications, snapshots, and a look at the log.

One of the supervisors of the stream processors. It sees to it that nothing depends on the group's consumer being
well: records that are there and are not delivered are read, and if that goes on, the consumer is replaced.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import Bounds, EventLog, TopicPartition
from dynamo_es.log.errors import LogError
from streams.partition_pool import Member, PartitionPool
from streams.partition_processor import ProcessorStatus
from streams.state_writer import StoreCondition

logger = logging.getLogger(__name__)
_TICK_S = 0.25
# A group that does not settle for so many session timeouts never will by itself.
_UNSETTLED_SESSIONS = 6


class ConsumerStalled(DynamoException):
    """The group's consumer does not do its work; a new one is to be made.

    Attributes:
        place: Partition that does not get on; None: the group assigns nothing.
        offset: Where it stands.
    """

    retriable = True

    def __init__(self, message: str, place: TopicPartition | None = None, offset: int = 0) -> None:
        super().__init__(message)
        self.place = place
        self.offset = offset


@dataclass(slots=True)
class Health:
    """``ready``: all partitions of this worker get on. ``reasons``: why not, a sentence each."""

    ready: bool
    reasons: list[str] = field(default_factory=list)


class PoolUpkeep:
    """Looks after a ``PartitionPool`` in a task. Belongs to one event loop."""

    def __init__(
        self,
        pool: PartitionPool,
        log: EventLog,
        *,
        clock: Clock,
        on_stalled: Callable[[ConsumerStalled], None],
        tick_s: float = _TICK_S,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """``on_stalled`` is called once, by when the consumer should go; it must not raise."""
        self.partition_counts: dict[str, int] = dict(pool.expected)
        self.stalled: ConsumerStalled | None = None
        self.tasks = tasks or BackgroundTasks()
        self._pool = pool
        self._log = log
        self._clock = clock
        self._on_stalled = on_stalled
        self._tick_s = tick_s
        self._began = self._seen_at = self._checked_at = clock.monotonic()
        self._quiet_until = 0.0
        self._jobs: dict[TopicPartition | None, asyncio.Task[None]] = {}
        self._begun: dict[TopicPartition | None, float] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = self.tasks.spawn(self._run(), "partition-upkeep")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._jobs:
            _, hanging = await asyncio.wait(set(self._jobs.values()), timeout=self._pool.settings.handover_s)
            for job in hanging:
                job.cancel()

    async def settle(self) -> None:
        """Wait for the work that was begun; for tests."""
        while self._jobs:
            await asyncio.wait(set(self._jobs.values()))
            self._forget_done()

    def health(self) -> Health:
        """How the worker is. Cheap; may be called from another thread."""
        reasons = [str(dead) for dead in self.tasks.dead]
        if not self._pool.assigned_once:
            reasons.append("the group has not assigned anything yet")
        if self.stalled is not None:
            reasons.append(str(self.stalled))
        if self._pool.log_error is not None:
            reasons.append(f"the log is away: {self._pool.log_error}")
        for topic, found in self.partition_counts.items():
            expected = self._pool.expected[topic]
            if found != expected:
                reasons.append(_repartitioned(topic, expected, found))
        for place, member in list(self._pool.members.items()):
            if member.given_up:
                reasons.append(f"{place.topic}[{place.partition}] is given up: another process holds its store")
            elif member.processor.status not in (ProcessorStatus.LIVE, ProcessorStatus.SUSPENDED):
                reasons.append(f"{place.topic}[{place.partition}] is {member.processor.status.value}")
            elif member.processor.store_condition is StoreCondition.HANGS:
                reasons.append(f"{place.topic}[{place.partition}] waits for its store, which hangs")
        return Health(not reasons, reasons)

    def tick(self) -> None:
        """Begin everything that is due. ``start`` calls it again and again; a job that hangs holds up no other."""
        now = self._clock.monotonic()
        settings = self._pool.settings
        if now - self._seen_at > settings.session_timeout_s / 2:
            # This process did not run: others may own the partitions by now, and the consumer learns of it with its
            # next heartbeat. Windows published before that would replace newer ones.
            self._quiet_until = now + 2 * settings.heartbeat_s
            logger.warning("this process stood still for %.1f s", now - self._seen_at)
        self._seen_at = now
        self._forget_done()
        for place, member in self._pool.members.items():
            if member.processor.status is ProcessorStatus.VOID:
                self._pool.reopen(member)
            elif member.live:
                self._begin(place, partial(self._tend, member, now))
        every_s = settings.check_interval_s if self._pool.log_error is None else min(1.0, settings.check_interval_s)
        if now - self._checked_at >= every_s:
            self._checked_at = now
            self._begin(None, partial(self._check, now))
        self._look_for_stalls(now)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            self.tick()

    def _begin(self, what: TopicPartition | None, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if what not in self._jobs:
            self._jobs[what] = asyncio.get_running_loop().create_task(job())
            self._begun[what] = self._clock.monotonic()

    def _forget_done(self) -> None:
        for what, job in [(what, job) for what, job in self._jobs.items() if job.done()]:
            del self._jobs[what], self._begun[what]
            error = None if job.cancelled() else job.exception()
            if error is not None:
                logger.error("upkeep of %s failed", what or "the log", exc_info=error)

    async def _tend(self, member: Member, now: float) -> None:
        pool, settings = self._pool, self._pool.settings
        pool.release(member)
        speaks = pool.log_error is None and now >= self._quiet_until
        publishes = speaks and now >= member.publish_at
        if publishes or now - member.commit_at >= settings.flush_interval_s:
            member.commit_at = now
            await member.processor.commit(patient=True)
        if publishes:
            member.publish_at = now + settings.publish_interval_s
            await pool.publish(member)
        idle = member.snapshot is None or member.snapshot.done()
        if member.snapshots is not None and idle and speaks and now >= member.snapshot_at:
            member.snapshot_at = now + settings.snapshot_interval_s
            member.snapshot = asyncio.get_running_loop().create_task(self._snapshot(member))

    async def _snapshot(self, member: Member) -> None:
        """Windows first: whoever starts from both needs windows that cover at least as much as the snapshot."""
        await member.processor.commit()
        await self._pool.publish(member)
        await self._pool.write_snapshot(member)

    async def _check(self, now: float) -> None:
        for topic in sorted(self._pool.expected):
            members = [member for place, member in self._pool.members.items() if place.topic == topic]
            if not members:
                continue
            # As they were before the log was asked: what is delivered during the question is beyond its answer.
            asked_at = {member.processor.place: member.processor.position for member in members}
            try:
                description = await self._log.describe(topic)
                bounds = await self._log.bounds(topic)
            except LogError as error:
                self._pool.note_failure("the log was not looked at", error)
                return
            self._note_count(topic, description.partitions)
            for member in members:
                position = min(asked_at[member.processor.place], member.processor.position)
                await self._check_member(member, position, bounds, description.topic_id, now)
        self._pool.note_back()

    async def _check_member(
        self, member: Member, position: int, bounds: Mapping[int, Bounds], topic_id: str, now: float
    ) -> None:
        """``position``: where it was when the log was asked for ``bounds``."""
        processor = member.processor
        limits = bounds.get(processor.place.partition)
        if not member.live or limits is None:
            return
        if processor.topic_id != topic_id:
            processor.invalidate(f"the topic was deleted and made anew (id {topic_id}, it was {processor.topic_id})")
            return
        if position > limits.end:
            processor.invalidate(f"it is at offset {position}, the log ends at {limits.end}")
            return
        # Known since the last check, and nothing was delivered meanwhile.
        undelivered = now - member.delivered_at >= self._pool.settings.check_interval_s
        missed = undelivered and processor.position < member.end_at_check
        idle = processor.position >= limits.end
        member.end_at_check = limits.end
        processor.end = max(processor.end, limits.end)
        if missed:
            if member.starved_since is None:
                member.starved_since = now
            try:
                await processor.catch_up(limits.end)
            except LogError as error:
                self._pool.note_failure("the log was not looked at", error)
        elif idle or not undelivered:
            member.starved_since = None

    def _look_for_stalls(self, now: float) -> None:
        pool = self._pool
        patience = pool.settings.stall_timeout_s
        if self.stalled is not None:
            return
        for place, member in pool.members.items():
            processor = member.processor
            if processor.store_condition is StoreCondition.HANGS:
                # Another consumer would wait for the same disk.
                member.starved_since = None
                continue
            name = f"{place.topic}[{place.partition}] at offset {processor.position}"
            busy_since = min(processor.busy_since or now, self._begun.get(place, now))
            if now - busy_since > patience:
                self._stall(f"{name}: its handler hangs for {now - busy_since:.0f} s", place)
                return
            if member.starved_since is not None and now - member.starved_since > patience:
                self._stall(
                    f"{name}: {processor.lag()} records are there and the group's consumer has delivered none for "
                    f"{now - member.delivered_at:.0f} s",
                    place,
                )
                return
        settles_s = _UNSETTLED_SESSIONS * pool.settings.session_timeout_s
        waits_since = pool.suspended_since if pool.assigned_once else self._began
        if waits_since is not None and now - waits_since > settles_s and pool.log_error is None:
            self._stall(f"the group assigns no partitions for {now - waits_since:.0f} s", None)

    def _stall(self, message: str, place: TopicPartition | None) -> None:
        self._pool.counters.stalls += 1
        position = self._pool.members[place].processor.position if place is not None else 0
        self.stalled = ConsumerStalled(message, place, position)
        logger.error("%s; the consumer is made anew", message)
        self._on_stalled(self.stalled)

    def _note_count(self, topic: str, found: int) -> None:
        if found != self.partition_counts[topic]:
            self.partition_counts[topic] = found
            logger.error("%s", _repartitioned(topic, self._pool.expected[topic], found))


def _repartitioned(topic: str, expected: int, found: int) -> str:
    return (
        f"topic {topic!r} had {expected} partitions and has {found} now: keys moved, the order of their records is "
        "broken; new partitions are refused. Use another namespace for another count"
    )
