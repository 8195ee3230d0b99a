"""Topic ``kv-snapshots``: what ``kv-events`` comes to, up to an offset, so that a reader need not begin at its start.

A snapshot of one partition of ``kv-events`` is a manifest and, for each source with blocks, its checksummed chunks.
All its records are in the partition of the same number. Keys alternate between two generations: the snapshot before
stays whole while the next one is written. The manifest comes last; a snapshot counts only if every chunk that its
manifest names is there with the right checksum, otherwise the one before is used.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.columns import check_columns
from schemas.kv_events import Tier
from schemas.numbers import Positive, Unsigned
from schemas.topic import Cleanup, TopicSpec


class SnapshotTier(msgspec.Struct, array_like=True, gc=False):
    """Sequence hashes that one tier holds, a packed u64 column in any order."""

    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) & 7:
            check_columns((("sequence_hashes", self.sequence_hashes),))


class KvSnapshotChunk(msgspec.Struct, tag="kv-snapshot", array_like=True, gc=False):
    """Chunk ``chunk`` (from 0) of ``chunks`` of the blocks of one source.

    Attributes:
        version: Layout version.
        model, worker_id, dp_rank, incarnation: The source, as in ``kv-events``.
        snapshot_id: Same in all chunks that one writer made of one source at one time.
        tiers: The blocks in this chunk.
        checksum: XXH3-64 over this chunk: each tier's name and packed column, one after the other.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    snapshot_id: str
    chunk: Unsigned
    chunks: Unsigned
    tiers: list[SnapshotTier]
    checksum: Unsigned


class SourceState(msgspec.Struct, array_like=True, gc=False):
    """One source as a manifest has it.

    Attributes:
        model, worker_id, dp_rank, incarnation, block_size: The source, as in ``kv-events``.
        next_seq: First ``seq`` that is not covered.
        exact: Its events were applied without a gap; otherwise it has no chunks.
        retired: Its worker is gone; kept for the fence.
        fenced: Incarnations that are over.
        snapshot_id: Of its chunks; empty if there are none.
        generation: 0 or 1: which of the two keys its chunks have.
        chunks: How many.
        checksum: XXH3-64 over the checksums of the chunks, each as 8 bytes, little-endian.
    """

    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    block_size: Positive
    next_seq: Unsigned
    exact: bool
    retired: bool
    fenced: list[Unsigned]
    snapshot_id: str
    generation: Literal[0, 1]
    chunks: Unsigned
    checksum: Unsigned


class KvSnapshotManifest(msgspec.Struct, tag="kv-manifest", array_like=True, gc=False):
    """Everything that ``partition`` of ``kv-events`` comes to, below ``next_offset``.

    Attributes:
        version: Layout version.
        partition: Of ``kv-events``, and of these records.
        next_offset: First offset that is not covered.
        topic_id: Of ``kv-events``: the snapshot of a topic that was deleted is void.
        fold_version: Of the fold that made it.
        written_by: Who, for people.
        sources: All sources of the partition that are remembered.
    """

    version: int
    partition: Unsigned
    next_offset: Unsigned
    topic_id: str
    fold_version: Unsigned
    written_by: str
    sources: list[SourceState]


KvSnapshotRecord = KvSnapshotChunk | KvSnapshotManifest

KV_SNAPSHOTS = TopicSpec(
    name="kv-snapshots",
    version=1,
    value=KvSnapshotRecord,
    key="<model>/<worker_id>:<dp_rank>/<generation>/<chunk> or manifest/<partition>/<generation>",
    partitions=8,
    cleanup=Cleanup.COMPACTION,
    description="Snapshots of each partition of kv-events: a manifest, and checksummed chunks of each source's blocks.",
)


def key_kv_snapshot(model: str, worker_id: int, dp_rank: int, generation: int, chunk: int) -> bytes:
    """Record key of one chunk."""
    return f"{model}/{worker_id}:{dp_rank}/{generation}/{chunk}".encode()


def key_kv_manifest(partition: int, generation: int) -> bytes:
    """Record key of a manifest."""
    return f"manifest/{partition}/{generation}".encode()
