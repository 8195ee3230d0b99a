"""Routes that the frontend answers by itself, with bodies read as those of any inference route."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import msgspec

from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.http_exchange import HttpExchange, Send, Speech
from dynamo_es.frontend.reading import ClientGone, Receive, decode_request
from dynamo_es.frontend.service import OFFLOAD_BYTES, FrontendService


class LocalRoute(Speech, Protocol):
    """One such route; shared by its requests. No state."""

    def reply(self, source: Any) -> dict[str, Any]:
        """The answer, JSON. May run in a thread. Raises ``ApiError``."""


class LocalExchange(HttpExchange):
    """Answers one request. ``run`` once; ``interrupt`` at any time from the same loop."""

    def __init__(
        self, service: FrontendService, route: LocalRoute, receive: Receive, send: Send, headers: RequestHeaders
    ) -> None:
        super().__init__(service, route, receive, send, headers)
        self._route = route

    async def _answer(self) -> int:
        try:
            body = await self._read()
            if len(body) < OFFLOAD_BYTES:
                answer = self._reply(body)
            else:
                answer = await asyncio.get_running_loop().run_in_executor(self._service.executor, self._reply, body)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            return await self._refuse(error)
        await self._respond(200, answer)
        return 200

    def _reply(self, body: bytes) -> bytes:
        source, _ = decode_request(body, self._route.kind)
        return msgspec.json.encode(self._route.reply(source))
