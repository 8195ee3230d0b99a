"""``dynamo-es frontend``: the HTTP frontend with its router."""

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
from dynamo_es.config.aic_options import AicConfig
from dynamo_es.config.options import add_flags, load
from dynamo_es.config.tree import (
    FrontendConfig,
    HttpPathsConfig,
    LogConfig,
    LoggingConfig,
    RouterConfig,
    RuntimeConfig,
    StateConfig,
)
from dynamo_es.frontend.main import FrontendSettings, run_frontend
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.runtime.core import RuntimeSettings


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("frontend", help="serve the OpenAI-compatible HTTP API and route its requests")
    for config in (
        FrontendConfig,
        HttpPathsConfig,
        RouterConfig,
        AicConfig,
        LogConfig,
        StateConfig,
        RuntimeConfig,
        LoggingConfig,
    ):
        add_flags(parser, config)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    env = os.environ
    logging_config = load(LoggingConfig, flags, env)
    process = RuntimeSettings(
        load(LogConfig, flags, env), load(StateConfig, flags, env), load(RuntimeConfig, flags, env), "frontend"
    )
    settings = FrontendSettings(
        process,
        load(FrontendConfig, flags, env),
        load(RouterConfig, flags, env),
        load(AicConfig, flags, env),
        load(HttpPathsConfig, flags, env),
    )
    if settings.frontend.model_path is not None:
        # It is loaded when a worker comes; a mistake should not wait until then.
        load_tokenizer(settings.frontend.model_path)
    check_log(process.log)
    check_state_dir(process.state)
    set_up_logging(logging_config)
    run_async(_serve(settings))
    return 0


async def _serve(settings: FrontendSettings) -> None:
    stop = asyncio.Event()
    stop_on_signals(stop)

    def on_ready(server: FrontendServer) -> None:
        settle_heap()
        # One line on standard output, for whoever started the process.
        print(f"ready http://{server.host}:{server.port}", flush=True)

    await run_frontend(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
