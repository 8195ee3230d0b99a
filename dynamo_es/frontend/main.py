"""The frontend process: builds the object graph, serves until it is told to stop, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from dynamo_es.clock import Clock
from dynamo_es.config.tree import FrontendConfig, RouterConfig
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.health import RuntimeHealth
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_views import ViewsCollector
from dynamo_es.frontend.server import FrontendServer, bind, serve
from dynamo_es.log.base import EventLog
from dynamo_es.router.build import check_mode
from dynamo_es.router.config_options import settings_of
from dynamo_es.router.modes import mode_named
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.views import RoutingViews

logger = logging.getLogger(__name__)
_TOKENIZER_THREADS = 2


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Everything that a frontend process is configured by."""

    process: RuntimeSettings
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    router: RouterConfig = field(default_factory=RouterConfig)


async def run_frontend(
    settings: FrontendSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[FrontendServer], None] | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain and give everything back.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    check_mode(mode_named(settings.frontend.router_mode))
    weights = settings_of(settings.router)
    # The port is taken first: a mistake there should not cost a catch-up.
    listener = bind(settings.frontend)
    core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
    try:
        await core.start()
        views = RoutingViews(core)
        await views.start()
        await _catch_up(views, settings.process.state.catch_up_timeout_s)
        SourceReaper(core, views).start()
        registry = CollectorRegistry()
        metrics = FrontendMetrics(registry, settings.frontend.metrics_prefix)
        directory = RegistryModels(core, views, settings.frontend, weights, metrics.forget)
        directory.refresh()
        log_watch = LogWatch(core)
        log_watch.start()
        registry.register(ViewsCollector(core, views, directory, log_watch))
        health = RuntimeHealth(core, views, directory, log_watch)
        app = build_app(settings.frontend, directory, health, metrics, clock, executor)
        server = await serve(app, settings.frontend, listener=listener)
        if on_ready is not None:
            on_ready(server)
        await _until_stopped(stop, server)
        await server.shutdown()
    finally:
        listener.close()
        await core.close()
        executor.shutdown(wait=False, cancel_futures=True)


async def _catch_up(views: RoutingViews, timeout_s: float) -> None:
    try:
        await views.wait_caught_up(timeout_s)
    except TimeoutError:
        logger.warning("the views are not caught up after %g s; serving with what they have", timeout_s)


async def _until_stopped(stop: asyncio.Event, server: FrontendServer) -> None:
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(server.wait_closed())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
