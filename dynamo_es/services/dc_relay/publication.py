"""What a relay told readers so far, and the records that bring them up to date. Pure: no I/O, no clock.

What was told is the reader's own fold of it, so relay and readers cannot disagree about what a record means.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import xxhash

from dynamo_es.log.base import Record
from dynamo_es.services.dc_relay.pools import PoolMembers
from dynamo_es.services.dc_relay.watched_index import IndexChanges
from schemas.dc_relay import CHUNK_BLOCKS, DC_RELAY, DcRelayRecord, DcStatus, PoolDelta, PoolSnapshot, RelayPool
from streams.block_table import U64
from streams.dc_relay import DcRelayFold
from streams.dc_relay_state import DataCentre, Pool
from streams.kv_index_state import KvIndexState, SourceKey

_NONE: U64 = np.zeros(0, np.uint64)


class PoolPublication:
    """Numbers records, finds what changed, and remembers what was told.

    Order of calls: ``begin``; then ``status`` and ``plan`` in any order, and ``told_all`` once their records are in the
    log. If it is not known whether they are, ``begin`` again: readers then get everything anew.
    """

    def __init__(self, dc_id: str, mix: int) -> None:
        """``mix``: see ``BlockTable``."""
        self._dc_id = dc_id
        self._fold = DcRelayFold(mix)
        self._told = self._fold.new_state()
        self._relay = 0
        self._seq = 0
        self._places: dict[RelayPool, frozenset[tuple[SourceKey, int]]] = {}

    @property
    def relay(self) -> int:
        """The present life."""
        return self._relay

    def begin(self, relay: int) -> None:
        """Begin a new life: nothing was told. ``relay``: a u64 that no life had before."""
        self._told = self._fold.new_state()
        self._relay, self._seq = relay, 0
        self._places = {}

    def pools_told(self) -> set[RelayPool]:
        """Pools whose blocks readers have."""
        centre = self._centre()
        return set() if centre is None else {key for key, pool in centre.pools.items() if pool.held is not None}

    def blocks_told(self, pool: RelayPool) -> int:
        """How many blocks of a pool readers have."""
        found = self._pool(pool)
        if found is None or found.held is None:
            return 0
        self._told.models[pool.model].settle()
        return sum(found.held.counts)

    def number(self, status: DcStatus) -> DcStatus:
        """Give a status its place in the order."""
        status.dc_id, status.relay, status.seq = self._dc_id, self._relay, self._next_seq()
        return status

    def plan(
        self,
        index: KvIndexState,
        pools: Mapping[RelayPool, PoolMembers],
        changes: IndexChanges,
        refresh: Collection[RelayPool] = (),
    ) -> list[DcRelayRecord]:
        """Records for what ``changes`` says, and whole snapshots of the pools in ``refresh`` and of new ones."""
        records: list[DcRelayRecord] = []
        touched: dict[str, U64] = {}
        for pool, members in pools.items():
            places, before = members.places, self._places.get(pool)
            self._places[pool] = places
            told = self._pool(pool)
            if told is None or told.held is None or pool in refresh:
                records += self._snapshot(pool, _blocks_of(index, members))
            elif changes.everything or places != before or any(key in changes.moved for key, _ in places):
                records += self._compare_whole(told, _blocks_of(index, members))
            elif changes.blocks:
                if pool.model not in touched:
                    touched[pool.model] = changes.touched(pool.model)
                records += self._compare(told, index, members.bits, touched[pool.model])
        for gone in self._places.keys() - pools.keys():
            del self._places[gone]
        return records

    def told_all(self, records: Sequence[DcRelayRecord], at_ms: int) -> None:
        """These records are in the log."""
        for record in records:
            self._fold.apply(self._told, Record(DC_RELAY.name, 0, record.seq, at_ms, None, None), record)
        self._fold.housekeep(self._told)

    def _centre(self) -> DataCentre | None:
        return self._told.centres.get(self._dc_id)

    def _pool(self, pool: RelayPool) -> Pool | None:
        centre = self._centre()
        return None if centre is None else centre.pools.get(pool)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _snapshot(self, pool: RelayPool, blocks: U64) -> Iterator[DcRelayRecord]:
        chunks = max(1, -(-len(blocks) // CHUNK_BLOCKS))
        for number in range(chunks):
            column = _packed(blocks[number * CHUNK_BLOCKS : (number + 1) * CHUNK_BLOCKS])
            yield PoolSnapshot(
                DC_RELAY.version, self._dc_id, self._relay, self._next_seq(), pool, number, chunks, column,
                xxhash.xxh3_64_intdigest(column),
            )  # fmt: skip

    def _compare_whole(self, told: Pool, blocks: U64) -> Iterator[DcRelayRecord]:
        before = np.sort(self._told.blocks_of(told))
        added = np.setdiff1d(blocks, before, assume_unique=True)
        removed = np.setdiff1d(before, blocks, assume_unique=True)
        if len(added) + len(removed) > len(blocks):
            return self._snapshot(told.pool, blocks)
        return self._delta(told.pool, added, removed)

    def _compare(self, told: Pool, index: KvIndexState, bits: int, keys: U64) -> Iterator[DcRelayRecord]:
        assert told.held is not None
        model = index.models.get(told.pool.model)
        if model is None or not len(keys):
            return iter(())
        now = model.held_by_any(keys, bits)
        before = self._told.models[told.pool.model].held_by_any(keys, told.held.bit)
        return self._delta(told.pool, keys[now & ~before], keys[before & ~now])

    def _delta(self, pool: RelayPool, added: U64, removed: U64) -> Iterator[DcRelayRecord]:
        while len(added) or len(removed):
            gone, removed = removed[:CHUNK_BLOCKS], removed[CHUNK_BLOCKS:]
            room = CHUNK_BLOCKS - len(gone)
            come, added = added[:room], added[room:]
            yield PoolDelta(
                DC_RELAY.version, self._dc_id, self._relay, self._next_seq(), pool, _packed(come), _packed(gone)
            )


def _blocks_of(index: KvIndexState, members: PoolMembers) -> U64:
    model = index.models.get(members.pool.model)
    return _NONE if model is None else model.blocks_of_any(members.bits)


def _packed(blocks: U64) -> bytes:
    return blocks.astype("<u8", copy=False).tobytes()
