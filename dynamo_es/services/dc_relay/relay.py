"""The relay of one data centre: follows the local topics, and tells ``dc-relay`` what changed.

A supervisor: a log that is away, or a fault of its own, only delays what it tells. After either it begins a new life,
since it cannot know what of its last records is in the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo_es.log.base import Entry
from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError, LogUnavailable
from dynamo_es.router.resync import GRACE_S
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.views import make_index_runner
from dynamo_es.services.dc_relay.pools import Fences, PoolMembers, ScopedWorkers, find_members, pool_status
from dynamo_es.services.dc_relay.publication import PoolPublication, next_life
from dynamo_es.services.dc_relay.settings import RelaySettings
from dynamo_es.services.dc_relay.told_bounds import LeftOut, bound_models, bound_pools
from dynamo_es.services.dc_relay.watched_index import IndexChanges, WatchedIndexFold
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.dc_relay import DC_RELAY, DcRelayRecord, DcStatus, PoolDelta, PoolSnapshot, RelayPool, key_dc_relay
from streams.kv_index_state import KvIndexState, SourceKey
from streams.runner import FoldRunner
from streams.worker_load import WorkerLoadFold, WorkerLoadState

logger = logging.getLogger(__name__)
# Records that are appended at once: eight megabytes of a snapshot.
_BATCH = 16
_LOAD_PACE_S = 0.02
_CATCH_UP_AGAIN_S = 0.5
_BACKOFF = BackoffPolicy(initial_s=0.2, maximum_s=10.0)


@dataclass(slots=True)
class RelayCounts:
    """For metrics: what was told since the start, and lives of the relay."""

    statuses: int = 0
    snapshots: int = 0
    deltas: int = 0
    added: int = 0
    removed: int = 0
    failures: int = 0
    lives: int = 0


class DcRelay:
    """Belongs to one event loop. Order of calls: ``start``, then anything, then ``close``.

    It is closed with the runtime too; ``ended`` is set once it is.
    """

    def __init__(self, core: RuntimeCore, settings: RelaySettings) -> None:
        """Does nothing yet."""
        self.settings = settings
        self.counts = RelayCounts()
        self.last_error: str | None = None
        self.ended = asyncio.Event()
        self._core = core
        self._changes = IndexChanges(settings.expected_unique_blocks)
        self._publication = PoolPublication(settings.dc_id, core.rng.getrandbits(64))
        self._fences = Fences(GRACE_S + settings.recovery_attempt_timeout_ms / 1000)
        self._codec = TopicCodec(DC_RELAY)
        self._workers: ScopedWorkers | None = None
        self._pools: dict[RelayPool, PoolMembers] = {}
        self._seen: tuple[int, int] | None = None
        self._fenced: set[SourceKey] = set()
        self._differs = True
        self._outline: Any = None
        self._refreshed: dict[RelayPool, float] = {}
        self._large: set[RelayPool] = set()
        self._counting: Mapping[RelayPool, PoolMembers] = {}
        self.left_out = LeftOut()
        self._wake = asyncio.Event()
        self._first_change = math.inf
        self._status_at = 0.0
        self._publishing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self._caught_up = False
        self._index: FoldRunner[KvIndexState]
        self._load: FoldRunner[WorkerLoadState]
        self._reaper: SourceReaper

    async def start(self) -> None:
        """Follow the local topics, and publish from then on: once they are read to their end, if that takes long. Once.

        Raises:
            ConfigError: The settings are wrong; nothing was opened.
            LogError, StoreError: As ``RuntimeCore.start``.
        """
        self.settings.check()
        core = self._core
        await core.start()
        # Not the process's own store: a router in this process keeps folds of the same names there.
        store = MemoryStore("memory://dc-relay")
        fold = WatchedIndexFold(core.rng.getrandbits(64), self._changes)
        self._index = make_index_runner(core, store, fold=fold)
        self._load = core.make_runner(WorkerLoadFold(), _LOAD_PACE_S, store=store)
        core.add_cleanup(self.close)
        try:
            await self._index.start()
            await self._load.start()
            await self._catch_up()
        except BaseException:
            await self.close()
            raise
        repeat_s = self.settings.recovery_attempt_timeout_ms / 1000
        self._reaper = SourceReaper(core, self._states, repeat_s)
        self._reaper.start()
        self._begin()
        self._index.add_listener(self._on_index)
        core.registry.add_listener(self._on_registry)
        self._tasks = [
            core.tasks.spawn(self._run(), "dc-relay"),
            core.tasks.spawn(self._end_with_runtime(), "dc-relay-end"),
        ]

    async def flush(self) -> None:
        """Publish everything that is in the local topics now, without waiting for threshold or delay.

        Raises:
            LogError: It is not known to be in the log, or the topics were not read to their end since the start; the
                relay tries on.
        """
        if self._closing:
            return
        if not await self._catch_up():
            raise LogUnavailable(f"nothing is told yet: {self.last_error}")
        await self._publish(blocks=True)

    async def close(self) -> None:
        """Stop. What was told stays with readers, as the last that is known. Safe to call twice."""
        if self._closing:
            await self.ended.wait()
            return
        self._closing = True
        core = self._core
        own = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not own]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if tasks:
            self._index.remove_listener(self._on_index)
            core.registry.remove_listener(self._on_registry)
            await self._reaper.close()
            core.drop_cleanup(self._reaper.close)
        for runner in (self._index, self._load):
            await runner.stop()
            core.drop_runner(runner)
        core.drop_cleanup(self.close)
        self.ended.set()

    def health(self) -> dict[str, Any]:
        """As Dynamo has it: counts of endpoints with a model, with blocks that count, with ranks that are fenced."""
        if not self._closing:
            self._look()
        active = {pool.path for pool, members in self._pools.items() if members.exact}
        return {
            "healthy": not self._closing and self.last_error is None,
            "shutting_down": self._closing,
            "host_last_error": self.last_error,
            "endpoint_count": len(self._workers.endpoints) if self._workers is not None else 0,
            "active_endpoint_count": 0 if self._closing else len(active),
            "fenced_endpoint_count": 0 if self._closing else len(self._fenced_endpoints()),
        }

    def pools(self) -> Mapping[RelayPool, int]:
        """Pools that readers were told of, with their blocks."""
        return {pool: self._publication.blocks_told(pool) for pool in self._publication.pools_told()}

    def pools_given_up(self) -> int:
        """Pools that have too many blocks for readers."""
        return len(self._publication.given_up)

    def _states(self) -> Mapping[int, KvIndexState]:
        return {place.partition: self._index.state for place in self._index.positions()}

    async def _catch_up(self) -> bool:
        """Wait for the folds; whether what they hold may be told.

        Before they were caught up once, it may not: readers would give up what the life before told them.
        """
        timeout_s = self._core.settings.state.catch_up_timeout_s
        behind = ""
        for runner in (self._index, self._load, self._core.registry):
            try:
                await runner.wait_caught_up(timeout_s)
            except (TimeoutError, LogError) as error:
                behind = f"{runner.label} is not caught up: {str(error) or f'not within {timeout_s:g} s'}"
                if behind != self.last_error:
                    logger.warning("%s", behind)
        if not self._caught_up:
            self._caught_up = not behind
            self.last_error = behind or None
        return self._caught_up

    def _begin(self) -> None:
        """A new life: everything is told anew."""
        core = self._core
        self._publication.begin(next_life(self._publication.relay, core.clock.now_ms(), core.rng))
        self._outline = None
        self._status_at = 0.0
        self._first_change = -math.inf
        self.counts.lives += 1

    def _on_index(self) -> None:
        if self._changes.pending:
            if self._first_change == math.inf:
                self._first_change = self._core.clock.monotonic()
            self._wake.set()

    def _on_registry(self) -> None:
        if self._seen is None or self._core.registry.state.revision != self._seen[0]:
            self._tell_at_once()

    def _tell_at_once(self) -> None:
        self._first_change = -math.inf
        self._wake.set()

    async def _end_with_runtime(self) -> None:
        await self._core.shutdown_event.wait()
        await self.close()

    async def _run(self) -> None:
        failures = 0
        while True:
            try:
                await self._step()
                failures = 0
                continue
            except LogError as error:
                logger.warning("dc-relay: nothing is told while the log is away: %s", error)
            except Exception:  # supervisor: whatever is wrong with one publication, the next one is tried
                logger.exception("dc-relay: a publication failed; everything is told anew")
            await asyncio.sleep(_BACKOFF.wait_s(failures, self._core.rng))
            failures += 1

    async def _step(self) -> None:
        """Publish what is due, or wait until something may be."""
        if not self._caught_up and not await self._catch_up():
            await asyncio.sleep(_CATCH_UP_AGAIN_S)
            return
        now = self._core.clock.monotonic()
        settings = self.settings
        blocks_at = self._first_change + settings.publication_delay_ms / 1000
        if self._changes.pending and self._changes.blocks >= settings.publication_threshold:
            blocks_at = now
        wait_s = min(blocks_at, self._status_at) - now
        if wait_s <= 0:
            await self._publish(blocks=blocks_at <= now)
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(wait_s):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _publish(self, *, blocks: bool) -> None:
        """One publication: a status if it is due or says something new, then blocks if they are due."""
        async with self._publishing:
            if self._closing:
                return
            try:
                records = await self._make_records(blocks=blocks)
                for start in range(0, len(records), _BATCH):
                    await self._append(records[start : start + _BATCH])
            except BaseException as error:
                self.counts.failures += 1
                self._begin()
                if not isinstance(error, asyncio.CancelledError):
                    self.last_error = str(error) or type(error).__name__
                raise
            self.last_error = None

    async def _make_records(self, *, blocks: bool) -> list[DcRelayRecord]:
        now = self._core.clock.monotonic()
        self._look()
        due = now >= self._status_at
        counting = self._counting
        blocks = blocks or self._first_change == -math.inf or self._publication.owes(counting)
        records: list[DcRelayRecord] = []
        if self._differs or due:
            self._differs = False
            status = self._make_status(counting)
            outline = [entry.pool for entry in status.pools], status.models, status.fenced_endpoints, status.endpoints
            if due or outline != self._outline:
                records.append(self._publication.number(status))
                self._outline = outline
                self._status_at = now + self.settings.load_window_ms / 1000
        refresh = self._to_refresh(counting, now) if due else ()
        if blocks or refresh:
            self._first_change = math.inf
            records += await self._publication.plan(self._look_now, self._changes.take(), refresh, asyncio.to_thread)
        return records

    def _look_now(self) -> tuple[KvIndexState, Mapping[RelayPool, PoolMembers]]:
        self._look()
        return self._index.state, self._counting

    def _make_status(self, counting: Mapping[RelayPool, PoolMembers]) -> DcStatus:
        assert self._workers is not None
        now_ms = self._core.clock.now_ms()
        pools = [
            pool_status(members, self._publication.blocks_told(pool), self._fenced, self._load.state, now_ms)
            for pool, members in counting.items()
        ]
        self._warn_of_large(pools)
        models, left_models, left_names = bound_models(self._workers.readiness())
        self._leave_out(models=left_models, names=left_names)
        return DcStatus(
            DC_RELAY.version,
            self.settings.dc_id,
            0,
            0,
            now_ms,
            self.settings.load_window_ms,
            len(self._workers.endpoints),
            len({pool.path for pool in counting}),
            len(self._fenced_endpoints()),
            pools,
            models,
        )

    def _look(self) -> None:
        """Bring workers, pools and fences up to date with the views, and note whether they differ from before."""
        registry = self._core.registry.state
        before, self._seen = self._seen, (registry.revision, self._changes.structure)
        if before is None or before[0] != self._seen[0] or self._workers is None:
            self._workers = ScopedWorkers(registry, self.settings.scope)
            # Whoever looks first: the timer or ``health`` may, before the registry's listeners are called.
            self._tell_at_once()
        if before != self._seen:
            self._pools = find_members(self._index.state, self._workers)
            self._counting, left = bound_pools({key: each for key, each in self._pools.items() if each.exact})
            self._leave_out(pools=left)
        fenced = self._fences.look(self._pools, self._core.clock.monotonic())
        for key in fenced - self._fenced:
            logger.warning(
                "worker %d (rank %d) did not announce its blocks anew: it is left out until it does",
                key.worker_id, key.dp_rank,
            )  # fmt: skip
        self._differs = self._differs or before != self._seen or fenced != self._fenced
        self._fenced = fenced

    def _leave_out(self, **counts: int) -> None:
        left = replace(self.left_out, **counts)
        if left != self.left_out and any(counts.values()):
            logger.warning(
                "more than readers take: %d pools, %d models, %d aliases and adapters are not told; narrow the scope",
                left.pools, left.models, left.names,
            )  # fmt: skip
        self.left_out = left

    def _fenced_endpoints(self) -> set[str]:
        return {
            pool.path
            for pool, members in self._pools.items()
            if any(source.key in self._fenced for source in members.degraded)
        }

    def _to_refresh(self, counting: Mapping[RelayPool, PoolMembers], now: float) -> list[RelayPool]:
        """Pools whose last snapshot is old, so that late readers find a newer one; not all of them at once."""
        interval_s = self.settings.snapshot_interval_s
        first = {pool: now - interval_s * self._core.rng.uniform(0.0, 0.5) for pool in counting}
        self._refreshed = {pool: self._refreshed.get(pool, first[pool]) for pool in counting}
        due = [pool for pool, at in self._refreshed.items() if now - at >= interval_s]
        self._refreshed |= dict.fromkeys(due, now)
        return due

    def _warn_of_large(self, pools: list[Any]) -> None:
        expected = self.settings.expected_unique_blocks
        large = {entry.pool for entry in pools if entry.blocks > expected}
        for pool in large - self._large:
            logger.warning(
                "%s, model %s: more blocks than --expected-unique-blocks %d", pool.path, pool.model, expected
            )
        self._large = large

    async def _append(self, records: list[DcRelayRecord]) -> None:
        core = self._core
        key = key_dc_relay(self.settings.dc_id)
        at_ms = core.clock.now_ms()
        entries = [Entry(self._codec.encode(record), key, self._codec.headers, at_ms) for record in records]
        await core.log.append_all(DC_RELAY.qualified(core.settings.log.namespace), entries)
        for record in records:
            self._publication.told(record, at_ms)
            self._count(record)
            # A chunk of a snapshot takes the reader's fold some 20 ms.
            await asyncio.sleep(0)

    def _count(self, record: DcRelayRecord) -> None:
        counts = self.counts
        if isinstance(record, DcStatus):
            counts.statuses += 1
        elif isinstance(record, PoolSnapshot):
            counts.snapshots += record.chunk == 0
        elif isinstance(record, PoolDelta):
            counts.deltas += 1
            counts.added += len(record.added) >> 3
            counts.removed += len(record.removed) >> 3
