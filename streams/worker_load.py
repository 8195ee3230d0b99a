"""The fold of ``worker-load`` and ``forward-pass``: the newest measured load of each rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import blake3
import msgspec

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, Put, StateRows
from schemas.forward_pass import FORWARD_PASS, ForwardPass
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD, WorkerLoad

FAMILY = "worker-load"
# Ranks that are remembered; the one that was silent longest is forgotten first.
MAX_RANKS = 65_536


class RankKey(NamedTuple):
    """One rank of one worker of a model."""

    model: str
    worker_id: int
    dp_rank: int


@dataclass(slots=True)
class RankLoad:
    """Newest of each kind, with the record's time (ms): a consumer treats old values as unknown."""

    load: WorkerLoad | None = None
    load_at_ms: int = 0
    forward_pass: ForwardPass | None = None
    forward_pass_at_ms: int = 0


class _Row(msgspec.Struct, array_like=True):
    load: WorkerLoad | None
    load_at_ms: int
    forward_pass: ForwardPass | None
    forward_pass_at_ms: int
    key: RankKey


class WorkerLoadState:
    """Measured load by rank."""

    def __init__(self) -> None:
        self.ranks: dict[RankKey, RankLoad] = {}
        self.dirty: set[RankKey] = set()


class WorkerLoadFold:
    """A ``Fold[WorkerLoadState]``. Order across the two topics does not matter: each has its own slot."""

    name = "worker-load"
    version = 1
    horizon_ms: int | None = None
    topics: Sequence[TopicSpec] = (WORKER_LOAD, FORWARD_PASS)
    families: Sequence[str] = (FAMILY,)

    def new_state(self) -> WorkerLoadState:
        return WorkerLoadState()

    def apply(self, state: WorkerLoadState, record: Record, value: Any) -> None:
        if value is None:
            return
        key = RankKey(value.model, value.worker_id, value.dp_rank)
        rank = state.ranks.pop(key, None) or RankLoad()
        state.ranks[key] = rank
        if isinstance(value, ForwardPass):
            rank.forward_pass, rank.forward_pass_at_ms = value, record.timestamp_ms
        else:
            rank.load, rank.load_at_ms = value, record.timestamp_ms
        state.dirty.add(key)
        if len(state.ranks) > MAX_RANKS:
            oldest = next(iter(state.ranks))
            del state.ranks[oldest]
            state.dirty.add(oldest)

    def changes(self, state: WorkerLoadState) -> list[Change]:
        changes: list[Change] = []
        for key in state.dirty:
            rank = state.ranks.get(key)
            row_key = msgspec.msgpack.encode(key)
            if rank is None:
                changes.append(Delete(FAMILY, row_key))
            else:
                row = _Row(rank.load, rank.load_at_ms, rank.forward_pass, rank.forward_pass_at_ms, key)
                changes.append(Put(FAMILY, row_key, msgspec.msgpack.encode(row)))
        state.dirty = set()
        return changes

    def mark_all(self, state: WorkerLoadState) -> Iterator[None]:
        state.dirty = set(state.ranks)
        return iter(())

    def load(self, rows: StateRows) -> WorkerLoadState:
        state = WorkerLoadState()
        decoder = msgspec.msgpack.Decoder(_Row)
        found = [decoder.decode(data) for _, data in rows.scan(FAMILY)]
        found.sort(key=lambda row: max(row.load_at_ms, row.forward_pass_at_ms))
        for row in found:
            state.ranks[row.key] = RankLoad(row.load, row.load_at_ms, row.forward_pass, row.forward_pass_at_ms)
        return state

    def adopt(self, previous: WorkerLoadState, state: WorkerLoadState) -> None:
        return None

    def digest(self, state: WorkerLoadState) -> str:
        lines = sorted(
            repr((key, rank.load, rank.load_at_ms, rank.forward_pass, rank.forward_pass_at_ms))
            for key, rank in state.ranks.items()
        )
        return blake3.blake3("\n".join(lines).encode()).hexdigest()

    def housekeep(self, state: WorkerLoadState) -> bool:
        return False

    def compaction(self, state: WorkerLoadState) -> Callable[[StateRows], list[Change]] | None:
        return None
