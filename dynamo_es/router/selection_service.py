"""``SelectionService``: choosing workers without a runtime (Dynamo's class; spec: router-core E).

Workers are registered by hand, their KV events come from the engines over ZMQ, and whoever asks sends the requests
himself. There is no log here: what a process knows is gone with it, unless peers tell.
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock, SystemClock
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.booked import already_booked
from dynamo_es.router.config_arguments import optional, to_real, to_text, to_texts, to_u16, to_u64
from dynamo_es.router.config_options import settings_from_environment
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.errors import SelectionServiceError
from dynamo_es.router.hashing import to_signed
from dynamo_es.router.hashing_arguments import check_optional
from dynamo_es.router.replica_events import ReplicaEvent, ReplicatedBooking, ReplicatedChange
from dynamo_es.router.replica_link import ReplicaLink
from dynamo_es.router.selection_answers import scheduler_errors, selection_answer
from dynamo_es.router.selection_cache import CachedSelection, SelectionCache
from dynamo_es.router.selection_fleet import SelectionFleet
from dynamo_es.router.selection_partition import DEFAULT_EXPIRY_S, BookingTaken, Partition, Selected
from dynamo_es.router.selection_requests import (
    PartitionKey,
    PromptQuery,
    ReservationRequest,
    SelectRequest,
    WorkerSpec,
    parse_patch,
    parse_query,
    parse_reservation,
    parse_select,
    parse_worker,
)
from dynamo_es.router.tracking import load_tracking
from dynamo_es.runtime.health import tasks_entry

_EXPIRY_VARIABLE = "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"
_STOPPED = "endpoint subscriber shutdown"


class SelectionService:
    """Chooses a worker for each request by what it has cached and what is booked on it, and keeps the bookings.

    Belongs to the event loop on which it is awaited first. What cannot be read raises ValueError at the call, before
    anything is awaited; everything else raises ``SelectionServiceError``. ``shutdown`` ends it; there is no way back.
    """

    _clock: Clock
    _rng: random.Random
    _settings: KvRouterSettings
    _cache: SelectionCache
    _fleet: SelectionFleet
    _router_id: int
    _tasks: BackgroundTasks
    _replicas: ReplicaLink | None
    _closed: bool
    _closing: asyncio.Task[None] | None

    def __new__(
        cls,
        *,
        indexer_threads: int = 4,
        indexer_peers: list[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: list[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        env: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> Self:
        """Reads its configuration from ``env`` (default: the process's environment), now.

        Args:
            indexer_threads: Taken for Dynamo's sake; there is one index, on the event loop.
            indexer_peers: URLs of indexers or selection services, asked in order for what they know when the first
                worker is registered. Who cannot be reached is passed over with a log line.
            replica_sync_port: Port on which bookings are told to others.
            replica_sync_peers: ZMQ endpoints of others that tell theirs.
            selection_cache: Bounds of the selections that can be booked by their id alone.

        Raises:
            TypeError, OverflowError: An argument is of the wrong type or out of range.
            ValueError: ``replica_sync_peers`` without a port, port 0, or a peer that is no endpoint.
            ConfigError: The environment is wrong, the port is taken, or a file that it names cannot be used.
        """
        to_u64("indexer_threads", indexer_threads)
        indexers = optional(to_texts)("indexer_peers", indexer_peers)
        port = optional(to_u16)("replica_sync_port", replica_sync_port)
        peers = optional(to_texts)("replica_sync_peers", replica_sync_peers)
        check_optional("selection_cache", selection_cache, SelectionCacheConfig, "SelectionCacheConfig")
        if peers and port is None:
            raise ValueError("replica_sync_peers requires replica_sync_port")
        self = object.__new__(cls)
        environment = os.environ if env is None else env
        self._clock = SystemClock() if clock is None else clock
        self._rng = random.SystemRandom() if rng is None else rng
        self._settings = settings_from_environment(environment)
        self._cache = SelectionCache(SelectionCacheConfig() if selection_cache is None else selection_cache)
        self._tasks = BackgroundTasks()
        self._fleet = SelectionFleet(
            self._settings,
            tracking=load_tracking(self._settings, self._rng),
            indexer_peers=indexers or (),
            clock=self._clock,
            rng=self._rng,
            expiry_s=_expiry(environment),
            tasks=self._tasks,
        )
        self._router_id = self._rng.getrandbits(64)
        self._replicas = None
        if port is not None:
            self._replicas = ReplicaLink(port, peers or (), self._router_id, self._on_replica_event, self._tasks)
        self._closed = False
        self._closing = None
        return self

    def upsert_worker(self, worker: Any) -> Awaitable[dict[str, Any]]:
        """Add or replace a worker and listen to its KV events; its catalog record. An incomplete one is kept, too.

        A worker whose description changes loses its cached blocks and its bookings.
        """
        return self._upsert(parse_worker(worker))

    def patch_worker(self, worker_id: int, patch: Any) -> Awaitable[dict[str, Any]]:
        """As ``upsert_worker``, with the members of ``patch`` replaced in what is known of a worker.

        None leaves a member as it is. Its model and routing group stay as they are.
        """
        number = to_u64("worker_id", worker_id)
        return self._patch(number, parse_patch(patch))

    def delete_worker(self, worker_id: int) -> Awaitable[dict[str, Any]]:
        """Take a worker out of use, with its blocks and bookings; its record, which stays in the catalog."""
        return self._delete(to_u64("worker_id", worker_id))

    def list_workers(self, *, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Catalog records of these workers, sorted by model, group and id."""
        return self._fleet.catalog.records(*_names(model_name, routing_group))

    def ready(self) -> dict[str, Any]:
        """Whether a request could be served, with all records; with ``dead_tasks`` if a listener or the replica sync
        died of what nobody thought of, and the service is to be started anew.
        """
        count = sum(1 for _ in self._fleet.catalog.schedulable())
        return {
            "ready": bool(count) and not self._closed and not self._tasks.dead,
            "schedulable_workers": count,
            "workers": self._fleet.catalog.records(),
            **self.dead_tasks(),
        }

    def dead_tasks(self) -> dict[str, Any]:
        """Which background tasks died, as ``/health`` tells it; empty: none. Not in Dynamo."""
        return tasks_entry(self._tasks.dead)

    def overlap_scores(self, request: Any) -> Awaitable[dict[str, Any]]:
        """What every rank holds of a prompt, by tier, in blocks."""
        return self._overlap_scores(parse_query(request, self._settings))

    def potential_loads(self, request: Any) -> Awaitable[list[dict[str, int]]]:
        """Load of every rank with a prompt added."""
        return self._potential_loads(parse_query(request, self._settings))

    def select(self, request: Any) -> Awaitable[dict[str, Any]]:
        """The best worker. With a ``selection_id`` the choice can be booked by it for a while."""
        return self._select(parse_select(request, self._settings))

    def select_and_reserve(self, request: Any) -> Awaitable[dict[str, Any]]:
        """The best worker, and the request booked on it under its ``selection_id`` (one is made if it has none)."""
        return self._select_and_reserve(parse_select(request, self._settings))

    def create_reservation(self, request: Any) -> Awaitable[dict[str, Any]]:
        """Book what ``select`` chose under this ``selection_id``; or, with a ``worker_id``, a prompt on that worker."""
        return self._create_reservation(parse_reservation(request, self._settings))

    def prefill_complete(self, selection_id: str) -> Awaitable[tuple[()]]:
        """The request's prompt is computed; a second time changes nothing."""
        return self._prefill_complete(to_text("selection_id", selection_id))

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """The request generated one more block; what it weighs from now on, see ``ActiveSequences``.

        Raises:
            ValueError: ``decay_fraction`` is not between 0 and 1.
            SelectionServiceError: ``not_found``.
        """
        name = to_text("selection_id", selection_id)
        fraction = optional(to_real)("decay_fraction", decay_fraction)
        if fraction is not None and not 0 <= fraction <= 1:
            raise ValueError("decay_fraction must be between 0.0 and 1.0")
        self._holder(name).add_output_block(name, fraction)

    def free_reservation(self, selection_id: str) -> Awaitable[tuple[()]]:
        """The request is over."""
        return self._free_reservation(to_text("selection_id", selection_id))

    def loads(self, *, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """What is booked and what waits, by partition."""
        model, group = _names(model_name, routing_group)
        return [
            partition.loads()
            for partition in self._fleet.partitions()
            if model in (None, partition.key.model_name) and group in (None, partition.key.routing_group)
        ]

    def indexer_snapshot(self) -> Awaitable[dict[str, Any]]:
        """All that the indexes hold, by ``model:group``, as router events."""
        return self._indexer_snapshot()

    def recover_indexer_from_peers(self, peers: Sequence[str]) -> Awaitable[bool]:
        """Take over what the first peer that answers knows of workers that are registered later; False if none does."""
        return self._fleet.recover(to_texts("peers", peers))

    def list_replica_peers(self) -> list[str]:
        """Endpoints whose bookings are listened to; none without replica sync."""
        return self._replicas.peers() if self._replicas is not None else []

    def register_replica_peer(self, endpoint: str) -> Awaitable[bool]:
        """Listen to one more; False if that was so.

        Raises:
            ValueError: It is no endpoint, or there is no replica sync.
            SelectionServiceError: ``not_ready``, after ``shutdown``.
        """
        return self._change_peer(ReplicaLink.add_peer, to_text("endpoint", endpoint))

    def deregister_replica_peer(self, endpoint: str) -> Awaitable[bool]:
        """Listen to it no longer; False if it was not. Raises what ``register_replica_peer`` does."""
        return self._change_peer(ReplicaLink.remove_peer, to_text("endpoint", endpoint))

    def shutdown(self) -> None:
        """Stop listening and selecting: who waits or asks fails. Bookings can still be ended. Idempotent.

        Call it on the service's event loop; ``shutdown_async`` also waits until everything is closed.
        """
        if self._closed:
            return
        self._closed = True
        self._fleet.stop(SelectionServiceError("scheduler", 503, _STOPPED))
        if self._fleet.started or self._replicas is not None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name="selection-service-close")

    async def shutdown_async(self) -> tuple[()]:
        """``shutdown``, and wait until sockets and tasks are closed."""
        self.shutdown()
        if self._closing is not None:
            await self._closing
        return ()

    async def _close(self) -> None:
        await self._fleet.close()
        if self._replicas is not None:
            await self._replicas.close()

    async def _upsert(self, spec: WorkerSpec) -> dict[str, Any]:
        self._check_open()
        if self._replicas is not None:
            self._replicas.start()
        return (await self._fleet.upsert(spec)).record()

    async def _patch(self, worker_id: int, changes: Mapping[str, Any]) -> dict[str, Any]:
        self._check_open()
        entry = self._fleet.catalog.get(worker_id)
        if entry is None:
            raise SelectionServiceError("not_found", 404, f"worker {worker_id} not found")
        return await self._upsert(replace(entry.spec, **changes))

    async def _delete(self, worker_id: int) -> dict[str, Any]:
        entry = self._fleet.delete(worker_id)
        if entry is None:
            raise SelectionServiceError("not_found", 404, f"worker {worker_id} not found")
        return entry.record()

    async def _indexer_snapshot(self) -> dict[str, Any]:
        return {
            f"{partition.key.model_name}:{partition.key.routing_group}": partition.snapshot()
            for partition in self._fleet.partitions()
        }

    async def _overlap_scores(self, query: PromptQuery) -> dict[str, Any]:
        return self._partition(query.partition).overlap_scores(query)

    async def _potential_loads(self, query: PromptQuery) -> list[dict[str, int]]:
        return self._partition(query.partition).potential_loads(query)

    async def _select(self, request: SelectRequest) -> dict[str, Any]:
        partition, selected = await self._choose(request, book=False)
        answer: dict[str, Any] = {}
        if request.selection_id is not None:
            answer["selection_id"] = request.selection_id
            self._cache.put(
                (partition.key, request.selection_id),
                CachedSelection(
                    selected.rank,
                    ReplicatedBooking(
                        selected.prompt.tracking_hashes,
                        selected.booked_prefill_tokens,
                        request.routing.expected_output_tokens,
                    ),
                    request.query.prompt.lora_name,
                ),
                self._clock.monotonic(),
            )
        return answer | selection_answer(partition, selected)

    async def _select_and_reserve(self, request: SelectRequest) -> dict[str, Any]:
        name = request.selection_id
        if name is None:
            name = str(uuid.UUID(int=self._rng.getrandbits(128), version=4))
        partition, selected = await self._choose(request.named(name), book=True)
        prompt = selected.prompt
        booking = ReplicatedBooking(
            prompt.tracking_hashes, selected.booked_prefill_tokens, request.routing.expected_output_tokens
        )
        self._publish(partition, name, selected.rank, booking, request.query.prompt.lora_name)
        return {
            "selection_id": name,
            "sequence_hashes": [to_signed(block) for block in prompt.tracking_hashes],
            "isl_tokens": prompt.isl_tokens,
            "track_prefill_tokens": prompt.settings.router_track_prefill_tokens,
        } | selection_answer(partition, selected)

    async def _choose(self, request: SelectRequest, *, book: bool) -> tuple[Partition, Selected]:
        self._check_open()
        query = request.query
        partition = self._partition(query.partition)
        prompt = partition.prompts.prepare_selection(query.prompt, query.settings)
        partition.expire()
        with scheduler_errors(request.routing.request_id):
            return partition, await partition.select(request, prompt, book)

    async def _create_reservation(self, request: ReservationRequest) -> dict[str, Any]:
        self._check_open()
        if request.worker_id is None:
            partition, rank = self._book_cached(request)
        else:
            partition, rank = self._book_explicit(request, request.worker_id)
        return {
            "selection_id": request.selection_id,
            "model_name": partition.key.model_name,
            "routing_group": partition.key.routing_group,
            "worker_id": rank.worker_id,
            "dp_rank": rank.dp_rank,
            "endpoint": partition.workers[rank.worker_id].endpoint,
        }

    def _book_cached(self, request: ReservationRequest) -> tuple[Partition, WorkerRank]:
        name, key = request.selection_id, (request.query.partition, request.selection_id)
        cached = self._cache.peek(key, self._clock.monotonic())
        if cached is None:
            raise SelectionServiceError(
                "not_found",
                404,
                f"no pending selection {name} for {request.query.partition} (expired, already used, or never selected)",
            )
        partition, rank = self._partition(request.query.partition), cached.rank
        if rank not in partition.ranks:
            raise SelectionServiceError(
                "not_found",
                404,
                f"schedulable worker {rank.worker_id} (dp_rank {rank.dp_rank}) not found for {request.query.partition}",
            )
        self._book(partition, name, rank, cached.booking, cached.lora_name)
        self._cache.discard(key)
        return partition, rank

    def _book_explicit(self, request: ReservationRequest, worker_id: int) -> tuple[Partition, WorkerRank]:
        self._cache.discard((request.query.partition, request.selection_id))
        partition = self._partition(request.query.partition)
        prompt = partition.prompts.prepare_booking(request.query.prompt, request.query.settings)
        tokens = request.effective_prefill_tokens or 0
        if tokens > prompt.isl_tokens:
            raise ValueError(f"effective_prefill_tokens ({tokens}) must not exceed isl_tokens ({prompt.isl_tokens})")
        if worker_id not in partition.workers:
            raise SelectionServiceError(
                "not_found", 404, f"schedulable worker {worker_id} not found for {request.query.partition}"
            )
        rank = WorkerRank(worker_id, request.dp_rank)
        if rank not in partition.ranks:
            raise SelectionServiceError(
                "sequence",
                404,
                f"Worker WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {request.dp_rank} }} not found",
            )
        # Whatever the service's own setting is: who books by hand says what is to be counted.
        tracks = request.track_prefill_tokens is not False
        booking = ReplicatedBooking(prompt.tracking_hashes, tokens if tracks else 0, request.expected_output_tokens)
        self._book(partition, request.selection_id, rank, booking, request.query.prompt.lora_name)
        return partition, rank

    def _book(
        self, partition: Partition, name: str, rank: WorkerRank, booking: ReplicatedBooking, lora_name: str | None
    ) -> None:
        partition.expire()
        try:
            partition.book(name, rank, booking.hashes, booking.prefill_tokens)
        except BookingTaken as error:
            raise SelectionServiceError("sequence", 409, already_booked(name, error.rank)) from error
        self._publish(partition, name, rank, booking, lora_name)

    async def _prefill_complete(self, name: str) -> tuple[()]:
        partition = self._holder(name)
        self._tell(partition, name, "prefill_completed")
        partition.complete_prefill(name)
        return ()

    async def _free_reservation(self, name: str) -> tuple[()]:
        partition = self._holder(name)
        self._tell(partition, name, "freed")
        partition.free(name)
        return ()

    def _holder(self, name: str) -> Partition:
        for partition in self._fleet.partitions():
            if partition.holds(name):
                return partition
        raise SelectionServiceError("not_found", 404, f"reservation {name} not found")

    def _partition(self, key: PartitionKey) -> Partition:
        partition = self._fleet.get(key)
        if partition is not None and partition.workers:
            return partition
        if any(other.workers for other in self._fleet.partitions()):
            raise SelectionServiceError("not_ready", 503, f"no schedulable workers for {key}")
        raise SelectionServiceError("not_ready", 503, "no schedulable workers are available")

    def _tell(self, partition: Partition, name: str, change: ReplicatedChange) -> None:
        rank = partition.rank_of(name)
        if rank is not None:
            self._publish(partition, name, rank, change)

    def _publish(
        self,
        partition: Partition,
        name: str,
        rank: WorkerRank,
        change: ReplicatedChange,
        lora_name: str | None = None,
    ) -> None:
        if self._replicas is not None:
            event = ReplicaEvent(partition.key, partition.block_size, name, rank, change, self._router_id, lora_name)
            self._replicas.publish(event)

    def _on_replica_event(self, event: ReplicaEvent) -> None:
        """Another process booked or freed; what is not about workers that are known here is passed over."""
        partition = self._fleet.get(event.partition)
        if partition is None or partition.block_size != event.block_size or event.rank not in partition.ranks:
            return
        change = event.change
        if isinstance(change, ReplicatedBooking):
            if not partition.holds(event.request_id):
                partition.book(event.request_id, event.rank, change.hashes, change.prefill_tokens)
        elif partition.rank_of(event.request_id) == event.rank:
            (partition.free if change == "freed" else partition.complete_prefill)(event.request_id)

    async def _change_peer(self, change: Callable[[ReplicaLink, str], bool], endpoint: str) -> bool:
        if self._replicas is None:
            raise ValueError("replica sync is disabled")
        if self._closed:
            raise SelectionServiceError("not_ready", 503, "replica peer manager is unavailable")
        self._replicas.start()
        return change(self._replicas, endpoint)

    def _check_open(self) -> None:
        if self._closed:
            raise SelectionServiceError("not_ready", 503, "selection service is shutting down")


def _names(model_name: Any, routing_group: Any) -> tuple[str | None, str | None]:
    return optional(to_text)("model_name", model_name), optional(to_text)("routing_group", routing_group)


def _expiry(env: Mapping[str, str]) -> float:
    text = env.get(_EXPIRY_VARIABLE, "").strip()
    try:
        seconds = float(text) if text else DEFAULT_EXPIRY_S
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise ValueError(f"{_EXPIRY_VARIABLE}={text}: must be a number of seconds greater than 0")
    return seconds
