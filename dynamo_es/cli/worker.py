"""``dynamo-es worker``: a process that serves a model."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

from dynamo_es.cli.process import (
    check_log,
    check_state_dir,
    run_async,
    set_up_logging,
    settle_heap,
    stop_on_signals,
)
from dynamo_es.clock import SystemClock
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import (
    LogConfig,
    LoggingConfig,
    MockConfig,
    RuntimeConfig,
    StateConfig,
    SystemConfig,
    WorkerConfig,
)
from dynamo_es.engines.mock_worker import MockWorkerSettings, run_mock_workers
from dynamo_es.runtime.core import RuntimeSettings


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("worker", help="serve a model on the request plane")
    engines = parser.add_subparsers(title="engines", metavar="ENGINE", required=True)
    mock = engines.add_parser("mock", help="an engine without a model: real scheduling, cache and timing, made-up text")
    for config in (WorkerConfig, MockConfig, LogConfig, StateConfig, RuntimeConfig, SystemConfig, LoggingConfig):
        add_flags(mock, config)
    mock.set_defaults(run=run_mock)


def run_mock(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = RuntimeSettings(
        load(LogConfig, flags, env),
        load(StateConfig, flags, env),
        load(RuntimeConfig, flags, env),
        "worker",
        load(SystemConfig, flags, env),
    )
    settings = MockWorkerSettings(process, load(WorkerConfig, flags, env), load(MockConfig, flags, env))
    check_log(process.log)
    check_state_dir(process.state)
    set_up_logging(logging_config)
    run_async(_serve(settings))
    return 0


async def _serve(settings: MockWorkerSettings) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def on_ready(worker_id: int) -> None:
        settle_heap()
        # One line on standard output, for whoever started the process.
        print(f"ready worker {worker_id}", flush=True)

    await run_mock_workers(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
