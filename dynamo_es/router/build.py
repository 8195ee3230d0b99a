"""Building the router of an endpoint from the process's runtime and views."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_es.errors import ConfigError
from dynamo_es.router.active_sequences import ActiveSequences, OtherRouters
from dynamo_es.router.candidates import EndpointRanks
from dynamo_es.router.choosers import Chooser, KvChooser, RandomChooser, RoundRobinChooser
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.router.modes import RouterMode, mode_name
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.views import RoutingViews

MODES = (RouterMode.RoundRobin, RouterMode.Random, RouterMode.KV)


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
) -> tuple[RequestRouter, EndpointRanks]:
    """A router over the ranks of ``endpoint``, with other routers' bookings mirrored into its load.

    ``accepts`` leaves out workers (by id) that registered something else under the same name.

    Raises:
        ConfigError: The mode is not one of ``MODES``.
    """
    check_mode(mode)
    core = endpoint.core
    client = await endpoint.client()
    ranks = EndpointRanks(
        lambda: core.registry.state, client, (endpoint.namespace, endpoint.component, endpoint.name), accepts
    )
    sequences = ActiveSequences()
    mirror = OtherRouters(sequences, core.instance_id)
    mirror.replaced(views.requests.state.bookings.values())
    views.requests.state.observers.append(mirror)
    chooser: Chooser
    if mode is RouterMode.RoundRobin:
        chooser = RoundRobinChooser()
    elif mode is RouterMode.Random:
        chooser = RandomChooser(core.rng)
    else:
        chooser = KvChooser(
            lambda: views.kv_index.state,
            sequences,
            model=ranks.model,
            block_size=block_size,
            settings=settings,
            rng=core.rng,
        )
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
    )
    return router, ranks
