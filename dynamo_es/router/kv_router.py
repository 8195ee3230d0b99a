"""``KvRouter``: routing by KV-cache overlap and load (Dynamo's class; spec: router-core D.9)."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.aic_model import load_aic_times
from dynamo_es.router.build import build_request_router
from dynamo_es.router.candidates import EndpointRanks
from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_arguments import to_u32
from dynamo_es.router.config_routing import LoadThresholdConfig
from dynamo_es.router.config_settings import check_shared_cache
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.cost_selector import NO_OVERLAP, Overlaps, PreparedPrompt
from dynamo_es.router.errors import IndexElsewhere
from dynamo_es.router.index_dump import dump_index
from dynamo_es.router.index_server import ViewServer
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.modes import RouterMode
from dynamo_es.router.overload import BusyThresholds, OverloadMonitor
from dynamo_es.router.radix_model import DumpedBlocks
from dynamo_es.router.remote_index import DEFAULT_DEADLINE_S, RemoteIndex
from dynamo_es.router.remote_index_metrics import show_remote_index
from dynamo_es.router.reports import dump_events, load_row, overlap_report
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.router.session_affinity import AffinitySettings
from dynamo_es.router.upkeep import start_upkeep
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews
from schemas.kv_events import Tier

logger = logging.getLogger(__name__)


class KvRouter:
    """Routes requests to the workers of one endpoint. Constructing it does no I/O; its methods open what they need.

    Every decision, with what it rested on, and every request's life go to the topic ``requests``; other routers'
    bookings come back from there.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        block_size: int,
        kv_router_config: KvRouterConfig | None = None,
        aic_perf_config: AicPerfConfig | None = None,
        *,
        load_threshold_config: LoadThresholdConfig | None = None,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
        remote_indexer_timeout_s: float = DEFAULT_DEADLINE_S,
        views: RoutingViews | None = None,
    ) -> None:
        """``views`` shares running views with other routers of the process; by default it runs its own.

        ``aic_perf_config``: the deployment whose prefill times are predicted, if ``kv_router_config`` has
        ``router_prefill_load_model="aic"``. ``load_threshold_config``: above these a worker counts as overloaded and is
        left out; None: nobody is. ``session_affinity_ttl_secs``, ``session_affinity_mode``: as in ``RouterConfig``.
        ``remote_indexer_timeout_s``: how long a decision waits for the indexers that ``use_remote_indexer`` asks.

        Raises:
            ValueError: ``block_size`` or the timeout is not positive, or the affinity is refused.
            ConfigError: The configuration names a shared cache, of which a router can learn nothing here.
        """
        if block_size < 1:
            raise ValueError("block_size must be greater than 0")
        if not remote_indexer_timeout_s > 0:
            raise ValueError("remote_indexer_timeout_s must be greater than 0")
        self._remote_timeout_s = remote_indexer_timeout_s
        self._aic = aic_perf_config
        self._affinity = affinity_of(session_affinity_ttl_secs, session_affinity_mode)
        self._thresholds = thresholds_of(load_threshold_config)
        self._endpoint = endpoint
        self._block_size = block_size
        self._config = kv_router_config if kv_router_config is not None else KvRouterConfig()
        check_shared_cache(self._config.settings)
        self._views = views
        self._router: RequestRouter | None = None
        self._ranks: EndpointRanks | None = None
        self._told_sizes: dict[int, int] = {}

    @property
    def other_block_sizes(self) -> Mapping[int, int]:
        """Workers with KV blocks of another size than the router's, and theirs: they are routed to by load only."""
        return {} if self._ranks is None else self._ranks.other_block_sizes(self._block_size)

    async def start(self) -> RequestRouter:
        """Open what is needed and catch up; idempotent.

        Raises:
            LogError, StoreError, TimeoutError: The log or the store cannot be used.
            ConfigError: The configuration asks for prefill times, and there are none.
        """
        if self._router is None:
            settings = self._config.settings
            times = None
            if settings.router_prefill_load_model != "none" and self._aic is not None:
                times = await asyncio.to_thread(load_aic_times, self._aic)
            core = self._endpoint.core
            await core.start()
            if self._views is None:
                views = RoutingViews(core, keeps_index=not settings.use_remote_indexer)
                await views.start()
                await views.wait_caught_up(core.settings.state.catch_up_timeout_s)
                start_upkeep(core, views)
                self._views = views
            remote = await self._open_index(self._views)
            self._router, self._ranks = await build_request_router(
                self._endpoint,
                self._views,
                mode=RouterMode.KV,
                block_size=self._block_size,
                settings=settings,
                overload=OverloadMonitor(self._thresholds),
                affinity=self._affinity,
                prefill_times=times,
                remote=remote,
            )
            core.registry.add_listener(self._tell_block_sizes)
            self._tell_block_sizes()
        return self._router

    async def _open_index(self, views: RoutingViews) -> RemoteIndex | None:
        """Ask others for the index, or answer them, if the configuration says so."""
        core, settings = self._endpoint.core, self._config.settings
        if settings.use_remote_indexer:
            remote = RemoteIndex(core, deadline_s=self._remote_timeout_s)
            await remote.start()
            show_remote_index(core, remote)
            return remote
        if settings.serve_indexer and views.kv_index is not None:
            ViewServer(core, views.kv_index).start()
        return None

    def _tell_block_sizes(self) -> None:
        """One line for each worker, and another one if it comes back with another size."""
        found = dict(self.other_block_sizes)
        for worker_id, size in found.items():
            if self._told_sizes.get(worker_id) != size:
                logger.warning(
                    "worker %d has KV blocks of %d tokens, this router's are of %d: it is routed to by load only, its "
                    "cache earns no credit; start it, or the router, with the other's block size",
                    worker_id, size, self._block_size,
                )  # fmt: skip
        self._told_sizes = found

    async def generate(
        self,
        token_ids: list[int],
        model: str,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: int | None = None,
        dp_rank: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        multi_modal_data: Any = None,
        mm_routing_info: Mapping[str, Any] | None = None,
        routing_constraints: RoutingConstraints | None = None,
        response_buffer_size: int = 100,
    ) -> AsyncIterator[Any]:
        """Route and send; an async iterator over the worker's frames. Arguments are those of Dynamo's ``generate``.

        Raises:
            ValueError: ``response_buffer_size`` is negative.
        """
        request: dict[str, Any] = {
            "model": model,
            "token_ids": list(token_ids),
            "stop_conditions": dict(stop_conditions or {}),
            "sampling_options": dict(sampling_options or {}),
            "output_options": dict(output_options or {}),
            "router_config_override": router_config_override,
            "routing": {
                "worker_id": worker_id,
                "dp_rank": dp_rank,
                "routing_constraints": _constraints_value(routing_constraints),
            },
            "extra_args": extra_args,
        }
        if multi_modal_data is not None:
            request["multi_modal_data"] = multi_modal_data
        if mm_routing_info is None and block_mm_infos is not None:
            mm_routing_info = {"routing_token_ids": list(token_ids), "block_mm_infos": block_mm_infos}
        if mm_routing_info is not None:
            request["mm_routing_info"] = mm_routing_info
        return await self.generate_from_request(request, response_buffer_size)

    async def generate_from_request(
        self, request: Mapping[str, Any], response_buffer_size: int = 100
    ) -> AsyncIterator[Any]:
        """The same for a preprocessed request (``token_ids``, ``model``, ``stop_conditions``, ...)."""
        if response_buffer_size < 0:
            raise ValueError("response_buffer_size must not be negative")
        await self.start()
        return self._frames(dict(request))

    async def stream(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[Any], None]:
        """As ``generate_from_request``, in the batches in which frames arrive; the context's id is the request id."""
        router = await self.start()
        async with aclosing(router.stream(routing_request(request, context.id()), request, context)) as batches:
            async for batch in batches:
                yield batch

    async def best_worker(
        self,
        token_ids: list[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        update_indexer: bool = False,
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        routing_constraints: RoutingConstraints | None = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
        *,
        session_id: str | None = None,
    ) -> tuple[int, int, int]:
        """Worker id, rank and overlap in blocks of the best worker; books the request if ``request_id`` is given.

        Waits for a worker if the router queues and all are busy. ``session_id``: see ``session_affinity_ttl_secs``.

        Raises:
            InvalidArgument: ``token_ids`` is empty, an override is wrong, or the session's name is too long.
            NoEligibleWorker, AllWorkersOverloaded: No worker may take it.
            BookingConflict: The request id is booked.
            RouterQueueLimitExceeded: It would have to wait, and may not.
            OverflowError: ``strict_priority`` is no u32.
        """
        strict_priority = to_u32("strict_priority", strict_priority)
        router = await self.start()
        request = RoutingRequest(
            request_id=request_id if request_id is not None else str(uuid.uuid4()),
            token_ids=token_ids,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            block_mm_infos=block_mm_infos,
            config_override=router_config_override,
            constraints=routing_constraints,
            strict_priority=strict_priority,
            policy_class=policy_class,
            update_indexer=update_indexer,
            session_id=session_id,
        )
        choice = await router.select(request) if request_id is None else (await router.admit(request)).choice
        return choice.rank.worker_id, choice.rank.dp_rank, choice.overlap_blocks

    async def get_potential_loads(
        self,
        token_ids: list[int],
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Load of every rank with this prompt added (spec: router-core D.3)."""
        chooser, prompt, overlaps, ranks = await self._query(token_ids, block_mm_infos, lora_name, cache_namespace)
        tracks_prefill = prompt.settings.router_track_prefill_tokens
        return [
            load_row(
                item.candidate.rank,
                item.candidate.load,
                item.prefill_tokens if tracks_prefill else 0,
                item.candidate.new_blocks,
            )
            for item in chooser.selector.costs(prompt, ranks, overlaps)
        ]

    async def get_overlap_scores(
        self,
        token_ids: list[int],
        router_config_override: Mapping[str, Any] | None = None,
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """Overlap of every rank by tier (spec: router-core D.2). There is no shared cache to include.

        Raises:
            InvalidArgument: An override is wrong.
        """
        _, prompt, overlaps, ranks = await self._query(
            token_ids, block_mm_infos, lora_name, cache_namespace, router_config_override
        )
        rows = {**dict.fromkeys(ranks, NO_OVERLAP), **overlaps}
        return overlap_report(self._block_size, len(prompt.tokens_hashes), rows.items(), prompt.settings)

    async def dump_events(self) -> str:
        """All that the router's index holds, as JSON text: a list of router events that, stored in this order, give the
        same index again. Blocks are named by their sequence hashes. Reads the log, which may take long.

        Raises:
            LogError: The log cannot be read.
            IndexElsewhere: The index is with other processes.
        """
        router = await self.start()
        chooser = router.chooser
        assert isinstance(chooser, KvChooser)
        core = self._endpoint.core
        dumped: list[tuple[Tier, DumpedBlocks]] = []
        if self._config.settings.use_kv_events:
            assert self._views is not None
            assert self._ranks is not None
            if chooser.is_remote or self._views.kv_index is None:
                raise IndexElsewhere("this router keeps no KV index (use_remote_indexer): dump that of one that does")
            dumped.extend(await dump_index(core, self._views.kv_index, self._ranks.model(), self._block_size))
        if chooser.approximate is not None:
            dumped.extend(("device", blocks) for blocks in chooser.approximate.dump(core.clock.monotonic()))
        return msgspec.json.encode(list(dump_events(dumped))).decode()

    async def mark_prefill_complete(self, request_id: str) -> None:
        """The request's prompt is computed. Raises ``UnknownRequest``."""
        (await self.start()).complete_prefill(request_id)

    async def free(self, request_id: str) -> None:
        """The request is over. Raises ``UnknownRequest``."""
        (await self.start()).release(request_id)

    async def _query(
        self,
        token_ids: Sequence[int],
        block_mm_infos: list[dict[str, Any] | None] | None,
        lora_name: str | None,
        cache_namespace: str | None,
        override: Mapping[str, Any] | None = None,
    ) -> tuple[KvChooser, PreparedPrompt, Overlaps, Sequence[WorkerRank]]:
        chooser = (await self.start()).chooser
        assert isinstance(chooser, KvChooser)
        assert self._ranks is not None
        prompt = chooser.prepare_query(
            RoutingRequest("", token_ids, lora_name, cache_namespace, block_mm_infos, config_override=override)
        )
        return chooser, prompt, (await chooser.look_up(prompt)).overlaps, self._ranks()

    async def _frames(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        async with aclosing(self.stream(request, Context())) as batches:
            async for batch in batches:
                for frame in batch:
                    yield frame


def thresholds_of(config: LoadThresholdConfig | None) -> BusyThresholds:
    """The thresholds that a configuration stands for."""
    if config is None:
        return BusyThresholds()
    return BusyThresholds(
        active_decode_blocks=config.active_decode_blocks_threshold,
        active_prefill_tokens=config.active_prefill_tokens_threshold,
        active_prefill_tokens_frac=config.active_prefill_tokens_threshold_frac,
    )


def affinity_of(ttl_secs: int | None, mode: str) -> AffinitySettings | None:
    """How sessions are kept together; None: they are not. Raises ValueError."""
    if mode not in ("hard", "soft"):
        raise ValueError(f"invalid session affinity mode \"{mode}\"; expected 'hard' or 'soft'")
    return None if ttl_secs is None else AffinitySettings(ttl_secs, mode == "hard")


def routing_request(request: Mapping[str, Any], request_id: str, **course: Any) -> RoutingRequest:
    """What routing reads of a preprocessed request (spec: frontend 3.1, 4.1); ``course``: more of it, of its way here.

    Raises:
        InvalidArgument: A field has the wrong type.
    """
    routing = request.get("routing") or {}
    agent = request.get("agent_context") or {}
    if not isinstance(agent, Mapping):
        raise InvalidArgument("agent_context must be an object")
    mm_info = request.get("mm_routing_info") or {}
    token_ids = mm_info.get("routing_token_ids") or request.get("token_ids")
    if not isinstance(token_ids, list):
        raise InvalidArgument("token_ids must be a list of integers")
    return RoutingRequest(
        request_id=request_id,
        token_ids=token_ids,
        lora_name=routing.get("lora_name"),
        cache_namespace=routing.get("cache_namespace") or routing.get("cache_salt"),
        block_mm_infos=mm_info.get("block_mm_infos"),
        worker_id=_pinned_worker(routing),
        dp_rank=_integer(routing, "dp_rank"),
        prefill_worker_id=_integer(routing, "prefill_worker_id"),
        prefill_dp_rank=_integer(routing, "prefill_dp_rank"),
        config_override=request.get("router_config_override"),
        allowed_worker_ids=routing.get("allowed_worker_ids"),
        constraints=_read_constraints(routing.get("routing_constraints")),
        priority_jump=_number(routing, "priority_jump"),
        strict_priority=_integer(routing, "strict_priority") or 0,
        policy_class=routing.get("policy_class"),
        update_indexer=True,
        expected_output_tokens=_integer(routing, "expected_output_tokens"),
        session_id=_text(agent, "session_id"),
        **course,
    )


def _pinned_worker(routing: Mapping[str, Any]) -> int | None:
    """By the first of its names that is there."""
    names = ("worker_id", "decode_worker_id", "backend_instance_id")
    return next((found for name in names if (found := _integer(routing, name)) is not None), None)


def _constraints_value(constraints: RoutingConstraints | None) -> dict[str, Any] | None:
    """Constraints as a preprocessed request carries them."""
    if constraints is None:
        return None
    return {
        "required_taints": sorted(constraints.required_taints),
        "preferred_taints": constraints.preferred_taints,
    }


def _read_constraints(value: object) -> RoutingConstraints | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidArgument("routing.routing_constraints must be an object")
    required, preferred = value.get("required_taints"), value.get("preferred_taints")
    try:
        return RoutingConstraints(None if required is None else set(required), preferred)
    except TypeError as error:
        raise InvalidArgument(f"routing.routing_constraints: {error}") from error


def _integer(routing: Mapping[str, Any], name: str) -> int | None:
    value = routing.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise InvalidArgument(f"routing.{name} must be an integer")
    return value


def _text(section: Mapping[str, Any], name: str) -> str | None:
    value = section.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidArgument(f"{name} must be a string")
    return value


def _number(routing: Mapping[str, Any], name: str) -> float:
    value = routing.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"routing.{name} must be a number")
    return float(value)
