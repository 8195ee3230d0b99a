"""Serves the routes of extensions: in the FastAPI application, handlers in threads, answers as JSON."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Response

from dynamo_es.frontend.errors import ModelNotFound
from dynamo_es.frontend.route_extensions import FrontendExtensionContext, FrontendResponse, FrontendRoute
from dynamo_es.frontend.service import FrontendService

logger = logging.getLogger(__name__)
_FAILED = b'{"error":"frontend route extension failed"}'
_FINAL = range(200, 600)
_NO_CONTENT = 204
_JSON = "application/json"


def add_extensions(app: FastAPI, service: FrontendService, routes: Sequence[FrontendRoute]) -> None:
    """Add the routes. Their paths are checked before (``check_duplicates``)."""
    for route in routes:
        app.add_api_route(
            route.path,
            _endpoint(service, route),
            methods=["GET"],
            tags=["extensions"],
            summary=f"{route.path}, of an extension",
            response_model=None,
            responses={"default": {"description": "What the extension answers", "content": {_JSON: {"schema": {}}}}},
            operation_id="extension" + route.path.replace("/", "_"),
        )


def extension_context(service: FrontendService) -> FrontendExtensionContext:
    """The frontend's state now."""
    directory = service.directory
    return FrontendExtensionContext(
        ready=not service.draining,
        cancelled=service.draining,
        registered=_display_names(service),
        serving={name: model.name for name, model in directory.models()},
    )


def _display_names(service: FrontendService) -> list[str]:
    names = []
    for name in service.directory.statuses():
        try:
            names.append(service.directory.primary_name(name))
        except ModelNotFound:
            continue
    return names


def _endpoint(service: FrontendService, route: FrontendRoute) -> Callable[[], Any]:
    async def answer() -> Response:
        status, body = await asyncio.to_thread(_call, route, extension_context(service))
        return Response(body, status, media_type=_JSON)

    return answer


def _call(route: FrontendRoute, context: FrontendExtensionContext) -> tuple[int, bytes | None]:
    """Status and body of the handler's answer; whatever it does, the frontend goes on."""
    try:
        made = route.handler(context)
        status, value = (made.status_code, made.body) if isinstance(made, FrontendResponse) else (200, made)
        if status not in _FINAL:
            raise ValueError(f"{status} is no final status of HTTP")
        body = msgspec.json.encode(value)
    except Exception:  # a supervisor: what it calls is not ours
        logger.exception("the route extension %s %s failed", route.method, route.path)
        return 500, _FAILED
    return status, None if status == _NO_CONTENT else body
