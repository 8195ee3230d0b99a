"""The OpenAPI document: FastAPI's own routes plus the inference routes, described from their msgspec types."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dynamo_es.frontend.asgi import InferenceApp

RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong"},
    404: {"description": "No such model or route"},
    503: {"description": "The model or the service is not ready"},
    529: {"description": "All workers are overloaded"},
}

_SUMMARIES = {"chat": "Chat completion", "completions": "Text completion"}
_ERROR = {
    "type": "object",
    "required": ["message", "type", "code", "error"],
    "properties": {
        "message": {"type": "string"},
        "type": {"type": "string", "description": "Reason phrase of the status"},
        "code": {"type": "integer", "description": "HTTP status"},
        "details": {"type": "object"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}


def describe_api(app: FastAPI, inference: InferenceApp) -> dict[str, Any]:
    """The document; made once, then kept on the application."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        kinds = [route.kind.type for route in inference.routes.values()]
        schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        known = document.setdefault("components", {}).setdefault("schemas", {})
        known.update(components, Error=_ERROR)
        for (path, route), schema in zip(inference.routes.items(), schemas, strict=True):
            document["paths"][path] = {"post": _operation(path, route.family, schema)}
        app.openapi_schema = document
    return app.openapi_schema


def _operation(path: str, family: str, schema: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {
        "tags": ["inference"],
        "summary": _SUMMARIES[family],
        "operationId": "post" + path.replace("/", "_"),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": "The answer, as a stream if `stream` is true", "content": answer},
            **{str(status): {**value, "content": error} for status, value in RESPONSES.items()},
        },
    }
