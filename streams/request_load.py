"""The fold of ``requests`` by windows of time: what was routed to each rank, and how it ended.

A decision names the rank, an ending only the request; so what is open is remembered until it ends. What ended lately
is remembered too: a publisher may append a run of events twice. All events of a request are in one partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import blake3
import msgspec

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, Put, StateRows
from schemas.aggregates import RequestLoad
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed, RouterLost
from schemas.topic import TopicSpec
from streams.fold import RecordRejected
from streams.windows import FAMILY, WindowSettings, WindowTable

LIVES_FAMILY = "request-lives"
# Open requests of one partition; beyond it the oldest is given up, and its ending is not counted.
MAX_OPEN = 100_000
# Requests that ended, remembered by partition against repetitions of their events. A publisher repeats an append of
# up to a thousand events.
MAX_ENDED = 2048

_Key = tuple[int, str, int]


class _Life(msgspec.Struct, array_like=True):
    """``offset``: of its decision. ``ended_at``: offset of its ending, -1 while it is open."""

    model: str
    worker_id: int
    dp_rank: int
    router_id: int
    routed_at_ms: int
    offset: int
    ended_at: int = -1


@dataclass(slots=True)
class _Lives:
    """Of one partition: open requests in the order of their decisions, ended ones in that of their endings.

    There are thousands of those that ended, in each partition, so of them only the key of their row is kept, and the
    offsets of their decision and of their ending.
    """

    open: dict[_Key, _Life] = field(default_factory=dict)
    ended: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class RequestLoadState:
    """Windows, and requests that are open or ended lately."""

    def __init__(self, windows: WindowTable) -> None:
        self.windows = windows
        self.partitions: dict[int, _Lives] = {}
        self.dirty: dict[bytes, _Life | None] = {}

    def lives(self, partition: int) -> _Lives:
        """Of one partition."""
        return self.partitions.setdefault(partition, _Lives())


class RequestLoadFold:
    """A ``WindowedFold[RequestLoadState]``. Repeated and late events count nothing."""

    name = "request-load"
    version = 1
    topics: Sequence[TopicSpec] = (REQUESTS,)
    families: Sequence[str] = (FAMILY, LIVES_FAMILY)
    horizon_ms: int | None = None

    def __init__(self, settings: WindowSettings | None = None) -> None:
        self._settings = settings or WindowSettings()

    def new_state(self) -> RequestLoadState:
        return RequestLoadState(WindowTable(REQUESTS.name, self._settings))

    def windows(self, state: RequestLoadState) -> WindowTable:
        return state.windows

    def replay_from(self, state: RequestLoadState, partition: int, position: int) -> int:
        lives = state.lives(partition)
        began = [offset for offset, _ in lives.ended.values()]
        began += [life.offset for life in lives.open.values()][:1]
        return min(began, default=position)

    def apply(self, state: RequestLoadState, record: Record, value: Any) -> None:
        state.windows.note_time(record)
        _give_up_old(state, record)
        if isinstance(value, Routed):
            _begin(state, record, value)
        elif isinstance(value, Finished):
            _finish(state, record, value)
        elif isinstance(value, RouterLost):
            keys = [
                key for key, life in state.lives(record.partition).open.items() if life.router_id == value.router_id
            ]
            _give_up(state, record, keys)
        elif not isinstance(value, PrefillCompleted):
            raise RecordRejected("requests has no deletions")

    def changes(self, state: RequestLoadState) -> list[Change]:
        changes = state.windows.changes()
        for row_key, life in state.dirty.items():
            if life is None:
                changes.append(Delete(LIVES_FAMILY, row_key))
            else:
                changes.append(Put(LIVES_FAMILY, row_key, msgspec.msgpack.encode(life)))
        state.dirty = {}
        return changes

    def mark_all(self, state: RequestLoadState) -> Iterator[None]:
        for lives in list(state.partitions.values()):
            for key, life in lives.open.items():
                state.dirty[msgspec.msgpack.encode(key)] = life
            for row_key, (offset, ended_at) in lives.ended.items():
                # Of what ended no more is kept, and no more is read of its row.
                state.dirty.setdefault(row_key, _Life("", 0, 0, 0, 0, offset, ended_at))
            yield
        yield from state.windows.mark_all()

    def load(self, rows: StateRows) -> RequestLoadState:
        state = self.new_state()
        state.windows.load(rows)
        decoder = msgspec.msgpack.Decoder(_Life)
        keys = msgspec.msgpack.Decoder(tuple[int, str, int])
        found = [(key, decoder.decode(data)) for key, data in rows.scan(LIVES_FAMILY)]
        found.sort(key=lambda item: (item[1].ended_at, item[1].offset))
        for row_key, life in found:
            key = keys.decode(row_key)
            if life.ended_at < 0:
                state.lives(key[0]).open[key] = life
            else:
                state.lives(key[0]).ended[row_key] = (life.offset, life.ended_at)
        return state

    def adopt(self, previous: RequestLoadState, state: RequestLoadState) -> None:
        state.windows.counters = previous.windows.counters

    def digest(self, state: RequestLoadState) -> str:
        lines = [repr((key, life)) for lives in state.partitions.values() for key, life in lives.open.items()]
        return blake3.blake3("\n".join([*sorted(lines), state.windows.digest()]).encode()).hexdigest()

    def housekeep(self, state: RequestLoadState) -> bool:
        return False

    def compaction(self, state: RequestLoadState) -> Callable[[StateRows], list[Change]] | None:
        return None


def _begin(state: RequestLoadState, record: Record, event: Routed) -> None:
    lives = state.lives(record.partition)
    key = (record.partition, event.request_id, event.attempt)
    row_key = msgspec.msgpack.encode(key)
    if key in lives.open or row_key in lives.ended:
        return
    life = _Life(
        event.model, event.worker_id, event.dp_rank, event.router_id, record.timestamp_ms, record.offset
    )  # fmt: skip
    lives.open[key] = state.dirty[row_key] = life
    row = _row(state, record, life)
    if row is not None:
        row.routed += 1
        row.prompt_tokens += event.isl_tokens
        row.cached_tokens += max(0, event.cached_tokens)
    if len(lives.open) > MAX_OPEN:
        _give_up(state, record, [next(iter(lives.open))])


def _finish(state: RequestLoadState, record: Record, event: Finished) -> None:
    lives = state.lives(record.partition)
    key = (record.partition, event.request_id, event.attempt)
    life = lives.open.pop(key, None)
    if life is None:
        return
    _end(state, lives, key, life, record)
    row = _row(state, record, life)
    if row is None:
        return
    if event.outcome == "ok":
        row.ok += 1
    elif event.outcome == "cancelled":
        row.cancelled += 1
    elif event.outcome == "migrated":
        row.migrated += 1
    else:
        row.error += 1
    row.output_tokens += max(0, event.output_tokens)
    row.duration_ms_sum += max(0, event.duration_ms)
    if event.first_token_ms >= 0:
        row.first_tokens += 1
        row.first_token_ms_sum += event.first_token_ms
        row.first_token_ms_max = max(row.first_token_ms_max, event.first_token_ms)


def _give_up_old(state: RequestLoadState, record: Record) -> None:
    old = []
    for key, life in state.lives(record.partition).open.items():
        if not state.windows.is_over(record.partition, life.routed_at_ms):
            break
        old.append(key)
    if old:
        _give_up(state, record, old)


def _give_up(state: RequestLoadState, record: Record, keys: Sequence[_Key]) -> None:
    lives = state.lives(record.partition)
    ranks: Counter[tuple[str, int, int]] = Counter()
    for key in keys:
        life = lives.open.pop(key)
        _end(state, lives, key, life, record)
        ranks[life.model, life.worker_id, life.dp_rank] += 1
        row = _row(state, record, life)
        if row is not None:
            row.unfinished += 1


def _end(state: RequestLoadState, lives: _Lives, key: _Key, life: _Life, record: Record) -> None:
    life.ended_at = record.offset
    row_key = msgspec.msgpack.encode(key)
    lives.ended[row_key] = (life.offset, record.offset)
    state.dirty[row_key] = life
    if len(lives.ended) > MAX_ENDED:
        oldest = next(iter(lives.ended))
        del lives.ended[oldest]
        state.dirty[oldest] = None


def _row(state: RequestLoadState, record: Record, life: _Life) -> RequestLoad | None:
    def make(version: int, partition: int, start: int, window_ms: int) -> RequestLoad:
        return RequestLoad(version, partition, 0, start, window_ms, life.model, life.worker_id, life.dp_rank)

    return state.windows.row(record, (life.model, life.worker_id, life.dp_rank), make)
