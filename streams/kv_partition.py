"""The fold of ``kv-events`` as the stream processors run it: the KV index, and what was wrong with its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import blake3

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, StateRows
from schemas.aggregates import KvSourceCounts
from schemas.kv_events import KV_EVENTS
from schemas.topic import TopicSpec
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.windows import FAMILY, WindowSettings, WindowTable

_OWN_VERSION = 1


class KvPartitionState:
    """The index, and counts by source and window."""

    def __init__(self, index: KvIndexState, windows: WindowTable) -> None:
        self.index = index
        self.windows = windows


class KvPartitionFold:
    """A ``WindowedFold[KvPartitionState]``. Its rows of the index are those of ``KvIndexFold``."""

    name = "kv-partition"
    version = 1000 * _OWN_VERSION + KvIndexFold.version
    topics: Sequence[TopicSpec] = (KV_EVENTS,)
    families: Sequence[str] = (*KvIndexFold.families, FAMILY)
    horizon_ms: int | None = None

    def __init__(self, settings: WindowSettings | None = None) -> None:
        self._settings = settings or WindowSettings()
        self._index = KvIndexFold()

    def new_state(self) -> KvPartitionState:
        return KvPartitionState(self._index.new_state(), self._new_windows())

    def windows(self, state: KvPartitionState) -> WindowTable:
        return state.windows

    def replay_from(self, state: KvPartitionState, partition: int, position: int) -> int:
        return position

    def apply(self, state: KvPartitionState, record: Record, value: Any) -> None:
        counters = state.index.counters
        before = (
            counters.batches, counters.duplicates, counters.stragglers, counters.gaps, counters.gap_batches,
            counters.skipped_degraded,
        )  # fmt: skip
        self._index.apply(state.index, record, value)
        if counters.batches == before[0]:
            return

        def make(version: int, partition: int, start: int, window_ms: int) -> KvSourceCounts:
            return KvSourceCounts(
                version, partition, 0, start, window_ms, value.model, value.worker_id, value.dp_rank
            )  # fmt: skip

        row = state.windows.row(record, (value.model, value.worker_id, value.dp_rank), make)
        if row is not None:
            row.batches += 1
            row.duplicates += counters.duplicates - before[1]
            row.stragglers += counters.stragglers - before[2]
            row.gaps += counters.gaps - before[3]
            row.missing_batches += counters.gap_batches - before[4]
            row.skipped_batches += counters.skipped_degraded - before[5]

    def changes(self, state: KvPartitionState) -> list[Change]:
        return [*self._index.changes(state.index), *state.windows.changes()]

    def mark_all(self, state: KvPartitionState) -> Iterator[None]:
        yield from self._index.mark_all(state.index)
        yield from state.windows.mark_all()

    def load(self, rows: StateRows) -> KvPartitionState:
        windows = self._new_windows()
        windows.load(rows)
        return KvPartitionState(self._index.load(rows), windows)

    def adopt(self, previous: KvPartitionState, state: KvPartitionState) -> None:
        self._index.adopt(previous.index, state.index)
        state.windows.counters = previous.windows.counters

    def digest(self, state: KvPartitionState) -> str:
        parts = (self._index.digest(state.index), state.windows.digest())
        return blake3.blake3("\n".join(parts).encode()).hexdigest()

    def housekeep(self, state: KvPartitionState) -> bool:
        return self._index.housekeep(state.index)

    def compaction(self, state: KvPartitionState) -> Callable[[StateRows], list[Change]] | None:
        return self._index.compaction(state.index)

    def _new_windows(self) -> WindowTable:
        return WindowTable(KV_EVENTS.name, self._settings)
