"""The door before the whole application when there are API keys: who has none gets 401 before anything is read.

It knows paths that are open, and nothing of the routes behind: a new route is closed by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter

from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend import anthropic_errors
from dynamo_es.frontend.api_keys import Caller, KeyRing
from dynamo_es.frontend.asgi import CALLER, Scope, send_body
from dynamo_es.frontend.busy_threshold import PATH as BUSY_THRESHOLD
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.headers import read_headers
from dynamo_es.frontend.http_exchange import Header, Send
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.server import ServedApp
from dynamo_es.frontend.service import FrontendService

_ADMIN = frozenset({BUSY_THRESHOLD})
_BEARER = b"bearer "
_SOON: Header = (b"retry-after", b"1")
_MAX_CREDENTIALS = 4
"""A request may carry a key in both headers; more than a few is no client's way."""


class KeyGate:
    """An ASGI application before another one. Belongs to one event loop.

    Args:
        app: Gets the requests that are let in; ``scope[CALLER]`` says whose they are.
        ring: The keys.
        paths: Of the routes.
        registry: For metrics.
        metrics_prefix: Of their names.
        probes_open: Health, liveness and metrics need no key.
    """

    def __init__(
        self,
        app: ServedApp,
        ring: KeyRing,
        paths: HttpPathsConfig,
        registry: CollectorRegistry,
        metrics_prefix: str,
        *,
        probes_open: bool,
    ) -> None:
        self._app = app
        self._ring = ring
        self._open = frozenset({paths.health, paths.live, paths.metrics}) if probes_open else frozenset()
        self._anthropic = paths.anthropic
        self._refused = Counter(
            f"{metrics_prefix}_api_key_refusals_total",
            "Requests that the API keys did not let in",
            ("reason",),
            registry=registry,
        )

    @property
    def service(self) -> FrontendService | None:
        """That of the application behind."""
        return self._app.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        try:
            caller = scope[CALLER] = self._admit(scope)
        except _Refused as refused:
            self._refused.labels(refused.reason).inc()
            await self._turn_away(scope, send, refused)
            return
        caller.usage.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            caller.usage.running -= 1

    def _admit(self, scope: Scope) -> Caller:
        given = credentials(scope["headers"])
        if not given:
            text = "An API key is needed: Authorization: Bearer <key>, or x-api-key: <key>"
            raise _Refused("missing", ApiError(401, text, code="missing_api_key"))
        caller = next((found for found in map(self._ring.find, given) if found is not None), None)
        if caller is None:
            raise _Refused("unknown", ApiError(401, "The API key is wrong or no longer valid", code="invalid_api_key"))
        if scope["path"] in _ADMIN and not caller.entry.admin:
            text = "This route needs an API key with --admin"
            raise _Refused("forbidden", ApiError(403, text, code="insufficient_permissions"))
        most = caller.entry.max_concurrent
        if most is not None and caller.usage.running >= most:
            text = f"This API key has {most} requests in progress, and may have no more at a time"
            raise _Refused("concurrency", ApiError(429, text, code="concurrency_limit_exceeded"), (_SOON,))
        wait_s = self._ring.wait_s(caller)
        if wait_s:
            limit = caller.entry.requests_per_minute
            text = f"Rate limit reached: {limit} requests a minute for this API key. Try again in {wait_s:.3g} s"
            error = ApiError(429, text, code="rate_limit_exceeded")
            raise _Refused("rate_limit", error, ((b"retry-after", b"%d" % math.ceil(wait_s)),))
        return caller

    async def _turn_away(self, scope: Scope, send: Send, refused: _Refused) -> None:
        error, path = refused.error, scope["path"]
        dialect = path == self._anthropic or path.startswith(f"{self._anthropic}/")
        body = anthropic_errors.error_body(error, error.status, None) if dialect else error.body()
        headers = refused.headers
        echoed = read_headers(scope["headers"]).echoed
        if echoed is not None:
            headers = (*headers, (b"x-request-id", echoed))
        await send_body(send, error.status, b"" if scope["method"] == "HEAD" else body, headers)


class _Refused(Exception):
    """Not let in."""

    def __init__(self, reason: str, error: ApiError, headers: tuple[Header, ...] = ()) -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error
        self.headers = (*headers, (b"www-authenticate", b"Bearer")) if error.status == 401 else headers


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """The keys that a request carries, a few at most; ASGI's header names are lower case."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == _BEARER:
            found.append(value[7:].strip())
    return found[:_MAX_CREDENTIALS]
