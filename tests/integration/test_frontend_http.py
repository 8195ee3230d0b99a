"""The frontend over real sockets: released clients, disconnects, slow clients, drain."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.server import AddressUnavailable, FrontendServer, bind, serve
from dynamo_es.runtime.context import Context
from tests.unit.frontend.fakes import Script, ScriptedEngine, application, frame, says, served

HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


async def endless(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
    while True:
        yield [frame("x")]
        await asyncio.sleep(0.02)


async def silent(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
    await asyncio.Event().wait()
    yield [frame("never", "stop")]


def slow(pieces: list[str], delay_s: float) -> Script:
    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        for place, piece in enumerate(pieces):
            await asyncio.sleep(delay_s)
            yield [frame(piece, "stop" if place == len(pieces) - 1 else None)]

    return script


@asynccontextmanager
async def running(
    engine: ScriptedEngine, executor: ThreadPoolExecutor, *, http: str = "httptools", wrap: Any = None, **options: Any
) -> AsyncIterator[FrontendServer]:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, **options)
    app = application(served(engine), executor=executor, config=config)
    if wrap is not None:
        app.service, inner = app.service, app
        app = wrap(inner)
    server = await serve(app, config, http=http)
    try:
        yield server
    finally:
        await asyncio.wait_for(server.shutdown(), 40)


def url(server: FrontendServer, path: str = "") -> str:
    return f"http://127.0.0.1:{server.port}{path}"


async def until(condition: Callable[[], bool], limit_s: float = 5.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < limit_s, "the condition did not come true in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - start


async def open_request(
    server: FrontendServer, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


# -- clients -----------------------------------------------------------------------------------------------------------


async def test_openai_client_unary_and_stream(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hel"), frame("lo"), frame("", "stop")))
    async with (
        running(engine, executor) as server,
        openai.AsyncOpenAI(base_url=url(server, "/v1"), api_key="none", max_retries=0) as client,
    ):
        answer = await client.chat.completions.create(**HI)  # type: ignore[call-overload]
        assert answer.choices[0].message.content == "Hello"
        assert answer.usage.completion_tokens == 5
        stream = await client.chat.completions.create(  # type: ignore[call-overload]
            **HI, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello"
        assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 5
        text = await client.completions.create(model="m", prompt=["a", "b"])
        assert [choice.text for choice in text.choices] == ["Hello", "Hello"]
        assert [model.id async for model in client.models.list()] == ["m"]


async def test_openai_client_understands_errors(executor: ThreadPoolExecutor) -> None:
    async with (
        running(ScriptedEngine(says(frame("x", "stop"))), executor) as server,
        openai.AsyncOpenAI(base_url=url(server, "/v1"), api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "x"}])
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(**HI, temperature=9)  # type: ignore[call-overload]
        assert wrong.value.param == "temperature"


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_PROTO_12_keep_alive_comments_do_not_disturb_the_client(executor: ThreadPoolExecutor, http: str) -> None:
    engine = ScriptedEngine(slow(["é", "😀", "z"], 0.25))
    async with (
        running(engine, executor, http=http, sse_keep_alive_ms=40) as server,
        httpx.AsyncClient() as raw,
        openai.AsyncOpenAI(base_url=url(server, "/v1"), api_key="none", max_retries=0) as client,
    ):
        text = (await raw.post(url(server, CHAT), json={**HI, "stream": True})).text
        blocks = text.split("\n\n")
        assert blocks.count(":") >= 6
        assert {block[:5] for block in blocks if block} == {":", "data:"}
        assert text.endswith("data: [DONE]\n\n")
        stream = await client.chat.completions.create(**HI, stream=True)  # type: ignore[call-overload]
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "é😀z"


async def test_silent_stream_has_no_comments_by_default(executor: ThreadPoolExecutor) -> None:
    async with running(ScriptedEngine(slow(["a"], 0.2)), executor) as server, httpx.AsyncClient() as client:
        text = (await client.post(url(server, CHAT), json={**HI, "stream": True})).text
        assert not any(line.startswith(":") for line in text.splitlines())


# -- disconnects -------------------------------------------------------------------------------------------------------


def count_of(server: FrontendServer, name: str) -> float:
    text = server._service.metrics.text().decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def ended(server: FrontendServer, error_type: str) -> float:
    """Requests that ended with this ``error_type``, whatever the model."""
    return count_of(server, f'dynamo_frontend_requests_total{{endpoint="chat_completions",error_type="{error_type}"')


@pytest.mark.parametrize("http", ["httptools", "h11"])
@pytest.mark.parametrize("stream", [False, True])
async def test_PROTO_18_disconnect_stops_the_worker_within_a_second(
    executor: ThreadPoolExecutor, http: str, stream: bool
) -> None:
    engine = ScriptedEngine(endless if stream else silent)
    async with running(engine, executor, http=http) as server:
        reader, writer = await open_request(server, {**HI, "stream": stream})
        await until(lambda: bool(engine.contexts))
        if stream:
            await reader.readuntil(b"data: ")
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        assert await until(lambda: bool(engine.ended)) < 1.0
        assert engine.contexts[0].is_stopped()
        assert engine.ended in (["cancelled"], ["closed"])
        await until(lambda: not server._service.running)
        assert count_of(server, "dynamo_frontend_model_cancellation_total{") == 1
        assert (
            count_of(server, 'dynamo_frontend_requests_total{endpoint="chat_completions",error_type="cancelled"') == 1
        )
        assert count_of(server, 'dynamo_frontend_active_requests{model="m"}') == 0
        assert count_of(server, 'dynamo_frontend_inflight_requests{model="m"}') == 0


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_PROTO_18_disconnect_of_a_client_that_has_sent_the_next_request_already(
    executor: ThreadPoolExecutor, http: str
) -> None:
    engine = ScriptedEngine(endless)
    async with running(engine, executor, http=http) as server:
        reader, writer = await open_request(server, {**HI, "stream": True})
        await reader.readuntil(b"data: ")
        writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        await writer.drain()
        for _ in range(20):
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        await until(lambda: bool(engine.ended))
        assert engine.contexts[0].is_stopped()
        await until(lambda: not server._service.running)


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_PROTO_19_fifty_disconnects_are_all_seen(executor: ThreadPoolExecutor, http: str) -> None:
    engine = ScriptedEngine(endless)
    async with running(engine, executor, http=http) as server:
        writers = []
        for _ in range(50):
            reader, writer = await open_request(server, {**HI, "stream": True})
            await reader.readuntil(b"data: ")
            writers.append(writer)
        assert len(server._service.running) == 50
        for writer in writers:
            writer.transport.abort()
        assert await until(lambda: len(engine.ended) == 50) < 1.0
        await until(lambda: not server._service.running)


async def test_PROTO_18_disconnect_behind_a_middleware(executor: ThreadPoolExecutor) -> None:
    class Middleware:
        def __init__(self, app: Any) -> None:
            self.service = app.service
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def passed_on(message: Any) -> None:
                await send(message)

            async def received() -> Any:
                return await receive()

            await self._app(scope, received, passed_on)

    engine = ScriptedEngine(silent)
    async with running(engine, executor, wrap=Middleware) as server:
        _, writer = await open_request(server, HI)
        await until(lambda: bool(engine.contexts))
        writer.transport.abort()
        assert await until(lambda: bool(engine.ended)) < 1.0


async def test_disconnect_while_sending_the_body_reaches_no_worker(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("x", "stop")))
    async with running(engine, executor) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
        writer.write(head.encode() + b'{"model"')
        await writer.drain()
        await until(lambda: len(server._service.running) == 1)
        writer.transport.abort()
        await until(lambda: not server._service.running)
        assert engine.requests == []
        assert count_of(server, "dynamo_frontend_model_cancellation_total{") == 0
        assert ended(server, "incomplete_body") == 1


@pytest.mark.parametrize("http", ["httptools", "h11"])
async def test_a_body_with_broken_framing_is_an_error_of_its_own_not_a_cancellation(
    executor: ThreadPoolExecutor, http: str
) -> None:
    async with running(ScriptedEngine(says(frame("x", "stop"))), executor, http=http) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        writer.write(head.encode() + b'5\r\n{"mod\r\nno number\r\n')
        assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.transport.abort()
        await until(lambda: ended(server, "incomplete_body") == 1)
        assert count_of(server, "dynamo_frontend_model_cancellation_total{") == 0
        assert ended(server, "cancelled") == 0


async def test_a_body_that_is_no_json_is_a_validation_error(executor: ThreadPoolExecutor) -> None:
    async with running(ScriptedEngine(says(frame("x", "stop"))), executor) as server, httpx.AsyncClient() as client:
        reply = await client.post(url(server, CHAT), content=b"{bad", headers={"content-type": "application/json"})
        assert reply.status_code == 400
        await until(lambda: ended(server, "validation") == 1)
        assert count_of(server, "dynamo_frontend_model_cancellation_total{") == 0


async def test_PROTO_06_stop_string_stops_the_worker(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(endless)
    async with running(engine, executor) as server, httpx.AsyncClient() as client:
        for stream in (False, True):
            reply = await client.post(url(server, CHAT), json={**HI, "stop": "xxx", "stream": stream})
            assert '"finish_reason":"stop"' in reply.text
        await until(lambda: engine.ended == ["closed", "closed"])
        assert all(context.is_stopped() for context in engine.contexts)


async def test_client_that_does_not_read_holds_the_worker_back(executor: ThreadPoolExecutor) -> None:
    sent = 0

    async def fast(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        nonlocal sent
        while True:
            sent += 1
            yield [frame("x" * 50_000)]
            await asyncio.sleep(0)

    engine = ScriptedEngine(fast)
    async with running(engine, executor) as server:
        _, writer = await open_request(server, {**HI, "stream": True})
        previous = -1
        while sent != previous:
            previous = sent
            await asyncio.sleep(0.3)
        writer.transport.abort()
        assert await until(lambda: bool(engine.ended)) < 1.0


# -- large prompts -----------------------------------------------------------------------------------------------------


async def test_SCALE_04_large_prompts_do_not_starve_health_and_streams(executor: ThreadPoolExecutor) -> None:
    from dynamo_es.frontend.tokenizer_files import load_tokenizer
    from tests.unit.frontend.conftest import MODEL_DIR

    tokenizer, renderer = load_tokenizer(str(MODEL_DIR))
    assert renderer is not None

    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        if len(request["token_ids"]) > 1000:
            yield [{"token_ids": [28], "finish_reason": "stop"}]
            return
        while True:
            yield [{"token_ids": [28], "finish_reason": None}]
            await asyncio.sleep(0.02)

    engine = ScriptedEngine(script)
    config = FrontendConfig(http_host="127.0.0.1", http_port=0)
    app = application(served(engine, tokenizer=tokenizer), executor=executor, config=config)
    server = await serve(app, config)
    limits = httpx.Limits(max_connections=20)
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        reader, writer = await open_request(server, {**HI, "stream": True})
        gaps: list[float] = []

        async def read_stream() -> None:
            last = time.monotonic()
            while True:
                await reader.readuntil(b"data: ")
                now = time.monotonic()
                gaps.append(now - last)
                last = now

        reading = asyncio.create_task(read_stream())
        text = "the quick brown fox jumps over a lazy dog 123 " * 45_000
        big = [
            asyncio.create_task(
                client.post(url(server, "/v1/completions"), json={"model": "m", "prompt": f"{n} {text}"})
            )
            for n in range(2)
        ]
        latencies = []
        while not all(task.done() for task in big):
            start = time.monotonic()
            assert (await client.get(url(server, "/health"))).status_code == 200
            latencies.append(time.monotonic() - start)
            await asyncio.sleep(0.05)
        assert [task.result().status_code for task in big] == [200, 200]
        reading.cancel()
        writer.transport.abort()
    await server.shutdown()
    assert len(latencies) >= 5
    assert sorted(latencies)[int(len(latencies) * 0.9)] < 0.5
    assert sorted(gaps)[int(len(gaps) * 0.95)] < 0.5


# -- start and end -----------------------------------------------------------------------------------------------------


def test_port_in_use_names_address_and_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=rf"127\.0\.0\.1:{port}.*--http-port"):
            bind(FrontendConfig(http_host="127.0.0.1", http_port=port))


async def test_PROTO_24_running_streams_finish_while_new_requests_are_refused(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(slow(["a", "b", "c", "d"], 0.15))
    async with running(engine, executor) as server, httpx.AsyncClient() as client:
        stream = asyncio.create_task(client.post(url(server, CHAT), json={**HI, "stream": True}))
        await until(lambda: bool(engine.contexts))
        closing = asyncio.create_task(server.shutdown())
        await until(lambda: server._service.draining)
        assert (await client.get(url(server, "/health"))).status_code == 503
        refused = await client.post(url(server, CHAT), json=HI)
        assert (refused.status_code, refused.json()["message"]) == (503, "Service is not ready")
        text = (await stream).text
        assert '"finish_reason":"stop"' in text
        assert text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(closing, 3)
        with pytest.raises(httpx.ConnectError):
            await client.get(url(server, "/live"))


async def test_PROTO_24_streams_left_at_the_limit_get_an_error_and_done(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(endless)
    stalled = ScriptedEngine(silent)
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, graceful_shutdown_timeout_s=0.4)
    app = application(served(engine), served(stalled, "stalled"), executor=executor, config=config)
    server = await serve(app, config)
    async with httpx.AsyncClient(timeout=60) as client:
        bodies = [{**HI, "stream": True}, {**HI, "model": "stalled", "stream": True}, {**HI, "model": "stalled"}]
        requests = [asyncio.create_task(client.post(url(server, CHAT), json=body)) for body in bodies]
        _, deaf = await open_request(server, {**HI, "stream": True})
        await until(lambda: len(engine.contexts) + len(stalled.contexts) == 4)
        start = time.monotonic()
        await server.shutdown()
        assert time.monotonic() - start < 0.4 + 2
        for reply in (await asyncio.gather(*requests))[:2]:
            events = reply.text.strip().split("\n\n")
            assert json.loads(events[-2][6:])["error"]["code"] == 503
            assert events[-1] == "data: [DONE]"
        assert requests[2].result().status_code == 503
        assert len(engine.ended) + len(stalled.ended) == 4
        deaf.transport.abort()


async def test_PROTO_24_client_that_does_not_read_cannot_hold_the_shutdown(executor: ThreadPoolExecutor) -> None:
    async def flood(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        while True:
            yield [frame("x" * 100_000)]
            await asyncio.sleep(0)

    engine = ScriptedEngine(flood)
    async with running(engine, executor, graceful_shutdown_timeout_s=0.2) as server:
        _, writer = await open_request(server, {**HI, "stream": True})
        await until(lambda: bool(engine.contexts))
        await asyncio.sleep(0.3)
        start = time.monotonic()
        await server.shutdown()
        assert time.monotonic() - start < 0.2 + 2
        assert engine.ended in (["cancelled"], ["closed"])
        assert not server._server.server_state.connections
        writer.transport.abort()


async def test_shutdown_twice_and_wait_closed(executor: ThreadPoolExecutor) -> None:
    async with running(ScriptedEngine(says(frame("x", "stop"))), executor) as server:
        await asyncio.gather(server.shutdown(), server.shutdown(), server.wait_closed())
