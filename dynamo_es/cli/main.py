"""The command ``dynamo-es``: one verb a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dynamo_es import __version__
from dynamo_es.cli import config, demo, frontend, state, topics, worker
from dynamo_es.errors import DynamoException


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Every verb sets ``run``: namespace in, exit code out."""
    parser = argparse.ArgumentParser(
        prog="dynamo-es",
        description="KV-cache-aware routing for LLM inference fleets, event-sourced on Kafka or an embedded log.",
    )
    parser.add_argument("--version", action="version", version=f"dynamo-es {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in (frontend, worker, topics, state, config, demo):
        verb.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. A user's mistake, or a fault outside of the process, is one line and exit code 2."""
    flags = build_parser().parse_args(arguments)
    try:
        code: int = flags.run(flags)
    except DynamoException as error:
        print(f"dynamo-es: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
