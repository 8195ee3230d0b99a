"""The HTTP client of one upstream: questions with a small answer, and streams that can be given up at any time.

The server's address is the operator's; no request can change it, no redirection is followed, no proxy of the
environment is used. A stream is read only as fast as it is taken: while nobody takes it, the connection fills up and
the server waits. A stream that is given up closes its connection, which is how such servers learn of it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.engines.attach.refusals import refusal
from dynamo_es.engines.attach.sse import EventReader
from dynamo_es.errors import CannotConnect, ConfigError, ConnectionTimeout, Disconnected, StreamIncomplete, Unknown
from dynamo_es.log.secret_files import read_secret
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_MAX_ERROR_BYTES = 64 * 1024
_KEEP_ALIVE_S = 15.0
# Tries of a request that a kept connection lost before anything came back: the server had closed it meanwhile.
_TRIES = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of a small answer."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return msgspec.json.decode(self.body)
        except (msgspec.DecodeError, RecursionError):
            return None


def base_url(upstream: str) -> str:
    """The URL without ``/v1`` and slashes at its end: servers have routes beside ``/v1``."""
    return upstream.rstrip("/").removesuffix("/v1").rstrip("/")


def tls_of(config: AttachConfig) -> ssl.SSLContext | bool:
    """How certificates are checked; False: not at all. Reads files. Raises ``ConfigError``."""
    if not config.verify:
        if config.ca_cert_path is not None:
            raise ConfigError("--upstream-ca-cert-path and --no-upstream-verify exclude each other")
        return False
    try:
        return ssl.create_default_context(cafile=config.ca_cert_path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot use the certificates in {config.ca_cert_path} (--upstream-ca-cert-path): {error}"
        ) from error


class Upstream:
    """Belongs to one event loop. Use it as an async context manager."""

    def __init__(self, config: AttachConfig) -> None:
        """Reads the files that ``config`` names. Raises ``ConfigError``."""
        self.url = base_url(config.upstream)
        self._config = config
        self._tls = tls_of(config)
        key = read_secret(Path(config.api_key_file)) if config.api_key_file is not None else None
        self._headers = {"Accept-Encoding": "identity", **({} if key is None else {"Authorization": f"Bearer {key}"})}
        self._session: aiohttp.ClientSession | None = None
        self.open_requests = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            headers=self._headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Answer:
        """GET, or POST with ``body``; an answer of at most 16 MiB, within ``--upstream-health-timeout``.

        Raises:
            CannotConnect: Nobody takes connections there.
            Disconnected, ConnectionTimeout: It broke off, or did not answer in time.
            Unknown: The answer is too long.
        """
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                response = await self._send(path, body, {})
                try:
                    content = await _bounded(response, MAX_ANSWER_BYTES)
                finally:
                    response.release()
        except TimeoutError as error:
            raise ConnectionTimeout(f"{self.url}{path} did not answer in time (--upstream-health-timeout)") from error
        except aiohttp.ClientError as error:
            raise Disconnected(f"{self.url}{path}: {type(error).__name__}") from error
        if content is None:
            raise Unknown(f"{self.url}{path} answered with more than {MAX_ANSWER_BYTES} bytes")
        return Answer(response.status, content)

    async def stream(
        self, path: str, body: Mapping[str, Any], context: Context, headers: Mapping[str, str]
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Events of an inference request, all that arrived together in one list, until the server's end mark.

        Ends early, without an error, when ``context`` stops. Close the generator on every way out.

        Raises:
            CannotConnect: Nothing was sent: another worker can have the request.
            Overloaded, InvalidArgument, HttpError: As ``refusal``.
            ConnectionTimeout: It was silent for too long.
            Disconnected, StreamIncomplete: It broke off.
            Unknown: What it sent is no stream of events.
        """
        if self.open_requests >= self._config.max_requests:
            raise Overloaded(f"overloaded: {self._config.max_requests} requests are open (--upstream-max-requests)")
        self.open_requests += 1
        opened = asyncio.ensure_future(self._open(path, body, headers))
        response: aiohttp.ClientResponse | None = None

        def give_up() -> None:
            opened.cancel()
            if response is not None:
                response.close()

        context.add_stop_callback(give_up)
        try:
            response = await opened
            async for events in self._events(response):
                if context.is_stopped():
                    return
                yield events
        except asyncio.CancelledError:
            if context.is_stopped() and not _is_cancelling():
                return
            raise
        except aiohttp.ClientError as error:
            if context.is_stopped():
                return
            raise Disconnected(f"the connection to {self.url} was lost: {type(error).__name__}") from error
        except (Disconnected, StreamIncomplete):
            if not context.is_stopped():
                raise
        finally:
            self.open_requests -= 1
            context.remove_stop_callback(give_up)
            await self._leave(opened, response)

    async def _leave(self, opened: asyncio.Future[aiohttp.ClientResponse], response: Any) -> None:
        if not opened.done():
            opened.cancel()
        await asyncio.wait([opened])
        if response is None and not opened.cancelled() and opened.exception() is None:
            response = opened.result()
        if response is not None:
            response.close()

    async def _open(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        try:
            async with asyncio.timeout(self._config.first_token_timeout_s):
                response = await self._send(path, body, headers)
                if response.status == 200:
                    return response
                try:
                    content = await _bounded(response, _MAX_ERROR_BYTES)
                finally:
                    response.close()
        except TimeoutError as error:
            raise self._silent("--upstream-first-token-timeout") from error
        raise refusal(response.status, content or b"")

    async def _send(
        self, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        assert self._session is not None
        method, data, sent = "GET", None, dict(headers)
        if body is not None:
            method, data = "POST", msgspec.json.encode(body)
            sent["Content-Type"] = "application/json"
        for left in reversed(range(_TRIES)):
            try:
                return await self._session.request(
                    method, self.url + path, data=data, headers=sent, allow_redirects=False
                )
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                raise CannotConnect(f"cannot connect to {self.url}: {_reason(error)}") from error
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if not left:
                    raise Disconnected(f"{self.url} closed the connection before it answered") from error
        raise AssertionError("unreachable")

    async def _events(self, response: aiohttp.ClientResponse) -> AsyncGenerator[list[dict[str, Any]], None]:
        reader = EventReader()
        limit_s, flag = self._config.first_token_timeout_s, "--upstream-first-token-timeout"
        while not reader.done:
            try:
                async with asyncio.timeout(limit_s):
                    received = await response.content.readany()
            except TimeoutError as error:
                raise self._silent(flag) from error
            if not received:
                raise StreamIncomplete(f"{self.url} ended the stream without its end mark")
            events = reader.feed(received)
            if events:
                limit_s, flag = self._config.token_timeout_s, "--upstream-token-timeout"
                yield events

    def _silent(self, flag: str) -> ConnectionTimeout:
        return ConnectionTimeout(f"{self.url} sent nothing for too long ({flag})")


async def _bounded(response: aiohttp.ClientResponse, limit: int) -> bytes | None:
    """The whole body; None if it is longer than ``limit``."""
    parts, size = [], 0
    while part := await response.content.readany():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None)
    return str(getattr(cause, "strerror", None) or cause or type(error).__name__)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and bool(task.cancelling())
