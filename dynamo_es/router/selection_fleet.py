"""The workers of a selection service: catalog, partitions, and one listener for each rank's KV events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.publishers.zmq_relay import ZmqRelay
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.engine_feed import EngineFeed
from dynamo_es.router.errors import SelectionServiceError
from dynamo_es.router.peer_recovery import PartitionDump, fetch_dump
from dynamo_es.router.policy_config import PolicyProfile
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.selection_catalog import (
    MAX_WORKERS,
    CatalogEntry,
    WorkerCatalog,
    event_endpoint_problem,
    event_endpoints,
    missing_parts,
)
from dynamo_es.router.selection_partition import Partition
from dynamo_es.router.selection_requests import PartitionKey, WorkerSpec
from dynamo_es.router.tracking import TrackingIdentities

_RECONCILIATION = "reconciliation failed: "


class SelectionFleet:
    """Brings registered workers into use. Belongs to one event loop."""

    def __init__(
        self,
        settings: KvRouterSettings,
        *,
        tracking: TrackingIdentities,
        indexer_peers: Sequence[str],
        clock: Clock,
        rng: random.Random,
        expiry_s: float,
        tasks: BackgroundTasks,
    ) -> None:
        """``tasks``: who is told of a listener that dies."""
        self.catalog = WorkerCatalog()
        self.relays: dict[tuple[int, int], ZmqRelay] = {}
        self.started = False
        self._settings = settings
        self._tracking = tracking
        self._indexer_peers = indexer_peers
        self._clock = clock
        self._rng = rng
        self._expiry_s = expiry_s
        self._tasks = tasks
        self._partitions: dict[PartitionKey, Partition] = {}
        self._recovered: Mapping[str, PartitionDump] = {}
        self._listeners: dict[int, list[asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[bool] | None = None

    def get(self, key: PartitionKey) -> Partition | None:
        """A partition that once had a worker."""
        return self._partitions.get(key)

    def partitions(self) -> list[Partition]:
        """All of them, sorted."""
        return [self._partitions[key] for key in sorted(self._partitions)]

    async def upsert(self, spec: WorkerSpec) -> CatalogEntry:
        """Add or replace a worker; the first one waits for what peers know.

        Raises:
            SelectionServiceError: There are too many workers.
        """
        if self._indexer_peers and self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self.recover(self._indexer_peers))
        if self._starting is not None:
            await asyncio.shield(self._starting)
        self.started = True
        known = self.catalog.get(spec.worker_id)
        if known is None and not self.catalog.has_room():
            raise SelectionServiceError("conflict", 409, f"{MAX_WORKERS} workers are registered already")
        if known is not None and known.lifecycle == "schedulable":
            if known.spec == spec:
                return known
            self._retire(known.spec)
        entry = CatalogEntry(spec, "incomplete", self._problems(spec))
        if not entry.reasons:
            entry.lifecycle = "schedulable"
            self._engage(spec)
        self.catalog.put(entry)
        return entry

    def delete(self, worker_id: int) -> CatalogEntry | None:
        """Take a worker out of use; None if it was never seen."""
        entry = self.catalog.get(worker_id)
        if entry is not None:
            if entry.lifecycle == "schedulable":
                self._retire(entry.spec)
            entry.lifecycle, entry.reasons = "unschedulable", []
        return entry

    async def recover(self, peers: Sequence[str]) -> bool:
        """Ask peers for what they know of workers that are registered later; False if none answers."""
        dump = await fetch_dump(peers)
        if dump is not None:
            self._recovered = dump
        return dump is not None

    def stop(self, error: SelectionServiceError) -> None:
        """Stop listening; who waits fails with ``error``. Workers and bookings stay."""
        for partition in self._partitions.values():
            if partition.queue is not None:
                partition.queue.close(error)
        for worker_id in list(self._listeners):
            self._silence(worker_id)
        if self._starting is not None:
            self._starting.cancel()

    async def close(self) -> None:
        """Wait until what ``stop`` stopped has ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    def _problems(self, spec: WorkerSpec) -> list[str]:
        uses_events = self._settings.use_kv_events
        queues = self._profile(spec.partition) is not None
        reasons = missing_parts(spec, uses_events=uses_events, queues=queues)
        if reasons:
            return reasons
        partition, is_eagle = self._partitions.get(spec.partition), bool(spec.is_eagle)
        if partition is not None and partition.block_size != spec.block_size:
            return [
                f"{_RECONCILIATION}block_size mismatch for {spec.partition}: existing={partition.block_size} "
                f"requested={spec.block_size}"
            ]
        if partition is not None and partition.is_eagle != is_eagle:
            return [
                f"{_RECONCILIATION}is_eagle mismatch for {spec.partition}: existing={str(partition.is_eagle).lower()} "
                f"requested={str(is_eagle).lower()}"
            ]
        problem = event_endpoint_problem(spec) if uses_events else None
        return [] if problem is None else [_RECONCILIATION + problem]

    def _engage(self, spec: WorkerSpec) -> None:
        assert spec.block_size is not None
        partition = self._partitions.get(spec.partition)
        if partition is None:
            partition = self._partitions[spec.partition] = Partition(
                spec.partition,
                block_size=spec.block_size,
                is_eagle=bool(spec.is_eagle),
                settings=self._settings,
                profile=self._profile(spec.partition),
                tracking=self._tracking,
                clock=self._clock,
                rng=self._rng,
                loop=asyncio.get_running_loop(),
                expiry_s=self._expiry_s,
            )
        partition.add_worker(spec)
        if not self._settings.use_kv_events:
            return
        name = f"{spec.partition.model_name}:{spec.partition.routing_group}"
        recovered = self._recovered.get(name)
        if recovered is not None and recovered.block_size == spec.block_size:
            recovered.apply(partition.index, spec.worker_id)
        self._listen(spec, partition)

    def _listen(self, spec: WorkerSpec, partition: Partition) -> None:
        tasks = self._listeners[spec.worker_id] = []
        for rank, url in event_endpoints(spec).items():
            if rank not in spec.ranks:
                continue
            feed = EngineFeed(partition.index, spec.worker_id, rank, partition.block_size)
            relay = ZmqRelay(feed, url, replay_endpoint=spec.replay_endpoint)
            self.relays[spec.worker_id, rank] = relay
            tasks.append(self._tasks.spawn(relay.run(), f"kv-events-{spec.worker_id}:{rank}", "kv-events"))

    def _retire(self, spec: WorkerSpec) -> None:
        self._silence(spec.worker_id)
        self._partitions[spec.partition].remove_worker(spec.worker_id)

    def _silence(self, worker_id: int) -> None:
        for task in self._listeners.pop(worker_id, ()):
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key in [key for key in self.relays if key[0] == worker_id]:
            del self.relays[key]

    def _profile(self, key: PartitionKey) -> PolicyProfile | None:
        settings = self._settings
        policy = settings.policy.profile_for(key.model_name) if settings.policy is not None else None
        return queue_profile(policy, settings.router_queue_threshold, settings.router_queue_policy)
