"""The command line as a whole: what it says of its verbs, and what it imports for one of them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import dynamo_es.cli.main
from dynamo_es.cli.main import build_parser

WATCHED = (
    "fastapi",
    "uvicorn",
    "transformers",
    "tokenizers",
    "numpy",
    "zmq",
    "rocksdict",
    "prometheus_client",
    "jinja2",
)


def verbs_of(parser: argparse.ArgumentParser) -> dict[str, str | None]:
    (verbs,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {choice.dest: choice.help for choice in verbs._choices_actions}


def test_the_help_says_of_each_verb_what_the_verb_says_of_itself() -> None:
    assert verbs_of(build_parser("")) == verbs_of(build_parser())


def test_every_verb_can_be_parsed_by_itself() -> None:
    for verb in verbs_of(build_parser("")):
        with pytest.raises(SystemExit) as caught:
            build_parser(verb).parse_args([verb, "--help"])
        assert caught.value.code == 0


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["topics", "plan", "--log", "embedded://{folder}/none"], ["keys", "--help"]],
)
def test_a_verb_imports_nothing_that_others_need(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from dynamo_es.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"sys.exit([name for name in {WATCHED!r} if name in sys.modules] or 0)\n"
    )
    given = [argument.replace("{folder}", str(tmp_path)) for argument in arguments]
    done = subprocess.run([sys.executable, "-c", code, *given], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_flag_of_another_verb_is_still_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dynamo_es.cli.main.main(["topics", "list", "--router-mod"])
    assert "did you mean --router-mode?" in capsys.readouterr().err
