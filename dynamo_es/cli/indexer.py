"""``dynamo-es indexer``: a process that keeps part of the KV index and answers routers."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

from dynamo_es.cli.allocator import bound_free_memory
from dynamo_es.cli.process import announce_ready, load_process, serve_process
from dynamo_es.clock import SystemClock
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import IndexerConfig, LogConfig, LoggingConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.services.indexer import IndexerSettings, run_indexer


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("indexer", help="keep part of the KV index for routers that ask (--use-remote-indexer)")
    for config in (
        IndexerConfig, LogConfig, StateConfig, RuntimeConfig, SystemConfig, TelemetryConfig, LoggingConfig,
    ):  # fmt: skip
        add_flags(parser, config)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = load_process(flags, "indexer")
    settings = IndexerSettings(process, load(IndexerConfig, flags, env))
    bound_free_memory(env)
    serve_process(process, logging_config, lambda stop: _serve(settings, stop))
    return 0


async def _serve(settings: IndexerSettings, stop: asyncio.Event) -> None:
    def on_ready(instance_id: int) -> None:
        announce_ready(f"indexer {instance_id:x}")

    await run_indexer(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
