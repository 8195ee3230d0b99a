"""Folding a log once, from start to present end, into memory: for tools, and as the check of every other way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from dynamo_es.log.base import EventLog, LogReader, Record, TopicPartition
from dynamo_es.log.errors import OffsetOutOfRange
from schemas.codec import TopicCodec
from streams.apply import apply_record
from streams.fold import Fold

S = TypeVar("S")


async def refold(
    fold: Fold[S], log: EventLog, namespace: str, until: Mapping[TopicPartition, int] | None = None
) -> tuple[S, Mapping[TopicPartition, int]]:
    """State after all records up to now (or up to ``until``, exclusive offsets), and the positions that it covers.

    It ends at the log's present end whatever ``until`` says; where the log begins above ``until``, nothing is folded.
    Records that are refused are skipped: whoever runs the fold for good has already set them aside. Records that
    retention drops while this reads are skipped as well.

    Raises:
        LogError: The log is away, or is another one all of a sudden.
    """
    state = fold.new_state()
    codecs = {spec.qualified(namespace): TopicCodec(spec) for spec in fold.topics}
    positions: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    for topic in codecs:
        for partition, bounds in (await log.bounds(topic)).items():
            position = TopicPartition(topic, partition)
            positions[position] = bounds.start
            ends[position] = bounds.end if until is None else min(until.get(position, bounds.start), bounds.end)
    open_positions = {position: offset for position, offset in positions.items() if offset < ends[position]}
    if open_positions:
        reader = log.reader(open_positions)
        try:
            while any(positions[position] < ends[position] for position in open_positions):
                for position, records in (await _poll(reader)).items():
                    for record in records:
                        if record.offset < ends[position]:
                            apply_record(fold, state, codecs[position.topic], record)
                # Compaction may leave the last offsets empty: the reader's own position tells that it is past them.
                for position, offset in reader.positions().items():
                    positions[position] = min(offset, ends[position])
        finally:
            await reader.close()
    return state, positions


async def _poll(reader: LogReader) -> Mapping[TopicPartition, Sequence[Record]]:
    try:
        return await reader.poll(timeout_s=1.0)
    except OffsetOutOfRange as error:
        position = TopicPartition(error.topic, error.partition)
        if reader.positions()[position] >= error.start:
            raise
        # Retention was faster. The log's start only ever rises, so this comes to an end.
        reader.seek(position, error.start)
        return {}
