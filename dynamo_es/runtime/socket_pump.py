"""One ZeroMQ socket on an event loop, without a future per message.

ZeroMQ's file descriptor signals edges, not levels: after every send and every read the socket must be asked again.
``zmq.asyncio`` does that too, at several times the cost for each message; here a whole burst is drained in one go.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Sequence

import zmq

_BURST = 256


class PeerUnreachable(Exception):
    """ROUTER only: the peer is not connected any more."""


class SocketPump:
    """Owns ``socket``. ``on_message`` gets the parts of each message, on the loop; it must not raise."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[list[bytes]], None],
        on_writable: Callable[[], None],
    ) -> None:
        self._socket = socket
        self._loop = loop
        self._on_message = on_message
        self._on_writable = on_writable
        self._scheduled = False
        self._closed = False
        self._fd = int(socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._schedule()

    def try_send(self, parts: Sequence[bytes]) -> bool:
        """Send without blocking; False if the peer's queue is full (``on_writable`` will tell when to try again).

        Raises:
            PeerUnreachable: The peer is gone.
        """
        if self._closed:
            return True
        try:
            self._socket.send_multipart(parts, zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == errno.EHOSTUNREACH:
                raise PeerUnreachable from error
            raise
        finally:
            self._schedule()
        return True

    def close(self) -> None:
        """Stop listening and close the socket. What was sent is given 100 ms to leave."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=100)

    def _is_closed(self) -> bool:
        return self._closed

    def _schedule(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        for _ in range(_BURST):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=True)
            except zmq.Again:
                break
            except zmq.ZMQError as error:
                if error.errno in (zmq.ETERM, errno.ENOTSOCK):
                    return
                raise
            self._on_message(parts)
            if self._is_closed():
                return
        else:
            self._schedule()
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events & zmq.POLLIN:
            # It arrived after the last read, and asking took the edge: nobody will tell again.
            self._schedule()
        if events & zmq.POLLOUT:
            self._on_writable()
