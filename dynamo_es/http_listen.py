"""Serving HTTP with uvicorn inside a process that has its own signals: the listening socket and the server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from dynamo_es.errors import DynamoException

_STATUS_OPTIONS = "--system-host or --system-port (DYN_SYSTEM_HOST, DYN_SYSTEM_PORT)"
_CLOSE_S = 1


class AddressUnavailable(DynamoException):
    """The listen address cannot be used.

    Attributes:
        host, port: The address.
    """

    def __init__(self, host: str, port: int, reason: str, options: str = "--http-host or --http-port") -> None:
        super().__init__(f"cannot listen on {host}:{port}: {reason}; choose another {options}")
        self.host = host
        self.port = port


def listen(host: str, port: int, options: str, *, backlog: int = 100, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket (port 0: a free one).

    Args:
        host, port: The address.
        options: Those that name it, for the error.
        backlog: Connections that may wait to be accepted.
        reuse_port: Several processes share the port (``SO_REUSEPORT``).

    Raises:
        AddressUnavailable: In use, not allowed, or no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog, reuse_port=reuse_port)
    except OSError as error:
        reason = {
            errno.EADDRINUSE: "the port is in use by another process",
            errno.EACCES: "this user may not use the port",
            errno.EADDRNOTAVAIL: "the host is no address of this machine",
        }.get(error.errno or 0, error.strerror or str(error))
        raise AddressUnavailable(host, port, reason, options) from error


class StatusListener:
    """A small server for whoever watches a process. ``start`` once, ``close`` at the end. Belongs to one event loop.

    Attributes:
        host, port: Where it listens; port 0 takes a free one, which is known after ``start``.
    """

    def __init__(self, app: Starlette, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._app = app
        self._server: EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ``AddressUnavailable``."""
        listener = listen(self.host, self.port, _STATUS_OPTIONS)
        try:
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(
                self._app, lifespan="off", log_config=None, access_log=False, server_header=False, proxy_headers=False,
                ws="none", timeout_graceful_shutdown=_CLOSE_S,
            )  # fmt: skip
            self._server = EmbeddedServer(config)
            self._task = await self._server.begin(listener)
        except BaseException:
            listener.close()
            raise

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server.abort_connections()
            self._server = None


class EmbeddedServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: signals belong to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def begin(self, listener: socket.socket) -> asyncio.Task[None]:
        """Serve on ``listener`` in a task, which ends after ``should_exit`` was set. Returns when it accepts.

        Raises:
            AddressUnavailable: It did not start.
        """
        task = asyncio.create_task(self.serve(sockets=[listener]))
        while not self.started:
            if task.done():
                await task
                host, port = listener.getsockname()[:2]
                raise AddressUnavailable(host, port, "the server did not start")
            await asyncio.sleep(0.001)
        return task

    def abort_connections(self) -> None:
        """Drop connections whose client does not take what was written."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
