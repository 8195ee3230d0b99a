"""Snapshots of the KV index: from stored rows to records, and from records back to rows. Pure.

A snapshot is made from committed rows, never from live state: rows and positions in a store belong together, and the
work can be done beside the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from dynamo_es.log.base import Bounds
from dynamo_es.log.partitioning import partition_for
from dynamo_es.store.base import Change, Put, StateRows
from schemas.kv_events import TIERS, key_kv_events
from schemas.kv_snapshots import (
    KV_SNAPSHOTS,
    KvSnapshotChunk,
    KvSnapshotManifest,
    KvSnapshotRecord,
    SnapshotTier,
    SourceState,
    key_kv_manifest,
    key_kv_snapshot,
)
from streams.kv_index_rows import (
    BLOCKS_FAMILY,
    SOURCES_FAMILY,
    STORED,
    SourceRow,
    chunk_key,
    merge_chunks,
    scan_sources,
    segment_head,
    source_key,
)

# Blocks of one chunk: half of what a record may hold.
CHUNK_BLOCKS = 65_536
_TIER_NUMBER = {name: number for number, name in enumerate(TIERS)}


class SnapshotRefused(Exception):
    """A snapshot is torn, stale or foreign; the text says which, and of what."""


@dataclass(frozen=True, slots=True)
class SnapshotPlan:
    """Records of a snapshot in the order in which they must be appended: chunks, the manifest, then what is void."""

    chunks: Sequence[tuple[bytes, KvSnapshotChunk]]
    manifest: KvSnapshotManifest
    manifest_key: bytes
    generation: int

    def live_keys(self) -> set[bytes]:
        """Keys of all chunks that the manifest names."""
        return set(chunk_keys(self.manifest))


def plan_snapshot(
    rows: StateRows,
    *,
    partition: int,
    partitions: int,
    next_offset: int,
    topic_id: str,
    fold_version: int,
    snapshot_id: str,
    written_by: str,
    previous: tuple[int, KvSnapshotManifest] | None,
) -> SnapshotPlan:
    """The snapshot of one partition of ``kv-events``, from committed rows at ``next_offset``.

    ``previous``: the newest manifest and its generation. A source that did not change since is not written again.
    """
    before = {_key_of(state): state for state in previous[1].sources} if previous is not None else {}
    states: list[SourceState] = []
    chunks: list[tuple[bytes, KvSnapshotChunk]] = []
    for row_id, row in scan_sources(rows):
        key = (row.model, row.worker_id, row.dp_rank)
        if partition_for(key_kv_events(*key), partitions) != partition:
            continue
        old = before.get(key)
        if old is not None and _unchanged(old, row):
            states.append(old)
            continue
        columns = merge_chunks(rows, row_id) if row.exact and not row.retired else []
        generation = 0 if old is None else 1 - old.generation
        made = _make_chunks(row, columns, snapshot_id)
        states.append(_state_of(row, made, snapshot_id, generation))
        chunks += ((key_kv_snapshot(*key, generation, chunk.chunk), chunk) for chunk in made)
    generation = 0 if previous is None else 1 - previous[0]
    manifest = KvSnapshotManifest(
        KV_SNAPSHOTS.version, partition, next_offset, topic_id, fold_version, written_by, states
    )
    return SnapshotPlan(chunks, manifest, key_kv_manifest(partition, generation), generation)


def chunk_keys(manifest: KvSnapshotManifest) -> Iterator[bytes]:
    """Record keys of all chunks that a manifest names."""
    for state in manifest.sources:
        for chunk in range(state.chunks):
            yield key_kv_snapshot(*_key_of(state), state.generation, chunk)


def manifests_in(records: Mapping[bytes, KvSnapshotRecord], partition: int) -> list[tuple[int, KvSnapshotManifest]]:
    """Generations and manifests of a partition, the newest first."""
    found = []
    for generation in (0, 1):
        manifest = records.get(key_kv_manifest(partition, generation))
        if isinstance(manifest, KvSnapshotManifest) and manifest.partition == partition:
            found.append((generation, manifest))
    return sorted(found, key=lambda item: item[1].next_offset, reverse=True)


def check_snapshot(
    manifest: KvSnapshotManifest,
    records: Mapping[bytes, KvSnapshotRecord],
    *,
    topic_id: str,
    fold_version: int,
    bounds: Bounds,
) -> list[tuple[SourceState, list[KvSnapshotChunk]]]:
    """All sources with their chunks, if the snapshot is whole and fits the log.

    Raises:
        SnapshotRefused: It is of another topic or fold version, does not meet the log, or a chunk is missing or wrong.
    """
    if manifest.topic_id != topic_id:
        raise SnapshotRefused(f"foreign: made of topic {manifest.topic_id}, the log has {topic_id}")
    if manifest.fold_version != fold_version:
        raise SnapshotRefused(f"made by fold version {manifest.fold_version}, this is {fold_version}")
    if manifest.next_offset > bounds.end:
        raise SnapshotRefused(f"it covers offsets below {manifest.next_offset}, the log ends at {bounds.end}")
    if manifest.next_offset < bounds.start:
        raise SnapshotRefused(
            f"stale: it covers offsets below {manifest.next_offset}, the log starts at {bounds.start}"
        )
    return [(state, _chunks_of(state, records)) for state in manifest.sources]


def restored_rows(
    sources: Sequence[tuple[SourceState, list[KvSnapshotChunk]]], first_row_id: int
) -> tuple[list[Change], int]:
    """Rows of a checked snapshot, and how many blocks (by source and tier) they hold."""
    changes: list[Change] = []
    blocks = 0
    for row_id, (state, chunks) in enumerate(sources, first_row_id):
        row = SourceRow(
            state.model, state.worker_id, state.dp_rank, state.incarnation, state.block_size, state.next_seq,
            state.exact, state.retired, state.fenced,
        )  # fmt: skip
        changes.append(Put(SOURCES_FAMILY, source_key(row_id), msgspec.msgpack.encode(row)))
        for chunk in chunks:
            segments = [
                segment_head(STORED, _TIER_NUMBER[part.tier], part.sequence_hashes) + part.sequence_hashes
                for part in chunk.tiers
            ]
            changes.append(Put(BLOCKS_FAMILY, chunk_key(row_id, chunk.chunk), b"".join(segments)))
            blocks += sum(len(part.sequence_hashes) // 8 for part in chunk.tiers)
    return changes, blocks


def _key_of(state: SourceState) -> tuple[str, int, int]:
    return state.model, state.worker_id, state.dp_rank


def _unchanged(state: SourceState, row: SourceRow) -> bool:
    return (state.incarnation, state.next_seq, state.exact, state.retired, state.fenced) == (
        row.incarnation, row.next_seq, row.exact, row.retired, row.fenced,
    )  # fmt: skip


def _make_chunks(row: SourceRow, columns: Sequence[bytes], snapshot_id: str) -> list[KvSnapshotChunk]:
    """``columns``: blocks by tier. No tier shares a chunk with another unless both are small."""
    parts: list[list[SnapshotTier]] = [[]]
    room = CHUNK_BLOCKS
    for tier, column in zip(TIERS, columns, strict=False):
        start = 0
        while start < len(column):
            piece = column[start : start + 8 * room]
            parts[-1].append(SnapshotTier(tier, piece))
            start += len(piece)
            room -= len(piece) // 8
            if not room:
                parts.append([])
                room = CHUNK_BLOCKS
    parts = [tiers for tiers in parts if tiers]
    return [
        KvSnapshotChunk(
            KV_SNAPSHOTS.version, row.model, row.worker_id, row.dp_rank, row.incarnation, snapshot_id, number,
            len(parts), tiers, _checksum(tiers),
        )
        for number, tiers in enumerate(parts)
    ]  # fmt: skip


def _state_of(row: SourceRow, chunks: Sequence[KvSnapshotChunk], snapshot_id: str, generation: int) -> SourceState:
    return SourceState(
        row.model, row.worker_id, row.dp_rank, row.incarnation, row.block_size, row.next_seq, row.exact, row.retired,
        row.fenced, snapshot_id if chunks else "", 1 if generation else 0, len(chunks), _checksum_of_all(chunks),
    )  # fmt: skip


def _chunks_of(state: SourceState, records: Mapping[bytes, KvSnapshotRecord]) -> list[KvSnapshotChunk]:
    chunks: list[KvSnapshotChunk] = []
    name = f"{state.model} worker {state.worker_id} rank {state.dp_rank}"
    for number in range(state.chunks):
        chunk = records.get(key_kv_snapshot(*_key_of(state), state.generation, number))
        if not isinstance(chunk, KvSnapshotChunk) or chunk.snapshot_id != state.snapshot_id:
            raise SnapshotRefused(f"torn: chunk {number} of {state.chunks} of {name} is missing")
        if chunk.chunk != number or chunk.checksum != _checksum(chunk.tiers):
            raise SnapshotRefused(f"torn: chunk {number} of {state.chunks} of {name} has a wrong checksum")
        chunks.append(chunk)
    if _checksum_of_all(chunks) != state.checksum:
        raise SnapshotRefused(f"torn: the chunks of {name} do not belong together")
    return chunks


def _checksum(tiers: Sequence[SnapshotTier]) -> int:
    digest = xxhash.xxh3_64()
    for part in tiers:
        digest.update(part.tier.encode())
        digest.update(part.sequence_hashes)
    return digest.intdigest()


def _checksum_of_all(chunks: Sequence[KvSnapshotChunk]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(chunk.checksum.to_bytes(8, "little") for chunk in chunks))
