"""A connection's transport that writes less often than it is asked to, where nobody could tell.

A write is a system call, as dear as all else that a token costs here. The head of a response waits for what follows it
in the same turn of the event loop, and a stream that brings tokens faster than one in ``PACE_S`` sends those of such a
time together; a slower one sends each at once, and so does every stream its first and its last.
"""

from __future__ import annotations

import asyncio
from typing import Any

PACE_S = 0.004
"""Between two writes to a connection; at 250 tokens a second and less nothing waits."""
_MOST_HELD = 64 * 1024
"""Bytes; more are written at once, so that flow control sees them."""


class PacedTransport(asyncio.Transport):
    """In place of ``transport``, for one connection. ``begin`` before each response, ``flush`` at its end."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []
        self._size = 0
        self._timer: asyncio.Handle | None = None
        self._is_head = False
        self._next = 0.0

    def begin(self) -> None:
        """What is written next is the head of a response."""
        self._is_head = True
        self._next = 0.0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Now or soon, in order."""
        if self._held:
            self._hold(data)
            if self._size > _MOST_HELD:
                self.flush()
        elif self._is_head:
            self._is_head = False
            self._hold(data)
            self._timer = self._loop.call_soon(self._send_held)
        elif (now := self._loop.time()) < self._next:
            self._hold(data)
            self._timer = self._loop.call_at(self._next, self.flush)
        else:
            self._next = now + PACE_S
            self._transport.write(data)

    def flush(self) -> None:
        """Write what waits."""
        if self._held:
            self._next = self._loop.time() + PACE_S
            self._send_held()

    def drop(self) -> None:
        """The connection is lost: nothing is written any more."""
        self._held.clear()
        self._send_held()

    def _hold(self, data: bytes | bytearray | memoryview) -> None:
        self._held.append(bytes(data))
        self._size += len(data)

    def _send_held(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self._held, self._size = self._held, [], 0
        if held:
            self._transport.write(b"".join(held))

    # -- the transport's own ---------------------------------------------------------------------------------------

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self.drop()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._size + self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
