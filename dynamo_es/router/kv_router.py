"""``KvRouter``: routing by KV-cache overlap and load (Dynamo's class; spec: router-core D.9)."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.build import build_request_router
from dynamo_es.router.candidates import EndpointRanks
from dynamo_es.router.choosers import KvChooser, RoutingRequest
from dynamo_es.router.config import KvRouterConfig, override_settings
from dynamo_es.router.cost import CandidateCost, round_half_away
from dynamo_es.router.modes import RouterMode
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews


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
        aic_perf_config: object = None,
        *,
        views: RoutingViews | None = None,
    ) -> None:
        """``views`` shares running views with other routers of the process; by default it runs its own.

        Raises:
            ValueError: ``block_size`` is not positive.
        """
        if block_size < 1:
            raise ValueError("block_size must be greater than 0")
        self._endpoint = endpoint
        self._block_size = block_size
        self._config = kv_router_config if kv_router_config is not None else KvRouterConfig()
        self._views = views
        self._router: RequestRouter | None = None
        self._ranks: EndpointRanks | None = None

    async def start(self) -> RequestRouter:
        """Open what is needed and catch up; idempotent. Raises ``LogError``, ``StoreError``, ``TimeoutError``."""
        if self._router is None:
            core = self._endpoint.core
            await core.start()
            if self._views is None:
                views = RoutingViews(core)
                await views.start()
                await views.wait_caught_up(core.settings.state.catch_up_timeout_s)
                self._views = views
            self._router, self._ranks = await build_request_router(
                self._endpoint,
                self._views,
                mode=RouterMode.KV,
                block_size=self._block_size,
                settings=self._config.settings,
            )
        return self._router

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
        routing_constraints: object = None,
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
            "routing": {"worker_id": worker_id, "dp_rank": dp_rank},
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
        routing_constraints: object = None,
        strict_priority: int = 0,
        policy_class: str | None = None,
        cache_namespace: str | None = None,
    ) -> tuple[int, int, int]:
        """Worker id, rank and overlap in blocks of the best worker; books the request if ``request_id`` is given.

        Raises:
            InvalidArgument: ``token_ids`` is empty, or an override is wrong.
            NoEligibleWorker: No worker may take it.
            BookingConflict: The request id is booked.
        """
        router = await self.start()
        request = RoutingRequest(
            request_id=request_id if request_id is not None else str(uuid.uuid4()),
            token_ids=token_ids,
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            block_mm_infos=block_mm_infos,
            config_override=router_config_override,
        )
        choice = router.choose(request) if request_id is None else router.route(request).choice
        return choice.rank.worker_id, choice.rank.dp_rank, choice.overlap_blocks

    async def get_potential_loads(
        self,
        token_ids: list[int],
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        cache_namespace: str | None = None,
    ) -> list[dict[str, int]]:
        """Load of every rank with this prompt added (spec: router-core D.3)."""
        settings = self._config.settings
        rows = []
        for item in await self._costs(token_ids, block_mm_infos, lora_name, cache_namespace, None):
            load = item.candidate.load
            tracks = settings.router_track_prefill_tokens
            rows.append(
                {
                    "worker_id": item.candidate.rank.worker_id,
                    "dp_rank": item.candidate.rank.dp_rank,
                    "potential_prefill_tokens": load.prefill_tokens + (item.prefill_tokens if tracks else 0),
                    "potential_decode_blocks": round_half_away(item.decode_blocks)
                    if settings.router_track_active_blocks
                    else 0,
                    "active_requests": load.requests,
                }
            )
        return rows

    async def get_overlap_scores(
        self,
        token_ids: list[int],
        router_config_override: Mapping[str, Any] | None = None,
        block_mm_infos: list[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        include_shared: bool = True,
        cache_namespace: str | None = None,
    ) -> dict[str, Any]:
        """Overlap of every rank by tier (spec: router-core D.2)."""
        settings = override_settings(self._config.settings, router_config_override)
        workers = []
        for item in await self._costs(token_ids, block_mm_infos, lora_name, cache_namespace, router_config_override):
            candidate = item.candidate
            rank, device, host, disk = candidate.rank, candidate.device, candidate.host, candidate.disk
            credit = (
                settings.overlap_score_credit * device
                + settings.host_cache_hit_weight * host
                + settings.disk_cache_hit_weight * disk
            )
            workers.append(
                {
                    "worker_id": rank.worker_id,
                    "dp_rank": rank.dp_rank,
                    "device_blocks": device,
                    "host_pinned_blocks": device + host,
                    "disk_blocks": device + host + disk,
                    "host_pinned_extension_blocks": host,
                    "disk_extension_blocks": disk,
                    "shared_beyond_device_blocks": None,
                    "router_credit_blocks": credit,
                }
            )
        return {
            "block_size": self._block_size,
            "num_blocks": len(token_ids) // self._block_size,
            "workers": workers,
            "shared_cache": {"enabled": False, "total_hit_blocks": 0, "ranges": [], "error": None},
        }

    async def mark_prefill_complete(self, request_id: str) -> None:
        """The request's prompt is computed. Raises ``UnknownRequest``."""
        (await self.start()).complete_prefill(request_id)

    async def free(self, request_id: str) -> None:
        """The request is over. Raises ``UnknownRequest``."""
        (await self.start()).release(request_id)

    async def _costs(
        self,
        token_ids: Sequence[int],
        block_mm_infos: list[dict[str, Any] | None] | None,
        lora_name: str | None,
        cache_namespace: str | None,
        override: Mapping[str, Any] | None,
    ) -> list[CandidateCost]:
        router = await self.start()
        chooser = router.chooser
        assert isinstance(chooser, KvChooser)
        assert self._ranks is not None
        request = RoutingRequest("", token_ids, lora_name, cache_namespace, block_mm_infos)
        _, sequence_hashes = chooser.hash(request)
        settings = override_settings(chooser.settings, override)
        return chooser.costs(sequence_hashes, len(token_ids), self._ranks(), settings)

    async def _frames(self, request: dict[str, Any]) -> AsyncIterator[Any]:
        async with aclosing(self.stream(request, Context())) as batches:
            async for batch in batches:
                for frame in batch:
                    yield frame


def routing_request(request: Mapping[str, Any], request_id: str) -> RoutingRequest:
    """What routing reads of a preprocessed request (spec: frontend 4.1).

    Raises:
        InvalidArgument: A field has the wrong type.
    """
    routing = request.get("routing") or {}
    mm_info = request.get("mm_routing_info") or {}
    token_ids = mm_info.get("routing_token_ids") or request.get("token_ids")
    if not isinstance(token_ids, list):
        raise InvalidArgument("token_ids must be a list of integers")
    for name in ("worker_id", "dp_rank"):
        if not isinstance(routing.get(name), int | None):
            raise InvalidArgument(f"routing.{name} must be an integer")
    return RoutingRequest(
        request_id=request_id,
        token_ids=token_ids,
        lora_name=routing.get("lora_name"),
        cache_namespace=routing.get("cache_namespace"),
        block_mm_infos=mm_info.get("block_mm_infos"),
        worker_id=routing.get("worker_id"),
        dp_rank=routing.get("dp_rank"),
        config_override=request.get("router_config_override"),
    )
