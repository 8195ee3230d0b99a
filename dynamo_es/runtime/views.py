"""The views that routing rests on, one set a process: KV index, open bookings, measured load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynamo_es.log.base import TopicPartition
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.snapshot_duty import build_snapshot_writer
from streams.kv_index import KvIndexFold
from streams.kv_index_state import KvIndexState
from streams.requests import RequestsFold, RequestsState
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from streams.worker_load import WorkerLoadFold, WorkerLoadState

# Reading a few records costs as much as reading many: under load the log is looked at this often, not for each append.
# Other routers' bookings and measured load may be a little older than the index; own bookings never wait for the log.
_INDEX_PACE_S = 0.002
_LOAD_PACE_S = 0.02


class RoutingViews:
    """Runs the three folds on a process's log and store, and the snapshot writer. ``start`` once."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core
        index = KvIndexFold(mix=core.rng.getrandbits(64))
        start = SnapshotStart(core.log, core.settings.log.namespace, index.version)
        self.kv_index: FoldRunner[KvIndexState] = core.make_runner(index, _INDEX_PACE_S, start)
        self.requests: FoldRunner[RequestsState] = core.make_runner(RequestsFold(), _LOAD_PACE_S)
        self.snapshots = build_snapshot_writer(core, self.kv_index)
        self.worker_load: FoldRunner[WorkerLoadState] = core.make_runner(WorkerLoadFold(), _LOAD_PACE_S)

    def runners(self) -> Iterator[FoldRunner[object]]:
        """All of them, the registry's included."""
        yield self._core.registry  # type: ignore[misc]
        yield self.kv_index  # type: ignore[misc]
        yield self.requests  # type: ignore[misc]
        yield self.worker_load  # type: ignore[misc]

    async def start(self) -> None:
        """Load and follow. Raises ``LogError``, ``StoreError``."""
        for runner in (self.kv_index, self.requests, self.worker_load):
            await runner.start()
            self._core.add_cleanup(runner.stop)
        self.snapshots.start()
        self._core.add_cleanup(self.snapshots.close)

    async def wait_caught_up(self, timeout_s: float) -> None:
        """Wait until all views have everything that is in the log now. Raises ``TimeoutError``, ``LogError``."""
        for runner in (self.kv_index, self.requests, self.worker_load):
            await runner.wait_caught_up(timeout_s)

    def positions(self) -> Mapping[TopicPartition, int]:
        """How far the views that decisions rest on are."""
        return {**self.kv_index.positions(), **self.requests.positions(), **self._core.registry.positions()}
