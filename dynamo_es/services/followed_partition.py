"""One partition of ``kv-events`` as an indexer follows it: a store of its own, a fold, snapshots."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError
from dynamo_es.router.index_server import CaughtUp, Shard
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.snapshot_duty import build_snapshot_writer
from dynamo_es.runtime.views import make_index_runner
from dynamo_es.store.base import StateStore
from dynamo_es.store.errors import StoreError
from schemas.kv_events import KV_EVENTS
from streams.kv_index_state import KvIndexState
from streams.runner import FoldRunner
from streams.snapshot_writer import SnapshotWriter
from streams.state_writer import in_thread

logger = logging.getLogger(__name__)
_BACKOFF = BackoffPolicy(initial_s=0.2, maximum_s=10.0)


class FollowedPartition:
    """Follows one partition from ``start`` to ``close``; a log or store that is away is waited for. A supervisor."""

    def __init__(
        self,
        core: RuntimeCore,
        partition: int,
        make_store: Callable[[int], StateStore],
        gate: asyncio.Semaphore,
    ) -> None:
        """``make_store`` opens the partition's store, on another thread. ``gate``: held while the state is made, so
        that what is live already stays quick.
        """
        self.partition = partition
        self.runner: FoldRunner[KvIndexState] | None = None
        self.snapshots: SnapshotWriter | None = None
        self._core = core
        self._make_store = make_store
        self._gate = gate
        self._caught_up: CaughtUp | None = None
        self._store: StateStore | None = None
        self._opening: asyncio.Task[None] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the state has the partition up to where it once was live."""
        return self._caught_up is not None and self._caught_up.look()

    @property
    def shard(self) -> Shard | None:
        """The state to answer from; None as long as it is not whole."""
        runner = self.runner
        if runner is None or not self.is_whole:
            return None
        (offset,) = runner.positions().values()
        return Shard(runner.state, offset)

    @property
    def position(self) -> int:
        """Next offset to fold; 0 before it is known."""
        return max(self.runner.positions().values(), default=0) if self.runner is not None else 0

    def start(self) -> None:
        """Begin to follow; returns at once."""
        self._opening = asyncio.get_running_loop().create_task(self._open(), name=f"open-partition-{self.partition}")

    async def close(self) -> None:
        """Commit and let go of the store. Safe to call twice."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._let_go()

    async def _open(self) -> None:
        name = f"{KV_EVENTS.name}[{self.partition}]"
        for failures in itertools.count():
            try:
                async with self._gate:
                    await self._begin()
                return
            except (LogError, StoreError) as error:
                logger.warning("%s: not followed, will try again: %s", name, error)
            except Exception:  # supervisor: a partition that cannot be opened must not go unnoticed
                logger.exception("%s: not followed, will try again", name)
            await self._let_go()
            await asyncio.sleep(_BACKOFF.wait_s(failures, self._core.rng))

    async def _begin(self) -> None:
        core = self._core
        self._store = await in_thread(self._open_store)
        self.runner = make_index_runner(core, self._store, (self.partition,))
        await self.runner.start()
        self._caught_up = CaughtUp(self.runner)
        self.snapshots = build_snapshot_writer(core, self.runner, (self.partition,))
        self.snapshots.start()
        began = core.clock.monotonic()
        try:
            await self.runner.wait_caught_up(core.settings.state.catch_up_timeout_s)
        except (TimeoutError, LogError) as error:
            # The runner goes on by itself.
            logger.warning("%s[%d] is not caught up yet: %s", KV_EVENTS.name, self.partition, error or "it takes long")
            return
        logger.info(
            "%s[%d] followed from offset %d on, caught up in %.1f s",
            KV_EVENTS.name, self.partition, self.position, core.clock.monotonic() - began,
        )  # fmt: skip

    def _open_store(self) -> StateStore:
        # Kept at once: whoever is cancelled while the store opens must still be able to close it.
        self._store = self._make_store(self.partition)
        return self._store

    async def _let_go(self) -> None:
        runner, self.runner, self._caught_up = self.runner, None, None
        snapshots, self.snapshots = self.snapshots, None
        store, self._store = self._store, None
        if snapshots is not None:
            await snapshots.close()
        if runner is not None:
            await runner.stop()
            self._core.drop_runner(runner)
        if store is not None:
            await in_thread(store.close)
