"""API keys as clients and operators meet them: released clients, a file that changes, a real process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import trustme
from prometheus_client import CollectorRegistry, Gauge

from dynamo_es.cli.main import main
from dynamo_es.clock import SystemClock
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend.key_gate import KeyGate
from dynamo_es.frontend.secrets_watch import FrontendSecrets
from dynamo_es.frontend.server import serve
from tests.support.fleet import Fleet
from tests.support.tls_files import issue
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

HI: Any = [{"role": "user", "content": "Hi"}]
LIMIT_S = 60


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


class Keys:
    """The file and its command."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path = path
        self._capsys = capsys

    def add(self, *options: str) -> str:
        assert main(["keys", "add", "--api-keys-file", str(self.path), "--name", "x", *options]) == 0
        return self._capsys.readouterr().out.strip()

    def revoke(self, key: str) -> None:
        assert main(["keys", "revoke", "--api-keys-file", str(self.path), key[3:11]]) == 0


@pytest.fixture
def keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Keys:
    return Keys(tmp_path / "keys.json", capsys)


@contextlib.asynccontextmanager
async def running(keys: Keys, executor: ThreadPoolExecutor, stale: Gauge | None = None) -> AsyncIterator[str]:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
    secrets = FrontendSecrets(TlsConfig(), ApiKeysConfig(str(keys.path)), SystemClock())
    assert secrets.keys is not None
    app = application(
        served(ScriptedEngine(says(frame("Hello", "stop"))), "m"), served(ScriptedEngine(says()), "n"),
        executor=executor, config=config,
    )  # fmt: skip
    gate = KeyGate(app, secrets.keys, HttpPathsConfig(), CollectorRegistry(), "p", probes_open=True)
    server = await serve(gate, config)
    secrets.watch(server, 0.05, stale)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await secrets.close()
        await asyncio.wait_for(server.shutdown(), LIMIT_S)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def status_of(url: str, key: str, verify: ssl.SSLContext | bool = True) -> int:
    async with httpx.AsyncClient(timeout=LIMIT_S, verify=verify) as client:
        return (await client.get(f"{url}/v1/models", headers={"x-api-key": key})).status_code


async def test_openai_s_client_knows_what_a_refusal_means(executor: ThreadPoolExecutor, keys: Keys) -> None:
    key, slow = keys.add("--models", "m"), keys.add("--requests-per-minute", "1", "--burst", "1")
    async with running(keys, executor) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
            answer = await client.chat.completions.create(model="m", messages=HI)
            assert answer.choices[0].message.content == "Hello"
            assert [model.id async for model in client.models.list()] == ["m"]
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model="n", messages=HI)
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="nonsense", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(model="m", messages=HI)
            assert refused.value.code == "invalid_api_key"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=slow, max_retries=0) as client:
            await client.chat.completions.create(model="m", messages=HI)
            with pytest.raises(openai.RateLimitError) as limited:
                await client.chat.completions.create(model="m", messages=HI)
            assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60


async def test_anthropic_s_client_knows_what_a_refusal_means(executor: ThreadPoolExecutor, keys: Keys) -> None:
    key, slow = keys.add(), keys.add("--requests-per-minute", "1", "--burst", "1")
    ask: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": HI}
    async with running(keys, executor) as url:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0) as client:
            assert (await client.messages.create(**ask)).content[0].text == "Hello"  # type: ignore[union-attr]
        async with anthropic.AsyncAnthropic(base_url=url, auth_token=key, max_retries=0) as client:
            assert (await client.messages.create(**ask)).stop_reason == "end_turn"
        async with anthropic.AsyncAnthropic(base_url=url, api_key="nonsense", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**ask)
        async with anthropic.AsyncAnthropic(base_url=url, api_key=slow, max_retries=0) as client:
            await client.messages.create(**ask)
            with pytest.raises(anthropic.RateLimitError):
                await client.messages.create(**ask)


async def test_the_file_is_read_again_when_it_changes_and_a_broken_one_changes_nothing(
    executor: ThreadPoolExecutor, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    first = keys.add()
    registry = CollectorRegistry()

    def is_stale() -> float | None:
        return registry.get_sample_value("p_secrets_stale", {"what": "API keys"})

    async with running(keys, executor, Gauge("p_secrets_stale", "?", ("what",), registry=registry)) as url:
        assert await status_of(url, first) == 200
        assert is_stale() == 0
        second = keys.add()
        await until(lambda: _is(status_of(url, second), 200))
        keys.revoke(first)
        await until(lambda: _is(status_of(url, first), 401))
        good = keys.path.read_bytes()
        keys.path.write_bytes(good[:-20])

        async def told() -> bool:
            return "API keys not loaded again, the old state stays in force" in caplog.text

        await until(told)
        assert is_stale() == 1
        assert await status_of(url, second) == 200
        keys.path.unlink()
        await until(lambda: _is(_count(caplog, "cannot read the API keys"), 1))
        assert await status_of(url, second) == 200
        assert await status_of(url, first) == 401
        keys.path.write_bytes(good)
        third = keys.add()
        await until(lambda: _is(status_of(url, third), 200))
        assert is_stale() == 0


async def _count(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return caplog.text.count(text)


async def _is(value: Awaitable[int], wanted: int) -> bool:
    return await value == wanted


async def test_a_process_with_tls_and_keys_looks_at_its_files_at_sighup(tmp_path: Path, keys: Keys) -> None:
    authority = trustme.CA()
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    pair = issue(tmp_path, authority, password="open sesame")
    (tmp_path / "password").write_text("open sesame\n")
    key = keys.add()
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    try:
        process = await fleet.start(
            "frontend", "frontend", "--http-host", "127.0.0.1", "--http-port", "0",
            "--tls-cert-path", str(pair.cert), "--tls-key-path", str(pair.key),
            "--tls-key-password-file", str(tmp_path / "password"), "--api-keys-file", str(keys.path),
            "--secrets-check-interval", "3600", "--log-level", "debug",
        )  # fmt: skip
        base = await process.wait_ready(LIMIT_S)
        assert base.startswith("https://127.0.0.1:")
        assert await status_of(base, key, trust) == 200
        assert await status_of(base, "nonsense", trust) == 401
        async with httpx.AsyncClient(verify=trust) as client:
            assert (await client.get(f"{base}/live")).status_code == 200
            page = (await client.get(f"{base}/metrics")).text
        assert 'dynamo_frontend_api_key_refusals_total{reason="unknown"} 1.0' in page
        second = keys.add()
        assert await status_of(base, second, trust) == 401
        before = await _certificate(base)
        issue(tmp_path, authority, password="open sesame")
        process.process.send_signal(signal.SIGHUP)
        await until(lambda: _is(status_of(base, second, trust), 200))

        async def renewed() -> bool:
            return await _certificate(base) != before

        await until(renewed)
        assert await process.end(timeout_s=LIMIT_S) == 0
        log = process.log()
        assert "TLS certificate loaded again" in log
        assert "API keys loaded again" in log
        for secret in (key, second, "sesame"):
            assert secret not in log
    finally:
        await fleet.close()


def test_what_is_wrong_is_told_in_one_line_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair, other = issue(tmp_path, trustme.CA()), issue(tmp_path, trustme.CA(), "other")
    (tmp_path / "keys.json").write_text("{}")
    for options, text in (
        (("--tls-cert-path", pair.cert), "--tls-cert-path and --tls-key-path must be provided together"),
        (("--tls-client-ca-cert-path", pair.cert), "--tls-client-ca-cert-path requires --tls-cert-path and"),
        (
            ("--tls-cert-path", pair.cert, "--tls-key-path", other.key, "--workers", 2),
            "does not belong to the certificate in",
        ),
        (("--api-keys-file", tmp_path / "keys.json"), "keys.json: no list of API keys: "),
        (("--api-keys-file", tmp_path / "no"), "/no: No such file or directory; dynamo-es keys add makes it"),
    ):
        assert main(["frontend", "--log", f"embedded://{tmp_path}/log", *map(str, options)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("dynamo-es: ")
        assert text in error
        assert error.count("\n") == 1
    assert not (tmp_path / "log").exists()


async def _certificate(base: str) -> str:
    return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", int(base.rpartition(":")[2])))
