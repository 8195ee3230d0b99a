"""Partition processors on a memory log, without a consumer group: the test delivers what it likes."""

from __future__ import annotations

import itertools
import random
from typing import Any

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, Record, TopicPartition
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.base import StateStore
from dynamo_es.store.memory import MemoryStore
from schemas.aggregates import AGGREGATES, Progress
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.topic import TopicSpec
from streams.aggregate_log import AggregateOutlet, AggregateStart, read_aggregates
from streams.committed_rows import KvIndexRows
from streams.compacted import CompactedTopic
from streams.kv_index import KvIndexFold
from streams.partition_processor import PartitionProcessor
from streams.refold import refold
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotWriter
from streams.windows import WindowSettings
from tests.support.event_storm import EventStorm

NAMESPACE = "ns"
WINDOWS = WindowSettings(window_ms=1000, kept_ms=3_600_000)


class Letters:
    """Keeps dead letters."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def offer_dead_letter(self, letter: Any) -> None:
        self.kept.append(letter)


class PartitionFleet:
    """One log with a storm of events, and processors of ``make_fold``'s topic."""

    def __init__(self, make_fold: Any, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.rng = random.Random(seed)
        self.log = MemoryLog("test", self.clock, random.Random(seed))
        self.letters = Letters()
        self.aggregates = CompactedTopic(AGGREGATES, self.log, NAMESPACE, self.letters)
        self.snapshots = CompactedTopic(KV_SNAPSHOTS, self.log, NAMESPACE, self.letters)
        self.make_fold = make_fold
        self.spec: TopicSpec = make_fold(WINDOWS).topics[0]
        self.topic = self.spec.qualified(NAMESPACE)
        self._codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
        self._storm = iter(EventStorm(seed))

    async def start(self) -> None:
        await self.log.start()
        await self.log.create_topics(topic_configs(NAMESPACE, None))

    async def events(self, count: int, *, repeat: float = 0.0) -> None:
        """Append storm events of the topic; some of them twice, as a publisher does whose append failed half way."""
        events = (event for event in self._storm if event[0] is self.spec)
        for _, key, value in itertools.islice(events, count):
            self.clock.advance(self.rng.uniform(0, 0.2))
            entry = self.entry(self.spec, key, value)
            await self.log.append(self.topic, entry)
            if self.rng.random() < repeat:
                await self.log.append(self.topic, entry)

    def entry(self, spec: TopicSpec, key: bytes, value: Any) -> Entry:
        codec = self._codecs[spec.name]
        return Entry(None if value is None else codec.encode(value), key, codec.headers)

    def processor(self, partition: int, store: StateStore | None = None, **settings: Any) -> PartitionProcessor[Any]:
        """A processor as a worker makes it. Its store is ``store``, which it may not close for good."""
        place = TopicPartition(self.topic, partition)
        fold = self.make_fold(WINDOWS)
        kept = Reopened(store if store is not None else MemoryStore())
        snapshots = (
            SnapshotStart(self.log, NAMESPACE, KvIndexFold.version, self.snapshots) if self.spec is KV_EVENTS else None
        )
        processor: PartitionProcessor[Any] = PartitionProcessor(
            fold, place, self.log, NAMESPACE,
            **{
                "make_store": lambda: kept,
                "clock": self.clock,
                "rng": self.rng,
                "dead_letters": self.letters,
                "outlet": AggregateOutlet(
                    fold, self.log, NAMESPACE, place, topic_id=lambda: processor.topic_id, written_by="test"
                ),
                "snapshots": AggregateStart(fold, self.log, self.aggregates, snapshots=snapshots),
                **settings,
            },
        )  # fmt: skip
        return processor

    def snapshot_writer(self, processor: PartitionProcessor[Any]) -> SnapshotWriter:
        return SnapshotWriter(
            self.log, KvIndexRows(processor, KvIndexFold.version), NAMESPACE, self.snapshots,
            owned=lambda: (processor.place.partition,), name="test", clock=self.clock, rng=self.rng,
        )  # fmt: skip

    async def records(self, partition: int, start: int = 0) -> list[Record]:
        place = TopicPartition(self.topic, partition)
        end = (await self.log.bounds(self.topic))[partition].end
        found: list[Record] = []
        reader = self.log.reader({place: start})
        while reader.positions()[place] < end:
            for part in (await reader.poll(timeout_s=0)).values():
                found += part
        await reader.close()
        return found

    async def truth(self) -> tuple[Any, Any]:
        """The fold, and its state after all records from the start, in one go."""
        fold = self.make_fold(WINDOWS)
        state, _ = await refold(fold, self.log, NAMESPACE)
        return fold, state

    async def true_windows(self, partition: int) -> dict[bytes, Any]:
        fold, state = await self.truth()
        windows = fold.windows(state)
        return {windows.key(row): row for row in windows.rows(partition)}

    async def published(self, partition: int) -> dict[bytes, Any]:
        """Windows in topic ``aggregates``, by key."""
        found = await read_aggregates(self.aggregates, self.log, self.spec.name, partition)
        return {key: value for key, value in found.items() if not isinstance(value, Progress)}


class Reopened:
    """A store that stays when its processor closes it, as a folder does."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        return None
