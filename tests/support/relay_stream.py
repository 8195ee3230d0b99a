"""What relays of a few data centres might write, with losses and repetitions, and a plain model of what it means."""

from __future__ import annotations

import random
from collections.abc import Iterator

import xxhash

from schemas.columns import pack_u64, unpack_u64
from schemas.dc_relay import DcRelayRecord, DcStatus, LoadSignal, PoolDelta, PoolSnapshot, PoolStatus, RelayPool

NO_LOAD = [LoadSignal(0, 0)] * 5


def pool(name: str = "backend", model: str = "m", block_size: int = 4) -> RelayPool:
    return RelayPool("ns", name, "generate", model, block_size)


def status(dc_id: str, relay: int, seq: int, *pools: RelayPool, at_ms: int = 0) -> DcStatus:
    entries = [PoolStatus(each, ["aggregated"], False, 1, 0, 0, *NO_LOAD) for each in pools]
    return DcStatus(1, dc_id, relay, seq, at_ms, 1000, len(pools), len(pools), 0, entries, [])


def chunk(dc_id: str, relay: int, seq: int, where: RelayPool, number: int, chunks: int, *hashes: int) -> PoolSnapshot:
    column = pack_u64(hashes)
    return PoolSnapshot(1, dc_id, relay, seq, where, number, chunks, column, xxhash.xxh3_64_intdigest(column))


def delta(dc_id: str, relay: int, seq: int, where: RelayPool, added=(), removed=()) -> PoolDelta:
    return PoolDelta(1, dc_id, relay, seq, where, pack_u64(list(added)), pack_u64(list(removed)))


class RelayStream:
    """An endless stream of one data centre's records, some of them lost, some twice."""

    def __init__(self, dc_id: str, rng: random.Random) -> None:
        self._dc_id, self._rng = dc_id, rng
        self._relay, self._seq = rng.getrandbits(60), 0
        self._truth: dict[RelayPool, set[int]] = {}
        self._old: list[DcRelayRecord] = []

    def __iter__(self) -> Iterator[DcRelayRecord]:
        rng = self._rng
        while True:
            for record in self._next():
                if rng.random() < 0.02:
                    continue
                self._old.append(record)
                yield record
            if self._old and rng.random() < 0.05:
                yield rng.choice(self._old[-30:])

    def _number(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _next(self) -> list[DcRelayRecord]:
        rng = self._rng
        roll = rng.random()
        if roll < 0.03:
            self._relay, self._seq = self._relay + 1 + rng.getrandbits(40), 0
            return [self._status(), *(part for each in self._truth for part in self._snapshot(each))]
        if roll < 0.15:
            known = [pool(name, model) for name in "abc" for model in ("m", "n")]
            changed = rng.choice(known)
            if changed in self._truth:
                del self._truth[changed]
                return [self._status()]
            self._truth[changed] = set(rng.sample(range(1, 40), rng.randint(0, 20)))
            return [self._status(), *self._snapshot(changed)]
        if not self._truth:
            return [self._status()]
        where = rng.choice(sorted(self._truth, key=lambda each: (each.component, each.model)))
        if roll < 0.3:
            return self._snapshot(where)
        held = self._truth[where]
        added = set(rng.sample(range(1, 40), 5)) - held
        removed = set(rng.sample(sorted(held), min(3, len(held))))
        self._truth[where] = (held | added) - removed
        return [delta(self._dc_id, self._relay, self._number(), where, added, removed)]

    def _status(self) -> DcStatus:
        return status(self._dc_id, self._relay, self._number(), *self._truth)

    def _snapshot(self, where: RelayPool) -> list[PoolSnapshot]:
        hashes = sorted(self._truth[where])
        chunks = self._rng.randint(1, 3)
        return [
            chunk(self._dc_id, self._relay, self._number(), where, number, chunks, *hashes[number::chunks])
            for number in range(chunks)
        ]


class PlainPools:
    """The meaning of the records in sets. ``held``: by data centre and pool; None: not known."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, RelayPool], set[int] | None] = {}
        self._lives: dict[str, int] = {}
        self._next: dict[str, int] = {}
        self._life_of: dict[tuple[str, RelayPool], int] = {}
        self._coming: dict[tuple[str, RelayPool], list[PoolSnapshot]] = {}

    def apply(self, record: DcRelayRecord) -> None:
        centre = record.dc_id
        life = self._lives.setdefault(centre, record.relay)
        if record.relay < life:
            return
        if record.relay > life:
            self._lives[centre], self._next[centre] = record.relay, 0
        expected = self._next.setdefault(centre, record.seq)
        if record.seq < expected:
            return
        if record.seq > expected:
            for key in [key for key in self.held if key[0] == centre]:
                self.held[key] = None
                self._coming.pop(key, None)
        self._next[centre] = record.seq + 1
        if isinstance(record, DcStatus):
            named = {(centre, entry.pool) for entry in record.pools}
            for key in [key for key in self.held if key[0] == centre and key not in named]:
                del self.held[key]
                self._coming.pop(key, None)
            return
        key = centre, record.pool
        if isinstance(record, PoolSnapshot):
            self._take_chunk(key, record)
        elif key in self.held:
            held = self.held[key]
            if held is not None and (self._life_of[key] != record.relay or key in self._coming):
                self.held[key] = None
                self._coming.pop(key, None)
            elif held is not None:
                self.held[key] = held - set(unpack_u64(record.removed)) | set(unpack_u64(record.added))

    def _take_chunk(self, key: tuple[str, RelayPool], record: PoolSnapshot) -> None:
        self.held.setdefault(key, None)
        if record.chunk == 0:
            self._coming[key] = []
        parts = self._coming.get(key)
        if parts is None or len(parts) != record.chunk or (parts and parts[0].chunks != record.chunks):
            self._coming.pop(key, None)
            return
        parts.append(record)
        if len(parts) == record.chunks:
            del self._coming[key]
            self._life_of[key] = record.relay
            self.held[key] = {value for part in parts for value in unpack_u64(part.sequence_hashes)}
