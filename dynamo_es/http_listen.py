"""Serving HTTP with uvicorn inside a process that has its own signals: the listening socket and the server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
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
    try:
        return socket.create_server((host, port), family=_family(host), backlog=backlog, reuse_port=reuse_port)
    except OSError as error:
        raise _unavailable(host, port, error, options) from error


def reserve(host: str, port: int, options: str) -> socket.socket:
    """A socket that takes nothing, and holds a port (0: a free one) for those that listen on it with ``reuse_port``.

    Raises:
        AddressUnavailable: See ``listen``. Also if another process shares that port already.
    """
    # Without SO_REUSEPORT it is refused beside others that have it.
    with _bound(host, port, options, reuse_port=False) as probe:
        found = probe.getsockname()[1]
    return _bound(host, found, options, reuse_port=True)


def _bound(host: str, port: int, options: str, *, reuse_port: bool) -> socket.socket:
    held = socket.socket(_family(host), socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((host, port))
    except OSError as error:
        held.close()
        raise _unavailable(host, port, error, options) from error
    return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _unavailable(host: str, port: int, error: OSError, options: str) -> AddressUnavailable:
    reason = {
        errno.EADDRINUSE: "the port is in use by another process",
        errno.EACCES: "this user may not use the port",
        errno.EADDRNOTAVAIL: "the host is no address of this machine",
    }.get(error.errno or 0, error.strerror or str(error))
    return AddressUnavailable(host, port, reason, options)


class StatusListener:
    """A small server for whoever watches a process. ``start`` once, ``close`` at the end. Belongs to one event loop.

    Attributes:
        host, port: Where it listens; port 0 takes a free one, which is known after ``start``.
    """

    def __init__(self, app: Starlette, host: str, port: int, options: str = _STATUS_OPTIONS) -> None:
        """``options``: those that name the address, for the error."""
        self.host, self.port = host, port
        self._app = app
        self._options = options
        self._server: EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ``AddressUnavailable``."""
        listener = listen(self.host, self.port, self._options)
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
    """uvicorn's server without its signal handlers: signals belong to the process.

    Args:
        config: uvicorn's.
        tls: Context of TLS, or None.
    """

    def __init__(self, config: uvicorn.Config, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(config)
        self._tls = tls

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def begin(self, listener: socket.socket) -> asyncio.Task[None]:
        """Serve on ``listener`` in a task, which ends after ``should_exit`` was set. Returns when it accepts.

        Raises:
            AddressUnavailable: It did not start.
        """
        self.config.load()
        self.config.ssl = self._tls
        task = asyncio.create_task(self.serve(sockets=[listener]))
        while not self.started:
            if task.done():
                await task
                host, port = listener.getsockname()[:2]
                raise AddressUnavailable(host, port, "the server did not start")
            await asyncio.sleep(0.001)
        return task

    async def listen_again(self, listener: socket.socket, tls: ssl.SSLContext) -> None:
        """Accept with another context from now on; connections that are open stay as they are.

        Args:
            listener: Another descriptor of the socket that is listened on; the server closes it.
            tls: The new context, as a whole: nothing of the old one is kept.
        """

        def connection() -> asyncio.Protocol:
            return self.config.http_protocol_class(  # type: ignore[call-arg]
                config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )

        loop = asyncio.get_running_loop()
        fresh = await loop.create_server(connection, sock=listener, ssl=tls, backlog=self.config.backlog)
        before, self.servers = self.servers, [fresh]
        for server in before:
            server.close()

    def abort_connections(self) -> None:
        """Drop connections whose client does not take what was written."""
        for connection in list(self.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
