"""The event log on a Kafka cluster."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from aiokafka import errors as kafka

from dynamo_es.clock import Clock
from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import (
    RECORD_OVERHEAD_BYTES,
    Bounds,
    Entry,
    Position,
    TopicConfig,
    TopicDescription,
    TopicPartition,
)
from dynamo_es.log.checks import check_entry, check_topic_config
from dynamo_es.log.errors import (
    LogClosed,
    LogError,
    LogReplaced,
    LogUnavailable,
    RecordTooLarge,
    TopicMismatch,
    UnknownTopic,
)
from dynamo_es.log.kafka_admin import EARLIEST, LATEST, KafkaAdmin
from dynamo_es.log.kafka_appender import KafkaAppender
from dynamo_es.log.kafka_clients import KafkaClients
from dynamo_es.log.kafka_config import KafkaSettings, parse_kafka_url
from dynamo_es.log.kafka_logging import RepeatFilter
from dynamo_es.log.kafka_reader import KafkaReader
from dynamo_es.log.partitioning import Partitioner

_log = logging.getLogger(__name__)

# Kafka's default for max.message.bytes, where a principal may append but not read a topic's settings.
_DEFAULT_MESSAGE_BYTES = 1_048_588
# A producer knows topics by name only: this often an append asks whether the topic is still the same one.
RECHECK_S = 5.0
# And this often it reads the topic's settings again, for a bound on records that was changed.
SETTINGS_S = 60.0
_ALTERABLE = frozenset({"retention_ms", "compacted", "max_record_bytes", "min_insync_replicas"})


@dataclass(frozen=True, slots=True)
class _TopicLimits:
    topic_id: str
    partitions: int
    max_record_bytes: int
    learned_at: float
    settings_at: float


class KafkaLog:
    """An ``EventLog`` on Apache Kafka 2.4 or later (topic ids: 3.0 or later). Belongs to one event loop.

    Appends are idempotent and wait for all in-sync replicas; how many machines may be lost is the topic's
    ``replication`` and ``min.insync.replicas``. Keys are placed by Kafka's default partitioner. Readers see committed
    records only. A bound on time stands behind every call: ``request_timeout_ms`` for appends and questions,
    ``connect_timeout_ms`` for finding a broker.

    Not promised: Kafka refuses records without key and value, and (unless a topic's
    ``message.timestamp.after.max.ms`` says otherwise) records dated more than an hour ahead of the broker's clock. A
    cluster should run with ``auto.create.topics.enable=false``: this log never asks about a topic in a way that
    creates it, but a topic that is deleted while it is read or written may come back with the broker's defaults.
    """

    def __init__(self, settings: KafkaSettings, clock: Clock, partitioner: Partitioner) -> None:
        self._clock = clock
        self._settings = settings
        self._clients = KafkaClients(settings)
        self._admin = KafkaAdmin(self._clients)
        self._appender = KafkaAppender(self._clients, clock, partitioner)
        self._log_filter = RepeatFilter(clock)
        self._limits: dict[str, _TopicLimits] = {}
        self._stale_limits: dict[str, _TopicLimits] = {}
        self._readers: set[KafkaReader] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._log_id: str | None = None
        self._closed = False

    @classmethod
    def from_url(cls, url: str, clock: Clock, environment: Mapping[str, str] | None = None) -> KafkaLog:
        """The log at ``kafka://host:port[,host:port][?option=value]``; ``KafkaSettings`` tells the options.

        ``environment`` None: the process's. Raises ``ConfigError``.
        """
        settings = parse_kafka_url(url, os.environ if environment is None else environment)
        return cls(settings, clock, Partitioner(random.Random()))  # noqa: S311

    @property
    def url(self) -> str:
        return self._settings.url

    @property
    def log_id(self) -> str:
        if self._log_id is None:
            raise LogError(f"{self.url}: the cluster's id is known after start()")
        return self._log_id

    async def start(self) -> None:
        """As ``EventLog.start``; also raises ``ConfigError`` for unusable certificate files, ``LogError`` for a
        refused login."""
        self._check_open()
        self._log_filter.install()
        self._log_id = await self._admin.cluster_id()

    async def reopen(self) -> None:
        """As ``EventLog.reopen``: the cluster may be another one at the same addresses."""
        self._check_open()
        self._log_id = await self._admin.cluster_id()
        self._limits.clear()
        self._stale_limits.clear()

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(reader.close() for reader in list(self._readers)))
        if self._ending:
            await asyncio.wait(set(self._ending))
        await self._appender.close()
        await self._admin.close()
        self._log_filter.remove()

    async def create_topics(self, topics: Sequence[TopicConfig]) -> None:
        for config in topics:
            check_topic_config(config)
        known = await self._admin.topics([config.name for config in topics]) if topics else {}
        await self._admin.create([config for config in topics if config.name not in known])
        # Once more, also for those just created: another process may have been faster, with other numbers.
        known = await self._admin.topics([config.name for config in topics]) if topics else {}
        for config in topics:
            found = len(known[config.name].leaders) if config.name in known else 0
            if found != config.partitions:
                raise TopicMismatch(config.name, found, config.partitions)

    async def list_topics(self) -> Sequence[str]:
        return sorted(name for name, facts in (await self._admin.topics(None)).items() if not facts.internal)

    async def describe(self, topic: str) -> TopicDescription:
        """As ``EventLog.describe``. ``topic_id`` is Kafka's; brokers before 3.0 have none, it is the name there."""
        facts = await self._admin.topic(topic)
        configs = await self._admin.configs(topic)
        policies = configs.get("cleanup.policy", "delete").split(",")
        retention_ms = int(configs.get("retention.ms", "-1"))
        message_bytes = int(configs.get("max.message.bytes", _DEFAULT_MESSAGE_BYTES))
        return TopicDescription(
            name=topic,
            topic_id=facts.topic_id,
            partitions=len(facts.leaders),
            compacted="compact" in policies,
            retention_ms=retention_ms if retention_ms >= 0 and "delete" in policies else None,
            max_record_bytes=message_bytes - RECORD_OVERHEAD_BYTES,
            replication=facts.replication,
            min_insync_replicas=int(configs.get("min.insync.replicas", "1")),
        )

    @property
    def alterable(self) -> frozenset[str]:
        return _ALTERABLE

    async def alter_topic(self, config: TopicConfig) -> None:
        check_topic_config(config)
        facts = await self._admin.topic(config.name)
        if len(facts.leaders) != config.partitions:
            raise TopicMismatch(config.name, len(facts.leaders), config.partitions)
        if config.replication is not None and config.replication != facts.replication:
            raise InvalidArgument(
                f"topic {config.name!r} has replication {facts.replication}, not {config.replication}: replicas are "
                "moved by the cluster's administrator (kafka-reassign-partitions)"
            )
        await self._admin.alter(config)
        self._limits.pop(config.name, None)

    async def append(self, topic: str, entry: Entry) -> Position:
        return (await self.append_all(topic, (entry,)))[0]

    async def append_all(self, topic: str, entries: Sequence[Entry]) -> Sequence[Position]:
        self._check_open()
        limits = self._limits.get(topic)
        if limits is None or self._clock.monotonic() - limits.learned_at > RECHECK_S:
            limits = await self._learn_limits(topic)
        for entry in entries:
            check_entry(topic, entry, limits.partitions, limits.max_record_bytes)
            if entry.key is None and entry.value is None:
                raise InvalidArgument(f"record for {topic!r} without key and value: Kafka takes none")
        try:
            return await self._appender.append(topic, entries, limits.partitions, limits.max_record_bytes)
        except (LogUnavailable, UnknownTopic, RecordTooLarge) as error:
            # The topic may have been deleted, or changed: the next append asks.
            self._stale_limits[topic] = self._limits.pop(topic, limits)
            ailment = await self._admin.ailment(topic) if isinstance(error, LogUnavailable) else ""
            if ailment:
                raise LogUnavailable(f"{error}; {ailment}") from error
            raise

    def reader(self, positions: Mapping[TopicPartition, int]) -> KafkaReader:
        self._check_open()
        reader = KafkaReader(self._clients, self._admin, positions, self._readers.discard, self._ending)
        self._readers.add(reader)
        return reader

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        partitions = [TopicPartition(topic, number) for number in (await self._admin.topic(topic)).leaders]
        starts = await self._admin.offsets(dict.fromkeys(partitions, EARLIEST))
        ends = await self._admin.offsets(dict.fromkeys(partitions, LATEST))
        return {item.partition: Bounds(starts[item], ends[item]) for item in sorted(partitions)}

    async def offset_at(self, position: TopicPartition, timestamp_ms: int) -> int:
        # Kafka gives small negative times other meanings, and no record is older than 1970.
        found = (await self._admin.offsets({position: max(0, timestamp_ms)}))[position]
        return found if found >= 0 else (await self._admin.offsets({position: LATEST}))[position]

    async def trim(self, position: TopicPartition, before_offset: int) -> int:
        bounds = (await self.bounds(position.topic)).get(position.partition)
        if bounds is None:
            raise UnknownTopic(position.topic)
        policies = (await self._admin.configs(position.topic)).get("cleanup.policy", "delete").split(",")
        target = min(before_offset, bounds.end)
        # Kafka refuses to trim a topic that is only compacted.
        if target <= bounds.start or "delete" not in policies:
            return bounds.start
        return await self._admin.delete_records(position, target)

    async def enforce_retention(self, now_ms: int) -> Mapping[TopicPartition, int]:
        """Nothing to do: the brokers do it."""
        self._check_open()
        return {}

    async def _learn_limits(self, topic: str) -> _TopicLimits:
        facts = await self._admin.topic(topic)
        partitions = len(facts.leaders)
        now = self._clock.monotonic()
        known = self._limits.get(topic)
        if known is not None and known.topic_id == facts.topic_id:
            limits = replace(known, learned_at=now)
            if now - known.settings_at > SETTINGS_S:
                limits = replace(limits, settings_at=now, max_record_bytes=await self._record_bound(topic))
                if partitions != known.partitions:
                    # Keys stay where they are: their order is worth more than the new partitions.
                    _log.warning(
                        "appends keep to the old partitions: %s", TopicMismatch(topic, partitions, known.partitions)
                    )
            self._limits[topic] = limits
            return limits
        before = known or self._stale_limits.get(topic)
        bound = await self._record_bound(topic)
        if before is not None and before.topic_id == facts.topic_id and before.partitions != partitions:
            raise TopicMismatch(topic, partitions, before.partitions)
        limits = self._limits[topic] = _TopicLimits(facts.topic_id, partitions, bound, now, now)
        if before is not None and before.topic_id != facts.topic_id:
            raise LogReplaced(f"topic {topic!r} at {self._settings.bootstrap}", facts.topic_id, before.topic_id)
        return limits

    async def _record_bound(self, topic: str) -> int:
        try:
            configs = await self._admin.configs(topic)
        except LogError as error:
            if not isinstance(error.__cause__, kafka.TopicAuthorizationFailedError):
                raise
            configs = {}
        return max(1, int(configs.get("max.message.bytes", _DEFAULT_MESSAGE_BYTES)) - RECORD_OVERHEAD_BYTES)

    def _check_open(self) -> None:
        if self._closed:
            raise LogClosed(f"{self.url} was closed")
