"""LiteLLM's proxy in front of a frontend on a socket, as a process of its own, for OpenAI's client."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.client_server import WEATHER, ClientServer, calls, client_server, says

if find_spec("litellm") is None or find_spec("apscheduler") is None:
    pytest.skip("needs litellm[proxy]", allow_module_level=True)

# Its prices would be fetched from the web at the import.
LOCAL = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
KEY = "sk-of-a-test-0123456789abcdef0123456789abcdef"
START_S = 240
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def server() -> Iterator[ClientServer]:
    with client_server() as running:
        yield running


def user(text: str, **script: Any) -> Any:
    return [{"role": "user", "content": says(text, **script)}]


@contextmanager
def proxy(server: ClientServer, folder: Path) -> Iterator[str]:
    """LiteLLM's proxy over two names of the model, as its own process."""
    models = [
        {"model_name": name, "litellm_params": {"model": f"openai/{name}", "api_base": server.v1, "api_key": "none"}}
        for name in ("m", "claude-m")
    ]
    config = folder / "config.yaml"
    config.write_text(json.dumps({"model_list": models}))  # JSON is YAML
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-c", "import sys; from litellm import run_server; sys.exit(run_server())",
               "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, **LOCAL, "LITELLM_MASTER_KEY": KEY},
        )
        try:
            deadline = time.monotonic() + START_S
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.2)
            else:
                pytest.fail(f"the proxy did not start: {(folder / 'log').read_text()[-2000:]}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(30)


def test_a_proxy_between_client_and_frontend(server: ClientServer, tmp_path: Path) -> None:
    with proxy(server, tmp_path) as url, openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, timeout=60) as client:
        ask = user(f"I look. {calls('Paris', 'Rome')}", chunk=3)
        with client.chat.completions.stream(model="m", messages=ask, tools=[TOOL]) as stream:
            message = stream.get_final_completion().choices[0].message
        assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls or []] == ["Paris", "Rome"]
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls or []
        ]
        history: Any = [*user("x"), message.model_dump(exclude_none=True), *results, *user("Done")]
        answer = client.chat.completions.create(model="m", messages=history, tools=[TOOL])
        assert answer.choices[0].message.content == "Done"
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=user("x"), temperature=3)
        asyncio.run(_leaves(url, server))


async def _leaves(url: str, server: ClientServer) -> None:
    """A client of the proxy that goes away stops the worker, too."""
    over = len(server.stopped)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        stream = await client.chat.completions.create(model="m", messages=user("x" * 5000, delay=0.05), stream=True)
        async for _ in stream:
            break
        await stream.close()
    async with asyncio.timeout(60):
        while len(server.stopped) == over:
            await asyncio.sleep(0.05)
    assert server.stopped[-1]
