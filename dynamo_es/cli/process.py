"""What the verbs share: event loop, signals, logging, and what is checked before anything is opened or made."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from dynamo_es.cli.json_log import JsonFormatter
from dynamo_es.clock import SystemClock
from dynamo_es.config.command_options import ToolLoggingConfig
from dynamo_es.config.log_filter import parse_log_filter
from dynamo_es.config.options import load
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import LogConfig, LoggingConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.errors import ConfigError
from dynamo_es.folders import obstacle
from dynamo_es.log.base import EventLog
from dynamo_es.log.open import open_log
from dynamo_es.runtime.declared_topics import declared_topics
from schemas.registry import ProcessRole

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeSettings

T = TypeVar("T")


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is there, else on asyncio's own loop."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def set_up_logging(config: LoggingConfig) -> None:
    """Messages to standard error, one a line."""
    shown = parse_log_filter(config.level)
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(shown.admits)
    # The process is named, since several of a fleet (--workers, demo) may share one stream.
    text = logging.Formatter("%(asctime)s %(levelname)-7s [%(process)d] %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if config.jsonl else text)
    logging.basicConfig(level=shown.lowest, handlers=[handler])


def stop_on_signals(event: asyncio.Event) -> None:
    """SIGINT and SIGTERM set ``event``; a second one ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if event.is_set():
            logging.shutdown()
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        event.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)


def look_on_hangup(event: asyncio.Event) -> None:
    """SIGHUP sets ``event``, instead of ending the process."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, event.set)


def settle_heap() -> None:
    """What is loaded by now stays: the garbage collector need not walk it again, and may come by less often.

    Requests leave no cycles; the default threshold of 700 objects makes a busy process collect for each few of them.
    Clients of the log that are closed do, with what they read last: with more objects there are megabytes of them.
    """
    gc.collect()
    gc.freeze()
    # Every fourth time the middle generation: it is walked in a few milliseconds then, where 100,000 objects took 50.
    gc.set_threshold(5_000, 4, 250)


def load_process(flags: argparse.Namespace, role: ProcessRole) -> RuntimeSettings:
    """What every process of a fleet has, from flags and environment. Raises ``ConfigError``.

    A frontend shows its state on its own port, and has no system status server.
    """
    # Commands that only look at a log do without what a process of a fleet needs.
    from dynamo_es.runtime.core import RuntimeSettings

    env = os.environ
    system = SystemConfig() if role == "frontend" else load(SystemConfig, flags, env)
    return RuntimeSettings(
        load(LogConfig, flags, env), load(StateConfig, flags, env), load(RuntimeConfig, flags, env), role, system,
        load(TelemetryConfig, flags, env),
    )  # fmt: skip


def serve_process(
    settings: RuntimeSettings, logging_config: LoggingConfig, serve: Callable[[asyncio.Event], Awaitable[None]]
) -> None:
    """Run ``serve`` until SIGINT or SIGTERM sets its event, after the checks that need nothing opened.

    Raises ``ConfigError``.
    """
    prepare_process(settings, logging_config)

    async def run() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        await serve(stop)

    run_async(run())


def prepare_process(settings: RuntimeSettings, logging_config: LoggingConfig) -> None:
    """The checks that need nothing opened, then logging. Raises ``ConfigError``."""
    check_log(settings.log)
    check_state_dir(settings.state)
    set_up_logging(logging_config)


def announce_ready(what: str) -> None:
    """One line on standard output, for whoever started the process."""
    settle_heap()
    print(f"ready {what}", flush=True)


def check_log(config: LogConfig) -> None:
    """Refuse a URL that is wrong, or a log that no other process could see, and topics that cannot be. Opens nothing.

    Raises ``ConfigError``.
    """
    open_log(config.url, SystemClock())
    declared_topics(config)
    if urlsplit(config.url).scheme == "memory":
        raise ConfigError(
            f"{config.url} is a log within one process: no other process would see this one, nor it any other; "
            "use --log embedded:///dir (one machine) or kafka://host:port"
        )


def check_log_exists(config: LogConfig) -> None:
    """A command that only looks must not make a log where none is. Raises ``ConfigError``."""
    parts = urlsplit(config.url)
    if parts.scheme != "embedded":
        return
    folder = Path(unquote(parts.path))
    if not os.path.isfile(folder / "log.json"):
        remedy = "check the path, or make one: start a frontend or worker on it, or dynamo-es topics create"
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            remedy = "this user may not look into the folder"
        raise ConfigError(f"there is no log at {config.url}; {remedy}")


def check_state_dir(config: StateConfig) -> None:
    """See what is in the way of the state store before a log is made for nothing. Raises ``ConfigError``."""
    found = obstacle(Path(config.state_dir)) if config.state_dir is not None else None
    if found is not None:
        raise ConfigError(f"--state-dir {config.state_dir} cannot be used: {found}; choose another folder")


def run_on_log(
    flags: argparse.Namespace, use: Callable[[EventLog, LogConfig], Awaitable[int]], *, may_make: bool = False
) -> int:
    """Run a command on the log that flags and environment name; its exit code.

    Raises:
        ConfigError: A wrong value, or there is no such log and ``may_make`` is False; nothing was opened or made.
        LogError: As ``EventLog.start``, and what ``use`` raises.
    """
    config = load(LogConfig, flags, os.environ)
    logging_config = load(ToolLoggingConfig, flags, os.environ)
    check_log(config)
    if not may_make:
        check_log_exists(config)
    set_up_logging(logging_config)
    return run_async(_with_log(config, use))


async def _with_log(config: LogConfig, use: Callable[[EventLog, LogConfig], Awaitable[int]]) -> int:
    log = open_log(config.url, SystemClock(), rng=random.SystemRandom())
    await log.start()
    try:
        return await use(log, config)
    finally:
        await log.close()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
