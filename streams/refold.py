"""Folding a log once, from start to present end, into memory: for tools, and as the check of every other way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from dynamo_es.log.base import EventLog, Record, TopicPartition
from schemas.codec import SchemaError, TopicCodec
from streams.fold import Fold, RecordRejected

S = TypeVar("S")


async def refold(
    fold: Fold[S], log: EventLog, namespace: str, until: Mapping[TopicPartition, int] | None = None
) -> tuple[S, Mapping[TopicPartition, int]]:
    """State after all records up to now (or up to ``until``, exclusive offsets), and the positions that it covers.

    Records that do not decode are skipped: whoever runs the fold for good has already set them aside.

    Raises:
        LogError: The log is away.
    """
    state = fold.new_state()
    codecs = {spec.qualified(namespace): TopicCodec(spec) for spec in fold.topics}
    positions: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    for topic in codecs:
        for partition, bounds in (await log.bounds(topic)).items():
            position = TopicPartition(topic, partition)
            positions[position] = bounds.start
            ends[position] = bounds.end if until is None else until.get(position, bounds.start)
    open_positions = {position: offset for position, offset in positions.items() if offset < ends[position]}
    if open_positions:
        reader = log.reader(open_positions)
        try:
            while any(positions[position] < ends[position] for position in open_positions):
                for position, records in (await reader.poll(timeout_s=1.0)).items():
                    for record in records:
                        if record.offset < ends[position]:
                            _apply(fold, state, codecs[position.topic], record)
                    positions[position] = min(records[-1].offset + 1, ends[position])
                # Compaction may leave the last offsets empty: the reader's own position then tells that it is past.
                for position, offset in reader.positions().items():
                    positions[position] = max(positions[position], min(offset, ends[position]))
        finally:
            await reader.close()
    return state, positions


def _apply(fold: Fold[S], state: S, codec: TopicCodec, record: Record) -> None:
    try:
        value = None if record.value is None else codec.decode(record.value, record.headers)
        fold.apply(state, record, value)
    except (SchemaError, RecordRejected):
        return
