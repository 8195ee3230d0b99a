"""The access log: one line a request, whatever became of it, and nothing in it that a client wrote."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.access_log import AccessLog, AccessLogCollector
from dynamo_es.frontend.api_keys import KeyEntry, KeyRing, digest_of, new_key
from dynamo_es.frontend.key_gate import KeyGate
from dynamo_es.frontend.line_writer import LineWriter
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.frontend.routes import taken_paths
from dynamo_es.frontend.servable import NoTokenizer
from dynamo_es.frontend.server import serve
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, ServedModel, application, card, frame, says, served

CHAT = "/v1/chat/completions"
MARK = "Xyzzy-4711"
LIMIT_S = 60
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}


class Kept:
    """In the place of a ``LineWriter``."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def offer(self, line: bytes) -> None:
        assert b"\n" not in line
        assert MARK.encode() not in line
        self.lines.append(json.loads(line))


class Logged:
    """An application behind an access log."""

    def __init__(self, app: Any, clock: Any = None) -> None:
        self.kept = Kept()
        self.app: Any = AccessLog(app, self.kept, clock or SystemClock(), taken_paths(HttpPathsConfig()))  # type: ignore[arg-type]

    async def line(self, path: str, body: dict[str, Any] | bytes = b"", **more: Any) -> dict[str, Any]:
        """The one line of a request."""
        await self.ask(path, body, **more)
        assert len(self.kept.lines) == 1
        return self.kept.lines.pop()

    async def ask(self, path: str, body: dict[str, Any] | bytes = b"", **more: Any) -> Reply:
        return await call(self.app, path, body if isinstance(body, bytes) else json.dumps(body).encode(), **more)


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def logged(executor: ThreadPoolExecutor) -> Logged:
    engine = ScriptedEngine(says(frame("Hel"), frame("lo", "stop", completion_usage=USAGE)))
    extension = FrontendRoute("GET", "/ext", lambda context: 1)
    return Logged(application(served(engine), executor=executor, extensions=[extension]))


def hi(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": MARK}], **more}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_answered(logged: Logged, stream: bool) -> None:
    line = await logged.line(CHAT, hi(stream=stream), headers={"content-type": "application/json", "x-request-id": "r"})
    assert line["ts"].endswith("Z")
    assert line["duration_ms"] >= line["ttft_ms"] >= 0
    assert len(line["request_id"]) == 36
    expected = {
        "pid": os.getpid(), "client": "127.0.0.1", "method": "POST", "route": CHAT, "status": 200, "model": "m",
        "stream": stream, "x_request_id": "r", "output_tokens": 5, "cached_tokens": 4, "finish_reason": "stop",
        "disconnected": False, "error_type": None, "error_code": None, "api_key": None, "trace_id": None,
    }  # fmt: skip
    assert {name: line[name] for name in expected} == expected
    assert line["prompt_tokens"] > 0


async def test_several_choices_and_prompts_say_how_they_ended(executor: ThreadPoolExecutor) -> None:
    script = says([frame("a", "stop"), frame("b", "length", index=1)])
    logged = Logged(application(served(ScriptedEngine(script)), executor=executor))
    assert (await logged.line(CHAT, hi(n=2)))["finish_reason"] == "stop,length"
    line = await logged.line("/v1/completions", {"model": "m", "prompt": [MARK, MARK], "n": 2, "stream": True})
    assert (line["finish_reason"], line["output_tokens"]) == ("stop,length", 4)


async def test_chunks_of_workers_that_take_text_say_how_they_ended(executor: ThreadPoolExecutor) -> None:
    def chunk(text: str, reason: str | None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": reason}]}

    engine = ScriptedEngine(says(chunk("Hel", None), chunk("lo", "length")))
    model = ServedModel("m", card(model_input="Text"), NoTokenizer(), None, engine, 0)
    logged = Logged(application(model, executor=executor))
    for stream in (False, True):
        line = await logged.line(CHAT, hi(stream=stream))
        assert (line["status"], line["finish_reason"], line["output_tokens"]) == (200, "length", 2)


REFUSED: list[tuple[str, Any, dict[str, Any], dict[str, Any]]] = [
    (CHAT, b"{" + MARK.encode(), {}, {"route": CHAT, "status": 400, "error_type": "validation"}),
    (CHAT, {"model": MARK, "messages": []}, {}, {"status": 400, "model": None}),
    (CHAT, hi(model=MARK), {}, {"status": 404, "error_code": "model_not_found", "model": None}),
    (CHAT, b"", {"method": "GET"}, {"route": CHAT, "method": "GET", "status": 405, "error_type": "validation"}),
    (CHAT, b"x", {"headers": {"content-type": "text/plain"}}, {"status": 415}),
    (f"/{MARK}", b"", {"method": "GET"}, {"route": None, "status": 404, "error_type": "not_found"}),
    (f"/{MARK}\n", b"", {"method": MARK}, {"route": None, "status": 404, "method": "OTHER"}),
    (f"/v1/models/{MARK}", b"", {"method": "GET"}, {"route": "/v1/models/{model_id}", "status": 404}),
    ("/v1/images/generations", hi(), {}, {"status": 501, "error_type": "not_implemented"}),
    ("/v1/models/m", b"", {"method": "HEAD"}, {"route": "/v1/models/{model_id}", "method": "HEAD", "status": 200}),
    ("/ext", b"", {"method": "GET"}, {"route": "/ext", "status": 200}),
    ("/health", b"", {"method": "GET"}, {"route": "/health", "status": 200, "request_id": None}),
]


@pytest.mark.parametrize(("path", "body", "how", "expected"), REFUSED)
async def test_other_requests_and_what_is_refused(
    logged: Logged, path: str, body: Any, how: dict[str, Any], expected: dict[str, Any]
) -> None:
    line = await logged.line(path, body, **how)
    assert {name: line[name] for name in expected} == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_its_worker_fails(executor: ThreadPoolExecutor, stream: bool) -> None:
    engine = ScriptedEngine(says(frame("Hel"), ValueError(MARK), frame("lo")))
    logged = Logged(application(served(engine), executor=executor))
    line = await logged.line(CHAT, hi(stream=stream))
    # Of a stream, the client was told 200 before.
    assert (line["status"], line["output_tokens"]) == (200 if stream else 400, 3)
    assert line["error_type"] == "validation"


async def test_a_client_that_leaves(executor: ThreadPoolExecutor) -> None:
    begun = asyncio.Event()

    async def endless(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        yield [frame("a")]
        begun.set()
        await context.async_killed_or_stopped()

    logged = Logged(application(served(ScriptedEngine(endless)), executor=executor))
    body = json.dumps(hi(stream=True)).encode()
    messages: Iterator[dict[str, Any]] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        message = next(messages, None)
        if message is None:
            await begun.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Any) -> None: ...

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "client": None,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
    }  # fmt: skip
    async with asyncio.timeout(LIMIT_S):
        await logged.app(scope, receive, send)
    line = logged.kept.lines.pop()
    assert (line["status"], line["disconnected"], line["error_type"]) == (200, True, "cancelled")
    assert (line["client"], line["output_tokens"]) == (None, 1)


async def test_api_keys_are_named_by_their_ids(executor: ThreadPoolExecutor) -> None:
    key_id, key = new_key()
    ring = KeyRing([KeyEntry(key_id, digest_of(key), "k", "2026-05-01T12:00:00Z")], ManualClock())
    inner = application(served(ScriptedEngine(says(frame("a", "stop")))), executor=executor)
    gate = KeyGate(inner, ring, HttpPathsConfig(), CollectorRegistry(), "p", probes_open=True)
    logged = Logged(gate)
    kind = {"content-type": "application/json"}
    line = await logged.line(CHAT, hi(), headers={**kind, "x-api-key": key})
    assert (line["status"], line["api_key"]) == (200, key_id)
    assert key not in json.dumps(line)
    line = await logged.line(CHAT, hi(), headers={**kind, "x-api-key": MARK})
    assert (line["status"], line["route"], line["api_key"], line["error_type"]) == (401, CHAT, None, "validation")


async def test_an_application_that_raises_is_a_500() -> None:
    class Raises:
        service = None

        async def __call__(self, *arguments: Any) -> None:
            raise KeyError(MARK)

    logged = Logged(Raises())
    with pytest.raises(KeyError):
        await logged.ask("/live", method="GET")
    assert (logged.kept.lines[0]["status"], logged.kept.lines[0]["error_type"]) == (500, "internal")


async def test_what_is_no_http_has_a_line_too(executor: ThreadPoolExecutor) -> None:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, header_limit_kb=4)
    logged = Logged(application(served(ScriptedEngine(says())), executor=executor, config=config))
    server = await serve(logged.app, config, on_refused=logged.app.refused)
    try:
        for sent in (f"{MARK}\r\n\r\n", f"GET / HTTP/1.1\r\na: {'x' * 5000}\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent.encode())
            async with asyncio.timeout(LIMIT_S):
                await reader.read()
            writer.close()
            await writer.wait_closed()
    finally:
        await asyncio.wait_for(server.shutdown(), LIMIT_S)
    assert [(line["status"], line["method"], line["client"]) for line in logged.kept.lines] == [
        (400, None, "127.0.0.1"), (431, None, "127.0.0.1"),
    ]  # fmt: skip


# -- the file ----------------------------------------------------------------------------------------------------------


def until(condition: Callable[[], object]) -> None:
    for _ in range(6000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to that")


def test_lines_are_appended_and_a_file_that_is_moved_away_is_made_anew(tmp_path: Path) -> None:
    file, moved = tmp_path / "access.log", tmp_path / "access.log.1"
    file.write_text("before\n")
    writer = LineWriter(str(file), 10)
    try:
        writer.offer(b"a")
        until(lambda: writer.written == 1)
        file.rename(moved)

        def written_anew() -> bool:
            writer.offer(b"b")
            until(lambda: not writer.waiting)
            return file.exists()

        until(written_anew)
    finally:
        writer.close()
    writer.close()
    lines = moved.read_text().splitlines() + file.read_text().splitlines()
    assert lines == ["before", "a", *["b"] * (writer.written - 1)]
    assert oct(file.stat().st_mode & 0o777) == "0o640"
    assert writer.dropped_full == writer.dropped_failed == 0


def test_what_finds_no_room_or_no_disk_is_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = LineWriter(str(pipe), 2)
    registry = CollectorRegistry()
    AccessLogCollector(writer, registry, "p")
    try:
        # Nobody reads the pipe, so that the thread waits with what it has while lines are offered.
        writer.offer(b"x" * 1_000_000)
        until(lambda: not writer.waiting)
        for _ in range(5):
            writer.offer(b"y")
        assert (writer.waiting, writer.dropped_full) == (2, 3)
        os.close(reader)
        until(lambda: writer.dropped_failed == 3)
    finally:
        writer.close()
    page = generate_latest(registry).decode()
    assert 'p_access_log_dropped_total{cause="full"} 3.0' in page
    assert 'p_access_log_dropped_total{cause="failed"} 3.0' in page
    assert caplog.text.count("cannot be written, lines are lost: Broken pipe") == 1


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--access-log .* cannot be opened: No such file or directory"):
        LineWriter(str(tmp_path / "none" / "access.log"), 10)
