"""Appending to Kafka: one idempotent producer, replaced as soon as it cannot be trusted to go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka

from dynamo_es.clock import Clock
from dynamo_es.log.base import Entry, Position
from dynamo_es.log.checks import entry_size
from dynamo_es.log.errors import LogClosed, LogUnavailable
from dynamo_es.log.kafka_clients import BATCH_BYTES, KafkaClients, stop_producer
from dynamo_es.log.kafka_errors import map_kafka_error
from dynamo_es.log.partitioning import Partitioner

_log = logging.getLogger(__name__)

# How often the deadline of a long append_all is moved on: progress keeps it alive, a stalled cluster does not.
_DEADLINE_STRIDE = 64


@dataclass(eq=False, slots=True)
class _Slot:
    """A producer and the calls that use it."""

    producer: AIOKafkaProducer
    calls: int = 0
    spoilt: bool = False
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class KafkaAppender:
    """Appends through one producer at a time. Belongs to one event loop.

    A producer is replaced when an append failed or was not acknowledged in time: aiokafka numbers its batches for the
    broker to drop repeats, and a batch that failed leaves a hole that the broker refuses for ever; and a producer
    whose brokers all moved never finds them again. Calls that still wait for the old producer keep it until they end.
    """

    def __init__(self, clients: KafkaClients, clock: Clock, partitioner: Partitioner) -> None:
        self._clients = clients
        self._clock = clock
        self._partitioner = partitioner
        self._timeout_s = clients.settings.request_timeout_ms / 1000
        self._slot: _Slot | None = None
        self._starting: asyncio.Task[_Slot] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._one_by_one: dict[str, asyncio.Lock] = {}
        self._closed = False
        self.replaced_producers = 0

    async def append(self, topic: str, entries: Sequence[Entry], partitions: int, limit: int) -> list[Position]:
        """Append checked entries to a topic that has so many ``partitions`` and takes records of ``limit`` bytes.

        Keys are placed by that count, and not by what the cluster says meanwhile: the order of a key's records
        survives it when somebody adds partitions to a topic in use.

        Raises what ``EventLog.append_all`` does. No acknowledgement for ``request_timeout_ms`` is ``LogUnavailable``.
        """
        if limit >= BATCH_BYTES:
            return await self._append(topic, entries, partitions, limit)
        # The broker bounds the batch, not the record: where batches could exceed the bound, a record goes alone.
        lock = self._one_by_one.setdefault(topic, asyncio.Lock())
        positions: list[Position] = []
        async with lock:
            for entry in entries:
                positions += await self._append(topic, (entry,), partitions, limit)
        return positions

    async def close(self) -> None:
        """Wait for calls under way (each has its deadline), then end the producer."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        self._retire(self._slot)
        while self._ending:
            await asyncio.wait(self._ending)

    async def _append(self, topic: str, entries: Sequence[Entry], partitions: int, limit: int) -> list[Position]:
        action = f"append to {topic!r} at {self._clients.settings.bootstrap}"
        slot = await self._current(action)
        slot.calls += 1
        sent: list[asyncio.Future[Any]] = []
        entry = entries[0] if entries else None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                for number, entry in enumerate(entries):
                    sent.append(await self._send(slot, topic, entry, partitions))
                    if number % _DEADLINE_STRIDE == 0:
                        deadline.reschedule(loop.time() + self._timeout_s)
                        # ``send`` does not suspend while it has room: a backlog must not hold up requests on this loop.
                        await asyncio.sleep(0)
                positions = []
                for number, future in enumerate(sent):
                    positions.append(_position(await future))
                    if number % _DEADLINE_STRIDE == 0:
                        deadline.reschedule(loop.time() + self._timeout_s)
                return positions
        except TimeoutError as error:
            slot.spoilt = True
            self._retire(slot)
            raise LogUnavailable(
                f"cannot {action}: no acknowledgement within {self._timeout_s:g} s; the record may be there or appear"
            ) from error
        except kafka.KafkaError as error:
            slot.spoilt = True
            self._retire(slot)
            size = 0 if entry is None else entry_size(entry)
            raise map_kafka_error(error, action, topic=topic, size=size, limit=limit) from error
        finally:
            for future in sent:
                _forget(future)
            slot.calls -= 1
            if slot.calls == 0:
                slot.idle.set()

    def _send(self, slot: _Slot, topic: str, entry: Entry, partitions: int) -> Awaitable[asyncio.Future[Any]]:
        placed = entry.partition
        if placed is None:
            placed = self._partitioner.choose(entry.key, partitions)
        return slot.producer.send(  # type: ignore[no-any-return]
            topic,
            value=entry.value,
            key=entry.key,
            partition=placed,
            timestamp_ms=self._clock.now_ms() if entry.timestamp_ms is None else entry.timestamp_ms,
            headers=list(entry.headers),
        )

    async def _current(self, action: str) -> _Slot:
        """The producer to use; the first caller starts it, the others wait with it."""
        if self._closed:
            raise LogClosed(f"cannot {action}: the log was closed")
        if self._slot is not None:
            return self._slot
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(self._started)
        # Shielded: a caller that gives up must not take the producer from the others.
        return await asyncio.shield(self._starting)

    async def _start(self) -> _Slot:
        return _Slot(await self._clients.producer())

    def _started(self, task: asyncio.Task[_Slot]) -> None:
        self._starting = None
        if not task.cancelled() and task.exception() is None:
            self._slot = task.result()

    def _retire(self, slot: _Slot | None) -> None:
        """Use ``slot`` for no new call. Does nothing for one that is retired."""
        if slot is None or slot is not self._slot:
            return
        self._slot = None
        if not self._closed:
            self.replaced_producers += 1
            _log.warning("replacing the Kafka producer for %s", self._clients.settings.bootstrap)
        task = asyncio.create_task(self._end(slot))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    @staticmethod
    async def _end(slot: _Slot) -> None:
        while slot.calls:
            slot.idle.clear()
            await slot.idle.wait()
        await stop_producer(slot.producer, flush=not slot.spoilt)


def _position(acknowledged: Any) -> Position:
    # A broker that remembers a repeated batch, but not where it went, acknowledges it without an offset. aiokafka
    # then counts from -1, which looks like a real offset for all but the first record; the log start is -1 as well.
    if acknowledged.offset < 0 or (acknowledged.log_start_offset is not None and acknowledged.log_start_offset < 0):
        raise kafka.DuplicateSequenceNumber("acknowledged, but the position is not known")
    return Position(acknowledged.topic, acknowledged.partition, acknowledged.offset)


def _forget(future: asyncio.Future[Any]) -> None:
    """Take the result that nobody waits for any more, so that asyncio does not complain about it."""
    if not future.done():
        future.cancel()
    elif not future.cancelled():
        future.exception()
