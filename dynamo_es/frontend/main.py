"""The frontend process: builds the object graph, serves until it is told to stop, and ends in order."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.config.access_log_options import AccessLogConfig
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig, RouterConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.access_log import AccessLog, AccessLogCollector
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.chat_factory import ChatEngineFactory, ChatEngines, own_processors
from dynamo_es.frontend.chat_processors import ChatProcessors, ProcessorSettings, chat_processors
from dynamo_es.frontend.chat_processors import setup_engine_factory as setup_engine_factory  # noqa: PLC0414 - Dynamo's place for it
from dynamo_es.frontend.chat_processors import (
    setup_sglang_engine_factory as setup_sglang_engine_factory,  # noqa: PLC0414 - the same
)
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.dynamo_main import async_main as async_main  # noqa: PLC0414 - Dynamo's place for it
from dynamo_es.frontend.dynamo_main import graceful_shutdown as graceful_shutdown  # noqa: PLC0414 - the same
from dynamo_es.frontend.dynamo_main import main as main  # noqa: PLC0414 - the same
from dynamo_es.frontend.dynamo_main import parse_args as parse_args  # noqa: PLC0414 - the same
from dynamo_es.frontend.health import RuntimeHealth
from dynamo_es.frontend.http_protocol import OnRefused
from dynamo_es.frontend.key_gate import KeyGate
from dynamo_es.frontend.line_writer import LineWriter
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.frontend.loop_canary import LoopCanary
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_views import register_views
from dynamo_es.frontend.preprocess_pool import PreprocessCollector, PreprocessPool
from dynamo_es.frontend.route_extensions import FrontendRoute, check_duplicates
from dynamo_es.frontend.route_extensions import (
    load_frontend_route_extensions as load_frontend_route_extensions,  # noqa: PLC0414 - Dynamo's place for it
)
from dynamo_es.frontend.routes import check_paths, taken_paths
from dynamo_es.frontend.routing_plan import RoutingPlan, plan_routing
from dynamo_es.frontend.secrets_watch import FrontendSecrets
from dynamo_es.frontend.server import FrontendServer, ServedApp, bind, serve
from dynamo_es.frontend.siblings import Siblings, answers_of
from dynamo_es.frontend.starting import StartingApp
from dynamo_es.frontend.tls_handshakes import HandshakeCollector
from dynamo_es.frontend.tokenizer_backends import check_backend
from dynamo_es.log.base import EventLog
from dynamo_es.router.build import check_mode
from dynamo_es.router.index_server import ViewServer
from dynamo_es.router.modes import mode_named
from dynamo_es.router.remote_index import RemoteIndex
from dynamo_es.router.remote_index_metrics import RemoteIndexCollector
from dynamo_es.router.upkeep import start_upkeep
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.metrics_runtime import RuntimeCollector
from dynamo_es.runtime.views import RoutingViews

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Everything that a frontend process is configured by.

    ``plan``: how to route, instead of what ``router`` and ``aic`` say. ``chat_engine_factory``: makes the models' chat
    engines, instead of what ``chat_processor`` says.
    """

    process: RuntimeSettings
    frontend: FrontendConfig = field(default_factory=FrontendConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    aic: AicConfig = field(default_factory=AicConfig)
    paths: HttpPathsConfig = field(default_factory=HttpPathsConfig)
    chat_processor: ChatProcessorConfig = field(default_factory=ChatProcessorConfig)
    extensions: Sequence[FrontendRoute] = ()
    tls: TlsConfig = field(default_factory=TlsConfig)
    api_keys: ApiKeysConfig = field(default_factory=ApiKeysConfig)
    access_log: AccessLogConfig = field(default_factory=AccessLogConfig)
    plan: RoutingPlan | None = None
    chat_engine_factory: ChatEngineFactory | None = None

    def routing(self) -> RoutingPlan:
        """How to route: the plan, or what the options say. Raises ``ConfigError``."""
        check_mode(mode_named(self.frontend.router_mode))
        return self.plan if self.plan is not None else plan_routing(self.frontend, self.router, self.aic)


class BuildApp(Protocol):
    """Makes the application of a process whose port is open already."""

    def __call__(
        self, core: RuntimeCore, metrics: FrontendMetrics, executor: Executor, /
    ) -> Coroutine[Any, Any, FrontendApp]:
        """``core`` is not started. What is opened is left to ``core.close``. Raises ``DynamoException``."""


async def run_frontend(
    settings: FrontendSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[FrontendServer], None] | None = None,
    siblings: Siblings | None = None,
    look: asyncio.Event | None = None,
    core: RuntimeCore | None = None,
    build: BuildApp | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain and give everything back.

    ``core``: the caller's, who closes it; it is not started. None: one is made of ``settings``, ``rng`` and ``log``.
    ``build``: makes the application instead of ``recover``.
    ``siblings``: the other processes on the same port, which are asked and answered from the start to the end.
    ``look``: set by whoever wants certificates and API keys to be loaded again at once.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    plan = settings.routing()
    check_paths(settings.paths)
    check_backend(settings.frontend)
    _check_extensions(settings)
    secrets = FrontendSecrets(settings.tls, settings.api_keys, clock, look)
    # The port is taken first: a mistake there should not cost a catch-up.
    listener = bind(settings.frontend, reuse_port=siblings is not None)
    lines = _access_lines(settings.access_log, listener)
    given = core
    if core is None:
        core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    make = build if build is not None else partial(recover, settings, plan)
    metrics = process_metrics(core, settings.frontend.metrics_prefix)
    canary = LoopCanary(metrics.registry, settings.frontend.metrics_prefix, clock)
    entrance = StartingApp(core, metrics, settings.paths, siblings)
    executor = PreprocessPool(settings.frontend.preprocess_threads, settings.frontend.preprocess_queue)
    metrics.registry.register(PreprocessCollector(executor, settings.frontend.metrics_prefix))
    try:
        canary.start(core.tasks)
        if siblings is not None:
            await siblings.start(answers_of(metrics, None))
        door = _with_keys(entrance, secrets, settings, metrics)
        door, refused = _with_access_log(door, lines, settings, metrics, clock)
        server = await serve(door, settings.frontend, listener=listener, tls=secrets.tls, on_refused=refused)
        try:
            _watch_secrets(secrets, server, settings, metrics, core.tasks)
            app = await unless_stopped(stop, make(core, metrics, executor))
            if app is not None:
                if siblings is not None:
                    await _join(siblings, app)
                entrance.become(app)
                if on_ready is not None:
                    on_ready(server)
                await _until_stopped(stop, server)
        finally:
            await secrets.close()
            await server.shutdown()
    finally:
        listener.close()
        if siblings is not None:
            await siblings.close()
        await canary.close()
        if given is None:
            await core.close()
        executor.shutdown(wait=False, cancel_futures=True)
        await _close_lines(lines)


async def _close_lines(lines: LineWriter | None) -> None:
    if lines is not None:
        await asyncio.to_thread(lines.close)


def _with_access_log(
    door: ServedApp, lines: LineWriter | None, settings: FrontendSettings, metrics: FrontendMetrics, clock: Clock
) -> tuple[ServedApp, OnRefused | None]:
    """The application behind the access log, if there is one, and who is told of what does not reach it."""
    if lines is None:
        return door, None
    AccessLogCollector(lines, metrics.registry, settings.frontend.metrics_prefix)
    access_log = AccessLog(door, lines, clock, taken_paths(settings.paths))
    return access_log, access_log.refused


def _access_lines(config: AccessLogConfig, listener: socket.socket) -> LineWriter | None:
    """Who writes the access log; None: nobody. Closes ``listener`` if it cannot be opened."""
    if config.path is None:
        return None
    try:
        return LineWriter(config.path, config.queue)
    except ConfigError:
        listener.close()
        raise


def _watch_secrets(
    secrets: FrontendSecrets,
    server: FrontendServer,
    settings: FrontendSettings,
    metrics: FrontendMetrics,
    tasks: BackgroundTasks,
) -> None:
    prefix, registry = settings.frontend.metrics_prefix, metrics.registry
    text = "1: the files changed and could not be loaded; what was loaded before is in force"
    stale = Gauge(f"{prefix}_secrets_stale", text, ("what",), registry=registry)
    secrets.watch(server, settings.frontend.secrets_check_interval_s, stale, tasks)
    if secrets.tls is not None:
        registry.register(HandshakeCollector(secrets.handshakes, prefix))


def _with_keys(
    entrance: ServedApp, secrets: FrontendSecrets, settings: FrontendSettings, metrics: FrontendMetrics
) -> ServedApp:
    """The application behind a door, if there are API keys."""
    if secrets.keys is None:
        return entrance
    config = settings.frontend
    return KeyGate(
        entrance,
        secrets.keys,
        settings.paths,
        metrics.registry,
        config.metrics_prefix,
        probes_open=not config.api_keys_for_probes,
    )


def _check_extensions(settings: FrontendSettings) -> None:
    try:
        check_duplicates(settings.extensions, taken_paths(settings.paths))
    except ValueError as error:
        raise ConfigError(f"--frontend-route-extension: {error}") from error


async def _join(siblings: Siblings, app: FrontendApp) -> None:
    """Take over what the others on this port were told, and answer them from now on."""
    service = app.service
    service.siblings = siblings
    siblings.answer_with(answers_of(service.metrics, service.directory))
    for name, thresholds in (await siblings.thresholds()).items():
        if name in service.directory.thresholds():
            service.directory.set_thresholds(name, thresholds)


def process_metrics(core: RuntimeCore, prefix: str) -> FrontendMetrics:
    """A registry with what a frontend shows from its first moment on."""
    registry = CollectorRegistry()
    registry.register(RuntimeCollector(lambda: [core]))
    ProcessCollector(registry=registry)
    return FrontendMetrics(registry, prefix)


async def recover(
    settings: FrontendSettings,
    plan: RoutingPlan,
    core: RuntimeCore,
    metrics: FrontendMetrics,
    executor: Executor,
) -> FrontendApp:
    """Bring the views up to the log, and make the application over them."""
    await core.start()
    views = RoutingViews(core, keeps_index=plan.remote_timeout_s is None)
    await views.start()
    await _catch_up(views, settings.process.state.catch_up_timeout_s)
    start_upkeep(core, views)
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
        migrations=metrics.migrations_of,
        processors=processors_of(settings, executor, core.clock),
        chat_engines=chat_engines_of(settings),
        tokenizer_caches=metrics.tokenizer_cache_of,
    )
    directory.refresh()
    log_watch = LogWatch(core)
    log_watch.start()
    register_views(metrics.registry, core, views, directory, settings.frontend.metrics_prefix)
    if remote is not None:
        metrics.registry.register(RemoteIndexCollector(remote))
    health = RuntimeHealth(core, views, directory, log_watch, remote)
    return build_app(
        settings.frontend, directory, health, metrics, core.clock, executor,
        paths=settings.paths, extensions=settings.extensions, tracing=core.tracing,
    )  # fmt: skip


def processors_of(settings: FrontendSettings, executor: Executor, clock: Clock) -> ChatProcessors | None:
    """What makes the models' chat processors, by the options; None: chat goes the frontend's own way.

    Raises:
        ConfigError: The options do not go together, or the library is not installed.
    """
    if settings.chat_engine_factory is not None:
        return own_processors(settings.chat_engine_factory)
    frontend = settings.frontend
    parts = ProcessorSettings(
        settings.chat_processor.preprocess_workers,
        settings.chat_processor.trust_remote_code,
        frontend.exclude_tools_when_tool_choice_none,
    )
    return chat_processors(settings.chat_processor, parts, executor, lambda: clock.now_ms() / 1000)


def chat_engines_of(settings: FrontendSettings) -> ChatEngines | None:
    """What makes the models' chat engines, if a script does."""
    factory = settings.chat_engine_factory
    return None if factory is None or own_processors(factory) is not None else ChatEngines(factory)


async def _open_index(core: RuntimeCore, views: RoutingViews, plan: RoutingPlan) -> RemoteIndex | None:
    """Ask other processes for the KV index, or answer them, if the plan says so."""
    if plan.remote_timeout_s is not None:
        remote = RemoteIndex(core, deadline_s=plan.remote_timeout_s)
        await remote.start()
        return remote
    if plan.settings.serve_indexer and views.kv_index is not None:
        ViewServer(core, views.kv_index).start()
    return None


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
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
