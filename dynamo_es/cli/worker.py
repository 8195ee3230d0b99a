"""``dynamo-es worker``: a process that serves a model."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

from dynamo_es.cli.process import announce_ready, load_process, serve_process
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
    process = load_process(flags, "worker")
    settings = MockWorkerSettings(process, load(WorkerConfig, flags, env), load(MockConfig, flags, env))
    serve_process(process, logging_config, lambda stop: _serve(settings, stop))
    return 0


async def _serve(settings: MockWorkerSettings, stop: asyncio.Event) -> None:
    def on_ready(worker_id: int) -> None:
        announce_ready(f"worker {worker_id}")

    await run_mock_workers(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
