"""The event log in this process's memory: for unit tests, and for trying things out. Gone when the process ends."""

from __future__ import annotations

import asyncio
import bisect
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from dynamo_es.clock import Clock
from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import (
    TOMBSTONE_RETENTION_MS,
    Bounds,
    Entry,
    Position,
    Record,
    TopicConfig,
    TopicDescription,
    TopicPartition,
)
from dynamo_es.log.checks import ALTERABLE, check_alteration, check_entry, check_topic_config
from dynamo_es.log.errors import LogClosed, LogReplaced, OffsetOutOfRange, TopicMismatch, UnknownTopic
from dynamo_es.log.partitioning import Partitioner

_OFFSET = attrgetter("offset")


@dataclass(slots=True)
class _Partition:
    records: list[Record] = field(default_factory=list)
    start: int = 0
    end: int = 0


@dataclass(slots=True)
class _Topic:
    config: TopicConfig
    topic_id: str
    partitions: list[_Partition]


class MemoryLog:
    """An ``EventLog`` without a disk. Keeps everything until ``trim`` or ``enforce_retention``; it has no other bound.

    ``durability`` is that of the process. Records are dropped one by one, so a trim is exact.
    """

    def __init__(self, name: str, clock: Clock, rng: random.Random | None = None) -> None:
        self._name = name
        self._clock = clock
        self._partitioner = Partitioner(rng or random.Random())  # noqa: S311
        self._log_id = uuid.uuid4().hex
        self._topics: dict[str, _Topic] = {}
        self._appended_to: dict[str, str] = {}
        self._readers: set[MemoryReader] = set()
        self._closed = False

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def log_id(self) -> str:
        return self._log_id

    async def start(self) -> None:
        self._check_open()

    async def reopen(self) -> None:
        self._check_open()
        self._appended_to.clear()

    async def close(self) -> None:
        self._closed = True
        for reader in list(self._readers):
            await reader.close()

    async def create_topics(self, topics: Sequence[TopicConfig]) -> None:
        self._check_open()
        for config in topics:
            check_topic_config(config)
            found = self._topics.get(config.name)
            if found is None:
                parts = [_Partition() for _ in range(config.partitions)]
                self._topics[config.name] = _Topic(config, uuid.uuid4().hex, parts)
            elif len(found.partitions) != config.partitions:
                raise TopicMismatch(config.name, len(found.partitions), config.partitions)

    async def list_topics(self) -> Sequence[str]:
        self._check_open()
        return sorted(self._topics)

    async def describe(self, topic: str) -> TopicDescription:
        found = self._topic(topic)
        config = found.config
        return TopicDescription(
            topic, found.topic_id, config.partitions, config.compacted, config.retention_ms, config.max_record_bytes
        )

    @property
    def alterable(self) -> frozenset[str]:
        return ALTERABLE

    async def alter_topic(self, config: TopicConfig) -> None:
        found = self._topic(config.name)
        check_alteration(config, found.config)
        found.config = config

    async def append(self, topic: str, entry: Entry) -> Position:
        return (await self.append_all(topic, (entry,)))[0]

    async def append_all(self, topic: str, entries: Sequence[Entry]) -> Sequence[Position]:
        found = self._topic(topic)
        expected = self._appended_to.setdefault(topic, found.topic_id)
        if expected != found.topic_id:
            self._appended_to[topic] = found.topic_id
            raise LogReplaced(f"topic {topic!r} in {self.url}", found.topic_id, expected)
        count = len(found.partitions)
        for entry in entries:
            check_entry(topic, entry, count, found.config.max_record_bytes)
        positions = [self._append_one(topic, found, entry) for entry in entries]
        for reader in self._readers:
            reader.wake()
        return positions

    def reader(self, positions: Mapping[TopicPartition, int]) -> MemoryReader:
        self._check_open()
        reader = MemoryReader(self, positions)
        self._readers.add(reader)
        return reader

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        return {number: Bounds(p.start, p.end) for number, p in enumerate(self._topic(topic).partitions)}

    async def offset_at(self, position: TopicPartition, timestamp_ms: int) -> int:
        partition = self._partition(position)
        for record in partition.records:
            if record.timestamp_ms >= timestamp_ms:
                return record.offset
        return partition.end

    async def trim(self, position: TopicPartition, before_offset: int) -> int:
        partition = self._partition(position)
        if not self._topic(position.topic).config.compacted:
            self._drop_below(partition, min(before_offset, partition.end))
        return partition.start

    async def enforce_retention(self, now_ms: int) -> Mapping[TopicPartition, int]:
        self._check_open()
        trimmed: dict[TopicPartition, int] = {}
        for name, topic in self._topics.items():
            for number, partition in enumerate(topic.partitions):
                if topic.config.compacted:
                    partition.records = _compact(partition.records, now_ms - TOMBSTONE_RETENTION_MS)
                elif topic.config.retention_ms is not None:
                    start = partition.start
                    self._drop_older(partition, now_ms - topic.config.retention_ms)
                    if partition.start != start:
                        trimmed[TopicPartition(name, number)] = partition.start
        return trimmed

    def read(self, position: TopicPartition, offset: int, limit: int) -> tuple[list[Record], int]:
        """Records of one partition from ``offset``, and the offset behind them. For ``MemoryReader``."""
        partition = self._partition(position)
        if offset < partition.start or offset > partition.end:
            raise OffsetOutOfRange(position.topic, position.partition, offset, partition.start, partition.end)
        first = bisect.bisect_left(partition.records, offset, key=_OFFSET)
        records = partition.records[first : first + limit]
        behind = records[-1].offset + 1 if len(records) == limit else partition.end
        return records, behind

    def check_topic(self, topic: str, expected: str | None) -> str:
        """The topic's id, which must be ``expected`` if that is known. For ``MemoryReader``."""
        found = self._topic(topic).topic_id
        if expected is not None and found != expected:
            raise LogReplaced(f"topic {topic!r} in {self.url}", found, expected)
        return found

    def forget(self, reader: MemoryReader) -> None:
        """For ``MemoryReader.close``."""
        self._readers.discard(reader)

    def _append_one(self, topic: str, found: _Topic, entry: Entry) -> Position:
        number = entry.partition
        if number is None:
            number = self._partitioner.choose(entry.key, len(found.partitions))
        partition = found.partitions[number]
        stamp = self._clock.now_ms() if entry.timestamp_ms is None else entry.timestamp_ms
        headers = tuple((name, content) for name, content in entry.headers)
        partition.records.append(Record(topic, number, partition.end, stamp, entry.key, entry.value, headers))
        partition.end += 1
        return Position(topic, number, partition.end - 1)

    @staticmethod
    def _drop_below(partition: _Partition, offset: int) -> None:
        if offset > partition.start:
            del partition.records[: bisect.bisect_left(partition.records, offset, key=_OFFSET)]
            partition.start = offset

    def _drop_older(self, partition: _Partition, timestamp_ms: int) -> None:
        keep = next((r.offset for r in partition.records if r.timestamp_ms >= timestamp_ms), partition.end)
        self._drop_below(partition, keep)

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed(f"{self.url} was closed")

    def _topic(self, topic: str) -> _Topic:
        self._check_open()
        found = self._topics.get(topic)
        if found is None:
            raise UnknownTopic(topic)
        return found

    def _partition(self, position: TopicPartition) -> _Partition:
        partitions = self._topic(position.topic).partitions
        if not 0 <= position.partition < len(partitions):
            raise InvalidArgument(
                f"topic {position.topic!r} has partitions 0 to {len(partitions) - 1}, not {position.partition}"
            )
        return partitions[position.partition]


class MemoryReader:
    """A ``LogReader`` over a ``MemoryLog``."""

    def __init__(self, log: MemoryLog, positions: Mapping[TopicPartition, int]) -> None:
        self._log = log
        self._offsets = dict(positions)
        self._order = list(self._offsets)
        self._topic_ids: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._closed = False

    async def poll(
        self, *, max_records: int = 10_000, timeout_s: float | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            if self._closed:
                raise LogClosed("the reader was closed")
            self._wake.clear()
            batch = self._take(max_records)
            if batch or timeout_s == 0:
                return batch
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wake.wait()
            except TimeoutError:
                return {}

    def seek(self, position: TopicPartition, offset: int) -> None:
        if position not in self._offsets:
            raise InvalidArgument(f"this reader does not read {position.topic}[{position.partition}]")
        self._offsets[position] = offset
        self._wake.set()

    def positions(self) -> Mapping[TopicPartition, int]:
        return dict(self._offsets)

    async def close(self) -> None:
        self._closed = True
        self._log.forget(self)
        self._wake.set()

    def wake(self) -> None:
        """Something was appended."""
        self._wake.set()

    def _take(self, max_records: int) -> dict[TopicPartition, Sequence[Record]]:
        batch: dict[TopicPartition, Sequence[Record]] = {}
        for topic in {position.topic for position in self._order}:
            self._topic_ids[topic] = self._log.check_topic(topic, self._topic_ids.get(topic))
        for position in self._order:
            if max_records <= 0:
                break
            try:
                records, behind = self._log.read(position, self._offsets[position], max_records)
            except OffsetOutOfRange:
                if batch:
                    break
                raise
            self._offsets[position] = behind
            if records:
                batch[position] = records
                max_records -= len(records)
        # The next poll starts at another partition, so that a busy one cannot hold up the rest.
        if self._order:
            self._order.append(self._order.pop(0))
        return batch


def _compact(records: list[Record], tombstones_before_ms: int) -> list[Record]:
    newest = {record.key: record.offset for record in records if record.key is not None}
    return [
        record
        for record in records
        if record.key is None
        or (
            newest[record.key] == record.offset
            and (record.value is not None or record.timestamp_ms >= tombstones_before_ms)
        )
    ]
