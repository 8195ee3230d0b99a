"""The KV index: which worker holds which block, in memory.

Per model and tier: 256 dicts (by the top byte of the hash) from a block's sequence hash to an int used as a bit set
of slots; a slot is one source (worker and rank). A sequence hash commits to its whole prefix, so the longest match
of a prompt needs no tree: walk its hashes while some slot is still in every mask. There are no node objects, nothing
for the garbage collector to walk, and a resize touches 1/256 of the keys.

A source that is cleared takes a fresh slot; its old bit no longer counts at once and is swept away in small steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from schemas.columns import unpack_u64
from schemas.kv_events import TIERS

SHARDS = 256
_SHARD_SHIFT = 56
_SEGMENT = struct.Struct("<BBI")
STORED = 1
REMOVED = 0
MAX_FENCED = 16


class SourceKey(NamedTuple):
    """One ordered stream of KV events."""

    model: str
    worker_id: int
    dp_rank: int


@dataclass(slots=True)
class Source:
    """What is known of one source.

    ``exact``: every batch of this incarnation was applied; otherwise its blocks count as nothing (wrong overlap is
    worse than none) until a batch with ``reset`` comes. ``fenced``: incarnations that are over. ``pending`` holds
    row segments that are not in the store yet; ``wiped`` says that its stored rows are void.
    """

    key: SourceKey
    row_id: int
    slot: int
    incarnation: int
    block_size: int
    next_seq: int = 0
    exact: bool = False
    retired: bool = False
    fenced: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=lambda: [0] * len(TIERS))
    pending: list[bytes] = field(default_factory=list)
    wiped: bool = False
    next_chunk: int = 0
    stored_bytes: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.slot


@dataclass(slots=True)
class IndexCounters:
    """What happened to batches; for metrics, not part of the state's meaning."""

    batches: int = 0
    duplicates: int = 0
    stragglers: int = 0
    gaps: int = 0
    gap_batches: int = 0
    skipped_degraded: int = 0
    stored_noop: int = 0
    removed_noop: int = 0


class Overlap(NamedTuple):
    """Matched blocks of one source: in device memory, then how far host memory and disk extend that prefix."""

    source: Source
    device: int
    host: int
    disk: int


class ModelIndex:
    """Blocks of one model."""

    def __init__(self) -> None:
        self.tiers: list[list[dict[int, int]]] = [[{} for _ in range(SHARDS)] for _ in TIERS]
        self.tier_blocks = [0] * len(TIERS)
        self.by_slot: dict[int, Source] = {}
        self.exact: dict[int, int] = {}
        self._free: list[int] = []
        self._next_slot = 0
        self._dead = 0
        self._sweeping = 0
        self._cursor = 0

    def take_slot(self, source: Source) -> None:
        """Give ``source`` a slot whose bit is in no mask."""
        if self._free:
            source.slot = self._free.pop()
        else:
            source.slot = self._next_slot
            self._next_slot += 1
        self.by_slot[source.slot] = source

    def drop_slot(self, source: Source) -> None:
        """Void all blocks of ``source`` at once; the bits themselves go with ``sweep``."""
        if source.slot < 0:
            return
        self.set_exact(source, False)
        del self.by_slot[source.slot]
        if any(source.counts):
            self._dead |= source.bit
        else:
            self._free.append(source.slot)
        for tier, count in enumerate(source.counts):
            self.tier_blocks[tier] -= count
        source.counts = [0] * len(TIERS)
        source.slot = -1

    def set_exact(self, source: Source, exact: bool) -> None:
        """Let the source's blocks count, or not."""
        source.exact = exact
        mask = self.exact.get(source.block_size, 0)
        self.exact[source.block_size] = mask | source.bit if exact else mask & ~source.bit

    def store(self, source: Source, tier: int, column: bytes) -> int:
        """Add the blocks of a packed column; returns how many were there already."""
        shards = self.tiers[tier]
        bit = source.bit
        added = 0
        # The fold's inner loop. The top byte of each hash, which names its shard, is read from the column itself.
        for block, shard_number in zip(unpack_u64(column), column[7::8], strict=False):
            shard = shards[shard_number]
            if block in shard:
                mask = shard[block]
                if not mask & bit:
                    shard[block] = mask | bit
                    added += 1
            else:
                shard[block] = bit
                added += 1
        source.counts[tier] += added
        self.tier_blocks[tier] += added
        return len(column) // 8 - added

    def remove(self, source: Source, tier: int, column: bytes) -> int:
        """Take the blocks of a packed column away; returns how many were not there."""
        shards = self.tiers[tier]
        bit = source.bit
        gone = 0
        for block, shard_number in zip(unpack_u64(column), column[7::8], strict=False):
            shard = shards[shard_number]
            mask = shard.get(block, 0)
            if mask & bit:
                gone += 1
                if mask == bit:
                    del shard[block]
                else:
                    shard[block] = mask ^ bit
        source.counts[tier] -= gone
        self.tier_blocks[tier] -= gone
        return len(column) // 8 - gone

    def sweep(self) -> bool:
        """Clear dead bits from one shard of each tier; True if there is more to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead, self._cursor = self._dead, 0, 0
        dead = self._sweeping
        for shards in self.tiers:
            shard = shards[self._cursor]
            for block in [block for block, mask in shard.items() if mask & dead]:
                mask = shard[block] & ~dead
                if mask:
                    shard[block] = mask
                else:
                    del shard[block]
        self._cursor += 1
        if self._cursor == SHARDS:
            self._free.extend(bits_of(dead))
            self._sweeping = 0
        return bool(self._sweeping or self._dead)

    def match(self, hashes: Sequence[int], block_size: int) -> dict[int, int]:
        """Slot to number of leading blocks in device memory; slots without a match are absent."""
        active = self.exact.get(block_size, 0)
        depths: dict[int, int] = {}
        shards = self.tiers[0]
        depth = 0
        for block in hashes:
            mask = shards[block >> _SHARD_SHIFT].get(block, 0) & active
            if mask != active:
                if depth:
                    for slot in bits_of(active & ~mask):
                        depths[slot] = depth
                active = mask
                if not active:
                    return depths
            depth += 1
        if depth:
            for slot in bits_of(active):
                depths[slot] = depth
        return depths

    def extend(self, hashes: Sequence[int], slot: int, tier: int, start: int) -> int:
        """How many blocks from ``start`` on the slot holds in ``tier``, without a hole."""
        shards = self.tiers[tier]
        bit = 1 << slot
        end = start
        while end < len(hashes) and shards[hashes[end] >> _SHARD_SHIFT].get(hashes[end], 0) & bit:
            end += 1
        return end - start

    def blocks_of(self, slot: int, tier: int) -> Iterator[int]:
        """All blocks of a slot in a tier; walks the whole tier."""
        bit = 1 << slot
        for shard in self.tiers[tier]:
            for block, mask in shard.items():
                if mask & bit:
                    yield block

    def entries(self) -> int:
        """Keys in all dicts, swept or not: what memory is spent on."""
        return sum(len(shard) for shards in self.tiers for shard in shards)


class KvIndexState:
    """All models and sources."""

    def __init__(self) -> None:
        self.models: dict[str, ModelIndex] = {}
        self.sources: dict[SourceKey, Source] = {}
        self.counters = IndexCounters()
        self.dirty: dict[SourceKey, Source] = {}
        self.deleted_rows: list[int] = []
        self.next_row_id = 0

    def index_of(self, model: str) -> ModelIndex:
        """The model's index, made if missing."""
        index = self.models.get(model)
        if index is None:
            index = self.models[model] = ModelIndex()
        return index

    def match(self, model: str, hashes: Sequence[int], block_size: int) -> list[Overlap]:
        """Overlap of every source that holds a leading part of the prompt in some tier.

        ``hashes``: sequence hashes of the prompt's complete blocks. Lower tiers extend the device match: host memory
        first, then disk, then external (both count as disk).
        """
        index = self.models.get(model)
        if index is None or not hashes:
            return []
        device = index.match(hashes, block_size)
        if not any(index.tier_blocks[1:]):
            return [Overlap(index.by_slot[slot], depth, 0, 0) for slot, depth in device.items()]
        result = []
        for slot in bits_of(index.exact.get(block_size, 0)):
            depth = device.get(slot, 0)
            host = index.extend(hashes, slot, 1, depth)
            disk = index.extend(hashes, slot, 2, depth + host)
            external = index.extend(hashes, slot, 3, depth + host + disk)
            if depth or host or disk or external:
                result.append(Overlap(index.by_slot[slot], depth, host, disk + external))
        return result


def bits_of(mask: int) -> Iterator[int]:
    """Numbers of the set bits, rising."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def pack_segment(operation: int, tier: int, column: bytes) -> bytes:
    """A piece of a stored chunk: operation, tier, count, packed hashes."""
    return _SEGMENT.pack(operation, tier, len(column) // 8) + column


def unpack_segments(chunk: bytes) -> Iterator[tuple[int, int, bytes]]:
    """The pieces of a stored chunk: operation, tier, packed column."""
    offset = 0
    while offset < len(chunk):
        operation, tier, count = _SEGMENT.unpack_from(chunk, offset)
        offset += _SEGMENT.size
        yield operation, tier, chunk[offset : offset + 8 * count]
        offset += 8 * count
