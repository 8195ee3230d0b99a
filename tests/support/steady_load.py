"""Streaming requests at a steady rate, however long each takes, and when their first tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. Times are ``time.monotonic`` seconds; ``due`` is when it was to be sent, whenever that was done."""

    due: float
    first_token_s: float | None
    error: str | None


class SteadyLoad:
    """Sends ``rate`` chat requests a second from ``start`` to ``stop``, in turn about ``prompts`` different topics.

    Waiting is measured from the moment that a request was due, so that a server that holds all up is not measured less
    often for it.
    """

    def __init__(self, base: str, model: str, rate: float, *, prompts: int = 200, max_tokens: int = 4) -> None:
        address = urlsplit(base)
        assert address.hostname is not None
        self._host, self._port = address.hostname, address.port or 80
        self._rate = rate
        self._requests = [self._request(model, number, max_tokens) for number in range(prompts)]
        self._under_way: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.outcomes: list[Outcome] = []

    def start(self) -> None:
        self._task = asyncio.create_task(self._send_all())

    async def stop(self) -> None:
        """Send no more, and wait for the answers to what was sent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            if not self._task.cancelled():
                self._task.result()
            self._task = None
        if self._under_way:
            await asyncio.wait(self._under_way)

    def between(self, begin: float, end: float) -> list[Outcome]:
        """Of the requests that were due then."""
        return [outcome for outcome in self.outcomes if begin <= outcome.due < end]

    def _request(self, model: str, number: int, max_tokens: int) -> bytes:
        words = " ".join(f"topic {number} and another word" for _ in range(6))
        body = json.dumps(
            {
                "model": model,
                "stream": True,
                "max_tokens": max_tokens,
                "messages": [{"role": "user", "content": words}],
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {self._host}:{self._port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def _send_all(self) -> None:
        begun = time.monotonic()
        number = 0
        while True:
            due = begun + number / self._rate
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            task = asyncio.create_task(self._ask(due, self._requests[number % len(self._requests)]))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)
            number += 1

    async def _ask(self, due: float, request: bytes) -> None:
        first = None
        error: str | None = "the answer ended early"
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(request)
                    status = await reader.readline()
                    if b" 200 " not in status:
                        error = (status + await reader.read()).decode(errors="replace")
                    else:
                        async for line in reader:
                            if first is None and b'"content":"' in line and b'"content":""' not in line:
                                first = time.monotonic() - due
                            if b'"error"' in line:
                                error = line.decode(errors="replace")
                                break
                            if line.startswith(b"data: [DONE]"):
                                error = None
                finally:
                    writer.close()
                    await writer.wait_closed()
        except (OSError, TimeoutError) as failure:
            error = repr(failure)
        if error is None and first is None:
            error = "an answer without tokens"
        self.outcomes.append(Outcome(due, first, error))
