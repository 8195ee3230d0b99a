"""The KV index: which worker holds which block, in memory.

Per model and tier: a packed table from a block's sequence hash to a bit set of slots; a slot is one source (worker and
rank). A sequence hash commits to its whole prefix, so the longest match of a prompt needs no tree: walk its hashes
while some slot is still in every bit set. There are no node objects and nothing for the garbage collector to walk.

A source that is cleared takes a fresh slot; its old bit no longer counts at once and is swept away in small steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from schemas.kv_events import TIERS
from streams.block_table import MAX_COLUMN, U64, BlockTable, Bools, bits_of, int_of, sorted_distinct, words_of

# Changes wait for each other up to so many blocks: about a millisecond's work.
_SETTLE_BLOCKS = 8192
# A prompt that nobody holds is known by its first blocks; the rest of a long one is looked up in growing pieces.
_FIRST_CHUNK = 128
# Up to so many blocks are looked up one by one.
_FEW_BLOCKS = 12
_CHUNK_GROWTH = 8
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
    heads and columns that are not in the store yet; ``wiped`` says that its stored rows are void.
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
    """Blocks of one model.

    ``store`` and ``remove`` only note what is to change; ``settle`` brings it into the tables, and every method that
    reads does that first. Changing a thousand blocks at once costs a small part of changing them one by one.
    """

    def __init__(self, mix: int) -> None:
        """``mix``: see ``BlockTable``."""
        self.tables = [BlockTable(mix) for _ in TIERS]
        self.by_slot: dict[int, Source] = {}
        self.exact: dict[int, int] = {}
        self.stored_noop = 0
        self.removed_noop = 0
        self._tier_blocks = [0] * len(TIERS)
        self._waiting = [_Waiting() for _ in TIERS]
        self._free: list[int] = []
        self._next_slot = 0
        self._dead = 0
        self._sweeping = 0
        self._cursors = [0] * len(TIERS)

    @property
    def tier_blocks(self) -> list[int]:
        """Blocks by tier, summed over sources."""
        self.settle()
        return self._tier_blocks

    @property
    def dead_slots(self) -> int:
        """Slots that are in no use and must be swept before they are again."""
        return (self._dead | self._sweeping).bit_count()

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
        self.settle()
        self.set_exact(source, False)
        del self.by_slot[source.slot]
        if any(source.counts):
            self._dead |= source.bit
        else:
            self._free.append(source.slot)
        for tier, count in enumerate(source.counts):
            self._tier_blocks[tier] -= count
        source.counts = [0] * len(TIERS)
        source.slot = -1

    def set_exact(self, source: Source, exact: bool) -> None:
        """Let the source's blocks count, or not."""
        source.exact = exact
        mask = self.exact.get(source.block_size, 0)
        self.exact[source.block_size] = mask | source.bit if exact else mask & ~source.bit

    def store(self, source: Source, tier: int, column: bytes) -> None:
        """Add the blocks of a packed column."""
        waiting = self._waiting[tier]
        waiting.columns.append(column)
        waiting.codes.append(2 * source.slot + 1)
        waiting.blocks += len(column) >> 3
        if waiting.blocks >= _SETTLE_BLOCKS:
            self._settle_tier(tier, waiting)

    def remove(self, source: Source, tier: int, column: bytes) -> None:
        """Take the blocks of a packed column away."""
        waiting = self._waiting[tier]
        waiting.columns.append(column)
        waiting.codes.append(2 * source.slot)
        waiting.blocks += len(column) >> 3
        if waiting.blocks >= _SETTLE_BLOCKS:
            self._settle_tier(tier, waiting)

    def settle(self) -> None:
        """Bring noted changes into the tables, the sources' counts and the no-op counts."""
        for tier, waiting in enumerate(self._waiting):
            if waiting.blocks:
                self._settle_tier(tier, waiting)

    def sweep(self) -> bool:
        """Clear dead bits from some rows of each tier; True if there is more to do."""
        if not self._sweeping:
            if not self._dead:
                return False
            self._sweeping, self._dead = self._dead, 0
            self._cursors = [0] * len(TIERS)
        for tier, table in enumerate(self.tables):
            if self._cursors[tier] < table.rows:
                self._cursors[tier] = table.sweep(self._sweeping, self._cursors[tier])
        # Rows move to later pages only, and never with a dead bit from a page that was swept.
        if all(cursor == table.rows for cursor, table in zip(self._cursors, self.tables, strict=True)):
            self._free.extend(bits_of(self._sweeping))
            self._sweeping = 0
        return bool(self._sweeping or self._dead)

    def match(self, hashes: U64, block_size: int) -> dict[int, int]:
        """Slot to number of leading blocks in device memory; slots without a match are absent."""
        self.settle()
        depths: dict[int, int] = {}
        table = self.tables[0]
        active = self.exact.get(block_size, 0) & ((1 << 64 * table.words) - 1)
        if len(hashes) <= _FEW_BLOCKS:
            return _match_few(table, active, hashes.tolist())
        start, size = 0, _FIRST_CHUNK
        while active and start < len(hashes):
            held = table.masks(hashes[start : start + size])
            held &= words_of(active, table.words)
            held = np.bitwise_and.accumulate(held, axis=0)
            for depth, left in _changes(active, held):
                if start + depth:
                    for slot in bits_of(active & ~left):
                        depths[slot] = start + depth
                active = left
            start, size = start + size, size * _CHUNK_GROWTH
        for slot in bits_of(active):
            depths[slot] = len(hashes)
        return depths

    def extensions(self, hashes: U64, tier: int) -> Callable[[int, int], int]:
        """A function of slot and start: how many blocks from there on the slot holds in ``tier``, without a hole."""
        self.settle()
        table = self.tables[tier]
        if not self._tier_blocks[tier]:
            return lambda slot, start: 0
        held = table.masks(hashes)

        def extend(slot: int, start: int) -> int:
            if slot >> 6 >= table.words:
                return 0
            holes = np.flatnonzero(held[start:, slot >> 6] & np.uint64(1 << (slot & 63)) == 0)
            return int(holes[0]) if len(holes) else len(hashes) - start

        return extend

    def blocks_of(self, slot: int, tier: int) -> U64:
        """All blocks of a slot in a tier; walks the whole tier."""
        self.settle()
        return self.tables[tier].blocks_of(slot)

    def blocks_of_any(self, slots: int) -> U64:
        """Blocks that some slot of a bit set has in some tier, each once, sorted; walks all tiers."""
        return sorted_distinct(np.concatenate(self.columns_of_any(slots)))

    def columns_of_any(self, slots: int) -> list[U64]:
        """The same by tier, each block once a tier, in no order; copies."""
        self.settle()
        return [table.blocks_of_any(slots) for table in self.tables]

    def held_by_any(self, keys: U64, slots: int) -> Bools:
        """Which of the blocks some slot of a bit set has in some tier."""
        self.settle()
        held = np.zeros(len(keys), bool)
        for table in self.tables:
            held |= (table.masks(keys) & words_of(slots, table.words)).any(axis=1)
        return held

    def entries(self) -> int:
        """Rows in use in all tables; walks them."""
        self.settle()
        return sum(table.live() for table in self.tables)

    def _settle_tier(self, tier: int, waiting: _Waiting) -> None:
        self._waiting[tier] = _Waiting()
        keys = np.frombuffer(b"".join(waiting.columns), "<u8").astype(np.uint64, copy=False)
        lengths = [len(column) >> 3 for column in waiting.columns]
        codes = np.repeat(np.array(waiting.codes, np.int64), lengths)
        slots, stores = codes >> 1, (codes & 1).astype(bool)
        for start in range(0, len(keys), MAX_COLUMN):
            part = slice(start, start + MAX_COLUMN)
            applied = self.tables[tier].apply(keys[part], slots[part], stores[part])
            self.stored_noop += applied.stored_noop
            self.removed_noop += applied.removed_noop
            for slot, growth in zip(applied.slots.tolist(), applied.growth.tolist(), strict=True):
                self.by_slot[slot].counts[tier] += growth
                self._tier_blocks[tier] += growth


@dataclass(slots=True)
class _Waiting:
    """Changes of one tier that are noted and not made. A column's code is twice its slot, and one if it is stored."""

    columns: list[bytes] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    blocks: int = 0


def _changes(active: int, held: U64) -> Iterator[tuple[int, int]]:
    """Where the running intersection ``held`` (rows, words) loses slots: row number, and the slots that are left."""
    heads = np.flatnonzero((held[1:] != held[:-1]).any(axis=1)) + 1
    first = int_of(held[0])
    if first != active:
        yield 0, first
    for head in heads.tolist():
        yield head, int_of(held[head])


def _match_few(table: BlockTable, active: int, hashes: Sequence[int]) -> dict[int, int]:
    """``ModelIndex.match`` of a short prompt."""
    depths: dict[int, int] = {}
    for depth, block in enumerate(hashes):
        if not active:
            return depths
        left = active & table.mask_of(block)
        if depth and left != active:
            for slot in bits_of(active & ~left):
                depths[slot] = depth
        active = left
    for slot in bits_of(active):
        depths[slot] = len(hashes)
    return depths


class KvIndexState:
    """All models and sources. ``mix``: see ``BlockTable``."""

    def __init__(self, mix: int) -> None:
        self._mix = mix
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
            index = self.models[model] = ModelIndex(self._mix)
        return index

    def settle(self) -> None:
        """Make all noted changes; reading does it too, so this only chooses the time."""
        for index in self.models.values():
            index.settle()
            self.counters.stored_noop += index.stored_noop
            self.counters.removed_noop += index.removed_noop
            index.stored_noop = index.removed_noop = 0

    def knows(self, model: str, block_size: int) -> bool:
        """Whether some source with blocks of this size is exact."""
        index = self.models.get(model)
        return index is not None and index.exact.get(block_size, 0) != 0

    def match(self, model: str, hashes: Sequence[int], block_size: int) -> list[Overlap]:
        """Overlap of every source that holds a leading part of the prompt in some tier.

        ``hashes``: sequence hashes of the prompt's complete blocks. Lower tiers extend the device match: host memory
        first, then disk, then external (both count as disk).
        """
        return self.match_column(model, np.array(hashes, np.uint64), block_size)

    def match_column(self, model: str, keys: U64, block_size: int) -> list[Overlap]:
        """As ``match``, for hashes that are an array already."""
        index = self.models.get(model)
        if index is None or not len(keys):
            return []
        device = index.match(keys, block_size)
        if not any(index.tier_blocks[1:]):
            return [Overlap(index.by_slot[slot], depth, 0, 0) for slot, depth in device.items()]
        host_from, disk_from, external_from = (index.extensions(keys, tier) for tier in (1, 2, 3))
        result = []
        for slot in bits_of(index.exact.get(block_size, 0)):
            depth = device.get(slot, 0)
            host = host_from(slot, depth)
            disk = disk_from(slot, depth + host)
            external = external_from(slot, depth + host + disk)
            if depth or host or disk or external:
                result.append(Overlap(index.by_slot[slot], depth, host, disk + external))
        return result
