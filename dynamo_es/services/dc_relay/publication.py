"""What a relay told readers so far, and the records that bring them up to date. Pure: no I/O, no clock.

What was told is the reader's own fold of it, so relay and readers cannot disagree about what a record means.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import xxhash

from dynamo_es.log.base import Record
from dynamo_es.services.dc_relay.pools import PoolMembers
from dynamo_es.services.dc_relay.watched_index import IndexChanges
from schemas.dc_relay import CHUNK_BLOCKS, DC_RELAY, DcRelayRecord, DcStatus, PoolDelta, PoolSnapshot, RelayPool
from streams.block_table import U64, sorted_distinct
from streams.dc_relay import MAX_POOL_BLOCKS, DcRelayFold
from streams.dc_relay_state import DataCentre, Pool
from streams.kv_index_state import KvIndexState, SourceKey

_NONE: U64 = np.zeros(0, np.uint64)
_SALT_BITS = 20
# Of more changes than so many, a pool is compared as a whole, off the loop.
_MANY_BLOCKS = 4 * CHUNK_BLOCKS
T = TypeVar("T")
_Chunk = tuple[bytes, int]
Look = Callable[[], tuple[KvIndexState, Mapping[RelayPool, PoolMembers]]]


class OffLoop(Protocol):
    """Runs a job, which changes nothing; other tasks of the loop may run meanwhile."""

    def __call__(self, job: Callable[[], T], /) -> Awaitable[T]: ...


def next_life(previous: int, now_ms: int, rng: random.Random) -> int:
    """Number of a life that begins now (see ``DcStatus``); above ``previous`` even if the clock went back."""
    return max(previous + 1, now_ms << _SALT_BITS | rng.getrandbits(_SALT_BITS))


class PoolPublication:
    """Numbers records, finds what changed, and remembers what was told.

    Order of calls: ``begin``; then ``number`` and ``plan`` in any order, and ``told`` for each of their records, in
    their order, once it is in the log; no two of these calls at once. If it is not known whether one is, ``begin``
    again: readers then get everything anew.
    """

    def __init__(self, dc_id: str, mix: int) -> None:
        """``mix``: see ``BlockTable``."""
        self._dc_id = dc_id
        self._fold = DcRelayFold(mix)
        self._told = self._fold.new_state()
        self._relay = 0
        self._seq = 0
        self._places: dict[RelayPool, frozenset[tuple[SourceKey, int]]] = {}
        self._given_up: set[RelayPool] = set()

    @property
    def relay(self) -> int:
        """The present life."""
        return self._relay

    def begin(self, relay: int) -> None:
        """Begin a new life: nothing was told. ``relay``: greater than that of any life before."""
        self._told = self._fold.new_state()
        self._relay, self._seq = relay, 0
        self._places = {}
        self._given_up = set()

    def pools_told(self) -> set[RelayPool]:
        """Pools whose blocks readers have."""
        centre = self._centre()
        return set() if centre is None else {key for key, pool in centre.pools.items() if pool.held is not None}

    @property
    def given_up(self) -> Collection[RelayPool]:
        """Pools with more blocks than readers take: they are told of, their blocks are not."""
        return self._given_up

    def owes(self, pools: Mapping[RelayPool, PoolMembers]) -> bool:
        """Whether readers do not have the blocks of some of these pools, and would take them."""
        return bool(pools.keys() - self.pools_told() - self._given_up)

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

    async def plan(
        self, look: Look, changes: IndexChanges, refresh: Collection[RelayPool], off_loop: OffLoop
    ) -> list[DcRelayRecord]:
        """Records for what ``changes`` says, and whole snapshots of the pools in ``refresh`` and of new ones.

        Large pools are sorted and compared by ``off_loop``, and the index may change meanwhile. So ``changes`` is what
        was taken before the call: what changes later is noted anew, and compared with what is told by then. ``look``
        gives the index and the pools as they are, each time after something may have changed.
        """
        records: list[DcRelayRecord] = []
        touched: dict[str, U64] = {}
        index, pools = look()
        for pool in list(pools):
            members = pools.get(pool)
            if members is None:
                continue
            places, before = members.places, self._places.get(pool)
            self._places[pool] = places
            told = self._pool(pool)
            if told is None or told.held is None or pool in refresh:
                if pool in self._given_up and pool not in refresh:
                    continue
                columns = _columns_of(index, members)
                large = _blocks_in(columns) > CHUNK_BLOCKS
                job = partial(_chunks_of, columns)
                records += self._snapshot(pool, await off_loop(job) if large else job())
            elif (
                changes.everything or changes.blocks > _MANY_BLOCKS or places != before
                or any(key in changes.moved for key, _ in places)
            ):  # fmt: skip
                columns = _columns_of(index, members)
                large = _blocks_in(columns) + self.blocks_told(pool) > CHUNK_BLOCKS
                # What was told does not change before the next ``told``, and all of it was settled just now.
                compare = partial(_difference, columns, partial(self._told.blocks_of, told))
                chunks, added, removed = await off_loop(compare) if large else compare()
                records += self._delta(pool, added, removed) if chunks is None else self._snapshot(pool, chunks)
            else:
                if changes.blocks:
                    if pool.model not in touched:
                        touched[pool.model] = changes.touched(pool.model)
                    records += self._compare(told, index, members.bits, touched[pool.model])
                continue
            if large:
                index, pools = look()
        for gone in self._places.keys() - pools.keys():
            del self._places[gone]
        self._given_up &= pools.keys()
        return records

    def told(self, record: DcRelayRecord, at_ms: int) -> None:
        """This record is in the log: the next one that was planned, or numbered."""
        self._fold.apply(self._told, Record(DC_RELAY.name, 0, record.seq, at_ms, None, None), record)
        self._fold.housekeep(self._told)
        if isinstance(record, PoolDelta) or (isinstance(record, PoolSnapshot) and record.chunk + 1 == record.chunks):
            pool = self._pool(record.pool)
            if pool is None or pool.held is None:
                self._given_up.add(record.pool)
            else:
                self._given_up.discard(record.pool)

    def _centre(self) -> DataCentre | None:
        return self._told.centres.get(self._dc_id)

    def _pool(self, pool: RelayPool) -> Pool | None:
        centre = self._centre()
        return None if centre is None else centre.pools.get(pool)

    def _next_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _snapshot(self, pool: RelayPool, chunks: Sequence[_Chunk]) -> Iterator[DcRelayRecord]:
        if sum(len(column) for column, _ in chunks) >> 3 > MAX_POOL_BLOCKS:
            self._given_up.add(pool)
            return
        for number, (column, checksum) in enumerate(chunks):
            yield PoolSnapshot(
                DC_RELAY.version,
                self._dc_id,
                self._relay,
                self._next_seq(),
                pool,
                number,
                len(chunks),
                column,
                checksum,
            )

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


def _columns_of(index: KvIndexState, members: PoolMembers) -> list[U64]:
    """Blocks of a pool, each once a column; copies."""
    model = index.models.get(members.pool.model)
    return [] if model is None else model.columns_of_any(members.bits)


def _distinct(columns: Sequence[U64]) -> U64:
    """Each block once. Those of one column, the usual case, are so already."""
    filled = [column for column in columns if len(column)]
    if len(filled) > 1:
        return sorted_distinct(np.concatenate(filled))
    return filled[0] if filled else _NONE


def _chunks_of(columns: Sequence[U64]) -> list[_Chunk]:
    """The columns of a snapshot, with their checksums; an empty one for no blocks."""
    blocks = _distinct(columns)
    packed = [_packed(blocks[start : start + CHUNK_BLOCKS]) for start in range(0, max(1, len(blocks)), CHUNK_BLOCKS)]
    return [(column, xxhash.xxh3_64_intdigest(column)) for column in packed]


def _difference(columns: Sequence[U64], read_told: Callable[[], U64]) -> tuple[list[_Chunk] | None, U64, U64]:
    """Blocks that came and went since what was told; or a snapshot's columns, if that is shorter."""
    blocks, before = _distinct(columns), read_told()
    added = np.setdiff1d(blocks, before, assume_unique=True)
    removed = np.setdiff1d(before, blocks, assume_unique=True)
    chunks = _chunks_of([blocks]) if len(added) + len(removed) > len(blocks) else None
    return chunks, added, removed


def _blocks_in(columns: Sequence[U64]) -> int:
    return sum(map(len, columns))


def _packed(blocks: U64) -> bytes:
    return blocks.astype("<u8", copy=False).tobytes()
