"""The reader of the embedded log: short read transactions in a thread, woken by the doorbell."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from dynamo_es.errors import DynamoException, InvalidArgument
from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.log.doorbell import BellWatcher
from dynamo_es.log.embedded_cursor import PartitionCursor
from dynamo_es.log.embedded_layout import LogLayout
from dynamo_es.log.embedded_topics import KnownTopic, check_log, check_place, load_topic
from dynamo_es.log.errors import LogClosed, LogError

# Values that one poll returns at most, about: the reader's memory bound, whatever ``max_records`` says.
POLL_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReaderAccess:
    """What readers share with their log handle.

    Attributes:
        log_id: Of the log that is read; any other one in its place is refused.
        forget: Called when the reader was closed.
    """

    layout: LogLayout
    log_id: str
    executor: Executor
    watcher: BellWatcher
    recheck_s: float
    forget: Callable[[EmbeddedReader], None]


@dataclass(slots=True)
class _Taken:
    """What a thread read of one partition."""

    position: TopicPartition
    requested: int
    next_offset: int
    records: list[Record]
    size: int
    drained: bool


@dataclass(slots=True)
class _Outcome:
    taken: list[_Taken]
    error: DynamoException | None = None


class EmbeddedReader:
    """A ``LogReader`` over an ``EmbeddedLog``.

    Only partitions whose doorbell rang are read, and every ``recheck_s`` all of them. A poll returns about 64 MiB of
    values at most.
    """

    def __init__(self, access: ReaderAccess, positions: Mapping[TopicPartition, int]) -> None:
        self._access = access
        self._offsets = {TopicPartition(*position): offset for position, offset in positions.items()}
        self._order = list(self._offsets)
        self._dirty = set(self._order)
        self._rung = asyncio.Event()
        self._watched: dict[TopicPartition, Callable[[], None]] = {}
        self._cursors: dict[TopicPartition, PartitionCursor] = {}
        self._topics: dict[str, KnownTopic] = {}
        self._inflight: asyncio.Future[_Outcome] | None = None
        self._swept_at = float("-inf")
        self._closed = False

    async def poll(
        self, *, max_records: int = 10_000, timeout_s: float | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        if max_records < 1:
            raise InvalidArgument(f"max_records is {max_records}, expected at least 1")
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        self._check_open()
        if len(self._watched) < len(self._order):
            await self._begin()
        while True:
            self._check_open()
            self._rung.clear()
            batch = await self._read(max_records, look_everywhere=timeout_s == 0)
            if batch:
                return batch
            now = loop.time()
            if deadline is not None and now >= deadline:
                return {}
            recheck_at = now + self._access.recheck_s
            try:
                async with asyncio.timeout_at(recheck_at if deadline is None else min(deadline, recheck_at)):
                    await self._rung.wait()
            except TimeoutError:
                if deadline is not None and loop.time() >= deadline:
                    self._check_open()
                    return {}

    def seek(self, position: TopicPartition, offset: int) -> None:
        if position not in self._offsets:
            raise InvalidArgument(f"this reader does not read {position.topic}[{position.partition}]")
        self._offsets[position] = offset
        self._ring(position)

    def positions(self) -> Mapping[TopicPartition, int]:
        return dict(self._offsets)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._rung.set()
        for position, callback in self._watched.items():
            self._access.watcher.unwatch(self._access.layout.bell(position), callback)
        # Each leads back here: the reader, and what it read last, would wait for the garbage collector.
        self._watched.clear()
        self._access.forget(self)
        await self._settle()
        self._inflight = None
        await asyncio.get_running_loop().run_in_executor(self._access.executor, self._close_cursors)

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed("the reader was closed")

    async def _begin(self) -> None:
        """Know all topics, then listen to their bells; a first read follows, so that no ring is missed."""
        await asyncio.get_running_loop().run_in_executor(self._access.executor, self._load_topics)
        self._check_open()
        for position in self._order:
            if position not in self._watched:
                callback = self._watched[position] = partial(self._ring, position)
                self._access.watcher.watch(self._access.layout.bell(position), callback)

    def _load_topics(self) -> None:
        check_log(self._access.layout, self._access.log_id)
        for topic, partition in self._order:
            if topic not in self._topics:
                self._topics[topic] = load_topic(self._access.layout, topic)
            count = self._topics[topic].config.partitions
            if not 0 <= partition < count:
                raise InvalidArgument(f"topic {topic!r} has partitions 0 to {count - 1}, not {partition}")

    def _ring(self, position: TopicPartition) -> None:
        self._dirty.add(position)
        self._rung.set()

    async def _read(self, max_records: int, look_everywhere: bool) -> dict[TopicPartition, Sequence[Record]]:
        loop = asyncio.get_running_loop()
        due = loop.time() - self._swept_at >= self._access.recheck_s
        everywhere = look_everywhere or due
        wanted = [position for position in self._order if everywhere or position in self._dirty]
        if not wanted:
            return {}
        # The next read starts at another partition, so that a busy one cannot hold up the rest.
        self._order.append(self._order.pop(0))
        await self._settle()
        self._check_open()
        self._dirty.difference_update(wanted)
        requests = [(position, self._offsets[position]) for position in wanted]
        future = loop.run_in_executor(self._access.executor, self._read_blocking, requests, max_records, due)
        self._inflight = future
        try:
            # A cancelled poll leaves the thread at work; the next one waits for it and reads the same again.
            outcome = await asyncio.shield(future)
        except asyncio.CancelledError:
            self._dirty.update(wanted)
            raise
        self._inflight = None  # It holds what was read, which may be much, until the next read.
        self._check_open()
        if due and outcome.error is None:
            self._swept_at = loop.time()
        return self._deliver(outcome, wanted)

    async def _settle(self) -> None:
        if self._inflight is not None and not self._inflight.done():
            await asyncio.wait((self._inflight,))

    def _deliver(self, outcome: _Outcome, wanted: Iterable[TopicPartition]) -> dict[TopicPartition, Sequence[Record]]:
        batch: dict[TopicPartition, Sequence[Record]] = {}
        unread = set(wanted)
        for taken in outcome.taken:
            position = taken.position
            if self._offsets[position] != taken.requested:
                continue  # ``seek`` came in between: it stays marked and is read from there
            self._offsets[position] = taken.next_offset
            if taken.drained:
                unread.discard(position)
            if taken.records:
                batch[position] = taken.records
        self._dirty |= unread
        if outcome.error is not None and not batch:
            raise outcome.error
        return batch

    # ---- in a thread, one at a time ----

    def _read_blocking(
        self, requests: Sequence[tuple[TopicPartition, int]], max_records: int, check_in_place: bool
    ) -> _Outcome:
        outcome = _Outcome([])
        budget = POLL_BYTES
        for position, offset in requests:
            if max_records <= 0 or budget <= 0:
                break
            taken = _Taken(position, offset, offset, [], 0, drained=False)
            try:
                self._read_partition(taken, max_records, budget, check_in_place)
            except LogError as error:
                # What was read before is delivered first; the partition stays marked and tells its error again.
                outcome.error = error
                if taken.records:
                    outcome.taken.append(taken)
                break
            outcome.taken.append(taken)
            max_records -= len(taken.records)
            budget -= taken.size
        return outcome

    def _read_partition(self, taken: _Taken, max_records: int, max_bytes: int, check_in_place: bool) -> None:
        cursor = self._cursors.get(taken.position)
        if cursor is None:
            topic = self._topics[taken.position.topic]
            layout, log_id, name = self._access.layout, self._access.log_id, topic.config.name
            check = partial(check_place, layout, log_id, name, topic.topic_id)
            cursor = PartitionCursor(layout, taken.position, topic.config.compacted, check)
            self._cursors[taken.position] = cursor
        if check_in_place:
            cursor.check_in_place()
        while len(taken.records) < max_records and taken.size < max_bytes and not taken.drained:
            wanted = max_records - len(taken.records)
            chunk, taken.next_offset = cursor.read(taken.next_offset, wanted, max_bytes - taken.size)
            taken.records = [*taken.records, *chunk.records] if taken.records else chunk.records
            taken.size += chunk.size
            taken.drained = chunk.exhausted

    def _close_cursors(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors.clear()
