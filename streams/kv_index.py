"""The fold of ``kv-events`` into the KV index.

Rows are as in ``kv_index_rows``: a source's chunk is what was stored and removed since the chunk before. A commit
writes what changed (8 bytes a block), not whole blobs: keeping, in memory, the sets that blobs would be written from
costs 0.2–0.5 µs a block and misses the fold rate
that a fleet needs. A source whose chunks outgrow its blocks is compacted into one chunk off the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3
import msgspec
import numpy as np

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, DeleteRange, Put, StateRows
from dynamo_es.store.layout import prefix_end
from schemas.kv_events import KV_EVENTS, TIERS, BlocksRemoved, BlocksStored, KvEvents, SourceRetired
from schemas.topic import TopicSpec
from streams.block_table import DEFAULT_MIX, PAGE
from streams.fold import RecordRejected
from streams.kv_index_rows import (
    BLOCKS_FAMILY,
    REMOVED,
    SOURCES_FAMILY,
    STORED,
    SourceRow,
    chunk_key,
    chunk_number,
    merge_chunks,
    scan_sources,
    segment_head,
    source_key,
    unpack_segments,
)
from streams.kv_index_state import MAX_FENCED, IndexCounters, KvIndexState, ModelIndex, Source, SourceKey

_TIER_NUMBER = {name: number for number, name in enumerate(TIERS)}
# A retired source keeps its fence against stragglers; this many are remembered, then the oldest is forgotten.
MAX_RETIRED = 10_000
# Chunks may take this much more than the blocks they stand for before they are rewritten.
_COMPACT_FACTOR = 2
_COMPACT_SLACK_BYTES = 256 * 1024
# Whole pages of a table whose blocks are marked in one go: a millisecond or two.
_MARK_ROWS = 4 * PAGE


class KvIndexFold:
    """A ``Fold[KvIndexState]``.

    A batch of a fenced incarnation is a straggler and is dropped; one of an unknown incarnation starts the source
    anew; a seq that was seen is dropped; a gap makes the source degraded until a batch with ``reset``.
    """

    name = "kv-index"
    version = 1
    horizon_ms: int | None = None
    topics: Sequence[TopicSpec] = (KV_EVENTS,)
    families: Sequence[str] = (SOURCES_FAMILY, BLOCKS_FAMILY)

    def __init__(self, mix: int = DEFAULT_MIX) -> None:
        """``mix``: a random u64 that rows in memory are placed by (see ``BlockTable``); no result depends on it."""
        self._mix = mix

    def new_state(self) -> KvIndexState:
        return KvIndexState(self._mix)

    def apply(self, state: KvIndexState, record: Record, value: Any) -> None:
        if not isinstance(value, KvEvents):
            raise RecordRejected("kv-events has no deletions")
        key = SourceKey(value.model, value.worker_id, value.dp_rank)
        source = state.sources.get(key)
        if value.events and isinstance(value.events[0], SourceRetired):
            if source is not None and source.incarnation == value.incarnation and not source.retired:
                _retire(state, source)
            return
        state.counters.batches += 1
        if source is None:
            source = _add_source(state, key, value)
        elif value.incarnation in source.fenced:
            state.counters.stragglers += 1
            return
        elif source.incarnation != value.incarnation:
            _begin_incarnation(state, source, value)
        if _admit(state, source, value):
            _apply_events(state, source, value)
        state.dirty[key] = source

    def changes(self, state: KvIndexState) -> list[Change]:
        state.settle()
        changes: list[Change] = []
        for row_id in state.deleted_rows:
            changes.append(Delete(SOURCES_FAMILY, source_key(row_id)))
            changes.append(_delete_blocks(row_id))
        for source in state.dirty.values():
            if source.wiped:
                changes.append(_delete_blocks(source.row_id))
                source.wiped = False
            if source.pending:
                chunk = b"".join(source.pending)
                changes.append(Put(BLOCKS_FAMILY, chunk_key(source.row_id, source.next_chunk), chunk))
                source.next_chunk += 1
                source.stored_bytes += len(chunk)
                source.pending = []
            changes.append(Put(SOURCES_FAMILY, source_key(source.row_id), _source_row(source)))
        state.deleted_rows = []
        state.dirty = {}
        return changes

    def mark_all(self, state: KvIndexState) -> Iterator[None]:
        state.settle()
        state.deleted_rows = []
        for source in state.sources.values():
            source.pending, source.wiped, source.next_chunk, source.stored_bytes = [], False, 0, 0
            state.dirty[source.key] = source
        for index in list(state.models.values()):
            yield from _mark_blocks(index)

    def load(self, rows: StateRows) -> KvIndexState:
        state = KvIndexState(self._mix)
        for row_id, row in scan_sources(rows):
            source = Source(
                key=SourceKey(row.model, row.worker_id, row.dp_rank),
                row_id=row_id,
                slot=-1,
                incarnation=row.incarnation,
                block_size=row.block_size,
                next_seq=row.next_seq,
                retired=row.retired,
                fenced=list(row.fenced),
            )
            state.sources[source.key] = source
            state.next_row_id = max(state.next_row_id, source.row_id + 1)
            if not row.retired:
                index = state.index_of(row.model)
                index.take_slot(source)
                index.set_exact(source, row.exact)
                _load_blocks(rows, index, source)
        state.settle()
        state.counters = IndexCounters()
        return state

    def adopt(self, previous: KvIndexState, state: KvIndexState) -> None:
        state.counters = previous.counters

    def digest(self, state: KvIndexState) -> str:
        # Block hashes are already uniform, so sum and xor over a set of them identify it in any order.
        state.settle()
        lines = []
        for model, index in state.models.items():
            sums = _block_sums(index)
            for slot, source in index.by_slot.items():
                lines.append(repr((model, *_meaning(source), source.counts, sums[slot])))
        lines += [repr((key.model, *_meaning(source))) for key, source in state.sources.items() if source.retired]
        return blake3.blake3("\n".join(sorted(lines)).encode()).hexdigest()

    def housekeep(self, state: KvIndexState) -> bool:
        state.settle()
        more = False
        for index in state.models.values():
            more = index.sweep() or more
        return more

    def compaction(self, state: KvIndexState) -> Callable[[StateRows], list[Change]] | None:
        state.settle()
        for source in state.sources.values():
            limit = _COMPACT_FACTOR * 8 * sum(source.counts) + _COMPACT_SLACK_BYTES
            if source.stored_bytes > limit and not source.wiped:
                source.stored_bytes = 8 * sum(source.counts)
                row_id, last = source.row_id, source.next_chunk - 1
                return lambda rows: _compact_chunks(rows, row_id, last)
        return None


def _block_sums(index: ModelIndex) -> dict[int, list[int]]:
    sums: dict[int, list[int]] = {}
    for slot in index.by_slot:
        sums[slot] = []
        for tier in range(len(TIERS)):
            blocks = index.blocks_of(slot, tier)
            sums[slot] += [int(blocks.sum()), int(np.bitwise_xor.reduce(blocks))]
    return sums


def _meaning(source: Source) -> tuple[Any, ...]:
    key = source.key
    return (
        key.worker_id, key.dp_rank, source.incarnation, source.block_size, source.next_seq, source.exact,
        source.retired, source.fenced,
    )  # fmt: skip


def _add_source(state: KvIndexState, key: SourceKey, batch: KvEvents) -> Source:
    source = Source(key, state.next_row_id, -1, batch.incarnation, batch.block_size)
    state.next_row_id += 1
    state.sources[key] = source
    state.index_of(key.model).take_slot(source)
    return source


def _begin_incarnation(state: KvIndexState, source: Source, batch: KvEvents) -> None:
    """The engine started anew: its cache is empty, whatever was known of it is void."""
    if not source.retired:
        source.fenced = [*source.fenced, source.incarnation][-MAX_FENCED:]
    _void_blocks(state, source)
    source.incarnation = batch.incarnation
    source.block_size = batch.block_size
    source.next_seq = 0
    source.retired = False
    state.index_of(source.key.model).take_slot(source)


def _void_blocks(state: KvIndexState, source: Source) -> None:
    state.index_of(source.key.model).drop_slot(source)
    source.pending = []
    source.wiped = True
    source.stored_bytes = 0


def _retire(state: KvIndexState, source: Source) -> None:
    _void_blocks(state, source)
    source.fenced = [*source.fenced, source.incarnation][-MAX_FENCED:]
    source.retired = True
    state.dirty[source.key] = source
    # A dict keeps its order: moved to the end, the first retired one is the one that was retired first.
    del state.sources[source.key]
    state.sources[source.key] = source
    retired = [other for other in state.sources.values() if other.retired]
    for oldest in retired[: max(0, len(retired) - MAX_RETIRED)]:
        del state.sources[oldest.key]
        state.dirty.pop(oldest.key, None)
        state.deleted_rows.append(oldest.row_id)


def _admit(state: KvIndexState, source: Source, batch: KvEvents) -> bool:
    """Whether the batch is the next one; moves ``next_seq`` and the trust in the source."""
    index = state.index_of(source.key.model)
    expected = source.next_seq
    if batch.seq < expected:
        state.counters.duplicates += 1
        return False
    if batch.block_size != source.block_size:
        raise RecordRejected(f"block_size {batch.block_size}, this incarnation began with {source.block_size}")
    source.next_seq = batch.seq + 1
    if batch.reset:
        _void_blocks(state, source)
        index.take_slot(source)
        index.set_exact(source, True)
        return True
    if batch.seq == expected and (source.exact or expected == 0):
        index.set_exact(source, True)
        return True
    if batch.seq > expected:
        state.counters.gaps += 1
        state.counters.gap_batches += batch.seq - expected
    state.counters.skipped_degraded += 1
    index.settle()
    if source.exact or any(source.counts):
        _void_blocks(state, source)
        index.take_slot(source)
    return False


def _apply_events(state: KvIndexState, source: Source, batch: KvEvents) -> None:
    index = state.index_of(source.key.model)
    pending = source.pending
    for event in batch.events:
        if isinstance(event, BlocksStored):
            tier, column = _TIER_NUMBER[event.tier], event.sequence_hashes
            index.store(source, tier, column)
            pending += (segment_head(STORED, tier, column), column)
        elif isinstance(event, BlocksRemoved):
            tier, column = _TIER_NUMBER[event.tier], event.sequence_hashes
            index.remove(source, tier, column)
            pending += (segment_head(REMOVED, tier, column), column)
        else:
            exact = source.exact
            _void_blocks(state, source)
            index.take_slot(source)
            index.set_exact(source, exact)
            pending = source.pending


def _mark_blocks(index: ModelIndex) -> Iterator[None]:
    """All blocks of all sources go before what came in since this began: what is last in a chunk counts."""
    sources = dict(index.by_slot)
    found: dict[int, list[bytes]] = {slot: [] for slot in sources}
    for tier, table in enumerate(index.tables):
        columns: dict[int, list[bytes]] = {slot: [] for slot in sources}
        start = 0
        while start < table.rows:
            end = min(start + _MARK_ROWS, table.rows)
            for word in range(table.words):
                for slot, blocks in table.blocks_at(start, end, word):
                    if slot in columns:
                        columns[slot].append(blocks.astype("<u8", copy=False).tobytes())
                yield
            start = end
        for slot, parts in columns.items():
            column = b"".join(parts)
            found[slot] += (segment_head(STORED, tier, column), column) if column else ()
            yield
    for slot, source in sources.items():
        # One that was voided meanwhile has had nothing else since.
        if not source.wiped:
            source.pending[:0] = found[slot]


def _source_row(source: Source) -> bytes:
    key = source.key
    return msgspec.msgpack.encode(
        SourceRow(
            key.model,
            key.worker_id,
            key.dp_rank,
            source.incarnation,
            source.block_size,
            source.next_seq,
            source.exact,
            source.retired,
            source.fenced,
        )
    )


def _delete_blocks(row_id: int) -> DeleteRange:
    prefix = source_key(row_id)
    return DeleteRange(BLOCKS_FAMILY, prefix, prefix_end(prefix))


def _load_blocks(rows: StateRows, index: ModelIndex, source: Source) -> None:
    for key, chunk in rows.scan(BLOCKS_FAMILY, source_key(source.row_id)):
        source.next_chunk = chunk_number(key) + 1
        source.stored_bytes += len(chunk)
        for operation, tier, column in unpack_segments(chunk):
            if operation == STORED:
                index.store(source, tier, column)
            else:
                index.remove(source, tier, column)


def _compact_chunks(rows: StateRows, row_id: int, last: int) -> list[Change]:
    """Replace chunks up to ``last`` by one that has only the blocks that are left."""
    columns = merge_chunks(rows, row_id, last)
    merged = b"".join(segment_head(STORED, tier, column) + column for tier, column in enumerate(columns) if column)
    return [
        DeleteRange(BLOCKS_FAMILY, chunk_key(row_id, 0), chunk_key(row_id, last + 1)),
        Put(BLOCKS_FAMILY, chunk_key(row_id, last), merged),
    ]
