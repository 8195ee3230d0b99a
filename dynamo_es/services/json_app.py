"""What the HTTP faces of the standalone services share: JSON routes, bodies with bounds, refusals in Dynamo's form."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.services.json_bodies import BodyRefused, BodyShape, read_body
from dynamo_es.services.refusals import ServiceRefusal

_TEXT = "text/plain; charset=utf-8"
_NO_JSON = "Expected request with `Content-Type: application/json`"
_TOO_LONG = "Failed to buffer the request body: length limit exceeded"
_SILENCE_S = 60.0
"""How long a client may send nothing amid its body."""

Answer = tuple[int, Any]
"""Status and JSON body; a body of None is empty."""
OK: dict[str, str] = {"status": "ok"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        body: Members of its JSON object; empty for a route without a body.
        query: Its query's parameters; of several of one name the last.
        path: Parameters in the path.
        raw: The body's bytes.
    """

    body: Mapping[str, Any]
    query: Mapping[str, str]
    path: Mapping[str, str]
    raw: bytes = b""


def health_answer(dead: Mapping[str, Any], well: Any) -> Answer:
    """Of ``GET /health``: ``well`` as in Dynamo; 503 if ``dead`` names background tasks that died (``tasks_entry``)."""
    return (503, {"status": "notready", **dead}) if dead else (200, well)


Handler = Callable[[Call], Answer | Awaitable[Answer]]


@dataclass(frozen=True, slots=True)
class JsonRoute:
    """A route. ``shape`` None: it has no body."""

    method: str
    path: str
    handler: Handler
    shape: BodyShape | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that was answered, for metrics and access logs. ``endpoint``: its route's path; None: there is none."""

    method: str
    path: str
    endpoint: str | None
    status: int
    seconds: float
    headers: Mapping[str, str]
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Manners:
    """In what the services differ.

    Attributes:
        body_limit: Bytes.
        json_errors: Every refusal is ``{"error": text}``; otherwise those of bodies are text and those of routes empty.
        on_seen: Told of every request.
    """

    body_limit: int
    json_errors: bool = True
    on_seen: Callable[[Seen], None] | None = None


def build_json_app(routes: Sequence[JsonRoute], manners: Manners, extra: Sequence[Route] = ()) -> Starlette:
    """The ASGI application. ``extra``: routes that answer something else than JSON."""
    by_path: dict[str, dict[str, JsonRoute]] = {}
    for route in routes:
        by_path.setdefault(route.path, {})[route.method] = route
    made = [
        Route(path, _endpoint(path, by_method, manners), methods=list(by_method)) for path, by_method in by_path.items()
    ]

    async def refuse(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if manners.on_seen is not None:
            path = request.url.path
            known = path if path in by_path else None
            headers = dict(request.headers)
            manners.on_seen(Seen(request.method, path, known, error.status_code, 0.0, headers, {}))
        if not manners.json_errors:
            return Response(status_code=error.status_code, headers=error.headers)
        said = {404: "route not found", 405: "method not allowed"}.get(error.status_code, error.detail)
        return _json(error.status_code, {"error": said}, error.headers)

    return Starlette(routes=[*made, *extra], exception_handlers={HTTPException: refuse})


def _endpoint(path: str, routes: Mapping[str, JsonRoute], manners: Manners) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        # HEAD comes with GET, as Starlette has it.
        route = routes.get(request.method) or routes["GET"]
        began = time.monotonic()
        body: Mapping[str, Any] = {}
        try:
            raw = await _read(request, manners.body_limit) if route.shape is not None else b""
            body = read_body(raw, route.shape) if route.shape is not None else {}
            call = Call(body, dict(request.query_params), dict(request.path_params), raw)
            result = route.handler(call)
            status, value = await result if isinstance(result, Awaitable) else result
            response = _json(status, value)
        except BodyRefused as error:
            response = _refusal(error.status, str(error), manners)
        except ServiceRefusal as error:
            response = _json(error.status, {"error": str(error)})
        if manners.on_seen is not None:
            seconds = time.monotonic() - began
            headers = dict(request.headers)
            manners.on_seen(Seen(request.method, request.url.path, path, response.status_code, seconds, headers, body))
        return response

    return answer


async def _read(request: Request, limit: int) -> bytes:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise BodyRefused(415, _NO_JSON)
    parts = bytearray()
    try:
        async with asyncio.timeout(_SILENCE_S) as patience:
            async for part in request.stream():
                patience.reschedule(asyncio.get_running_loop().time() + _SILENCE_S)
                parts += part
                if len(parts) > limit:
                    raise BodyRefused(413, _TOO_LONG)
    except TimeoutError as error:
        raise BodyRefused(408, f"The body of the request did not come: nothing for {_SILENCE_S:g} s") from error
    except ClientDisconnect as error:
        raise BodyRefused(400, "The client left while it sent its request") from error
    return bytes(parts)


def _refusal(status: int, text: str, manners: Manners) -> Response:
    if manners.json_errors:
        return _json(status, {"error": text})
    return Response(text, status, headers={"content-type": _TEXT})


def _json(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Response:
    if value is None:
        return Response(status_code=status, headers=headers)
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")
