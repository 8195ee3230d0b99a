"""The raw ASGI application of the inference routes, and the dispatcher that puts it before the FastAPI one.

FastAPI never sees an inference request: routing, decoding and encoding are done here and in ``exchange``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from dynamo_es.frontend.access_log import PLAIN_SEND, AccessEntry, entry_of
from dynamo_es.frontend.chunk_writer import CHUNK_WRITER
from dynamo_es.frontend.errors import ApiError, no_model, not_implemented
from dynamo_es.frontend.headers import read_headers
from dynamo_es.frontend.http_exchange import JSON, Header, Send
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.routes import InferenceRoute
from dynamo_es.frontend.service import FrontendService

logger = logging.getLogger(__name__)

CALLER = "dynamo_es.caller"
"""Member of the scope: the ``Caller`` whose API key let the request in; not there without API keys."""
Scope = MutableMapping[str, Any]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class InferenceApp:
    """Inference routes. One instance an application."""

    def __init__(self, service: FrontendService, routes: Mapping[str, InferenceRoute]) -> None:
        self._service = service
        self._metadata_prefix = service.config.metadata_header.encode()
        self.routes = routes

    async def handle(self, route: InferenceRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for ``route``: gate, method, bound, then an ``Exchange``."""
        service = self._service
        headers = read_headers(scope["headers"], scope.get(CALLER), self._metadata_prefix)
        echoed = () if headers.echoed is None else ((b"x-request-id", headers.echoed),)
        if route.gate == "never" or (route.gate != "always" and not service.directory.serves(route.family)):
            error = no_model(scope["path"]) if route.gate == "registered" else not_implemented(scope["path"])
            await self._tell(route, send, error, *echoed)
            return
        if scope["method"] != route.method:
            await self._tell(route, send, method_not_allowed(scope), (b"allow", route.method.encode()), *echoed)
            return
        if len(service.running) >= service.config.max_concurrent_requests:
            await self._refuse(route, send, echoed)
            return
        entry = entry_of(scope)
        exchange = route.start(service, receive, send if entry is None else scope[PLAIN_SEND], headers)
        exchange.write_by(scope.get(CHUNK_WRITER))
        if service.tracing is not None:
            trace = service.tracing.request(scope["method"], scope["path"], headers.trace)
            exchange.log_to(entry if entry is not None else AccessEntry.of(scope), trace)
        elif entry is not None:
            exchange.log_to(entry)
        await exchange.run()

    async def _refuse(self, route: InferenceRoute, send: Send, echoed: tuple[Header, ...]) -> None:
        service = self._service
        limit = service.config.max_concurrent_requests
        service.metrics.refused(route.speech.endpoint)
        logger.warning("refused a request: %d are in progress (--max-concurrent-requests)", limit)
        error = ApiError(503, f"The frontend is at its limit of {limit} concurrent requests", code="overloaded")
        await self._tell(route, send, error, *echoed)

    @staticmethod
    async def _tell(route: InferenceRoute, send: Send, error: ApiError, *headers: Header) -> None:
        """Refuse in the route's own form."""
        body = route.speech.error_body(error, error.status, None)
        await send_body(send, error.status, body, (*error.headers, *headers))


class FrontendApp:
    """The whole ASGI application.

    Attributes:
        service: State; ``server.FrontendServer`` drains through it.
        admin: The FastAPI application of all other routes.
        inference: The raw one of the inference routes.
    """

    def __init__(self, service: FrontendService, inference: InferenceApp, admin: AsgiApp) -> None:
        self.service = service
        self.admin = admin
        self.inference = inference
        self._handle = inference.handle
        self._routes = inference.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = self._routes.get(scope["path"])
            if route is not None:
                await self._handle(route, scope, receive, send)
                return
            if "\n" in scope["path"]:
                # Starlette's patterns match before a line feed at the end: one route would have two paths.
                text = f"Route not found: {scope['method']} {scope['path']}"
                await send_error(send, ApiError(404, text, code="route_not_found"))
                return
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
        entry = entry_of(scope)
        try:
            await self.admin(scope, receive, send)
        finally:
            if entry is not None and entry.route is None:
                # FastAPI's, with the names of path parameters in place of their values.
                entry.route = getattr(scope.get("route"), "path_format", None)


def may_ask(scope: Scope, *names: str) -> bool:
    """Whether the request's API key lets it know the model that has these names; always without API keys."""
    caller = scope.get(CALLER)
    return caller is None or caller.may_ask(*names)


def method_not_allowed(scope: Scope) -> ApiError:
    """405 for a known path."""
    return ApiError(405, f"Method not allowed: {scope['method']} {scope['path']}", code="method_not_allowed")


async def send_error(send: Send, error: ApiError, headers: tuple[Header, ...] = ()) -> None:
    """Send an error's body with extra headers."""
    await send_body(send, error.status, error.body(), headers)


async def send_body(send: Send, status: int, body: bytes, headers: tuple[Header, ...]) -> None:
    """Send JSON with extra headers."""
    head = (JSON, (b"content-length", b"%d" % len(body)), *headers)
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
