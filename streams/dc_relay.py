"""The fold of ``dc-relay``: pools of blocks, load and readiness of every data centre in the topic.

It has no rows: its state is what the last ``SNAPSHOTS_WITHIN_MS`` of the topic say, so it starts from there. Give its
runner a store in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3
import numpy as np
import xxhash

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, StateRows
from schemas.dc_relay import DC_RELAY, SNAPSHOTS_WITHIN_MS, DcRelayRecord, DcStatus, PoolDelta, PoolSnapshot
from schemas.topic import TopicSpec
from streams.block_table import DEFAULT_MIX
from streams.dc_relay_state import DEVICE, DataCentre, DcRelayState, Pool
from streams.fold import RecordRejected
from streams.kv_index_state import Source

# Whoever may write to the topic must not be able to fill our memory.
MAX_CENTRES = 256
# Of one data centre, and of all.
MAX_MODELS = 256
MAX_ALL_MODELS = 1024
MAX_POOLS = 1024
MAX_POOL_BLOCKS = 64 * 1024 * 1024
# Of all pools, snapshots that are not whole included: some three gigabytes. A block counts once for each 64 pools that
# its model has, as wide as its row is. The pool that would outgrow it is given up.
MAX_BLOCKS = 128 * 1024 * 1024
_MAX_ID_CHARACTERS = 256


class DcRelayFold:
    """A ``Fold[DcRelayState]``.

    A record of an earlier life of a relay is dropped, one of a later life begins it; a ``seq`` that was seen is
    dropped; a gap makes the blocks of all pools of that data centre unknown, until each one's next snapshot. So does
    one block more than ``MAX_POOL_BLOCKS`` of a pool, or ``MAX_BLOCKS`` of all, for the pool that it belongs to.
    """

    name = "dc-relay"
    version = 1
    horizon_ms: int | None = SNAPSHOTS_WITHIN_MS
    topics: Sequence[TopicSpec] = (DC_RELAY,)
    families: Sequence[str] = ()

    def __init__(self, mix: int = DEFAULT_MIX) -> None:
        """``mix``: a random u64 that rows in memory are placed by (see ``BlockTable``); no result depends on it."""
        self._mix = mix

    def new_state(self) -> DcRelayState:
        return DcRelayState(self._mix)

    def apply(self, state: DcRelayState, record: Record, value: Any) -> None:
        if not isinstance(value, DcRelayRecord):
            raise RecordRejected("dc-relay has no deletions")
        _check(state, value)
        state.counters.records += 1
        centre = _admit(state, value)
        if centre is None:
            return
        # Not the highest: one wrong clock once would keep it fresh for good.
        centre.seen_ms = record.timestamp_ms
        if isinstance(value, DcStatus):
            _apply_status(state, centre, value)
        elif isinstance(value, PoolSnapshot):
            _apply_chunk(state, centre, value)
        else:
            _apply_delta(state, centre, value)

    def changes(self, state: DcRelayState) -> list[Change]:
        return []

    def mark_all(self, state: DcRelayState) -> Iterator[None]:
        return iter(())

    def load(self, rows: StateRows) -> DcRelayState:
        return self.new_state()

    def adopt(self, previous: DcRelayState, state: DcRelayState) -> None:
        state.counters = previous.counters

    def digest(self, state: DcRelayState) -> str:
        lines = [
            repr((centre.dc_id, centre.relay, centre.next_seq, centre.status)) for centre in state.centres.values()
        ]
        lines.append(contents_digest(state))
        return blake3.blake3("\n".join(sorted(lines)).encode()).hexdigest()

    def housekeep(self, state: DcRelayState) -> bool:
        more = False
        for index in state.models.values():
            index.settle()
            more = index.sweep() or more
        return more

    def compaction(self, state: DcRelayState) -> Callable[[StateRows], list[Change]] | None:
        return None


def contents_digest(state: DcRelayState, dc_id: str | None = None) -> str:
    """Hash of which pools hold which blocks, of one data centre or all, whichever life of a relay told it."""
    lines = []
    for pool in state.pools():
        if dc_id in (None, pool.dc_id):
            blocks = np.sort(state.blocks_of(pool)).astype("<u8", copy=False).tobytes()
            lines.append(repr((pool.dc_id, pool.pool, pool.held is not None, xxhash.xxh3_128_hexdigest(blocks))))
    return blake3.blake3("\n".join(sorted(lines)).encode()).hexdigest()


def _check(state: DcRelayState, value: DcRelayRecord) -> None:
    """Raises ``RecordRejected`` for what must not get in, before anything is changed."""
    if not value.dc_id or len(value.dc_id) > _MAX_ID_CHARACTERS:
        raise RecordRejected(
            f"a data centre's id has 1 to {_MAX_ID_CHARACTERS} characters, this has {len(value.dc_id)}"
        )
    centre = state.centres.get(value.dc_id)
    if centre is None and len(state.centres) >= MAX_CENTRES:
        raise RecordRejected(f"more than {MAX_CENTRES} data centres")
    if isinstance(value, DcStatus):
        if len(value.pools) > MAX_POOLS:
            raise RecordRejected(f"more than {MAX_POOLS} pools")
        return
    if isinstance(value, PoolDelta):
        return
    if value.checksum != xxhash.xxh3_64_intdigest(value.sequence_hashes):
        raise RecordRejected(f"chunk {value.chunk} of {value.chunks} has a wrong checksum")
    if centre is not None and value.pool not in centre.pools and len(centre.pools) >= MAX_POOLS:
        raise RecordRejected(f"more than {MAX_POOLS} pools")
    model = value.pool.model
    if model not in state.models and len(state.models) >= MAX_ALL_MODELS:
        raise RecordRejected(f"more than {MAX_ALL_MODELS} models of all data centres")
    if centre is not None and value.pool not in centre.pools:
        models = {pool.model for pool in centre.pools}
        if model not in models and len(models) >= MAX_MODELS:
            raise RecordRejected(f"more than {MAX_MODELS} models of a data centre")


def _admit(state: DcRelayState, value: DcRelayRecord) -> DataCentre | None:
    """The data centre, if the record is to be applied; moves its ``next_seq``, and the trust in its blocks."""
    centre = state.centres.get(value.dc_id)
    if centre is None:
        centre = state.centres[value.dc_id] = DataCentre(value.dc_id, value.relay, value.seq)
    if value.relay < centre.relay:
        state.counters.stragglers += 1
        return None
    if value.relay > centre.relay:
        # Blocks that the life before told of stay until the new one's snapshots replace them, or its status drops them.
        centre.relay, centre.next_seq = value.relay, 0
    if value.seq < centre.next_seq:
        state.counters.duplicates += 1
        return None
    if value.seq > centre.next_seq:
        state.counters.gaps += 1
        for pool in centre.pools.values():
            _distrust(state, pool)
    centre.next_seq = value.seq + 1
    return centre


def _apply_status(state: DcRelayState, centre: DataCentre, status: DcStatus) -> None:
    centre.status = status
    named = {entry.pool for entry in status.pools}
    for key in [key for key in centre.pools if key not in named]:
        _distrust(state, centre.pools.pop(key))


def _apply_chunk(state: DcRelayState, centre: DataCentre, value: PoolSnapshot) -> None:
    pool = centre.pools.get(value.pool)
    if pool is None:
        pool = centre.pools[value.pool] = Pool(centre.dc_id, value.pool)
    if value.chunk == 0:
        state.free(pool.coming)
        pool.coming, pool.next_chunk, pool.chunks = state.place(pool), 0, value.chunks
    coming = pool.coming
    if coming is None or value.chunk != pool.next_chunk or value.chunks != pool.chunks:
        # Its beginning was not seen; what was there before holds, if anything.
        state.counters.torn += 1
        state.free(coming)
        pool.coming = None
        return
    index = state.models[value.pool.model]
    index.store(coming, DEVICE, value.sequence_hashes)
    index.settle()
    pool.next_chunk += 1
    if _is_too_large(state, pool, coming, value.sequence_hashes) or pool.next_chunk < pool.chunks:
        return
    state.free(pool.held)
    index.set_exact(coming, True)
    pool.held, pool.coming, pool.relay = coming, None, value.relay


def _apply_delta(state: DcRelayState, centre: DataCentre, value: PoolDelta) -> None:
    pool = centre.pools.get(value.pool)
    if pool is None or pool.held is None:
        state.counters.skipped += 1
        return
    if pool.relay != centre.relay or pool.coming is not None:
        # A delta rests on a snapshot of the same life, which is missing or not whole.
        state.counters.torn += 1
        _distrust(state, pool)
        return
    index = state.models[value.pool.model]
    index.remove(pool.held, DEVICE, value.removed)
    index.store(pool.held, DEVICE, value.added)
    _is_too_large(state, pool, pool.held, value.added)


def _is_too_large(state: DcRelayState, pool: Pool, place: Source, added: bytes) -> bool:
    """Whether it outgrew a bound with what was added; it is then given up until its next snapshot."""
    full = state.outgrows(place, len(added) >> 3, MAX_BLOCKS)
    if full and place is not pool.held and pool.held is not None:
        # What the snapshot replaces makes room for it.
        state.free(pool.held)
        pool.held = None
        full = state.outgrows(place, 0, MAX_BLOCKS)
    if not full and place.counts[DEVICE] <= MAX_POOL_BLOCKS:
        return False
    state.counters.skipped += 1
    _distrust(state, pool)
    return True


def _distrust(state: DcRelayState, pool: Pool) -> None:
    state.free(pool.held)
    state.free(pool.coming)
    pool.held = pool.coming = None
