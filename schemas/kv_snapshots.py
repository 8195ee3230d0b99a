"""Topic ``kv-snapshots``: the whole state of one source at a position of ``kv-events``, in checksummed chunks."""

from __future__ import annotations

import msgspec

from schemas.columns import check_columns
from schemas.kv_events import Tier
from schemas.numbers import Positive, Unsigned
from schemas.topic import Cleanup, TopicSpec


class SnapshotTier(msgspec.Struct, array_like=True, gc=False):
    """Sequence hashes and tokens hashes that one tier holds, packed u64 columns in any order."""

    tier: Tier
    sequence_hashes: bytes
    tokens_hashes: bytes

    def __post_init__(self) -> None:
        check_columns((("sequence_hashes", self.sequence_hashes), ("tokens_hashes", self.tokens_hashes)))


class KvSnapshotChunk(msgspec.Struct, tag="kv-snapshot", array_like=True, gc=False):
    """Chunk ``chunk`` of ``chunks`` of the snapshot ``snapshot_id``.

    Attributes:
        version: Layout version.
        model, worker_id, dp_rank, incarnation, block_size: The source, as in ``kv-events``.
        snapshot_id: Same in all chunks of one snapshot.
        chunk, chunks: Index from 0, and count.
        next_seq: First ``kv-events`` seq that the snapshot does not cover.
        partition, next_offset: Position of ``kv-events`` that the snapshot covers (exclusive).
        tiers: The blocks in this chunk.
        checksum: XXH3-64 over the packed columns of all chunks in order; the same in every chunk.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    block_size: Positive
    snapshot_id: str
    chunk: Unsigned
    chunks: Unsigned
    next_seq: Unsigned
    partition: Unsigned
    next_offset: Unsigned
    tiers: list[SnapshotTier]
    checksum: Unsigned


KV_SNAPSHOTS = TopicSpec(
    name="kv-snapshots",
    version=1,
    value=KvSnapshotChunk,
    key="<model>/<worker_id>:<dp_rank>/<chunk>",
    partitions=8,
    cleanup=Cleanup.COMPACTION,
    description="Snapshots of each source of the KV index, chunked and checksummed; the newest replaces the last.",
)


def key_kv_snapshot(model: str, worker_id: int, dp_rank: int, chunk: int) -> bytes:
    """Record key of one chunk: a newer snapshot replaces an older one chunk by chunk."""
    return f"{model}/{worker_id}:{dp_rank}/{chunk}".encode()
