"""Serves the application over HTTP/1.1 with uvicorn, and ends in order.

Signals belong to the caller: it calls ``shutdown``. Stages of the end (spec/frontend.md 6.6): readiness false and new
inference requests refused at once, connections still accepted; running requests may finish until the limit; those
left get an error and ``[DONE]``; then the listener closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Iterator

import uvicorn

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import DynamoException
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.exchange import FAREWELL_S

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_CLOSE_S = 1
"""Seconds that uvicorn may take to close connections after the drain."""


class AddressUnavailable(DynamoException):
    """The listen address cannot be used.

    Attributes:
        host, port: The address.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another --http-host or --http-port")
        self.host = host
        self.port = port


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def abort_connections(self) -> None:
        """Drop connections whose client does not take what was written."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()


def bind(config: FrontendConfig, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket for ``http_host`` and ``http_port`` (0: a free port).

    Args:
        config: Address.
        reuse_port: Several processes share the port (``SO_REUSEPORT``).

    Raises:
        AddressUnavailable: In use, not allowed, or no address of this machine.
    """
    host, port = config.http_host, config.http_port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=reuse_port)
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use by another process",
            errno.EACCES: "this user may not use the port",
            errno.EADDRNOTAVAIL: "the host is no address of this machine",
        }.get(error.errno or 0, error.strerror or str(error))
        raise AddressUnavailable(host, port, reason) from error


class FrontendServer:
    """A running server. Made by ``serve``; belongs to one event loop.

    Attributes:
        host, port: Where it listens; the real port.
    """

    def __init__(self, app: FrontendApp, config: FrontendConfig, listener: socket.socket, http: str) -> None:
        self._service = app.service
        self._limit_s = config.graceful_shutdown_timeout_s
        self._listener = listener
        self.host, self.port = listener.getsockname()[:2]
        self._server = _Server(
            uvicorn.Config(
                app,
                http=http,
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                ws="none",
                timeout_graceful_shutdown=_CLOSE_S,
                backlog=_BACKLOG,
            )
        )
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when connections are accepted."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._task.done():
                await self._task
                raise AddressUnavailable(self.host, self.port, "the server did not start")
            await asyncio.sleep(0.001)
        logger.info("serving HTTP on %s:%d", self.host, self.port)

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
        self._service.drain()
        running = self._service.running
        logger.info("draining: %d requests may finish within %g s", len(running), self._limit_s)
        if not await self._wait_idle(self._limit_s):
            logger.warning("drain limit of %g s passed: ending %d requests", self._limit_s, len(running))
            self._service.interrupt_all()
            await self._wait_idle(2 * FAREWELL_S)
        self._server.should_exit = True
        assert self._task is not None
        await self._task
        self._server.abort_connections()

    async def _wait_idle(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._service.idle.wait()
        except TimeoutError:
            return False
        return True


async def serve(
    app: FrontendApp,
    config: FrontendConfig,
    *,
    listener: socket.socket | None = None,
    http: str = "httptools",
) -> FrontendServer:
    """Start serving; returns the running server.

    Args:
        app: From ``build_app``.
        config: Address and drain limit.
        listener: A socket from ``bind``; None: one is made.
        http: uvicorn's protocol implementation, ``httptools`` or ``h11``.

    Raises:
        AddressUnavailable: See ``bind``.
    """
    server = FrontendServer(app, config, listener if listener is not None else bind(config), http)
    await server.start()
    return server
