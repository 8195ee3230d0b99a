"""The reference as a child process, and when its tests are left out."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PYTHON_VARIABLE = "DYN_ES_REFERENCE_PYTHON"
SEED_VARIABLE = "DYN_ES_CONFORMANCE_SEED"
VERSION = "1.5.1"
_CHILD = Path(__file__).with_name("reference_child.py")
_ANSWER_TIMEOUT_S = 60.0
_HOW = f"needs the reference; set {PYTHON_VARIABLE} to a python that has ai-dynamo-runtime=={VERSION} and pyzmq"


class Reference:
    """Plays scripts on the reference. One script after the other; not thread-safe."""

    def __init__(self, python: str) -> None:
        self._process = subprocess.Popen(
            [python, str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": "", "DYN_LOG": "error"},
            text=True,
            encoding="utf-8",
        )
        self.version: str = self._answer("at its start")["version"]

    def play(self, script: dict[str, Any]) -> list[dict[str, Any]]:
        """The result of every step."""
        assert self._process.stdin is not None
        text = json.dumps(script)
        try:
            self._process.stdin.write(text + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pytest.fail(f"the reference is gone before {text[:4000]}")
        results: list[dict[str, Any]] = self._answer(text)
        return results

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _answer(self, asked: str) -> Any:
        assert self._process.stdout is not None
        watchdog = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            self._process.wait()
            pytest.fail(f"the reference ended with {self._process.returncode}, or hung: {asked[:4000]}")
        return json.loads(line)


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    """The reference, running; tests that ask for it are skipped where there is none."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        pytest.skip(_HOW)
    child = Reference(python)
    try:
        if child.version != VERSION:
            pytest.fail(f"{PYTHON_VARIABLE} has ai-dynamo-runtime {child.version}, these tests are for {VERSION}")
        yield child
    finally:
        child.close()


@pytest.fixture(scope="session")
def seed() -> int:
    """Where the random scripts start; another seed gives others."""
    return int(os.environ.get(SEED_VARIABLE, "1"))
