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
from dynamo_es.router.disaggregation import handed_over_settings, prefill_settings
from dynamo_es.router.kv_chooser import IndexSource, KvChooser, RemoteSource
from dynamo_es.router.measured_overload import MeasuredOverload
from dynamo_es.router.modes import RouterMode, mode_name
from dynamo_es.router.overload import BusyThresholds, OverloadMonitor
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.prefill_times import PrefillTimes
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import FactsSource
from dynamo_es.router.session_affinity import AffinitySettings, SessionAffinity
from dynamo_es.router.tracking import TrackingIdentities, load_tracking
from dynamo_es.runtime.client import CUDA_TO_CPU_RATIO
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews

MODES = tuple(RouterMode)
# Workers that compute no prompts.
DECODE = "decode"
PREFILL = "prefill"
# Between two tries to tell events for which there was no room.
_TELL_AGAIN_S = 1.0
NO_PREFILL_TIMES = (
    "router_prefill_load_model=aic needs to know the deployment: aic_backend, aic_system and aic_model_path"
)


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
    affinity: AffinitySettings | None = None,
    prefill_times: PrefillTimes | None = None,
    computes_for_others: bool = False,
    remote: RemoteSource | None = None,
) -> tuple[RequestRouter, EndpointRanks]:
    """A router over the ranks of ``endpoint``, with other routers' bookings mirrored into its load.

    ``accepts`` leaves out workers (by id) that registered something else under the same name. ``overload`` holds the
    busy thresholds, which its owner may change later; by default there are none. ``affinity``: None keeps no sessions
    together. ``prefill_times``: needed if the settings ask for a prefill load model. ``computes_for_others``: the
    workers only compute prompts, other workers generate. ``remote``: whom to ask in place of the index in ``views``.

    Raises:
        ConfigError: The mode is not one of ``MODES``, the tracking key cannot be read, there are no prefill times, or
            there is neither an index nor anybody to ask.
    """
    check_mode(mode)
    if settings.router_prefill_load_model == "none":
        prefill_times = None
    elif prefill_times is None:
        raise ConfigError(NO_PREFILL_TIMES)
    if computes_for_others:
        settings = prefill_settings(settings)
    core = endpoint.core
    client = await endpoint.client()
    ranks = EndpointRanks(lambda: core.registry.state, client, endpoint.parts, accepts)
    timed = core.clock if prefill_times is not None else None
    sequences = ActiveSequences(timed.monotonic if timed is not None else None)
    mirror = OtherRouters(sequences, core.instance_id, settings.router_track_active_blocks, timed)
    tracking = load_tracking(settings, core.rng)
    chooser: Chooser
    if mode is RouterMode.KV:
        chooser = _kv_chooser(views, sequences, ranks, core, block_size, settings, tracking, remote)
    else:
        chooser = plain_chooser(mode, sequences, ranks.facts, endpoint, cuda_to_cpu_ratio)
    role = PREFILL if computes_for_others else ""
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
        affinity=None if affinity is None else _sessions(affinity, endpoint, views, ranks, role, tracking.key),
        prefill_times=prefill_times,
        lease_id=lambda: core.registration.lease_id,
        later=lambda work: core.loop.call_later(_TELL_AGAIN_S, work),
    )
    _connect(router, mirror, core, views)
    if mode is RouterMode.KV:
        policy = settings.policy.profile_for(ranks.model()) if settings.policy is not None else None
        profile = queue_profile(policy, settings.router_queue_threshold, settings.router_queue_policy)
        if profile is not None:
            router.queue_by(profile, core.loop)
            core.add_cleanup(router.close)
            router.on_retired(lambda: core.drop_cleanup(router.close))
    return router, ranks


def _connect(router: RequestRouter, mirror: OtherRouters, core: RuntimeCore, views: RoutingViews) -> None:
    """Let the router hear of other routers' bookings and of a new lease, until it is retired."""
    mirror.replaced(views.requests.state.bookings.values())
    views.requests.state.observers.append(mirror)
    core.renewals.append(router.announce_open)
    # The state is another object by then, if the view was made anew.
    router.on_retired(lambda: views.requests.state.observers.remove(mirror))
    router.on_retired(lambda: core.renewals.remove(router.announce_open))


def _kv_chooser(
    views: RoutingViews,
    sequences: ActiveSequences,
    ranks: EndpointRanks,
    core: RuntimeCore,
    block_size: int,
    settings: KvRouterSettings,
    tracking: TrackingIdentities,
    remote: RemoteSource | None,
) -> KvChooser:
    return KvChooser(
        _index_of(views) if remote is None else None,
        sequences,
        model=ranks.model,
        block_size=block_size,
        settings=settings,
        rng=core.rng,
        facts=ranks.facts,
        approximate=approximate_index(settings, ranks.facts),
        tracking=tracking,
        clock=core.clock,
        decode_only=lambda: ranks.worker_type() == DECODE,
        handed_over=handed_over_settings(settings),
        remote=remote,
        is_eagle=ranks.is_eagle,
    )


def _index_of(views: RoutingViews) -> IndexSource:
    index = views.kv_index
    if index is None:
        raise ConfigError("this process keeps no KV index, so its routers need use_remote_indexer")
    return lambda: index.state


def _sessions(
    settings: AffinitySettings,
    endpoint: Endpoint,
    views: RoutingViews,
    ranks: EndpointRanks,
    role: str,
    key: bytes | None,
) -> SessionAffinity:
    where = ".".join(endpoint.parts)
    return SessionAffinity(
        settings, lambda: views.requests.state.sessions, lambda: "\x00".join((where, role, ranks.model())), key
    )


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
