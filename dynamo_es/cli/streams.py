"""``dynamo-es streams``: a worker of the stream processors' group."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiokafka.errors import KafkaError
from prometheus_client import CollectorRegistry, ProcessCollector

from dynamo_es.cli.allocator import bound_free_memory
from dynamo_es.cli.process import check_log, check_state_dir, run_async, set_up_logging, stop_on_signals
from dynamo_es.clock import Clock, SystemClock
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import LogConfig, LoggingConfig, StateConfig, StreamsConfig, SystemConfig
from dynamo_es.errors import DynamoException
from dynamo_es.log.buffered import BackoffPolicy

if TYPE_CHECKING:
    from streams.faust_app import StreamsApp
    from streams.stream_worker import StreamsSettings

logger = logging.getLogger(__name__)
# They tell every step of every service.
_TALKATIVE = ("faust", "mode", "aiokafka")
_BACKOFF = BackoffPolicy(initial_s=1.0, maximum_s=30.0)
# A worker that ran for so long did well: the next fault begins with a short wait again.
_SETTLED_S = 120.0


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "streams", help="share snapshots, load aggregates and anomaly counts with other workers (Kafka)"
    )
    for config in (StreamsConfig, LogConfig, StateConfig, SystemConfig, LoggingConfig):
        add_flags(parser, config)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Work until SIGINT or SIGTERM."""
    from streams.faust_app import build_app, kafka_settings
    from streams.stream_worker import StreamsSettings

    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    settings = StreamsSettings(
        load(LogConfig, flags, env), load(StateConfig, flags, env), load(StreamsConfig, flags, env),
        load(SystemConfig, flags, env),
    )  # fmt: skip
    check_log(settings.log)
    kafka_settings(settings, env)
    check_state_dir(settings.state)
    set_up_logging(_quieter(logging_config))
    bound_free_memory(env)
    clock, rng = SystemClock(), random.SystemRandom()
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)

    def build() -> StreamsApp:
        return build_app(settings, clock=clock, rng=rng, registry=registry, environment=env)

    run_async(_run_until_signal(settings, build, clock, rng))
    return 0


def _quieter(config: LoggingConfig) -> LoggingConfig:
    """Faust's own messages from ``warning`` on, unless the filter says something of them."""
    named = {part.partition("=")[0].strip().partition(".")[0] for part in config.level.split(",")}
    level = ",".join([config.level, *(f"{name}=warning" for name in _TALKATIVE if name not in named)])
    return dataclasses.replace(config, level=level)


async def _run_until_signal(
    settings: StreamsSettings, build: Callable[[], StreamsApp], clock: Clock, rng: random.Random
) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)
    await work(settings, build, stop, clock, rng)


async def work(
    settings: StreamsSettings, build: Callable[[], StreamsApp], stop: asyncio.Event, clock: Clock, rng: random.Random
) -> None:
    """Run the application until ``stop``; when it ends by itself, hand over and make a new one. A supervisor.

    Raises what the first start raises.
    """
    failures = 0
    while not stop.is_set():
        began = clock.monotonic()
        error = await _work_once(settings, build(), stop, first=not failures)
        if error is None:
            return
        failures = 1 if clock.monotonic() - began > _SETTLED_S else failures + 1
        wait_s = _BACKOFF.wait_s(failures - 1, rng)
        logger.error("this worker left the group, and joins it again in %.1f s: %s", wait_s, error)
        try:
            async with asyncio.timeout(wait_s):
                await stop.wait()
        except TimeoutError:
            continue


async def _work_once(
    settings: StreamsSettings, app: StreamsApp, stop: asyncio.Event, *, first: bool
) -> BaseException | None:
    """None after ``stop``, else why the application ended. Only the first start may fail for good."""
    try:
        await app.start()
    except (DynamoException, KafkaError) as error:
        await app.stop()
        if first:
            raise
        return error
    if first:
        # One line on standard output, for whoever started the process.
        print(f"ready {settings.group}", flush=True)
    ended = await _until_ended(app, stop)
    await app.stop()
    return ended


async def _until_ended(app: StreamsApp, stop: asyncio.Event) -> BaseException | None:
    """Wait for a signal (None) or the end of the application (why)."""
    stopping = asyncio.ensure_future(stop.wait())
    ending = asyncio.ensure_future(app.wait_until_stopped())
    await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, ending):
        task.cancel()
    await asyncio.gather(stopping, ending, return_exceptions=True)
    if stop.is_set():
        return None
    return app.crash_reason or DynamoException("the application ended")
