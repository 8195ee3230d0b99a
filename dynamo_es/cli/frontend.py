"""``dynamo-es frontend``: the HTTP frontend with its router."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from typing import Any

from dynamo_es.cli.process import announce_ready, load_process, serve_process
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
    process = load_process(flags, "frontend")
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
    serve_process(process, logging_config, lambda stop: _serve(settings, stop))
    return 0


async def _serve(settings: FrontendSettings, stop: asyncio.Event) -> None:
    def on_ready(server: FrontendServer) -> None:
        announce_ready(f"http://{server.host}:{server.port}")

    await run_frontend(settings, stop, clock=SystemClock(), rng=random.SystemRandom(), on_ready=on_ready)
