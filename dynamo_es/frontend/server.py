"""Serves the application over HTTP/1.1 with uvicorn, and ends in order.

Signals belong to the caller: it calls ``shutdown``. Stages of the end (spec/frontend.md 6.6): readiness false and new
inference requests refused at once, connections still accepted; running requests may finish until the limit; those
left get an error and ``[DONE]``; then the listener closes.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from typing import Any, Literal, Protocol

import uvicorn

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.asgi import Scope
from dynamo_es.frontend.http_exchange import FAREWELL_S, Send
from dynamo_es.frontend.http_protocol import BoundedHttpProtocol, OnRefused
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.service import FrontendService
from dynamo_es.http_listen import AddressUnavailable as AddressUnavailable  # noqa: PLC0414 - raised here
from dynamo_es.http_listen import EmbeddedServer, listen

logger = logging.getLogger(__name__)

_CLOSE_S = 1
"""Seconds that uvicorn may take to close connections after the drain."""
_IDLE_S = 75
"""Seconds that a connection without requests stays open: longer than clients' pools (5 s) and balancers (60 s) keep it,
or a request that is just being sent on it is lost."""


class ServedApp(Protocol):
    """An ASGI application with requests that are to end before the server does."""

    @property
    def service(self) -> FrontendService | None:
        """Where they are; None while the application takes none yet."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""


def bind(config: FrontendConfig, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket for ``http_host`` and ``http_port`` (0: a free port).

    Args:
        config: Address.
        reuse_port: Several processes share the port (``SO_REUSEPORT``).

    Raises:
        AddressUnavailable: In use, not allowed, or no address of this machine.
    """
    options = "--http-host or --http-port"
    return listen(config.http_host, config.http_port, options, backlog=config.listen_backlog, reuse_port=reuse_port)


class FrontendServer:
    """A running server. Made by ``serve``; belongs to one event loop.

    Attributes:
        host, port: Where it listens; the real port.
        scheme: What it speaks.
    """

    def __init__(
        self,
        app: ServedApp,
        config: FrontendConfig,
        listener: socket.socket,
        http: str,
        tls: ssl.SSLContext | None,
        on_refused: OnRefused | None = None,
    ) -> None:
        self._app = app
        self.scheme: Literal["http", "https"] = "http" if tls is None else "https"
        self._limit_s = config.graceful_shutdown_timeout_s
        self._listener = listener
        self.host, self.port = listener.getsockname()[:2]
        self._server = EmbeddedServer(
            uvicorn.Config(
                app,
                http=_bounded(config, on_refused) if http == "httptools" else http,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=_CLOSE_S,
                timeout_keep_alive=_IDLE_S,
                backlog=config.listen_backlog,
            ),
            tls,
        )
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        # uvicorn closes what it was given; the listener stays for ``use_tls``.
        self._task = await self._server.begin(self._listener.dup())
        logger.info("serving %s on %s:%d", self.scheme.upper(), self.host, self.port)

    async def use_tls(self, context: ssl.SSLContext) -> None:
        """Another certificate or other authorities for connections from now on; those that are open stay."""
        if self._closing is None:
            await self._server.listen_again(self._listener.dup(), context)

    async def wait_closed(self) -> None:
        """Returns after ``shutdown``, or raises what ended the server."""
        assert self._task is not None
        await asyncio.shield(self._task)

    async def shutdown(self) -> None:
        """Drain and close; returns when no connection is left. Further calls wait for the first."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        await asyncio.shield(self._closing)

    async def _shut_down(self) -> None:
        if self._service is not None:
            await self._drain(self._service)
        self._listener.close()
        self._server.should_exit = True
        assert self._task is not None
        await self._task
        self._server.abort_connections()

    @property
    def _service(self) -> FrontendService | None:
        return self._app.service

    async def _drain(self, service: FrontendService) -> None:
        service.drain()
        running = service.running
        logger.info("draining: %d requests may finish within %g s", len(running), self._limit_s)
        if not await self._wait_idle(service, self._limit_s):
            logger.warning("drain limit of %g s passed: ending %d requests", self._limit_s, len(running))
            service.interrupt_all()
            await self._wait_idle(service, 2 * FAREWELL_S)

    async def _wait_idle(self, service: FrontendService, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await service.idle.wait()
        except TimeoutError:
            return False
        return True


async def serve(
    app: ServedApp,
    config: FrontendConfig,
    *,
    listener: socket.socket | None = None,
    http: str = "httptools",
    tls: ssl.SSLContext | None = None,
    on_refused: OnRefused | None = None,
) -> FrontendServer:
    """Start serving; returns the running server.

    Args:
        app: From ``build_app``.
        config: Address and drain limit.
        listener: A socket from ``bind``; None: one is made.
        http: uvicorn's protocol implementation, ``httptools`` or ``h11``; only the former has bounds for heads.
        tls: HTTPS with this context; None: HTTP.
        on_refused: Told of what never reaches ``app``: no HTTP, or a head over its bound (``httptools`` only).

    Raises:
        AddressUnavailable: See ``bind``.
    """
    taken = listener if listener is not None else bind(config)
    server = FrontendServer(app, config, taken, http, tls, on_refused)
    await server.start()
    return server


def _bounded(config: FrontendConfig, on_refused: OnRefused | None) -> Any:
    return functools.partial(
        BoundedHttpProtocol,
        head_limit=config.header_limit_kb * 1024,
        head_timeout_s=config.receive_timeout_s,
        send_timeout_s=config.send_timeout_s,
        on_refused=on_refused,
    )
