"""What folds have in common that count by windows: rows in a ``WindowTable``, published in topic ``aggregates``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, StateRows
from schemas.aggregates import RankWindow
from schemas.topic import TopicSpec
from streams.fold import Fold
from streams.windows import FAMILY, WindowSettings, WindowTable

S = TypeVar("S")
P = TypeVar("P", bound=RankWindow)
_TIDY_RANKS = 1024


class WindowedFold(Fold[S], Protocol[S]):
    """A fold of one topic whose results are windows. Partitions do not influence each other."""

    def windows(self, state: S) -> WindowTable:
        """The rows."""

    def replay_from(self, state: S, partition: int, position: int) -> int:
        """Where a state is to be folded from that has nothing but the rows, which cover all below ``position``."""


class RankState(Generic[P]):
    """Windows, and what each rank told last: ``newest`` has the row that it was counted in."""

    def __init__(self, windows: WindowTable) -> None:
        self.windows = windows
        self.newest: dict[tuple[int, str, int, int], P] = {}
        self.tidy_at = _TIDY_RANKS

    def tidy(self) -> None:
        """Forget ranks whose row is no longer kept; called when there are many."""
        rows = self.windows
        self.newest = {rank: row for rank, row in self.newest.items() if rows.has(row)}
        self.tidy_at = 2 * len(self.newest) + _TIDY_RANKS


class RankWindowFold(Generic[P]):
    """Base of folds that sum up what ranks tell of themselves. A subclass has ``name``, ``topics`` and ``apply``."""

    name: str
    version = 1
    topics: Sequence[TopicSpec]
    families: Sequence[str] = (FAMILY,)
    horizon_ms: int | None = None
    row_type: type[P]

    def __init__(self, settings: WindowSettings | None = None) -> None:
        self._settings = settings or WindowSettings()

    def new_state(self) -> RankState[P]:
        return RankState(WindowTable(self.topics[0].name, self._settings))

    def windows(self, state: RankState[P]) -> WindowTable:
        return state.windows

    def replay_from(self, state: RankState[P], partition: int, position: int) -> int:
        return position

    def changes(self, state: RankState[P]) -> list[Change]:
        return state.windows.changes()

    def mark_all(self, state: RankState[P]) -> Iterator[None]:
        return state.windows.mark_all()

    def load(self, rows: StateRows) -> RankState[P]:
        state = self.new_state()
        state.windows.load(rows)
        for row in sorted(state.windows.rows(), key=lambda row: row.next_offset):
            if isinstance(row, self.row_type):
                state.newest[self._rank(row.partition, row)] = row
        return state

    def adopt(self, previous: RankState[P], state: RankState[P]) -> None:
        state.windows.counters = previous.windows.counters

    def digest(self, state: RankState[P]) -> str:
        return state.windows.digest()

    def housekeep(self, state: RankState[P]) -> bool:
        return False

    def compaction(self, state: RankState[P]) -> Callable[[StateRows], list[Change]] | None:
        return None

    def _count(self, state: RankState[P], record: Record, value: Any) -> tuple[P | None, P | None]:
        """The row that ``record`` adds to (None: it must not be counted), and the one that its rank added to last.

        Both may be the same. What a rank told so long ago that its window is gone is forgotten.
        """
        rank = self._rank(record.partition, value)
        previous = state.newest.get(rank)
        row: Any = state.windows.row(record, rank[1:], lambda *window: self._make(window, value))
        if row is None:
            return None, None
        state.newest[rank] = row
        if len(state.newest) > state.tidy_at:
            state.tidy()
        if previous is not None and not state.windows.has(previous):
            previous = None
        return row, previous

    def _make(self, window: tuple[int, int, int, int], value: Any) -> Any:
        version, partition, start, window_ms = window
        make: Any = self.row_type
        return make(version, partition, 0, start, window_ms, value.model, value.worker_id, value.dp_rank)

    @staticmethod
    def _rank(partition: int, value: Any) -> tuple[int, str, int, int]:
        return partition, value.model, value.worker_id, value.dp_rank
