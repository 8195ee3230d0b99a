"""The frontend process: builds the object graph, serves until it is told to stop, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, ProcessCollector

from dynamo_es.clock import Clock
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig, RouterConfig
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.health import RuntimeHealth
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.frontend.loop_canary import LoopCanary
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_views import register_views
from dynamo_es.frontend.routes import check_paths
from dynamo_es.frontend.routing_plan import RoutingPlan, plan_routing
from dynamo_es.frontend.server import FrontendServer, bind, serve
from dynamo_es.frontend.starting import StartingApp
from dynamo_es.log.base import EventLog
from dynamo_es.router.booking_reaper import BookingReaper
from dynamo_es.router.build import check_mode
from dynamo_es.router.index_server import ViewServer
from dynamo_es.router.modes import mode_named
from dynamo_es.router.remote_index import RemoteIndex
from dynamo_es.router.remote_index_metrics import RemoteIndexCollector
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.metrics_runtime import RuntimeCollector
from dynamo_es.runtime.views import RoutingViews

logger = logging.getLogger(__name__)
_TOKENIZER_THREADS = 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Everything that a frontend process is configured by."""

    process: RuntimeSettings
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    aic: AicConfig = field(default_factory=AicConfig)
    paths: HttpPathsConfig = field(default_factory=HttpPathsConfig)


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
    plan = plan_routing(settings.frontend, settings.router, settings.aic)
    check_paths(settings.paths)
    # The port is taken first: a mistake there should not cost a catch-up.
    listener = bind(settings.frontend)
    core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    metrics = process_metrics(core, settings.frontend.metrics_prefix)
    canary = LoopCanary(metrics.registry, settings.frontend.metrics_prefix, clock)
    entrance = StartingApp(core, metrics, settings.paths)
    executor = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenize")
    try:
        canary.start()
        server = await serve(entrance, settings.frontend, listener=listener)
        try:
            app = await _unless_stopped(stop, _recover(settings, plan, core, metrics, executor))
            if app is not None:
                entrance.become(app)
                if on_ready is not None:
                    on_ready(server)
                await _until_stopped(stop, server)
        finally:
            await server.shutdown()
    finally:
        listener.close()
        await canary.close()
        await core.close()
        executor.shutdown(wait=False, cancel_futures=True)


def process_metrics(core: RuntimeCore, prefix: str) -> FrontendMetrics:
    """A registry with what a frontend shows from its first moment on."""
    registry = CollectorRegistry()
    registry.register(RuntimeCollector(lambda: [core]))
    ProcessCollector(registry=registry)
    return FrontendMetrics(registry, prefix)


async def _recover(
    settings: FrontendSettings,
    plan: RoutingPlan,
    core: RuntimeCore,
    metrics: FrontendMetrics,
    executor: ThreadPoolExecutor,
) -> FrontendApp:
    """Bring the views up to the log, and make the application over them."""
    await core.start()
    views = RoutingViews(core, keeps_index=plan.remote_timeout_s is None)
    await views.start()
    await _catch_up(views, settings.process.state.catch_up_timeout_s)
    SourceReaper(core, views.index_states).start()
    BookingReaper(core, lambda: views.requests.state).start()
    remote = await _open_index(core, views, plan)
    directory = RegistryModels(
        core,
        views,
        settings.frontend,
        plan.settings,
        metrics.forget,
        affinity=plan.affinity,
        prefill_times=await plan.prefill_times(),
        remote=remote,
    )
    directory.refresh()
    log_watch = LogWatch(core)
    log_watch.start()
    register_views(metrics.registry, core, views, directory, settings.frontend.metrics_prefix)
    if remote is not None:
        metrics.registry.register(RemoteIndexCollector(remote))
    health = RuntimeHealth(core, views, directory, log_watch, remote)
    return build_app(settings.frontend, directory, health, metrics, core.clock, executor, paths=settings.paths)


async def _open_index(core: RuntimeCore, views: RoutingViews, plan: RoutingPlan) -> RemoteIndex | None:
    """Ask other processes for the KV index, or answer them, if the plan says so."""
    if plan.remote_timeout_s is not None:
        remote = RemoteIndex(core, deadline_s=plan.remote_timeout_s)
        await remote.start()
        return remote
    if plan.settings.serve_indexer and views.kv_index is not None:
        ViewServer(core, views.kv_index).start()
    return None


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of ``work``; None if ``stop`` is set before it is done, which is then cancelled."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        for left in (task, stopped):
            left.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


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
