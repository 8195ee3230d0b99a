"""The Vercel AI SDK against a frontend on a socket, by its providers for OpenAI, what is like OpenAI, and Anthropic.

Needs node and the packages of ``tests/clients/vercel`` (``npm install --prefix tests/clients/vercel``).
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_clients_openai import picture
from tests.support.client_server import ClientServer, client_server
from tests.support.runtimes import wait_for

FOLDER = Path(__file__).parents[1] / "clients" / "vercel"
NODE = shutil.which("node")
PROVIDERS = ["chat", "responses", "compatible", "messages"]
pytestmark = [
    pytest.mark.skipif(NODE is None, reason="needs node"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "ai").is_dir(), reason="needs npm install --prefix tests/clients/vercel"
    ),
]


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


@pytest.fixture(scope="module")
def report(server: ClientServer) -> dict[str, Any]:
    """What all operations came to, in one run of the SDK."""
    command = [str(NODE), "ask.mjs", server.url, picture()]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("provider", PROVIDERS)
def test_texts_whole_and_streamed(provider: str, report: dict[str, Any]) -> None:
    found = report[provider]
    assert found["whole"]["text"] == found["stream"]["text"] == "Héllo"
    assert found["whole"] == found["stream"]
    assert found["whole"]["finishReason"] == "stop"
    assert found["whole"]["tokens"] > 30


@pytest.mark.parametrize("provider", PROVIDERS)
def test_streams_with_tools_run_over_several_steps(provider: str, report: dict[str, Any]) -> None:
    tools, whole = report[provider]["tools"], report[provider]["toolsWhole"]
    assert (tools["asked"], tools["steps"]) == (["Paris", "Rome"], 2), tools
    assert tools["fragments"] > 2
    assert "I look." in tools["text"]
    assert tools["text"].endswith("Sunny in Rome")
    assert (whole["inputs"], whole["steps"], whole["text"]) == (["Paris", "Rome"], 2, "Sunny in Rome")
    assert report[provider]["required"] == ["Oslo"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_structured_output_and_pictures(provider: str, report: dict[str, Any]) -> None:
    assert report[provider]["structured"] == [{"final": 3}] * 2
    assert report[provider]["picture"] == "A cat"


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_failures_retries_and_aborts(provider: str, report: dict[str, Any], server: ClientServer) -> None:
    found = report[provider]
    assert found["broken"] == {"text": "Hel", "message": "Internal server error"}
    assert found["again"] == "Hello"
    assert found["abort"] is True
    assert found["unknown"]["status"] == 404
    # The worker learns of an abort later than the client that aborts.
    await wait_for(lambda: server.stopped.count(True) >= len(PROVIDERS))


def test_embeddings_and_completions(report: dict[str, Any]) -> None:
    assert report["embeddings"] == [8, 8]
    assert report["completion"] == "Hello"
