"""A running server becomes a worker: streams, usage, tools, disconnects, errors, health, restarts, load, KV events."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.config.tree import FrontendConfig, LogConfig, StateConfig, WorkerConfig
from dynamo_es.engines.attach.worker import AttachSettings, run_attached_worker
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.server import serve
from dynamo_es.frontend.tokenizer import BytesTokenizer
from dynamo_es.router.hashing import compute_sequence_hashes, hash_blocks
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeSettings
from tests.support.runtimes import FAST, SharedLog, wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, ServedFleet, served_fleet
from tests.support.token_server import METRICS, EventSocket, TokenServer
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@asynccontextmanager
async def attached(fleet: ServedFleet, worker: WorkerConfig, wait: bool = True, **attach: Any) -> AsyncIterator[None]:
    """An attached worker of the fleet while the block runs; its model ``m`` is ready when it starts."""
    settings = AttachSettings(
        RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), FAST, "worker"),
        worker,
        AttachConfig(health_interval_s=0.05, metrics_interval_s=0.05, **attach),
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        run_attached_worker(
            settings, stop, clock=SystemClock(), rng=random.Random(5), log=SharedLog(fleet.log),  # type: ignore[arg-type]
        )
    )  # fmt: skip
    try:
        if wait:
            await wait_for(lambda: running.done() or is_ready(fleet))
        if running.done():
            running.result()
        yield
    finally:
        stop.set()
        await asyncio.gather(running)


def is_ready(fleet: ServedFleet) -> bool:
    status = fleet.models.statuses().get("m")
    return status is not None and status.ready


# -- text in: the upstream is a frontend of this project ---------------------------------------------------------------


@asynccontextmanager
async def frontend_upstream(executor: ThreadPoolExecutor, engine: ScriptedEngine, port: int = 0) -> AsyncIterator[int]:
    config = FrontendConfig(http_host="127.0.0.1", http_port=port, graceful_shutdown_timeout_s=0)
    model = served(engine, "upstream", runtime_config={"tool_call_parser": "hermes"}, context_length=4096)
    server = await serve(application(model, executor=executor, config=config), config)
    try:
        yield server.port
    finally:
        await asyncio.wait_for(server.shutdown(), 60)


def letters(text: str) -> ScriptedEngine:
    return ScriptedEngine(says(*(frame(letter) for letter in text), frame("", "stop")))


async def test_text_goes_through_and_chunks_come_back(executor: ThreadPoolExecutor) -> None:
    async with (
        frontend_upstream(executor, letters("Paris.")) as port,
        served_fleet() as fleet,
        attached(fleet, WorkerConfig(model_name="m"), upstream=f"http://127.0.0.1:{port}/v1"),
    ):
        streamed = await fleet.ask(CHAT, stream=True, stream_options={"include_usage": True})
        unary = await fleet.ask(COMPLETIONS)
        chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        assert {chunk["model"] for chunk in chunks} == {"m"}
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == "Paris."
        assert chunks[-1]["usage"]["completion_tokens"] == 6
        answer = unary.json()
        assert (answer["model"], answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == (
            "m", "Paris.", "stop",
        )  # fmt: skip
        assert answer["usage"]["prompt_tokens"] == len("Hi")
        card = next(card for card in fleet.core.registry.state.models.values() if card.display_name == "m")
        assert (card.model_input, card.context_length) == ("Text", 0)


async def test_tools_and_refusals_are_the_upstreams(executor: ThreadPoolExecutor) -> None:
    async with (
        frontend_upstream(executor, letters(CALL)) as port,
        served_fleet() as fleet,
        attached(fleet, WorkerConfig(model_name="m"), upstream=f"http://127.0.0.1:{port}"),
    ):
        choice = (await fleet.ask(CHAT, tools=TOOLS)).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
            "get_weather", {"city": "Paris"},
        )  # fmt: skip
        # Only the upstream knows its vocabulary.
        refused = await fleet.ask(CHAT, logit_bias={"70000": 1.0})
        assert refused.status == 400
        assert "logit_bias" in refused.json()["message"]


async def endless(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
    while not context.is_stopped():
        yield [frame("x")]
        await asyncio.sleep(0.005)


async def test_a_client_that_leaves_ends_the_upstreams_stream(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(endless)
    async with (
        frontend_upstream(executor, engine) as port,
        served_fleet() as fleet,
        attached(fleet, WorkerConfig(model_name="m"), upstream=f"http://127.0.0.1:{port}"),
    ):
        config = FrontendConfig(http_host="127.0.0.1", http_port=0, graceful_shutdown_timeout_s=0)
        server = await serve(fleet.app, config)
        try:
            body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
            async with httpx.AsyncClient() as http:
                url = f"http://127.0.0.1:{server.port}{CHAT}"
                async with http.stream("POST", url, json=body, timeout=60) as response:
                    await anext(response.aiter_lines())
            await asyncio.wait_for(engine.closed.wait(), 60)
            assert engine.contexts[0].is_stopped()
        finally:
            await asyncio.wait_for(server.shutdown(), 60)


async def test_an_upstream_that_goes_and_comes_back(executor: ThreadPoolExecutor) -> None:
    async with served_fleet() as fleet:
        first = frontend_upstream(executor, letters("one"))
        port = await first.__aenter__()
        async with attached(fleet, WorkerConfig(model_name="m"), upstream=f"http://127.0.0.1:{port}"):
            assert (await fleet.ask(CHAT)).json()["choices"][0]["message"]["content"] == "one"
            await first.__aexit__(None, None, None)
            await wait_for(lambda: not is_ready(fleet))
            assert (await fleet.ask(CHAT)).status == 503
            async with frontend_upstream(executor, letters("two"), port):
                await wait_for(lambda: is_ready(fleet))
                assert (await fleet.ask(CHAT)).json()["choices"][0]["message"]["content"] == "two"


# -- token in ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def token_fleet(server: TokenServer, **attach: Any) -> AsyncIterator[ServedFleet]:
    await server.start()
    try:
        async with (
            served_fleet() as fleet,
            attached(fleet, WorkerConfig(model_name="m"), upstream=server.url, input="tokens", **attach),
        ):
            yield fleet
    finally:
        await server.close()


def tokens(text: str) -> list[int]:
    return BytesTokenizer().encode(text, False)


async def test_token_ids_go_in_and_come_out() -> None:
    server = TokenServer([*tokens("The capital is Paris."), 257])
    async with token_fleet(server) as fleet:
        reply = await fleet.ask(CHAT, max_tokens=20, temperature=0.0, logprobs=True, top_logprobs=1)
        answer = reply.json()
        choice = answer["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital is Paris.", "stop")
        assert {entry["logprob"] for entry in choice["logprobs"]["content"]} == {-0.5}
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
        (request,) = server.requests
        assert answer["usage"]["prompt_tokens"] == len(request["prompt"])
        assert "Hi" in bytes(token for token in request["prompt"] if token < 256).decode()
        assert (request["max_tokens"], request["temperature"], request["stop_token_ids"]) == (20, 0.0, [257, 262])
        assert server.headers[0]["X-Request-Id"]
        # What a server does by default is short; what fits the model is asked for.
        await fleet.ask(COMPLETIONS, prompt="one two")
        assert server.requests[1]["max_tokens"] == 512 - len(server.requests[1]["prompt"])


async def test_a_stop_string_ends_the_request_at_the_upstream() -> None:
    server = TokenServer(tokens("one two three four"))
    server.holds = True
    async with token_fleet(server) as fleet:
        answer = (await fleet.ask(COMPLETIONS, stop=[" three"])).json()
        assert answer["choices"][0]["text"] == "one two"
        await asyncio.wait_for(server.left.wait(), 60)


async def test_errors_of_the_upstream_reach_the_client_as_what_they_are() -> None:
    server = TokenServer([5])
    mistake = {"error": {"message": "max_tokens is too large", "param": "max_tokens"}}
    async with token_fleet(server) as fleet:
        for status, body, told, text in (
            (400, mistake, 400, "max_tokens is too large"),
            (429, {"error": {"message": "full"}}, 529, "overloaded"),
            (500, {"error": {"message": "secret"}}, 500, "Internal server error"),
            (401, {"error": "Unauthorized"}, 503, "unavailable"),
        ):
            server.status = (status, body)
            reply = await fleet.ask(COMPLETIONS)
            assert (reply.status, text in reply.text, "secret" in reply.text) == (told, True, False)


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    server = TokenServer(tokens("one two three"))
    server.breaks = True
    async with token_fleet(server) as fleet:
        reply = await fleet.ask(COMPLETIONS, stream=True)
        assert "service_unavailable" in reply.text
        assert is_ready(fleet)


async def test_its_metrics_are_load_and_its_events_are_blocks() -> None:
    server, socket = TokenServer([5]), EventSocket()
    try:
        async with token_fleet(server, kv_events=(socket.address,)) as fleet:
            await socket.subscribed()
            block = list(range(100, 116))
            await socket.stored(1, block)
            (card,) = fleet.core.registry.state.models.values()
            assert (card.kv_cache_block_size, card.runtime_config["total_kv_blocks"]) == (16, 400)

            def loads() -> list[Any]:
                known = [rank.load for rank in fleet.views.worker_load.state.ranks.values() if rank.load is not None]
                return [(load.kv_used_blocks, load.total_kv_blocks, load.waiting) for load in known]

            chain = compute_sequence_hashes(hash_blocks(block, 16))

            def blocks() -> int:
                state = next(iter(fleet.views.index_states().values()))
                return sum(found.device for found in state.match("m", chain, 16))

            await wait_for(lambda: (100, 400, 3) in loads())
            await wait_for(lambda: blocks() == 1)
            # Another process at the same address: what the old one held is gone, what the new one stores counts.
            server.started += 1
            await wait_for(lambda: blocks() == 0)
            socket.restart()
            await socket.stored(9, block)
            await wait_for(lambda: blocks() == 1)
    finally:
        socket.close()


async def test_pages_that_are_broken_or_lie_end_neither_the_worker_nor_its_load() -> None:
    server = TokenServer([5])
    async with token_fleet(server) as fleet:

        def loads() -> list[Any]:
            known = [rank.load for rank in fleet.views.worker_load.state.ranks.values() if rank.load is not None]
            return [(load.running, load.waiting) for load in known]

        await wait_for(lambda: bool(loads()))
        for number, page in enumerate((
            "<html>a proxy's</html>", "x" * (17 * 1024 * 1024), METRICS.format(running="+Inf", started="NaN"),
            "process_start_time_seconds -Inf\nvllm:num_requests_running 1e308\nvllm:num_requests_running NaN\n",
        ), 1):  # fmt: skip
            server.page, asked = page, server.pages_asked
            await wait_for(lambda asked=asked: server.pages_asked > asked + 2)
            server.page, server.running = None, 70 + number
            await wait_for(lambda number=number: (70 + number, 3) in loads())
        assert (await fleet.ask(COMPLETIONS)).status == 200


async def test_sick_upstreams_get_no_requests_until_they_are_well() -> None:
    server = TokenServer([5])
    async with token_fleet(server) as fleet:
        server.sick = True
        await wait_for(lambda: not is_ready(fleet))
        server.sick = False
        await wait_for(lambda: is_ready(fleet))
        assert (await fleet.ask(COMPLETIONS)).status == 200


async def test_another_tokenizer_than_the_upstreams_is_refused() -> None:
    server = TokenServer([5])
    server.tokens_of = [1, 2, 3]
    with pytest.raises(ConfigError, match="tokenizer"):
        async with token_fleet(server):
            pass


async def test_an_upstream_that_is_not_there_yet_is_waited_for() -> None:
    server = TokenServer([5])
    await server.start()
    await server.close()
    async with (
        served_fleet() as fleet,
        attached(fleet, WorkerConfig(model_name="m"), wait=False, upstream=server.url, input="tokens"),
    ):
        await server.start()
        try:
            await wait_for(lambda: is_ready(fleet))
            assert (await fleet.ask(COMPLETIONS)).status == 200
        finally:
            await server.close()
