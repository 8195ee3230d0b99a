"""One worker of the stream processors' group, but for the group itself: log, folds, stores, results, metrics."""

from __future__ import annotations

import logging
import math
import os
import random
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.config.tree import LogConfig, StateConfig, StreamsConfig, SystemConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import EventLog, TopicPartition
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.errors import UnknownTopic
from dynamo_es.runtime.appender import TopicAppender
from dynamo_es.runtime.declared_topics import declared_topics
from dynamo_es.runtime.metrics_index import SnapshotAgeCollector
from dynamo_es.store.base import StateStore
from dynamo_es.store.layout import partition_folder
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksMemory, RocksStore
from schemas.aggregates import AGGREGATES
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.requests import REQUESTS
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD
from streams.aggregate_log import AggregateOutlet, AggregateStart
from streams.committed_rows import KvIndexRows
from streams.compacted import CompactedTopic
from streams.kv_index import KvIndexFold
from streams.kv_partition import KvPartitionFold
from streams.open_files import allow_open_files
from streams.partition_pool import Member, PartitionPool, PoolSettings
from streams.partition_processor import PartitionProcessor
from streams.pool_metrics import PoolCollector
from streams.pool_upkeep import ConsumerStalled, PoolUpkeep
from streams.rank_load import MeasuredLoadFold, PassLoadFold
from streams.request_load import RequestLoadFold
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotCounters, SnapshotWriter
from streams.status_server import StatusServer
from streams.windows import WindowSettings

logger = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 5.0
_LEAST_CHECK_INTERVAL_S = 0.25
FOLDS: Mapping[TopicSpec, Callable[[WindowSettings], Any]] = {
    KV_EVENTS: KvPartitionFold,
    REQUESTS: RequestLoadFold,
    WORKER_LOAD: MeasuredLoadFold,
    FORWARD_PASS: PassLoadFold,
}


@dataclass(frozen=True, slots=True)
class StreamsSettings:
    """Configuration of a worker."""

    log: LogConfig
    state: StateConfig
    streams: StreamsConfig
    system: SystemConfig

    @property
    def group(self) -> str:
        """Name of the consumer group."""
        return f"{self.log.namespace}.{self.streams.group}"


class StreamWorker:
    """Everything that a worker needs beside its membership in the group. Belongs to one event loop.

    Call ``start``, let the group call ``pool``, then ``close``. A worker that is closed can be started again.
    """

    def __init__(
        self,
        settings: StreamsSettings,
        *,
        open_log: Callable[[], EventLog],
        clock: Clock,
        rng: random.Random,
        registry: CollectorRegistry,
        on_stalled: Callable[[ConsumerStalled], None],
    ) -> None:
        """Does nothing yet. ``open_log`` makes a log that is not started; it is started and closed here."""
        self.settings = settings
        self.name = f"streams {socket.gethostname()}/{os.getpid()}"
        self.status: StatusServer | None = None
        self._open_log = open_log
        self._clock = clock
        self._rng = rng
        self._registry = registry
        self._on_stalled = on_stalled
        self._store_memory = RocksMemory.for_partitions()
        self._closers: list[Callable[[], Awaitable[None]]] = []

    async def start(self) -> None:
        """Open the log, create its topics, look after partitions. Raises ``LogError`` and ``ConfigError``."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Hand over all partitions and close everything. Safe to call twice."""
        while self._closers:
            await self._closers.pop()()

    async def _start(self) -> None:
        config = self.settings
        namespace = config.log.namespace
        tasks = BackgroundTasks()
        self.log = self._open_log()
        self._closers.append(self.log.close)
        await self.log.start()
        await check_partition_counts(self.log, namespace)
        await self.log.create_topics(declared_topics(config.log))
        buffer = BufferedAppender(
            self.log,
            self._clock,
            self._rng,
            max_records=config.log.buffer_records,
            max_bytes=config.log.buffer_bytes,
            tasks=tasks,
        )
        buffer.start()
        self._closers.append(lambda: _close_buffer(buffer))
        self._dead_letters = TopicAppender(self.log, buffer, namespace, self._clock)
        self._kv_snapshots = CompactedTopic(KV_SNAPSHOTS, self.log, namespace, self._dead_letters)
        self._aggregates = CompactedTopic(AGGREGATES, self.log, namespace, self._dead_letters)
        expected = {
            spec.qualified(namespace): (await self.log.describe(spec.qualified(namespace))).partitions for spec in FOLDS
        }
        if config.state.state_dir is not None:
            allow_open_files(sum(expected.values()))
        self.pool = PartitionPool(
            self._make_member, expected, settings=pool_settings(config), clock=self._clock, rng=self._rng
        )
        self._closers.append(self.pool.close)
        self.upkeep = PoolUpkeep(self.pool, self.log, clock=self._clock, on_stalled=self._on_stalled, tasks=tasks)
        self.upkeep.start()
        self._closers.append(self.upkeep.close)
        await self._expose()

    async def _expose(self) -> None:
        collectors = (
            PoolCollector(self.pool, self.upkeep),
            SnapshotAgeCollector(self._snapshots, self._kv_position, self._clock),
        )
        for collector in collectors:
            self._registry.register(collector)

        async def hide() -> None:
            for collector in collectors:
                self._registry.unregister(collector)

        self._closers.append(hide)
        system = self.settings.system
        if system.port >= 0:
            self.status = StatusServer(system.host, system.port, self._registry, self.upkeep.health)
            await self.status.start()
            self._closers.append(self.status.close)

    def _snapshots(self) -> list[SnapshotCounters]:
        written = (member.snapshots for member in self.pool.members.values())
        return [writer.counters for writer in written if isinstance(writer, SnapshotWriter)]

    def _kv_position(self, partition: int) -> int:
        member = self.pool.members.get(TopicPartition(KV_EVENTS.qualified(self.settings.log.namespace), partition))
        return member.processor.position if member is not None else 0

    def _make_member(self, place: TopicPartition) -> Member:
        config, namespace = self.settings, self.settings.log.namespace
        (spec,) = (spec for spec in FOLDS if spec.qualified(namespace) == place.topic)
        fold = FOLDS[spec](window_settings(config.streams))
        snapshots = None
        if spec is KV_EVENTS:
            snapshots = SnapshotStart(self.log, namespace, KvIndexFold.version, self._kv_snapshots)
        processor: PartitionProcessor[Any] = PartitionProcessor(
            fold,
            place,
            self.log,
            namespace,
            make_store=lambda: self._make_store(place, fold.families),
            clock=self._clock,
            rng=self._rng,
            dead_letters=self._dead_letters,
            outlet=AggregateOutlet(
                fold, self.log, namespace, place, topic_id=lambda: processor.topic_id, written_by=self.name
            ),
            snapshots=AggregateStart(fold, self.log, self._aggregates, snapshots=snapshots),
            lock_timeout_s=config.streams.lock_timeout_s,
        )
        return Member(processor, self._snapshot_writer(processor) if spec is KV_EVENTS else None)

    def _snapshot_writer(self, processor: PartitionProcessor[Any]) -> SnapshotWriter:
        return SnapshotWriter(
            self.log,
            KvIndexRows(processor, KvIndexFold.version),
            self.settings.log.namespace,
            self._kv_snapshots,
            owned=lambda: (processor.place.partition,),
            name=self.name,
            clock=self._clock,
            rng=self._rng,
            interval_s=self.settings.state.snapshot_interval_s,
        )

    def _make_store(self, place: TopicPartition, families: tuple[str, ...]) -> StateStore:
        state_dir = self.settings.state.state_dir
        if state_dir is None:
            return MemoryStore(f"memory://{place.topic}-{place.partition}")
        return RocksStore(
            partition_folder(Path(state_dir), place.topic, place.partition), families, memory=self._store_memory
        )


def pool_settings(config: StreamsSettings) -> PoolSettings:
    """The options that the pool needs."""
    streams = config.streams
    patience_s = config.state.stall_timeout_s or math.inf
    return PoolSettings(
        flush_interval_s=config.state.flush_interval_s,
        publish_interval_s=streams.publish_interval_s,
        snapshot_interval_s=config.state.snapshot_interval_s,
        check_interval_s=min(_CHECK_INTERVAL_S, max(patience_s / 6, _LEAST_CHECK_INTERVAL_S)),
        stall_timeout_s=patience_s,
        heartbeat_s=heartbeat_s(streams),
        session_timeout_s=streams.session_timeout_s,
    )


def heartbeat_s(streams: StreamsConfig) -> float:
    """Time between heartbeats of the group: three may be lost within a session."""
    return streams.session_timeout_s * 0.3


def window_settings(streams: StreamsConfig) -> WindowSettings:
    """The options that the folds need."""
    return WindowSettings(int(streams.window_s * 1000), int(streams.window_retention_s * 1000))


async def check_partition_counts(log: EventLog, namespace: str) -> None:
    """A snapshot stands in the partition of the same number as its events. Raises ``ConfigError`` and ``LogError``."""
    counts = {}
    for spec in (KV_EVENTS, KV_SNAPSHOTS):
        topic = spec.qualified(namespace)
        try:
            counts[topic] = (await log.describe(topic)).partitions
        except UnknownTopic:
            continue
    if len(set(counts.values())) > 1:
        (events, found), (snapshots, other) = counts.items()
        raise ConfigError(
            f"topic {events!r} has {found} partitions and topic {snapshots!r} has {other}, but a snapshot stands in "
            f"the partition of the same number as its events: delete {snapshots!r} (it is made anew, with what the log "
            "still has), or use another --topic-namespace"
        )


async def _close_buffer(buffer: BufferedAppender) -> None:
    await buffer.close(timeout_s=5.0)
