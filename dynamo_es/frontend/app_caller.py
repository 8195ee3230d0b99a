"""Calls an ASGI application within this process: one request, its answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from dynamo_es.frontend.asgi import AsgiApp, Scope

_ENDED = None


@dataclass(slots=True)
class Answer:
    """An answer. ``status`` is there with the first part of the body.

    Attributes:
        status: HTTP status; 0 until it is known.
    """

    status: int = 0


async def post_json(app: AsgiApp, path: str, body: bytes, answer: Answer) -> AsyncGenerator[bytes, None]:
    """``POST`` a JSON body; yields the parts of the answer's body. Closing it early is a client that leaves."""
    parts: asyncio.Queue[bytes | None] = asyncio.Queue()
    left = asyncio.Event()
    requests = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Scope:
        if requests:
            return requests.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Scope) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        elif part := bytes(message.get("body", b"")):
            parts.put_nowait(part)

    task = asyncio.ensure_future(app(_scope(path, len(body)), receive, send))
    task.add_done_callback(lambda _: parts.put_nowait(_ENDED))
    try:
        while (part := await parts.get()) is not _ENDED:
            yield part
        await task
    finally:
        left.set()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _scope(path: str, length: int) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": None,
        "client": None,
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % length)],
    }
