"""The command ``dynamo-es``: one verb a file."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

from dynamo_es import __version__
from dynamo_es.errors import DynamoException

_VERBS = {
    "frontend": "serve the OpenAI-compatible HTTP API and route its requests",
    "worker": "serve a model on the request plane",
    "indexer": "keep part of the KV index for routers that ask (--use-remote-indexer)",
    "relay": "KV caches of several data centres: tell, and ask which holds a prompt",
    "streams": "share snapshots, load aggregates and anomaly counts with other workers (Kafka)",
    "topics": "declare, create, list and read the topics of a log",
    "dead-letters": "list, show and retry the records that readers refused",
    "state": "show what the log folds to, or verify a state store against it",
    "diagnose": "tell why requests are, or are not, routed by cache; exit code 1 if something is in the way",
    "keys": "add, list and revoke the API keys of a frontend",
    "config": "show all options, or the values that a process would use",
    "demo": "start one frontend and four mock workers on an embedded log, and send a few chats",
}
"""In the order of the help. A verb's module is imported when it is used: some need much that others do without."""


# Commands that are named because they have a flag that another one has not.
_MAX_TOLD = 3


class _Parser(argparse.ArgumentParser):
    """Tells a mistake in one line, as every other one, and guesses no flag from its beginning."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **{**settings, "allow_abbrev": False})

    def error(self, message: str) -> NoReturn:
        hint = f"see {self.prog} --help"
        if message.startswith("unrecognized arguments: "):
            words = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            hint = "".join(map(self._hint, words)) + hint
        self.exit(2, f"{_one_line(f'{message}; {hint}')}\n")

    def _hint(self, flag: str) -> str:
        """What may be meant by a flag that the verb does not have: another verb's, or one that is spelt alike."""
        everywhere = dict[str, list[str]]()
        for name, prog in _flags_of(build_parser()):
            everywhere.setdefault(name, []).append(prog)
        if flag in everywhere:
            return f"{flag} is an option of {', '.join(everywhere[flag][:_MAX_TOLD])}; "
        for known in (sorted({name for name, _ in _flags_of(self)}), sorted(everywhere)):
            if near := difflib.get_close_matches(flag, known, n=1, cutoff=0.75):
                return f"did you mean {near[0]}? "
        return ""


def _flags_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    """Flags of all verbs, each with the command that has it."""
    for action in parser._actions:
        yield from ((flag, parser.prog) for flag in action.option_strings if flag.startswith("--"))
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _flags_of(verb)


def build_parser(*used: str) -> argparse.ArgumentParser:
    """The command line, of which only the verbs in ``used`` can be parsed; without any, all can.

    Every verb sets ``run``: namespace in, exit code out.
    """
    parser = _Parser(
        prog="dynamo-es",
        description="KV-cache-aware routing for LLM inference fleets, event-sourced on Kafka or an embedded log.",
    )
    parser.add_argument("--version", action="version", version=f"dynamo-es {__version__}")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for verb, text in _VERBS.items():
        if not used or verb in used:
            import_module(f"dynamo_es.cli.{verb.replace('-', '_')}").add_parser(verbs)
        else:
            verbs.add_parser(verb, help=text)
    return parser


def _parser_for(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """What can parse them."""
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help", "--version"):
        return build_parser("")
    return build_parser(first) if first in _VERBS else build_parser()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. A user's mistake, or a fault outside of the process, is one line and exit code 2."""
    given = sys.argv[1:] if arguments is None else arguments
    flags = _parser_for(given).parse_args(given)
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
