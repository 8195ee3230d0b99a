"""``dynamo-es indexer``: a process that keeps part of the KV index and answers routers."""

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
from dynamo_es.config.tree import IndexerConfig, LogConfig, LoggingConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.services.indexer import IndexerSettings, run_indexer


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("indexer", help="keep part of the KV index for routers that ask (--use-remote-indexer)")
    for config in (IndexerConfig, LogConfig, StateConfig, RuntimeConfig, SystemConfig, LoggingConfig):
        add_flags(parser, config)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = RuntimeSettings(
        load(LogConfig, flags, env),
        load(StateConfig, flags, env),
        load(RuntimeConfig, flags, env),
        "indexer",
        load(SystemConfig, flags, env),
    )
    settings = IndexerSettings(process, load(IndexerConfig, flags, env))
    check_log(process.log)
    check_state_dir(process.state)
    set_up_logging(logging_config)
    run_async(_serve(settings))
    return 0


async def _serve(settings: IndexerSettings) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def on_ready(instance_id: int) -> None:
        settle_heap()
        # One line on standard output, for whoever started the process.
        print(f"ready indexer {instance_id:x}", flush=True)

    await run_indexer(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
