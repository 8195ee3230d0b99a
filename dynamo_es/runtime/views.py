"""The views that routing rests on, one set a process: KV index (or none), open bookings, measured load."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dynamo_es.log.base import TopicPartition
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.snapshot_duty import build_snapshot_writer
from dynamo_es.store.base import StateStore
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.requests import RequestsFold, RequestsState
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotWriter
from streams.worker_load import WorkerLoadFold, WorkerLoadState

# Reading a few records costs as much as reading many: under load the log is looked at this often, not for each append.
# Other routers' bookings and measured load may be a little older than the index; own bookings never wait for the log.
_INDEX_PACE_S = 0.002
_LOAD_PACE_S = 0.02


class RoutingViews:
    """Runs the folds on a process's log and store, and the snapshot writer. ``start`` once.

    Attributes:
        kv_index, snapshots: None if the process keeps no index of its own.
    """

    def __init__(self, core: RuntimeCore, *, keeps_index: bool = True) -> None:
        """``keeps_index`` False: the index is with other processes, which are asked (``use_remote_indexer``)."""
        self._core = core
        self.kv_index: FoldRunner[KvIndexState] | None = None
        self.snapshots: SnapshotWriter | None = None
        if keeps_index:
            self.kv_index = make_index_runner(core)
        self.requests: FoldRunner[RequestsState] = core.make_runner(RequestsFold(), _LOAD_PACE_S)
        if self.kv_index is not None:
            self.snapshots = build_snapshot_writer(core, self.kv_index)
        self.worker_load: FoldRunner[WorkerLoadState] = core.make_runner(WorkerLoadFold(), _LOAD_PACE_S)

    async def start(self) -> None:
        """Load and follow. Raises ``LogError``, ``StoreError``."""
        for runner in self._runners():
            await runner.start()
            self._core.add_cleanup(runner.stop)
        if self.snapshots is not None:
            self.snapshots.start()
            self._core.add_cleanup(self.snapshots.close)
        if self._core.system is not None:
            self._core.system.show_views(self)

    async def wait_caught_up(self, timeout_s: float) -> None:
        """Wait until all views have everything that is in the log now. Raises ``TimeoutError``, ``LogError``."""
        for runner in self._runners():
            await runner.wait_caught_up(timeout_s)

    def positions(self) -> Mapping[TopicPartition, int]:
        """How far the views that decisions rest on are."""
        index = self.kv_index.positions() if self.kv_index is not None else {}
        return {**index, **self.requests.positions(), **self._core.registry.positions()}

    def index_states(self) -> Mapping[int, KvIndexState]:
        """The index by partition of ``kv-events``: the same state for each, or nothing."""
        index = self.kv_index
        return {} if index is None else {place.partition: index.state for place in index.positions()}

    def _runners(self) -> Sequence[FoldRunner[Any]]:
        index = (self.kv_index,) if self.kv_index is not None else ()
        return (*index, self.requests, self.worker_load)


def make_index_runner(
    core: RuntimeCore,
    store: StateStore | None = None,
    partitions: Collection[int] | None = None,
    fold: KvIndexFold | None = None,
) -> FoldRunner[KvIndexState]:
    """A runner of the KV index that starts from snapshots; not started. Arguments are those of ``make_runner``."""
    fold = fold if fold is not None else KvIndexFold(mix=core.rng.getrandbits(64))
    start = SnapshotStart(core.log, core.settings.log.namespace, fold.version, core.kv_snapshots)
    return core.make_runner(fold, _INDEX_PACE_S, start, store=store, partitions=partitions)
