"""The OpenAPI document: FastAPI's own routes plus the inference routes, described from their msgspec types."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dynamo_es.frontend.asgi import InferenceApp
from dynamo_es.frontend.routes import InferenceRoute

RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The request is wrong"},
    404: {"description": "No such model or route"},
    503: {"description": "The model or the service is not ready"},
    529: {"description": "All workers are overloaded"},
}

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
        kinds = [route.body_type for route in inference.routes.values()]
        schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        known = document.setdefault("components", {}).setdefault("schemas", {})
        known.update(components, Error=_ERROR)
        for (path, route), schema in zip(inference.routes.items(), schemas, strict=True):
            document["paths"][path] = {route.method.lower(): _operation(path, route, schema)}
        app.openapi_schema = document
    return app.openapi_schema


def _operation(path: str, route: InferenceRoute, schema: dict[str, Any]) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer: dict[str, Any] = {"application/json": {"schema": {}}}
    if route.streams:
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return {
        "tags": ["inference"],
        "summary": route.summary,
        "operationId": "post" + path.replace("/", "_"),
        **(body if route.method == "POST" else {}),
        "responses": {
            "200": {
                "description": f"The answer{', as a stream if `stream` is true' if route.streams else ''}",
                "content": answer,
            },
            **{str(status): {**value, "content": error} for status, value in RESPONSES.items()},
        },
    }
