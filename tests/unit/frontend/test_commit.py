"""When a stream's status is sent, and options that change every request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import InvalidArgument
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.context import Context
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import Script, ScriptedEngine, application, frame, says, served

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
HELLO = [{"role": "user", "content": "Hi"}]


def late(error: Exception, delay_s: float) -> Script:
    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        await asyncio.sleep(delay_s)
        raise error
        yield []

    return script


async def stream(executor: Executor, script: Script, path: str, **options: Any) -> Reply:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True, **options)
    app = application(served(ScriptedEngine(script)), executor=executor, config=config)
    bodies = {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "Hi"},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    }
    return await call(app, path, json.dumps({"model": "m", "stream": True, **bodies[path]}).encode())


@pytest.mark.parametrize("path", PATHS)
async def test_early_error_has_its_own_status_if_the_stream_waits_for_it(path: str, executor: Executor) -> None:
    at_once = await stream(executor, late(InvalidArgument("no"), 0), path)
    assert (at_once.status, at_once.headers["content-type"]) == (200, "text/event-stream")
    assert "no" in at_once.text
    waited = await stream(executor, late(InvalidArgument("no"), 0.01), path, pre_commit_error_peek_ms=5000)
    assert (waited.status, waited.json()["message"]) == (400, "no")


@pytest.mark.parametrize("path", PATHS)
async def test_error_that_comes_later_than_that_is_part_of_the_stream(path: str, executor: Executor) -> None:
    reply = await stream(executor, late(InvalidArgument("no"), 0.2), path, pre_commit_error_peek_ms=20)
    assert reply.status == 200
    assert "no" in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", PATHS)
async def test_stream_that_waits_for_its_first_output_is_the_same_stream(path: str, executor: Executor) -> None:
    script = says(frame("He"), frame("llo"), frame("", "stop"))
    waited = await stream(executor, script, path, pre_commit_error_peek_ms=5000)
    plain = await stream(executor, script, path)
    assert waited.status == plain.status == 200
    assert waited.text.count("\n\n") == plain.text.count("\n\n")
    assert waited.headers.keys() == plain.headers.keys()
    assert waited.headers["content-type"] == plain.headers["content-type"] == "text/event-stream"
    empty = await stream(executor, says(), path, pre_commit_error_peek_ms=5000)
    assert empty.text.endswith("data: [DONE]\n\n")


async def test_status_of_overload_is_configurable_and_keeps_its_type(executor: Executor) -> None:
    script = says(HttpError(529, "full"))
    for path in PATHS:
        reply = await stream(executor, script, path, pre_commit_error_peek_ms=5000, overload_status_code=503)
        assert (reply.status, reply.json()["code"]) == (503, 503)
        kind = reply.json()["error"]["type"] if path == "/v1/messages" else reply.json()["type"]
        assert kind in ("Overloaded", "overloaded_error")


async def test_forced_usage_ends_every_stream(executor: Executor) -> None:
    script = says(frame("x", "stop"))
    for path in PATHS[:2]:
        reply = await stream(executor, script, path, force_include_usage=True)
        *_, last, done, _ = reply.text.split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["usage"]["completion_tokens"] == 1
