"""What the data centres told of themselves: whose pools hold which blocks, in memory.

Pools take the place that sources have in the KV index: per model a packed table from a block's sequence hash to a bit
set of pools (``ModelIndex``), so that one walk over a prompt's hashes finds the longest match of every pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from schemas.dc_relay import DcStatus, RelayPool
from streams.block_table import U64
from streams.kv_index_state import ModelIndex, Source, SourceKey

DEVICE = 0
"""All blocks of a pool are in one table, whatever tier they are in at the workers."""
_WORD = 64
_MAX_DEAD_SLOTS = _WORD


@dataclass(slots=True)
class Pool:
    """One pool of one data centre.

    Attributes:
        held: Its place in the model's index; None: its blocks are not known (a record is missing, or none came yet).
        relay: Life of the relay that the blocks in ``held`` are of.
        coming: Where the chunks of a snapshot go that is not whole yet.
        next_chunk, chunks: Of that snapshot.
    """

    dc_id: str
    pool: RelayPool
    held: Source | None = None
    relay: int = 0
    coming: Source | None = None
    next_chunk: int = 0
    chunks: int = 0


@dataclass(slots=True)
class DataCentre:
    """One data centre.

    Attributes:
        relay, next_seq: Life of its relay, and the number of the record that comes next.
        seen_ms: Time of its newest record; see ``bound_ages``.
        status: The newest one.
    """

    dc_id: str
    relay: int
    next_seq: int
    seen_ms: int = 0
    status: DcStatus | None = None
    pools: dict[RelayPool, Pool] = field(default_factory=dict)


@dataclass(slots=True)
class RelayCounters:
    """What happened to records; for metrics, not part of the state's meaning."""

    records: int = 0
    duplicates: int = 0
    stragglers: int = 0
    gaps: int = 0
    torn: int = 0
    skipped: int = 0


class PoolMatch(NamedTuple):
    """How many leading blocks of a prompt a pool holds."""

    pool: Pool
    blocks: int


class DcRelayState:
    """All data centres of one topic. ``mix``: see ``BlockTable``."""

    def __init__(self, mix: int) -> None:
        self._mix = mix
        self.centres: dict[str, DataCentre] = {}
        self.models: dict[str, ModelIndex] = {}
        self.counters = RelayCounters()
        self._by_number: dict[int, Pool] = {}
        self._next_number = 0
        self._room = 0

    def pools(self) -> Iterator[Pool]:
        """All pools of all data centres."""
        for centre in self.centres.values():
            yield from centre.pools.values()

    def match(self, model: str, hashes: Sequence[int] | U64, block_size: int) -> list[PoolMatch]:
        """Pools of a model that hold a leading part of a prompt, by its complete blocks' sequence hashes."""
        index = self.models.get(model)
        if index is None or not len(hashes):
            return []
        depths = index.match(np.asarray(hashes, np.uint64), block_size)
        return [PoolMatch(self._by_number[index.by_slot[slot].row_id], depth) for slot, depth in depths.items()]

    def bound_ages(self, now_ms: int) -> None:
        """No record is newer than the reader's ``now_ms``, at which it was there already, whatever its clock said."""
        for centre in self.centres.values():
            centre.seen_ms = min(centre.seen_ms, now_ms)

    def outgrows(self, place: Source, added: int, bound: int) -> bool:
        """Whether all pools hold more than ``bound`` blocks, each counted as often as its row has words.

        ``added``: how many came to ``place`` since this was asked, at most.
        """
        # They are counted only once that many may be there.
        self._room -= added * _words_of(self.models[place.key.model])
        if self._room < 0:
            self._room = bound - sum(index.tier_blocks[DEVICE] * _words_of(index) for index in self.models.values())
        return self._room < 0

    def blocks_of(self, pool: Pool) -> U64:
        """All blocks of a pool, in no order; empty if they are not known."""
        index = self.models.get(pool.pool.model)
        if pool.held is None or index is None:
            return np.zeros(0, np.uint64)
        return index.blocks_of(pool.held.slot, DEVICE)

    def place(self, pool: Pool) -> Source:
        """An empty place in the index that does not count yet."""
        model = pool.pool.model
        index = self.models.get(model)
        if index is None:
            index = self.models[model] = ModelIndex(self._mix)
        if not len(index.by_slot) % _WORD:
            # All of its rows become wider: count anew.
            self._room = -1
        source = Source(SourceKey(model, 0, 0), self._next_number, -1, 0, pool.pool.block_size)
        self._by_number[source.row_id] = pool
        self._next_number += 1
        index.take_slot(source)
        return source

    def free(self, source: Source | None) -> None:
        """Give a place back, with all blocks in it."""
        if source is None:
            return
        index = self.models[source.key.model]
        index.drop_slot(source)
        del self._by_number[source.row_id]
        if not index.by_slot:
            del self.models[source.key.model]
        elif index.dead_slots >= _MAX_DEAD_SLOTS:
            # Otherwise as many snapshots as come between two rounds of housekeeping would widen every row.
            while index.sweep():
                pass


def _words_of(index: ModelIndex) -> int:
    """How wide its rows are, without slots that are to be swept."""
    return -(-len(index.by_slot) // _WORD)
