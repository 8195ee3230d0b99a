"""HTTPS and mutual TLS over real sockets, and certificates that are renewed while the server runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import trustme
from cryptography import x509

from dynamo_es.clock import SystemClock
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.secrets_watch import FrontendSecrets
from dynamo_es.frontend.server import FrontendServer, serve
from dynamo_es.runtime.context import Context
from tests.support.runtimes import wait_for
from tests.support.tls_files import Pair, authority_file, issue
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
LIMIT_S = 60


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


class Running:
    def __init__(self, server: FrontendServer, look: asyncio.Event, secrets: FrontendSecrets) -> None:
        self.server = server
        self.look = look
        self.failures = secrets.handshakes.failures
        self.url = f"https://127.0.0.1:{server.port}"


@asynccontextmanager
async def running(
    tls: TlsConfig, executor: ThreadPoolExecutor, engine: ScriptedEngine | None = None, check_s: float = 3600.0
) -> AsyncIterator[Running]:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0)
    look = asyncio.Event()
    secrets = FrontendSecrets(tls, ApiKeysConfig(), SystemClock(), look)
    app = application(served(engine or ScriptedEngine(says(frame("Hello", "stop")))), executor=executor, config=config)
    server = await serve(app, config, tls=secrets.tls)
    secrets.watch(server, check_s)
    try:
        yield Running(server, look, secrets)
    finally:
        await secrets.close()
        await asyncio.wait_for(server.shutdown(), LIMIT_S)


def trusting(authority: trustme.CA, client: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    return context


async def reached(url: str, context: ssl.SSLContext) -> bool:
    """Whether a request over a fresh connection gets through."""
    try:
        async with httpx.AsyncClient(verify=context) as client:
            return (await client.get(f"{url}/live")).status_code == 200
    except httpx.TransportError:
        return False


async def serial_of(port: int) -> int:
    """Of the certificate that a fresh connection is shown."""
    pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
    return x509.load_pem_x509_certificate(pem.encode()).serial_number


def serial_in(pair: Pair) -> int:
    return x509.load_pem_x509_certificate(pair.cert.read_bytes()).serial_number


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


async def test_https_and_nothing_else(tmp_path: Path, authority: trustme.CA, executor: ThreadPoolExecutor) -> None:
    pair = issue(tmp_path, authority)
    async with (
        running(TlsConfig(str(pair.cert), str(pair.key)), executor) as it,
        httpx.AsyncClient(verify=trusting(authority)) as http,
        openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="x", http_client=http, max_retries=0) as client,
    ):
        assert it.server.scheme == "https"
        answer = await client.chat.completions.create(**HI)
        assert answer.choices[0].message.content == "Hello"
        stream = await client.chat.completions.create(**HI, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello"
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(f"http://127.0.0.1:{it.server.port}/live")
        await wait_for(lambda: it.failures == {"plain_http": 1})
        assert not await reached(it.url, ssl.create_default_context())  # its authority is not known
        old = trusting(authority)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        assert not await reached(it.url, old)


async def test_mutual_tls_lets_in_known_clients_only(
    tmp_path: Path, authority: trustme.CA, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pair, clients = issue(tmp_path, authority), trustme.CA()
    known, stranger = issue(tmp_path, clients, "known"), issue(tmp_path, trustme.CA(), "stranger")
    tls = TlsConfig(str(pair.cert), str(pair.key), client_ca_cert_path=str(authority_file(tmp_path, clients)))
    async with running(tls, executor) as it:
        assert await reached(it.url, trusting(authority, known))
        assert not await reached(it.url, trusting(authority, stranger))
        await wait_for(lambda: it.failures == {"client_certificate_refused": 1})
        assert not await reached(it.url, trusting(authority))
        await wait_for(lambda: it.failures == {"client_certificate_refused": 1, "no_client_certificate": 1})
    assert caplog.text.count("TLS handshakes failed") == 1  # and the next one not before ten seconds
    assert "1 TLS handshakes failed; the last: the client's certificate is not valid, or of no authority" in caplog.text


@pytest.mark.parametrize("how", ["signal", "change"])
async def test_a_renewed_certificate_is_shown_to_new_connections_and_open_streams_go_on(
    how: str, tmp_path: Path, authority: trustme.CA, executor: ThreadPoolExecutor
) -> None:
    renewed = asyncio.Event()

    async def script(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        yield [frame("be")]
        await renewed.wait()
        yield [frame("fore", "stop")]

    pair = issue(tmp_path, authority)
    tls = TlsConfig(str(pair.cert), str(pair.key))
    check_s = 3600.0 if how == "signal" else 0.05
    async with (
        running(tls, executor, ScriptedEngine(script), check_s) as it,
        httpx.AsyncClient(verify=trusting(authority), timeout=LIMIT_S) as http,
        http.stream("POST", f"{it.url}/v1/chat/completions", json={**HI, "stream": True}) as stream,
    ):
        before = await serial_of(it.server.port)
        assert before == serial_in(pair)
        for _ in range(2):  # and again: renewals come every few weeks
            issue(tmp_path, authority)
            it.look.set() if how == "signal" else None
            wanted = serial_in(pair)

            async def shown(wanted: int = wanted) -> bool:
                return await serial_of(it.server.port) == wanted

            await until(shown)
        renewed.set()
        text = (await stream.aread()).decode()
        assert "fore" in text
        assert text.endswith("data: [DONE]\n\n")


async def test_a_broken_renewal_changes_nothing_and_the_next_look_takes_what_is_right(
    tmp_path: Path, authority: trustme.CA, executor: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    pair = issue(tmp_path, authority)
    before, key = serial_in(pair), pair.key.read_bytes()
    async with running(TlsConfig(str(pair.cert), str(pair.key)), executor, check_s=0.05) as it:
        with caplog.at_level(logging.ERROR):
            pair.key.write_text("no key")

            async def told() -> bool:
                return "holds no private key" in caplog.text

            await until(told)
        assert await serial_of(it.server.port) == before
        assert "the old state stays in force" in caplog.text
        renewed = issue(tmp_path, authority)
        assert renewed.key.read_bytes() != key

        async def shown() -> bool:
            return await serial_of(it.server.port) == serial_in(pair)

        await until(shown)


async def test_an_authority_that_is_taken_off_lets_nobody_in_any_more(
    tmp_path: Path, authority: trustme.CA, executor: ThreadPoolExecutor
) -> None:
    pair, first, second = issue(tmp_path, authority), trustme.CA(), trustme.CA()
    one, two = issue(tmp_path, first, "one"), issue(tmp_path, second, "two")
    path = authority_file(tmp_path, first, second)
    async with running(TlsConfig(str(pair.cert), str(pair.key), client_ca_cert_path=str(path)), executor) as it:
        context = trusting(authority, one)
        assert await reached(it.url, context)
        authority_file(tmp_path, second)
        it.look.set()

        async def shut() -> bool:
            return not await reached(it.url, context)  # the same context: a resumed session must not help

        await until(shut)
        assert await reached(it.url, trusting(authority, two))
