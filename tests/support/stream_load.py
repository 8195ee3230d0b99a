"""Many streamed chats at a time over real connections, and when each of their tokens came.

The client is lean, so that what is measured is the server: a bare socket and one callback a connection, no parsing
beyond what says that a token came or that an answer is over. The kernel notes when bytes came to the socket, which is
earlier than when this process, one of several on the machine, gets round to reading them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
import uuid
from array import array
from dataclasses import dataclass, field

_TOKEN = b'"content":"'
_LAST_CHUNK = b"0\r\n\r\n"
_SO_TIMESTAMPNS = 35
"""Linux's, for which Python has no name: with what is read comes when it arrived, by the clock on the wall."""
_STAMP = struct.Struct("qq")
_BUFFER_BYTES = 256 * 1024


@dataclass(slots=True)
class Told:
    """One request: its id, when its tokens came, and how it ended.

    Attributes:
        arrivals: ``time.monotonic`` of each token at this process.
        landings: The same at the client's socket, as the kernel says; on systems where it does not, ``arrivals``.
    """

    request_id: str
    max_tokens: int
    cut_after: int | None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    landings: array[float] = field(default_factory=lambda: array("d"))
    error: str | None = None
    is_over: bool = False


class _Connection:
    """Asks one request after the other."""

    def __init__(self, buffer: bytearray) -> None:
        """``buffer``: what is read goes through it; one for all connections of a loop."""
        self.is_open = False
        self._buffer = buffer
        self._views = [memoryview(buffer)]
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()
        self._told: Told | None = None
        self._rest = b""
        self._head_seen = False
        self._ended: asyncio.Future[None] | None = None

    async def connect(self, host: str, port: int) -> None:
        """Open it."""
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        await self._loop.sock_connect(self._socket, (host, port))
        self._loop.add_reader(self._socket, self._on_readable)
        self.is_open = True

    async def ask(self, request: bytes, told: Told) -> None:
        """Returns at the end of the answer, or after it was cut."""
        self._told, self._rest, self._head_seen = told, b"", False
        self._ended = self._loop.create_future()
        await self._loop.sock_sendall(self._socket, request)
        await self._ended

    def close(self) -> None:
        """Without a goodbye: what the server still sends is answered with a reset."""
        if self.is_open:
            self._loop.remove_reader(self._socket)
        self.is_open = False
        self._socket.close()

    def _on_readable(self) -> None:
        try:
            size, extra, _, _ = self._socket.recvmsg_into(self._views, 64)
        except BlockingIOError:
            return
        except OSError:
            size, extra = 0, []
        now, told = time.monotonic(), self._told
        if not size:
            self.close()
            if told is not None and not told.is_over:
                self._end("the connection was closed in mid-answer")
        elif told is not None and not told.is_over:
            landed = now
            for level, kind, stamp in extra:
                if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS:
                    seconds, nanoseconds = _STAMP.unpack(stamp)
                    landed = now - max(time.time() - (seconds + nanoseconds / 1e9), 0.0)
            self._take(told, bytes(self._views[0][:size]), now, landed)

    def _take(self, told: Told, data: bytes, now: float, landed: float) -> None:
        text = self._rest + data
        if not self._head_seen:
            self._head_seen = True
            if not text.startswith(b"HTTP/1.1 200 "):
                self._end(text[:500].decode(errors="replace"))
                self.close()
                return
        # What has not ended yet is looked at again with what follows it.
        whole = text.rfind(b"\n\n") + 2
        self._rest = text[whole:] if whole > 1 else text
        done = text[:whole] if whole > 1 else b""
        for _ in range(done.count(_TOKEN)):
            told.arrivals.append(now)
            told.landings.append(landed)
        if b'"error"' in done:
            self._end(done.decode(errors="replace"))
            self.close()
        elif told.cut_after is not None and len(told.arrivals) >= told.cut_after:
            self._end(None)
            self.close()
        elif self._rest.endswith(_LAST_CHUNK):
            self._end(None)

    def _end(self, error: str | None) -> None:
        assert self._told is not None
        self._told.is_over, self._told.error = True, error
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class StreamLoad:
    """Keeps so many streams open until it is told to stop; each tenth is cut by the client at some token.

    Lengths vary by half, so that ends and beginnings are spread over time.

    Attributes:
        told: All requests, those that are over and those under way.
        full: From when to when all streams were open, ``time.monotonic``.
    """

    def __init__(
        self,
        host: str,
        port: int,
        model: str,
        *,
        streams: int,
        max_tokens: int,
        cut_every: int = 10,
        prompts: int = 400,
        words: int = 60,
        rng: random.Random,
    ) -> None:
        self._address = host, port
        self._model = model
        self._streams = streams
        self._max_tokens = max_tokens
        self._cut_every = cut_every
        self._rng = rng
        # The same in each run, so that caches of prompts are full after the first.
        vary = random.Random(1)
        self._prompts = [
            f"{number}: " + " ".join(f"word{vary.randrange(1000)}" for _ in range(words)) for number in range(prompts)
        ]
        self._buffer = bytearray(_BUFFER_BYTES)
        self.full = (0.0, 0.0)
        self.told: list[Told] = []

    async def run(self, seconds: float, ramp_s: float = 0.0) -> None:
        """Open all streams within ``ramp_s``; replace those that end for ``seconds`` more; then await the rest."""
        begin = time.monotonic() + ramp_s
        self.full = (begin, begin + seconds)
        async with asyncio.TaskGroup() as group:
            for number in range(self._streams):
                group.create_task(self._keep_one(ramp_s * number / self._streams))

    def faults(self) -> list[str]:
        """What is wrong with requests that are over: errors, and answers that are too short or too long."""
        found = [told.error for told in self.told if told.error is not None]
        for told in self.told:
            if told.error is None and told.cut_after is None and len(told.arrivals) != told.max_tokens:
                found.append(f"{len(told.arrivals)} tokens in place of {told.max_tokens}")
        return found

    async def _keep_one(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        connection = _Connection(self._buffer)
        try:
            first = True
            while first or time.monotonic() < self.full[1]:
                first = False
                if not connection.is_open:
                    connection.close()
                    connection = _Connection(self._buffer)
                    await connection.connect(*self._address)
                told = self._next()
                await connection.ask(self._request(told), told)
        finally:
            connection.close()

    def _next(self) -> Told:
        cut = len(self.told) % self._cut_every == self._cut_every - 1
        tokens = self._rng.randint(self._max_tokens // 2, 3 * self._max_tokens // 2)
        told = Told(
            str(uuid.UUID(int=self._rng.getrandbits(128), version=4)),
            tokens,
            self._rng.randrange(1, tokens) if cut else None,
        )
        self.told.append(told)
        return told

    def _request(self, told: Told) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "stream": True,
                "max_tokens": told.max_tokens,
                "messages": [{"role": "user", "content": self._rng.choice(self._prompts)}],
            }
        ).encode()
        host, port = self._address
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            f"x-dynamo-request-id: {told.request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
