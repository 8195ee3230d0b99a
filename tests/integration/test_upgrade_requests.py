"""Clients that ask for another protocol on a plain connection: they are answered in HTTP/1.1, and lose nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dynamo_es.frontend.upgrades import without_upgrade
from tests.integration.test_frontend_http import CHAT, HI, running
from tests.unit.frontend.fakes import ScriptedEngine, frame, says

H2C = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
WEBSOCKET = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    return int(head.split()[1]), await reader.readexactly(length)


async def test_a_body_with_an_offer_of_http2_is_read(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hello.", "stop")))
    body = json.dumps(HI).encode()
    request = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n" % (
        CHAT.encode(),
        len(body),
        H2C,
    )
    async with running(engine, executor) as server, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for cut in (0, len(body) // 2):  # the body with its head, and in two parts
            writer.write(request + body[:cut])
            await writer.drain()
            await asyncio.sleep(0)
            writer.write(body[cut:])
            status, answer = await read_answer(reader)
            assert (status, json.loads(answer)["choices"][0]["message"]["content"]) == (200, "Hello.")
        writer.close()
        await writer.wait_closed()


async def test_realtime_says_by_http_that_it_is_not_there(
    executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with running(ScriptedEngine(says()), executor) as server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(WEBSOCKET)
            status, answer = await read_answer(reader)
            writer.close()
            await writer.wait_closed()
    assert (status, json.loads(answer)["error"]["code"]) == (501, "not_implemented")
    assert not caplog.records  # nobody can fill the log so


def test_only_heads_are_changed_and_no_length() -> None:
    data = b"POST / HTTP/1.1\r\nUPGRADE: h2c\r\nX-Upgrade: 1\r\n\r\n\r\nupgrade: x"
    assert without_upgrade(data) == b"POST / HTTP/1.1\r\nignored: h2c\r\nX-Upgrade: 1\r\n\r\n\r\nupgrade: x"
    plain = b"GET /upgrade HTTP/1.1\r\nHost: x\r\n\r\n"
    assert without_upgrade(plain) is plain
