"""What a Faust agent does here: it hands what was delivered, in batches and by partition, to the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from faust.streams import Stream
from faust.types import TP, EventT

from dynamo_es.log.base import Record, TopicPartition
from streams.partition_pool import PartitionPool

# Records that an agent hands on at once, and how long it waits for so many.
BATCH_RECORDS = 500
BATCH_WAIT_S = 0.05


async def hand_on(pool: Callable[[], PartitionPool], stream: Stream[EventT[Any]]) -> None:
    """An agent: batches of events, by partition, to the pool. An event is acknowledged once the state covers it."""
    async for events in stream.noack_take(BATCH_RECORDS, within=BATCH_WAIT_S):
        parts: dict[TP, list[EventT[Any]]] = {}
        for event in events:
            parts.setdefault(event.message.tp, []).append(event)
        for (topic, partition), part in parts.items():
            records = [record_of(event) for event in part]
            await pool().take(TopicPartition(topic, partition), records, partial(_acknowledge, part))


def record_of(event: EventT[Any]) -> Record:
    """The record that Faust delivered, as the log would give it."""
    message = event.message
    timestamp_ms = -1 if message.timestamp is None else round(message.timestamp * 1000)
    headers = message.headers or ()
    return Record(
        message.topic, message.partition, message.offset, timestamp_ms, message.key, message.value,
        tuple(headers.items() if isinstance(headers, Mapping) else headers),
    )  # fmt: skip


def _acknowledge(events: Sequence[EventT[Any]]) -> None:
    for event in events:
        event.ack()
