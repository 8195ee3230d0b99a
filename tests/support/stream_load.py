"""Many streamed chats at a time over real connections, and when each of their tokens came.

The client is lean, so that what is measured is the server: one protocol object a connection, no parsing beyond what
says that a token came or that an answer is over.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from array import array
from dataclasses import dataclass, field
from typing import cast

_TOKEN = b'"content":"'
_END = b"data: [DONE]\n\n"
_LAST_CHUNK = b"0\r\n\r\n"


@dataclass(slots=True)
class Told:
    """One request: its id, ``time.monotonic`` of each of its tokens at the client, and how it ended."""

    request_id: str
    max_tokens: int
    cut_after: int | None
    arrivals: array[float] = field(default_factory=lambda: array("d"))
    error: str | None = None
    is_over: bool = False


class _Connection(asyncio.Protocol):
    """Asks one request after the other."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.Transport | None = None
        self._told: Told | None = None
        self._rest = b""
        self._head_seen = False
        self._ended: asyncio.Future[None] | None = None

    async def ask(self, request: bytes, told: Told) -> None:
        """Returns at the end of the answer, or after it was cut."""
        assert self._transport is not None
        self._told, self._rest, self._head_seen = told, b"", False
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended

    def abort(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._told is not None and not self._told.is_over:
            self._end("the connection was closed in mid-answer")

    def data_received(self, data: bytes) -> None:
        now, told = time.monotonic(), self._told
        if told is None or told.is_over:
            return
        text = self._rest + data
        if not self._head_seen:
            self._head_seen = True
            if not text.startswith(b"HTTP/1.1 200 "):
                self._end(text[:500].decode(errors="replace"))
                self.abort()
                return
        # What has not ended yet is looked at again with what follows it.
        whole = text.rfind(b"\n\n") + 2
        self._rest = text[whole:] if whole > 1 else text
        done = text[:whole] if whole > 1 else b""
        told.arrivals.extend([now] * done.count(_TOKEN))
        if b'"error"' in done:
            self._end(done.decode(errors="replace"))
            self.abort()
        elif told.cut_after is not None and len(told.arrivals) >= told.cut_after:
            self._end(None)
            self.abort()
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
        connection = _Connection()
        try:
            first = True
            while first or time.monotonic() < self.full[1]:
                first = False
                if not connection.is_open:
                    _, connection = await asyncio.get_running_loop().create_connection(_Connection, *self._address)
                told = self._next()
                await connection.ask(self._request(told), told)
        finally:
            connection.abort()

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
