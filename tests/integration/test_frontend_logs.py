"""What a client sends, and what a model answers, is in no log line, at whatever level and however a request ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.clock import SystemClock
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.errors import InvalidArgument, Unknown
from dynamo_es.frontend.api_keys import KeyEntry, digest_of, new_key
from dynamo_es.frontend.key_file import change_keys
from dynamo_es.frontend.key_gate import KeyGate
from dynamo_es.frontend.secrets_watch import FrontendSecrets
from dynamo_es.frontend.server import serve
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.http_error import HttpError
from dynamo_es.runtime.context import Context
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, served

MARK = "Xyzzy-4711"
CHAT = "/v1/chat/completions"
LIMIT_S = 60


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def script(failures: list[Exception]) -> Any:
    """Says the mark, then raises one failure after the other, request by request; then ends well."""

    async def run(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        yield [frame(f"I say {MARK} ")]
        if failures:
            raise failures.pop()
        yield [frame(f"and {MARK}", "stop")]

    return run


FAILURES: list[Exception] = [
    ValueError(MARK), InvalidArgument(MARK), Unknown(MARK), HttpError(500, MARK), HttpError(422, MARK), KeyError(MARK),
]  # fmt: skip
TEMPLATES = {
    "m": "{% for m in messages %}{{ m.content }}{% endfor %}",
    "raises": "{{ raise_exception(messages[0].content) }}",
    "fails": "{{ messages[0].content + 1 }}",
    "grows": "{{ messages[0].content * 99999999 }}",
    "none": None,
}


def bodies() -> list[Any]:
    hi = {"messages": [{"role": "user", "content": f"tell {MARK}", "name": MARK}]}
    tool = {"type": "function", "function": {"name": "f", "description": MARK, "parameters": {"title": MARK}}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"{MARK}'}}
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"http://x/{MARK}"}}]}
    good = [{"model": model, **hi} for model in TEMPLATES]
    return [
        *good,
        *([{"model": "m", **hi, "stream": True}] * 3),
        {"model": "m", **hi, "tools": [tool], "metadata": {MARK: MARK}, "user": MARK, "cache_salt": MARK},
        {"model": "m", "messages": [*hi["messages"], {"role": "assistant", "tool_calls": [call]}]},
        {"model": "m", "messages": [{"role": "user", "content": MARK * 20_000}]},
        {"model": "m", "messages": [image]},
        {"model": "m", "messages": [{"role": MARK, "content": MARK}]},
        {"model": MARK, **hi},
        {"model": "m", **hi, MARK: MARK},
        {"model": "m", **hi, "temperature": MARK},
        {"model": "m", **hi, "stop": [MARK] * 99},
        {"model": "m", **hi, "nvext": {MARK: MARK}},
    ]


async def test_prompts_answers_and_keys_are_never_logged(
    executor: ThreadPoolExecutor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)  # the lowest that can be chosen
    path = tmp_path / "keys.json"
    key_id, key = new_key()
    change_keys(path, lambda keys: (KeyEntry(key_id, digest_of(key), "n", "2026-05-01T12:00:00Z"),))
    secrets = FrontendSecrets(TlsConfig(), ApiKeysConfig(str(path)), SystemClock())
    assert secrets.keys is not None
    engine = ScriptedEngine(script([*FAILURES] * 3))
    models = []
    for name, template in TEMPLATES.items():
        model = served(engine, name)
        object.__setattr__(model, "renderer", None if template is None else ChatRenderer(template, {}))
        models.append(model)
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
    app = application(*models, executor=executor, config=config)
    gate = KeyGate(app, secrets.keys, HttpPathsConfig(), CollectorRegistry(), "p", probes_open=True)
    server = await serve(gate, config)
    secrets.watch(server, 0.05)
    try:
        seen = await _ask_everything(f"http://127.0.0.1:{server.port}", key)
        await _ask_raw(server.port, key)
        # A file that is wrong is told without what is in it.
        path.write_text(f'{{"version": "{key}", "keys": ["{MARK}"]}}')
        async with asyncio.timeout(LIMIT_S):
            while "API keys not loaded again" not in caplog.text:
                await asyncio.sleep(0.02)
    finally:
        await secrets.close()
        await asyncio.wait_for(server.shutdown(), LIMIT_S)
    assert {200, 400, 401, 404, 415, 500} <= seen
    assert engine.requests != []
    ours = [
        record for record in caplog.records if record.name.partition(".")[0] not in ("httpx", "httpcore", "asyncio")
    ]
    assert any(record.name.startswith("dynamo_es") for record in ours)
    formatter = logging.Formatter("%(name)s %(message)s")
    for record in ours:
        line = formatter.format(record)
        assert MARK not in line, line
        assert key not in line, line
        assert key[12:30] not in line, line


async def _ask_everything(url: str, key: str) -> set[int]:
    seen = set()
    login = {"authorization": f"Bearer {key}", "x-dynamo-meta-a": MARK, "x-request-id": MARK}
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        for body in bodies():
            seen.add((await client.post(url + CHAT, json=body, headers=login)).status_code)
        for name, body in (
            ("completions", {"prompt": MARK}), ("responses", {"input": MARK}), ("embeddings", {"input": MARK}),
            ("messages", {"max_tokens": 5, "messages": [{"role": "user", "content": MARK}]}),
        ):  # fmt: skip
            reply = await client.post(f"{url}/v1/{name}", json={"model": "m", **body}, headers=login)
            seen.add(reply.status_code)
        json_type = {**login, "content-type": "application/json"}
        for content in (f'{{"model": "{MARK}"', f'{{"messages": {MARK}}}', MARK, f'"{MARK}"'):
            seen.add((await client.post(url + CHAT, content=content, headers=json_type)).status_code)
        encoded = {**json_type, "content-encoding": MARK}
        seen.add((await client.post(url + CHAT, content=MARK, headers=encoded)).status_code)
        for headers in ({"authorization": f"Bearer {key}x"}, {"x-api-key": key.upper()}, {"authorization": key}):
            seen.add((await client.post(url + CHAT, json={"model": MARK}, headers=headers)).status_code)
        seen.add((await client.get(f"{url}/{MARK}?key={key}", headers=login)).status_code)
        seen.add((await client.get(f"{url}/v1/models/{MARK}", headers=login)).status_code)
    return seen


async def _ask_raw(port: int, key: str) -> None:
    """Requests that end before they are whole, and such that are none."""
    good = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": MARK}], "stream": True})
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n"
    whole = head.encode() + b"content-length: %d\r\n\r\n" % len(good) + good
    for data in (
        whole,
        whole[:-10],
        head.encode() + b"transfer-encoding: chunked\r\n\r\nzz" + MARK.encode(),
        head.encode() + json.dumps(MARK).encode() + b"\r\n\r\n",
        head.encode() + b"x: " + MARK.encode() * 10_000,
    ):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        await asyncio.gather(writer.drain(), return_exceptions=True)
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
