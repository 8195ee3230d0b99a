"""Reading from Kafka: partitions at explicit offsets, without a group, and never silent while the cluster is away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka import errors as kafka

from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.log.errors import LogClosed, LogError, LogReplaced, LogUnavailable, OffsetOutOfRange, UnknownTopic
from dynamo_es.log.kafka_admin import EARLIEST, LATEST, READ_COMMITTED, KafkaAdmin, TopicFacts
from dynamo_es.log.kafka_clients import KafkaClients, stop_consumer
from dynamo_es.log.kafka_errors import map_kafka_error

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# A waiting poll looks up this often: to see close(), a failed check, or its own deadline. Records wake it at once.
_SLICE_S = 0.25
# While nothing arrives the cluster is asked this often where the partitions end.
CHECK_INTERVAL_S = 2.0
CHECK_TIMEOUT_S = 3.0
# Records known to be there that do not arrive for this long: the consumer is stuck and is replaced.
STALL_S = 6.0
# How long a poll that must not wait gives known records to cross the network.
_CROSSING_S = 1.0


class KafkaReader:
    """A ``LogReader`` on an ``AIOKafkaConsumer`` of its own. Belongs to one event loop.

    aiokafka retries for ever and returns nothing meanwhile. So while it is polled the reader asks the cluster every
    ``CHECK_INTERVAL_S``, over another connection, where its partitions end. No answer, or records that are there and
    do not arrive, is ``LogUnavailable``: the consumer is dropped and the next poll starts a new one at the positions,
    from the configured servers. ``replaced_consumers`` counts that.
    """

    def __init__(
        self,
        clients: KafkaClients,
        admin: KafkaAdmin,
        positions: Mapping[TopicPartition, int],
        on_close: Callable[[KafkaReader], None],
        ending: set[asyncio.Task[None]],
    ) -> None:
        """``ending`` gets the tasks that end consumers; who made the reader waits for them at the end."""
        for position, offset in positions.items():
            _check_offset(position, offset)
        self._clients = clients
        self._admin = admin
        self._on_close = on_close
        self._positions = dict(positions)
        self._sought: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, str] = {}
        self._consumer: AIOKafkaConsumer | None = None
        self._starting: asyncio.Task[AIOKafkaConsumer] | None = None
        self._check: asyncio.Task[Mapping[TopicPartition, int]] | None = None
        self._checked_at = 0.0
        self._failed_checks = 0
        self._away: LogUnavailable | None = None
        self._ending = ending
        self._closing = asyncio.Event()
        self._quiet_since = 0.0
        self._polled_at = 0.0
        self.replaced_consumers = 0

    async def poll(
        self, *, max_records: int = 10_000, timeout_s: float | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        if max_records < 1:
            raise InvalidArgument(f"max_records={max_records}: expected at least 1")
        loop = asyncio.get_running_loop()
        if loop.time() - self._polled_at > CHECK_INTERVAL_S:
            # Nobody waited meanwhile, so nothing can be said about what did not arrive.
            self._quiet_since = loop.time()
        try:
            if timeout_s is not None and timeout_s <= 0:
                return await self._poll_now(max_records)
            return await self._poll_until(None if timeout_s is None else loop.time() + timeout_s, max_records)
        finally:
            self._polled_at = loop.time()

    def seek(self, position: TopicPartition, offset: int) -> None:
        if position not in self._positions:
            raise InvalidArgument(f"this reader does not read {position.topic}[{position.partition}]")
        _check_offset(position, offset)
        self._sought[position] = self._positions[position] = offset

    def positions(self) -> Mapping[TopicPartition, int]:
        return dict(self._positions)

    async def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._on_close(self)
            starting, self._starting = self._starting, None
            if starting is not None:
                starting.cancel()
                await asyncio.wait({starting})
                if not starting.cancelled() and starting.exception() is None:
                    self._consumer = starting.result()
            self._drop()

    async def _poll_until(self, deadline: float | None, max_records: int) -> Mapping[TopicPartition, Sequence[Record]]:
        loop = asyncio.get_running_loop()
        while True:
            left = _SLICE_S if deadline is None else deadline - loop.time()
            consumer = await self._started(left)
            if consumer is not None:
                self._watch()
                left = _SLICE_S if deadline is None else deadline - loop.time()
                batch = await self._take(consumer, max(0.0, min(left, _SLICE_S)), max_records)
                if batch:
                    return batch
            if deadline is not None and loop.time() >= deadline:
                if self._away is not None:
                    raise LogUnavailable(str(self._away))
                return {}

    async def _poll_now(self, max_records: int) -> Mapping[TopicPartition, Sequence[Record]]:
        """What is there now. Asks the cluster, since an empty buffer says nothing about the log."""
        loop = asyncio.get_running_loop()
        consumer = None
        while consumer is None:
            consumer = await self._started(_SLICE_S)
        batch = await self._take(consumer, 0, max_records)
        if batch:
            return batch
        ends = await self._ends()
        deadline = loop.time() + _CROSSING_S
        while any(offset < ends.get(position, 0) for position, offset in self._positions.items()):
            batch = await self._take(consumer, max(0.0, deadline - loop.time()), max_records)
            if batch or loop.time() >= deadline:
                return batch
        return {}

    async def _started(self, wait_s: float) -> AIOKafkaConsumer | None:
        """The consumer, or None while it is still connecting after ``wait_s``."""
        self._check_open()
        if self._consumer is None:
            if self._starting is None:
                self._starting = asyncio.create_task(self._start())
                self._starting.add_done_callback(_retrieve)
            # A poll that is cancelled or times out leaves the start to the next one.
            done, _ = await asyncio.wait({self._starting}, timeout=max(0.0, wait_s))
            self._check_open()
            if not done:
                return None
            starting, self._starting = self._starting, None
            try:
                self._consumer = starting.result()
            except LogUnavailable as error:
                self._away = error
                raise
            self._away = None
            self._failed_checks = 0
            self._quiet_since = self._checked_at = asyncio.get_running_loop().time()
            self._sought = dict(self._positions)
        for position, offset in self._sought.items():
            self._consumer.seek(KafkaPartition(*position), offset)
            self._quiet_since = asyncio.get_running_loop().time()
        self._sought.clear()
        return self._consumer

    async def _start(self) -> AIOKafkaConsumer:
        # First, since a consumer lets a broker with auto.create.topics.enable create what it is assigned to.
        known = await self._same_topics()
        for position in self._positions:
            if position.topic not in known:
                raise UnknownTopic(position.topic)
            if position.partition not in known[position.topic].leaders:
                raise InvalidArgument(
                    f"topic {position.topic!r} has partitions 0 to {len(known[position.topic].leaders) - 1}, "
                    f"not {position.partition}"
                )
        consumer = await self._clients.consumer()
        consumer.assign([KafkaPartition(*position) for position in self._positions])
        return consumer

    async def _take(
        self, consumer: AIOKafkaConsumer, wait_s: float, max_records: int
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """Next records, positions moved. Cancelled only while nothing has been taken: the rest does not suspend."""
        try:
            found = await consumer.getmany(timeout_ms=int(wait_s * 1000), max_records=max_records)
        except kafka.OffsetOutOfRangeError as error:
            raise await self._out_of_range(error) from error
        except kafka.ConsumerStoppedError as error:
            raise LogClosed("the reader was closed") from error
        except kafka.KafkaError as error:
            self._drop()
            raise map_kafka_error(error, self._action) from error
        self._check_open()
        batch = {
            TopicPartition(partition.topic, partition.partition): [
                Record(item.topic, item.partition, item.offset, item.timestamp, item.key, item.value, item.headers)
                for item in records
            ]
            for partition, records in found.items()
        }
        moved = bool(batch)
        for position, before in self._positions.items():
            if position not in self._sought:
                # The consumer's own position also passes what is not returned: transaction marks, compacted records.
                self._positions[position] = offset = await consumer.position(KafkaPartition(*position))
                moved = moved or offset != before
        if moved:
            self._quiet_since = asyncio.get_running_loop().time()
        return batch

    async def _out_of_range(self, error: kafka.OffsetOutOfRangeError) -> LogError:
        ((partition, offset),) = error.args[0].items()
        position = TopicPartition(partition.topic, partition.partition)
        await self._same_topics()
        start = (await self._answer(self._admin.offsets({position: EARLIEST})))[position]
        end = (await self._answer(self._admin.offsets({position: LATEST})))[position]
        return OffsetOutOfRange(position.topic, position.partition, offset, start, end)

    def _watch(self) -> None:
        """Begin a check when one is due; raise what the last one found."""
        now = asyncio.get_running_loop().time()
        if self._check is None:
            if now - self._checked_at >= CHECK_INTERVAL_S:
                self._checked_at = now
                self._check = asyncio.create_task(self._ends())
                self._check.add_done_callback(_retrieve)
            return
        if not self._check.done():
            return
        check, self._check, begun, self._checked_at = self._check, None, self._checked_at, now
        try:
            ends = check.result()
        except LogError as error:
            self._failed_checks += 1
            if isinstance(error, LogReplaced):
                self._drop()
                raise
            # Records came meanwhile: perhaps only this process was too busy to see the answer in time.
            if self._quiet_since > begun and self._failed_checks == 1:
                return
            self._drop()
            self._away = error if isinstance(error, LogUnavailable) else None
            raise
        self._failed_checks = 0
        behind = [position for position, end in ends.items() if self._positions[position] < end]
        if behind and now - self._quiet_since >= STALL_S:
            self._drop()
            names = ", ".join(f"{topic}[{number}]" for topic, number in behind[:5])
            raise LogUnavailable(f"cannot {self._action}: records of {names} do not arrive; reading starts anew")

    async def _ends(self) -> Mapping[TopicPartition, int]:
        """Where a reader of committed records ends; proves that every partition has a leader that answers."""
        await self._same_topics()
        return await self._answer(self._admin.offsets(dict.fromkeys(self._positions, LATEST), READ_COMMITTED))

    async def _same_topics(self) -> Mapping[str, TopicFacts]:
        """Facts about the topics; a consumer knows them by name only and would read on in a successor."""
        known = await self._answer(self._admin.topics(sorted({position.topic for position in self._positions})))
        for topic, facts in known.items():
            expected = self._topic_ids.setdefault(topic, facts.topic_id)
            if expected != facts.topic_id:
                where = self._clients.settings.bootstrap
                raise LogReplaced(f"topic {topic!r} at {where}", facts.topic_id, expected)
        return known

    async def _answer(self, asked: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                return await asked
        except TimeoutError as error:
            raise LogUnavailable(
                f"cannot {self._action}: the cluster does not answer for {CHECK_TIMEOUT_S:g} s, or a partition has "
                "no leader; positions are unchanged"
            ) from error

    def _drop(self) -> None:
        """End the consumer in the background; the next poll starts another at the positions."""
        if self._check is not None:
            self._check.cancel()
            self._check = None
        consumer, self._consumer = self._consumer, None
        if consumer is None:
            return
        if not self._closing.is_set():
            self.replaced_consumers += 1
            _log.warning("replacing the Kafka consumer for %s", self._clients.settings.bootstrap)
        task = asyncio.create_task(stop_consumer(consumer))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise LogClosed("the reader was closed")

    @property
    def _action(self) -> str:
        topics = sorted({position.topic for position in self._positions})
        return f"read {', '.join(topics)} at {self._clients.settings.bootstrap}"


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Take the error of a check that nobody waits for any more, so that asyncio does not complain about it."""
    if not task.cancelled():
        task.exception()


def _check_offset(position: TopicPartition, offset: int) -> None:
    if offset < 0:
        raise InvalidArgument(f"{position.topic}[{position.partition}]: offset {offset} is negative")
