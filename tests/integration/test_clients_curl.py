"""curl, as documentation shows it, against a frontend on a socket."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.client_server import ClientServer, client_server, says

CURL = shutil.which("curl")
pytestmark = pytest.mark.skipif(CURL is None, reason="needs curl")
JSON = ("-H", "content-type: application/json")


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


def curl(*arguments: str) -> str:
    command = [str(CURL), "--silent", "--show-error", "--max-time", "60", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def body(**more: object) -> str:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": says("Hello")}], **more})


def test_a_chat_whole_and_streamed(server: ClientServer) -> None:
    url = f"{server.v1}/chat/completions"
    whole = json.loads(curl(url, *JSON, "-d", body()))
    events = curl("--no-buffer", url, *JSON, "-d", body(stream=True)).split("\n\n")
    assert whole["choices"][0]["message"]["content"] == "Hello"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "Hello"
    assert events[-2:] == ["data: [DONE]", ""]


def test_a_body_from_a_file_that_curl_announces_first(server: ClientServer, tmp_path: Path) -> None:
    """Above a megabyte curl asks with ``Expect: 100-continue`` whether it may send."""
    file = tmp_path / "body.json"
    file.write_text(body(user="x" * 2_000_000))
    answer = json.loads(curl(f"{server.v1}/chat/completions", *JSON, "-d", f"@{file}"))
    assert answer["choices"][0]["message"]["content"] == "Hello"


def test_errors_and_other_routes(server: ClientServer) -> None:
    show = ("-o", "-", "-w", "\n%{http_code} %{content_type} %header{x-request-id}")
    wrong = curl(f"{server.v1}/chat/completions", "-d", body(), *show).splitlines()
    assert wrong[-1].startswith("415 application/json ")
    assert json.loads(wrong[0])["type"] == "Unsupported Media Type"
    missing = curl(f"{server.v1}/chat/completions", *JSON, "-d", body(model="zz"), *show).splitlines()
    assert json.loads(missing[0])["error"]["code"] == "model_not_found"
    models = json.loads(curl(f"{server.v1}/models"))
    assert {"m", "e"} <= {model["id"] for model in models["data"]}
    assert json.loads(curl(f"{server.url}/health"))["status"] == "healthy"
    messages = curl(f"{server.v1}/messages", *JSON, "-H", "anthropic-version: 2023-06-01", "-d", body(max_tokens=20))
    assert json.loads(messages)["content"][0]["text"] == "Hello"
