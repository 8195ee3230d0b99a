"""How a frontend is started from its options: one process, several behind one port, or a chat in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import random
import resource
import signal
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_es.cli.allocator import bound_free_memory
from dynamo_es.cli.process import (
    announce_ready,
    load_process,
    look_on_hangup,
    prepare_process,
    run_async,
    stop_on_signals,
)
from dynamo_es.cli.supervisor import Supervisor
from dynamo_es.clock import SystemClock
from dynamo_es.config.access_log_options import AccessLogConfig
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.dump import described, dump_config
from dynamo_es.config.dynamo_options import DynamoConfig, check_refused, ignored
from dynamo_es.config.launch_options import LaunchConfig
from dynamo_es.config.options import arguments_of, load, origins
from dynamo_es.config.processor_options import ChatProcessorConfig
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import (
    FrontendConfig,
    HttpPathsConfig,
    LogConfig,
    LoggingConfig,
    RouterConfig,
    RuntimeConfig,
    StateConfig,
)
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.interactive import run_interactive
from dynamo_es.frontend.main import FrontendSettings, run_frontend
from dynamo_es.frontend.route_extensions import FrontendRoute, load_frontend_route_extensions
from dynamo_es.frontend.secrets_watch import FrontendSecrets
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.frontend.siblings import Siblings
from dynamo_es.frontend.terminal_lines import typed_lines, written
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.http_listen import reserve
from dynamo_es.store.layout import process_folder

logger = logging.getLogger(__name__)

CONFIGS: tuple[type[Any], ...] = (
    FrontendConfig, ChatProcessorConfig, LaunchConfig, HttpPathsConfig, TlsConfig, ApiKeysConfig,
    AccessLogConfig, TelemetryConfig, RouterConfig, AicConfig, LogConfig, StateConfig, RuntimeConfig, DynamoConfig,
    LoggingConfig,
)  # fmt: skip
"""Everything that a frontend has options for."""
_STOP_MARGIN_S = 15.0
"""Time that a process may take to end, beyond its drain limits, before it is killed."""


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be started.

    Attributes:
        settings: Of the frontend.
        launch: Of its processes.
        logging: What they say.
        notes: What to tell about options that change nothing.
        arguments: The command line, for processes of their own.
        sibling: Folder, index and count of one process among several; None: this one starts them, or is alone.
    """

    settings: FrontendSettings
    launch: LaunchConfig
    logging: LoggingConfig
    notes: Sequence[str] = ()
    arguments: Sequence[str] = ()
    sibling: tuple[Path, int, int] | None = None


def read_launch(flags: argparse.Namespace, env: Mapping[str, str]) -> Launch:
    """The options, checked together; ``--dump-config-to`` is done. Nothing else is opened.

    Raises:
        ConfigError: What is wrong, in one line.
    """
    dynamo, launch = load(DynamoConfig, flags, env), load(LaunchConfig, flags, env)
    check_refused(dynamo)
    frontend = load(FrontendConfig, flags, env)
    if dynamo.load_aware:
        frontend = dataclasses.replace(frontend, router_mode="kv")
    if launch.dump_config_to is not None:
        dump_config(launch.dump_config_to, described([load(config, flags, env) for config in CONFIGS], flags, env))
    settings = FrontendSettings(
        load_process(flags, "frontend"),
        frontend,
        load(RouterConfig, flags, env),
        load(AicConfig, flags, env),
        load(HttpPathsConfig, flags, env),
        chat_processor=load(ChatProcessorConfig, flags, env),
        tls=load(TlsConfig, flags, env),
        api_keys=load(ApiKeysConfig, flags, env),
        access_log=load(AccessLogConfig, flags, env),
    )
    _check_together(settings, launch)
    sibling = getattr(flags, "sibling", None)
    return Launch(
        settings,
        launch,
        _logging(flags, env, launch),
        ignored(dynamo),
        arguments_of(flags, CONFIGS),
        None if sibling is None else (Path(sibling[0]), int(sibling[1]), int(sibling[2])),
    )


def _logging(flags: argparse.Namespace, env: Mapping[str, str], launch: LaunchConfig) -> LoggingConfig:
    config = load(LoggingConfig, flags, env)
    if launch.interactive and origins(LoggingConfig, flags, env)["level"] == "default":
        return LoggingConfig("warning")  # a chat is not to be interrupted by good news
    return config


def _check_together(settings: FrontendSettings, launch: LaunchConfig) -> None:
    if launch.interactive and launch.route_extensions:
        raise ConfigError(
            "--frontend-route-extension is only supported by the HTTP frontend, "
            "so it cannot be combined with --interactive"
        )
    if launch.interactive and launch.workers > 1:
        raise ConfigError("--workers is for the HTTP frontend; it cannot be combined with --interactive")
    if launch.workers > 1 and settings.process.runtime.port:
        raise ConfigError(
            "--request-plane-port names one port, and with --workers every process needs one of its own; leave it out"
        )


def start(launch: Launch) -> int:
    """Serve, or chat, until SIGINT or SIGTERM; the exit code.

    Raises:
        DynamoException: It cannot start; says why and what to do.
    """
    prepared = prepare(launch)

    async def run() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await serve(prepared, stop)

    run_async(run())
    return 0


def prepare(launch: Launch) -> Launch:
    """The checks that need nothing opened, and what is the whole process's: limits, logging. With the extensions.

    Raises:
        DynamoException: What is in the way.
    """
    bound_free_memory(os.environ)
    if launch.settings.frontend.model_path is not None:
        # It is loaded when a worker comes; a mistake should not wait until then.
        load_tokenizer(launch.settings.frontend.model_path)
    # Every process that serves reads these; a mistake is told before there are any.
    FrontendSecrets(launch.settings.tls, launch.settings.api_keys, SystemClock())
    settings = dataclasses.replace(launch.settings, extensions=_extensions(launch.launch.route_extensions))
    raise_fd_limit(launch.launch.fd_limit_target)
    prepare_process(settings.process, launch.logging)
    return dataclasses.replace(launch, settings=settings)


async def serve(launch: Launch, stop: asyncio.Event) -> None:
    """What was asked for, until ``stop`` is set.

    Raises:
        DynamoException: It cannot start; says why and what to do.
    """
    if launch.sibling is None or launch.sibling[1] == 0:
        for note in launch.notes:
            logger.warning("%s", note)
    if launch.launch.interactive:
        await _chat(launch, stop)
    elif launch.launch.workers > 1 and launch.sibling is None:
        await _supervise(launch, stop)
    else:
        await _serve(launch, stop)


def raise_fd_limit(target: int) -> None:
    """Raise the soft limit of open files to ``target``, or to the hard limit if that is lower. 0 or less: leave it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = target if hard == resource.RLIM_INFINITY else min(target, hard)
    if wanted > soft >= 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _extensions(names: Sequence[str]) -> list[FrontendRoute]:
    routes: list[FrontendRoute] = []
    for name in dict.fromkeys(names):
        try:
            routes += load_frontend_route_extensions([name])
        except Exception as error:  # a provider is code of others: it may raise anything
            known = isinstance(error, ValueError | TypeError) and repr(name) in str(error)
            text = str(error) if known else f"{name!r} failed with {describe(error)}: {error}"
            raise ConfigError(f"--frontend-route-extension (DYN_FRONTEND_ROUTE_EXTENSIONS): {text}") from error
    return routes


async def _serve(launch: Launch, stop: asyncio.Event) -> None:
    settings = launch.settings

    def on_ready(server: FrontendServer) -> None:
        announce_ready(f"{server.scheme}://{server.host}:{server.port}")

    look = asyncio.Event()
    if _reloads(settings):
        look_on_hangup(look)
    await run_frontend(
        settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready, look=look,
        siblings=None if launch.sibling is None else Siblings(*launch.sibling),
    )  # fmt: skip


def _reloads(settings: FrontendSettings) -> bool:
    return settings.tls.cert_path is not None or settings.api_keys.file is not None


# -- several processes -------------------------------------------------------------------------------------------------


async def _supervise(launch: Launch, stop: asyncio.Event) -> None:
    settings, count = launch.settings, launch.launch.workers
    config, runtime = settings.frontend, settings.process.runtime
    scheme = "http" if settings.tls.cert_path is None else "https"
    with (
        reserve(config.http_host, config.http_port, "--http-host or --http-port") as held,
        tempfile.TemporaryDirectory(prefix="dynamo-es-frontend-") as folder,
    ):
        host, port = held.getsockname()[:2]
        supervisor = Supervisor(
            [child_arguments(launch, folder, index, port) for index in range(count)],
            "frontend process",
            stop_limit_s=config.graceful_shutdown_timeout_s + runtime.drain_timeout_s + _STOP_MARGIN_S,
        )
        if _reloads(settings):
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGHUP, supervisor.send_signal, signal.SIGHUP)
        await supervisor.run(stop, lambda: announce_ready(f"{scheme}://{host}:{port}"))


def child_arguments(launch: Launch, folder: str, index: int, port: int) -> list[str]:
    """The command line of one of several processes: the same options, but for what each has for itself."""
    state = launch.settings.process.state.state_dir
    own = [f"--http-port={port}", "--dump-config-to=none"]
    if state is not None:
        own.append(f"--state-dir={process_folder(Path(state), index)}")
    return ["frontend", *launch.arguments, *own, "--sibling", folder, str(index), str(launch.launch.workers)]


# -- the terminal ------------------------------------------------------------------------------------------------------


async def _chat(launch: Launch, stop: asyncio.Event) -> None:
    await run_interactive(
        launch.settings, stop, clock=SystemClock(), rng=random.SystemRandom(), lines=typed_lines(), write=written,
        model=launch.launch.model_name,
    )  # fmt: skip
