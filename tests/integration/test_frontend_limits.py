"""What a client may not send, over raw sockets: ambiguous framing, large or slow heads, encoded bodies."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.server import FrontendServer, serve
from dynamo_es.runtime.context import Context
from tests.unit.frontend.fakes import Script, ScriptedEngine, application, frame, says, served

CHAT = "/v1/chat/completions"
HI = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}).encode()
HOST = b"host: x\r\n"
KIND = b"content-type: application/json\r\n"
LIMIT_S = 60
SECOND = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + KIND + b"content-length: %d\r\n\r\n" % len(HI) + HI


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@asynccontextmanager
async def running(
    executor: ThreadPoolExecutor, script: Script | None = None, **options: Any
) -> AsyncIterator[tuple[FrontendServer, ScriptedEngine]]:
    engine = ScriptedEngine(script or says(frame("Hello", "stop")))
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, **options)
    server = await serve(application(served(engine), executor=executor, config=config), config)
    try:
        yield server, engine
    finally:
        await asyncio.wait_for(server.shutdown(), LIMIT_S)


async def exchange(server: FrontendServer, *pieces: bytes) -> bytes:
    """Everything that comes back until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(LIMIT_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


def post(*headers: bytes, body: bytes = b"") -> bytes:
    return b"".join((b"POST ", CHAT.encode(), b" HTTP/1.1\r\n", HOST, KIND, *headers, b"\r\n", body))


CHUNKED = b"transfer-encoding: chunked\r\n"
SMUGGLED = {
    "length and chunks": post(b"content-length: 4\r\n", CHUNKED, body=b"0\r\n\r\n"),
    "chunks and length": post(CHUNKED, b"content-length: 4\r\n", body=b"0\r\n\r\n"),
    "chunked is not last": post(b"transfer-encoding: chunked, identity\r\n", body=b"0\r\n\r\n"),
    "chunked twice": post(b"transfer-encoding: chunked\r\ntransfer-encoding: xchunked\r\n", body=b"0\r\n\r\n"),
    "unknown encoding": post(b"transfer-encoding: xchunked\r\n", body=b"0\r\n\r\n"),
    "space before the colon": post(b"transfer-encoding : chunked\r\n", body=b"0\r\n\r\n"),
    "two lengths": post(b"content-length: 2\r\ncontent-length: 3\r\n", body=b"{} "),
    "the same length twice": post(b"content-length: 2\r\ncontent-length: 2\r\n", body=b"{}"),
    "a list of lengths": post(b"content-length: 2, 2\r\n", body=b"{}"),
    "a length with a sign": post(b"content-length: +2\r\n", body=b"{}"),
    "bare line feed behind a chunk's size": post(CHUNKED, body=b"2\n{}\r\n0\r\n\r\n"),
    "bare line feed behind a chunk": post(CHUNKED, body=b"2\r\n{}\n0\r\n\r\n"),
    "bare line feed in a chunk's extension": post(CHUNKED, body=b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
    "wrong end of a chunk": post(CHUNKED, body=b"2\r\n{}XX0\r\n\r\n"),
    "no size of a chunk": post(CHUNKED, body=b"\r\n{}\r\n0\r\n\r\n"),
    "bare line feeds": b"POST /v1/chat/completions HTTP/1.1\nhost: x\ncontent-length: 2\n\n{}",
    "bare line feed behind a header": post(b"x-a: b\ncontent-length: 0\r\n"),
    "folded header": post(b"x-a: b\r\n c\r\ncontent-length: 0\r\n"),
    "zero byte in a header": post(b"x-a: b\0c\r\ncontent-length: 0\r\n"),
}


async def test_SEC_07_framing_with_two_readings_is_refused_and_the_connection_closed(
    executor: ThreadPoolExecutor,
) -> None:
    async with running(executor) as (server, engine):
        for name, first in SMUGGLED.items():
            for pieces in ((first + SECOND,), (first, SECOND)):
                answer = await exchange(server, *pieces)
                assert answer.startswith(b"HTTP/1.1 400 ") or answer == b"", name
                assert answer.count(b"HTTP/1.1 ") <= 1, name
                assert engine.requests == [], name
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{server.port}/live")).status_code == 200


async def test_SEC_07_a_well_framed_second_request_is_answered(executor: ThreadPoolExecutor) -> None:
    """The counterpart: pipelining itself works, so that the cases above show what they say."""
    last = SECOND.replace(HOST, HOST + b"connection: close\r\n")
    chunked = post(CHUNKED, body=b"%x\r\n%b\r\n0\r\n\r\n" % (len(HI), HI))
    async with running(executor) as (server, engine):
        answer = await exchange(server, chunked + last)
        assert answer.count(b"HTTP/1.1 200 ") == 2
        assert len(engine.requests) == 2


# -- SEC-08 ------------------------------------------------------------------------------------------------------------


async def test_SEC_08_encoded_bodies_are_refused_unread(executor: ThreadPoolExecutor) -> None:
    bomb = gzip.compress(bytes(32 * 1024 * 1024))  # 32 MiB of zeros in 32 KiB
    async with running(executor) as (server, engine), httpx.AsyncClient(timeout=LIMIT_S) as client:
        url = f"http://127.0.0.1:{server.port}"
        tracemalloc.start()
        try:
            for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/busy_threshold"):
                for encoding in ("gzip", "zstd", "gzip, gzip", "GZIP"):
                    headers = {"content-type": "application/json", "content-encoding": encoding}
                    reply = await client.post(url + path, content=bomb, headers=headers)
                    assert reply.status_code == 415, (path, encoding)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 * 1024 * 1024
        headers = {"content-type": "application/json", "content-encoding": "identity"}
        assert (await client.post(url + CHAT, content=HI, headers=headers)).status_code == 200
        assert len(engine.requests) == 1


async def test_SEC_08_a_body_without_end_is_cut_off_at_the_limit(executor: ThreadPoolExecutor) -> None:
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    async with running(executor, body_limit_mb=1) as (server, engine):
        answer = await exchange(server, post(CHUNKED, b"connection: close\r\n"), *([chunk] * 20))
        assert answer == b"" or answer.startswith(b"HTTP/1.1 413 ")
        async with httpx.AsyncClient() as client:
            content = (b" " * 65536 for _ in range(20))
            reply = await client.post(
                f"http://127.0.0.1:{server.port}{CHAT}",
                content=_async(content),
                headers={"content-type": "application/json"},
            )
            assert reply.status_code == 413
        assert engine.requests == []


async def _async(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


# -- heads -------------------------------------------------------------------------------------------------------------

LARGE = {
    "one header": (b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: ", b"a" * 9000, b"\r\n\r\n"),
    "a header without end": (b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: ", *([b"a" * 1000] * 100)),
    "a name without end": (b"GET /live HTTP/1.1\r\nhost: x\r\n", *([b"a" * 1000] * 100)),
    "many headers": (b"GET /live HTTP/1.1\r\nhost: x\r\n", b"x-a: b\r\n" * 2000, b"\r\n"),
    "a long path": (b"GET /" + b"a" * 9000, b" HTTP/1.1\r\nhost: x\r\n\r\n"),
    "a path without end": (b"GET /", *([b"a" * 1000] * 100)),
    "in one piece": (b"GET /live HTTP/1.1\r\nhost: x\r\nx-a: " + b"a" * 20_000 + b"\r\n\r\n",),
    "a trailer": (post(CHUNKED, body=b"2\r\n{}\r\n0\r\n"), b"x-a: ", *([b"a" * 1000] * 100)),
}


async def test_a_head_above_the_limit_gets_431(executor: ThreadPoolExecutor) -> None:
    async with running(executor, header_limit_kb=8) as (server, engine):
        for name, pieces in LARGE.items():
            answer = await exchange(server, *pieces)
            # The reset of a connection that still sends may overtake the answer.
            expected = (b"HTTP/1.1 431 Request Header Fields Too Large\r\n", b"HTTP/1.1 400 ")
            assert answer.startswith(expected) or answer == b"", name
            assert engine.requests == [], name


async def test_431_says_the_limit(executor: ThreadPoolExecutor) -> None:
    async with running(executor, header_limit_kb=8) as (server, _), httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{server.port}/live"
        assert (await client.get(url, headers={"x-a": "a" * 7000})).status_code == 200
        reply = await client.get(url, headers={"x-a": "a" * 8200})
        assert reply.status_code == 431
        assert reply.json()["code"] == 431
        assert "8 KiB" in reply.json()["message"]


async def test_many_small_chunks_are_no_large_head(executor: ThreadPoolExecutor) -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in HI + b" " * 20_000) + b"0\r\n\r\n"
    async with running(executor, header_limit_kb=1) as (server, engine):
        answer = await exchange(server, post(CHUNKED, b"connection: close\r\n", body=body))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert len(engine.requests) == 1


async def test_a_head_that_does_not_come_closes_the_connection(executor: ThreadPoolExecutor) -> None:
    async with running(executor, receive_timeout_s=0.2) as (server, _):
        for sent in (b"", b"POST /v1", post()[:-2]):
            start = time.monotonic()
            assert await exchange(server, sent) == b""
            assert time.monotonic() - start >= 0.15


async def test_a_head_that_comes_by_drops_does_not_hold_its_connection(executor: ThreadPoolExecutor) -> None:
    async with running(executor, receive_timeout_s=0.3) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /live HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"x-a: b\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        try:
            async with asyncio.timeout(LIMIT_S):
                found = await asyncio.gather(reader.read(), return_exceptions=True)
            assert found == [b""] or isinstance(found[0], ConnectionError)
        finally:
            dripping.cancel()
            writer.close()
            await asyncio.gather(dripping, writer.wait_closed(), return_exceptions=True)


async def test_a_body_that_does_not_come_gets_408(executor: ThreadPoolExecutor) -> None:
    async with running(executor, receive_timeout_s=0.2) as (server, engine):
        head = post(b"content-length: 1000\r\n", b"connection: close\r\n")
        for pieces in ((head,), (head, b'{"model":')):
            answer = await exchange(server, *pieces)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"request_timeout" in answer
        assert engine.requests == []


async def test_a_client_that_does_not_read_is_cut_off_and_its_worker_is_free_again(
    executor: ThreadPoolExecutor,
) -> None:
    async def endless(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        while True:
            yield [frame("x" * 4096)]
            await asyncio.sleep(0)

    async with running(executor, endless, send_timeout_s=0.3) as (server, engine):
        body = json.dumps({**json.loads(HI), "stream": True}).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(b"content-length: %d\r\n" % len(body), body=body))
        async with asyncio.timeout(LIMIT_S):
            await engine.closed.wait()
        assert engine.contexts[0].is_stopped()
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def test_idle_connections_between_requests_are_kept_as_before(executor: ThreadPoolExecutor) -> None:
    async with running(executor, receive_timeout_s=0.2) as (server, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(2):
            writer.write(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(LIMIT_S):
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(0.5)
        writer.close()
        await writer.wait_closed()
