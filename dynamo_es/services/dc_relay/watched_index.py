"""The KV index of a relay: the fold of ``kv-events``, and a note of what it changed."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynamo_es.log.base import Record
from schemas.kv_events import BlocksRemoved, BlocksStored, KvEvents
from streams.block_table import U64, sorted_distinct
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState, SourceKey

_NONE: U64 = np.zeros(0, np.uint64)


class IndexChanges:
    """What changed since it was last taken: it may name blocks that are as before, and leaves out none that are not.

    Attributes:
        blocks: Blocks that were stored or removed, one that came twice counted twice.
        moved: Sources whose blocks became void, or began or ceased to count.
        everything: The whole index is another one, or more changed than is noted.
        structure: Rises with ``moved``.
    """

    def __init__(self, max_blocks: int) -> None:
        """``max_blocks``: of more than so many there is no note."""
        self.blocks = 0
        self.moved: set[SourceKey] = set()
        self.everything = False
        self.structure = 0
        self._max_blocks = max_blocks
        self._columns: dict[str, list[bytes]] = {}

    @property
    def pending(self) -> bool:
        """Is there anything to take?"""
        return bool(self.blocks or self.moved or self.everything)

    def note_column(self, model: str, column: bytes) -> None:
        """Blocks of a model may have changed."""
        self.blocks += len(column) >> 3
        if self.blocks > self._max_blocks:
            self._columns.clear()
            self.everything = True
        if not self.everything:
            self._columns.setdefault(model, []).append(column)

    def note_moved(self, key: SourceKey) -> None:
        """A source is another one than before."""
        self.moved.add(key)
        self.structure += 1

    def note_everything(self) -> None:
        """The index is another one."""
        self._columns.clear()
        self.everything = True
        self.structure += 1

    def touched(self, model: str) -> U64:
        """Blocks of a model that may have changed, each once, sorted."""
        columns = self._columns.get(model)
        if not columns:
            return _NONE
        return sorted_distinct(np.frombuffer(b"".join(columns), "<u8").astype(np.uint64, copy=False))

    def take(self) -> IndexChanges:
        """All of it, as it is now; what changes from now on is noted here."""
        taken = IndexChanges(self._max_blocks)
        taken.blocks, taken.moved, taken.everything = self.blocks, self.moved, self.everything
        taken.structure, taken._columns = self.structure, self._columns
        self.blocks, self.moved, self.everything, self._columns = 0, set(), False, {}
        return taken


class WatchedIndexFold(KvIndexFold):
    """``KvIndexFold`` that notes what it changes."""

    def __init__(self, mix: int, changes: IndexChanges) -> None:
        super().__init__(mix)
        self._changes = changes

    def apply(self, state: KvIndexState, record: Record, value: Any) -> None:
        """As ``KvIndexFold.apply``."""
        if not isinstance(value, KvEvents):
            super().apply(state, record, value)
            return
        key = SourceKey(value.model, value.worker_id, value.dp_rank)
        before = _standing(state, key)
        try:
            super().apply(state, record, value)
        finally:
            if _standing(state, key) != before:
                self._changes.note_moved(key)
            for event in value.events:
                if isinstance(event, BlocksStored | BlocksRemoved):
                    self._changes.note_column(value.model, event.sequence_hashes)

    def adopt(self, previous: KvIndexState, state: KvIndexState) -> None:
        """As ``KvIndexFold.adopt``."""
        super().adopt(previous, state)
        self._changes.note_everything()


def _standing(state: KvIndexState, key: SourceKey) -> tuple[int, bool] | None:
    """A source whose blocks became void has another place: the old one is free only once it was swept."""
    source = state.sources.get(key)
    return None if source is None else (source.slot, source.exact)
