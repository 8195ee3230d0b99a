"""Building the router of an endpoint from the process's runtime and views."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_es.errors import ConfigError
from dynamo_es.router.active_sequences import ActiveSequences, OtherRouters, WorkerRank
from dynamo_es.router.approximate_index import ApproximateIndex, LruIndex, TtlIndex
from dynamo_es.router.candidates import EndpointRanks
from dynamo_es.router.choosers import (
    Chooser,
    DeviceAwareChooser,
    DirectChooser,
    LeastLoadedChooser,
    PowerOfTwoChooser,
    RandomChooser,
    RoundRobinChooser,
)
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.measured_overload import MeasuredOverload
from dynamo_es.router.modes import RouterMode, mode_name
from dynamo_es.router.overload import BusyThresholds, OverloadMonitor
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import FactsSource
from dynamo_es.router.tracking import load_tracking
from dynamo_es.runtime.client import CUDA_TO_CPU_RATIO
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews

MODES = tuple(RouterMode)
# Workers that compute no prompts.
DECODE = "decode"
PREFILL = "prefill"


def check_mode(mode: RouterMode) -> None:
    """Raises ``ConfigError`` if the mode is not one of ``MODES``."""
    if mode not in MODES:
        raise ConfigError(
            f"--router-mode {mode_name(mode)} is not available in this version; "
            f"use one of {', '.join(mode_name(available) for available in MODES)}"
        )


async def build_request_router(
    endpoint: Endpoint,
    views: RoutingViews,
    *,
    mode: RouterMode,
    block_size: int,
    settings: KvRouterSettings,
    accepts: Callable[[int], bool] = lambda worker_id: True,
    overload: OverloadMonitor | None = None,
    cuda_to_cpu_ratio: float = CUDA_TO_CPU_RATIO,
) -> tuple[RequestRouter, EndpointRanks]:
    """A router over the ranks of ``endpoint``, with other routers' bookings mirrored into its load.

    ``accepts`` leaves out workers (by id) that registered something else under the same name. ``overload`` holds the
    busy thresholds, which its owner may change later; by default there are none.

    Raises:
        ConfigError: The mode is not one of ``MODES``, or the tracking key cannot be read.
    """
    check_mode(mode)
    core = endpoint.core
    client = await endpoint.client()
    ranks = EndpointRanks(
        lambda: core.registry.state, client, (endpoint.namespace, endpoint.component, endpoint.name), accepts
    )
    sequences = ActiveSequences()
    mirror = OtherRouters(sequences, core.instance_id, settings.router_track_active_blocks)
    mirror.replaced(views.requests.state.bookings.values())
    views.requests.state.observers.append(mirror)
    chooser: Chooser
    if mode is RouterMode.KV:
        chooser = KvChooser(
            lambda: views.kv_index.state,
            sequences,
            model=ranks.model,
            block_size=block_size,
            settings=settings,
            rng=core.rng,
            facts=ranks.facts,
            approximate=approximate_index(settings, ranks.facts),
            tracking=load_tracking(settings, core.rng),
            clock=core.clock,
            decode_only=lambda: ranks.worker_type() == DECODE,
        )
    else:
        chooser = plain_chooser(mode, sequences, ranks.facts, endpoint, cuda_to_cpu_ratio)
    monitor = overload if overload is not None else OverloadMonitor(BusyThresholds())
    router = RequestRouter(
        chooser,
        sequences,
        client,
        ranks,
        core.appender,
        router_id=core.instance_id,
        model=ranks.model,
        block_size=block_size,
        positions=views.positions,
        clock=core.clock,
        defer=core.loop.call_soon,
        facts=ranks.facts,
        overloaded=MeasuredOverload(monitor, lambda: views.worker_load.state, ranks, sequences, core.clock),
        track_output_blocks=lambda: settings.router_track_output_blocks and ranks.worker_type() != PREFILL,
    )
    if mode is RouterMode.KV:
        policy = settings.policy.profile_for(ranks.model()) if settings.policy is not None else None
        profile = queue_profile(policy, settings.router_queue_threshold, settings.router_queue_policy)
        if profile is not None:
            router.queue_by(profile, core.loop)
            core.add_cleanup(router.close)
    return router, ranks


def plain_chooser(
    mode: RouterMode, sequences: ActiveSequences, facts: FactsSource, endpoint: Endpoint, cuda_to_cpu_ratio: float
) -> Chooser:
    """The chooser of a mode that does not look at caches."""
    rng = endpoint.core.rng
    if mode is RouterMode.RoundRobin:
        return RoundRobinChooser()
    if mode is RouterMode.Random:
        return RandomChooser(rng)
    if mode is RouterMode.PowerOfTwoChoices:
        return PowerOfTwoChooser(sequences, rng)
    if mode is RouterMode.Direct:
        return DirectChooser(sequences, rng)
    if mode is RouterMode.LeastLoaded:
        return LeastLoadedChooser(sequences, rng)
    return DeviceAwareChooser(sequences, facts, cuda_to_cpu_ratio, rng)


def approximate_index(settings: KvRouterSettings, facts: FactsSource) -> ApproximateIndex | None:
    """The index of what was sent where that ``settings`` ask for, if any."""
    if settings.use_kv_events:
        ttl_s = settings.router_predicted_ttl_secs
        return TtlIndex(ttl_s) if ttl_s is not None else None
    if settings.overlap_score_credit == 0:
        return None

    def capacity(rank: WorkerRank) -> int | None:
        return facts(rank.worker_id).total_kv_blocks

    if settings.router_approximate_cache_policy == "lru":
        return LruIndex(capacity)
    return TtlIndex(settings.router_ttl_secs)
