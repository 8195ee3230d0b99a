"""The command ``dynamo-es``: one verb a file."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from dynamo_es import __version__
from dynamo_es.cli import config, dead_letters, demo, frontend, indexer, keys, state, streams, topics, worker
from dynamo_es.errors import DynamoException


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as every other one, and guesses no flag from its beginning."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        hint = f"see {self.prog} --help"
        if message.startswith("unrecognized arguments: "):
            meant = {flag for word in message.split() if word.startswith("--") for flag in self._near(word)}
            if meant:
                hint = f"did you mean {', '.join(sorted(meant))}? {hint}"
        self.exit(2, f"{_one_line(f'{message}; {hint}')}\n")

    def _near(self, word: str) -> list[str]:
        """The flag of any verb that is most like ``word``, if one is."""
        return difflib.get_close_matches(word.partition("=")[0], sorted(set(_flags_of(self))), n=1, cutoff=0.75)


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from (flag for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _flags_of(verb)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Every verb sets ``run``: namespace in, exit code out."""
    parser = _Parser(
        prog="dynamo-es",
        description="KV-cache-aware routing for LLM inference fleets, event-sourced on Kafka or an embedded log.",
    )
    parser.add_argument("--version", action="version", version=f"dynamo-es {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb in (frontend, worker, indexer, streams, topics, dead_letters, state, keys, config, demo):
        verb.add_parser(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. A user's mistake, or a fault outside of the process, is one line and exit code 2."""
    flags = build_parser().parse_args(arguments)
    try:
        code: int = flags.run(flags)
        sys.stdout.flush()
    except DynamoException as error:
        print(_one_line(str(error)), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the output has enough; the interpreter's own flush at the end must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code


def _one_line(message: str) -> str:
    return "dynamo-es: " + "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in message)


if __name__ == "__main__":
    sys.exit(main())
