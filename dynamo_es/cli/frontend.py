"""``dynamo-es frontend``: the HTTP frontend with its router."""

from __future__ import annotations

import argparse
import os
from typing import Any

from dynamo_es.cli.launch import CONFIGS, read_launch, start
from dynamo_es.config.options import add_flags


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser("frontend", help="serve the OpenAI-compatible HTTP API and route its requests")
    for config in CONFIGS:
        add_flags(parser, config)
    # How one of several processes is told its place; see --workers.
    parser.add_argument("--sibling", nargs=3, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(flags: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    return start(read_launch(flags, os.environ))
