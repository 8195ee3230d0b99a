"""Calls an ASGI application without a socket."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.frontend.asgi import FrontendApp


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def text(self) -> str:
        return self.body.decode()

    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    app: FrontendApp,
    path: str,
    body: bytes = b"",
    *,
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> Reply:
    reply = Reply()
    sent = False
    over = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if not sent:
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}
        await over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {key.decode(): value.decode("latin-1") for key, value in message["headers"]}
        else:
            reply.parts.append(bytes(message.get("body", b"")))

    given = {"content-type": "application/json"} if headers is None else headers
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "headers": [
            (b"content-length", str(len(body)).encode()),
            *((key.lower().encode(), value.encode("latin-1")) for key, value in given.items()),
        ],
    }
    await app(scope, receive, send)
    over.set()
    return reply
