"""The OpenAPI document: FastAPI's own routes plus the inference routes, described from their msgspec types."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from dynamo_es.frontend.asgi import InferenceApp
from dynamo_es.frontend.routes import InferenceRoute

_MEANINGS = {
    200: "The answer",
    400: "The request is wrong",
    401: "No API key, or a wrong one",
    403: "The API key does not allow this",
    404: "No such model or route",
    408: "The body did not come in time",
    413: "The body is too large",
    415: "The body is no JSON, or encoded",
    422: "The body is JSON of another shape",
    429: "The API key was used too often",
    431: "The headers are too large",
    500: "The answer failed",
    501: "Not implemented",
    503: "The model or the service is not ready, or too busy",
    504: "The answer took too long",
}
_OF_KEYS = (401, 403, 429)
"""What every route may answer where API keys are asked for."""
_OF_INFERENCE = (400, *_OF_KEYS[:2], 404, 408, 413, 415, 429, 431, 500, 501, 503, 504)
_ENGINE = "Another refusal, of the worker's engine"
_BUSY = "All workers are overloaded"
_ERROR_REF = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
_ANTHROPIC_REF = {"application/json": {"schema": {"$ref": "#/components/schemas/AnthropicError"}}}


def responses(*statuses: int, error: bool = True) -> dict[int | str, dict[str, Any]]:
    """What a small route answers beside 200, for FastAPI. ``error``: in the common form; else as JSON of its own."""
    content: dict[str, Any] = _ERROR_REF if error else {"application/json": {"schema": {}}}
    contents = {**dict.fromkeys(statuses, content), **dict.fromkeys(_OF_KEYS, _ERROR_REF)}
    return {status: {"description": _MEANINGS[status], "content": form} for status, form in contents.items()}


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


_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def describe_api(app: FastAPI, inference: InferenceApp, overload_status: int) -> dict[str, Any]:
    """The document; made once, then kept on the application. ``overload_status``: of busy workers."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        kinds = [route.body_type for route in inference.routes.values()]
        schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
        known = document.setdefault("components", {}).setdefault("schemas", {})
        # FastAPI describes its own refusal of path parameters; here they are texts, and none is refused so.
        for name in ("HTTPValidationError", "ValidationError"):
            if known.pop(name, None) is not None:
                _drop_validation(document)
        known.update(components, Error=_ERROR, AnthropicError=_ANTHROPIC_ERROR)
        for (path, route), schema in zip(inference.routes.items(), schemas, strict=True):
            document["paths"][path] = {route.method.lower(): _operation(path, route, schema, overload_status)}
        app.openapi_schema = document
    return app.openapi_schema


def _drop_validation(document: dict[str, Any]) -> None:
    for operations in document["paths"].values():
        for operation in operations.values():
            refusal = operation["responses"].get("422", {}).get("content", {}).get("application/json", {})
            if refusal.get("schema", {}).get("$ref", "").endswith("/HTTPValidationError"):
                del operation["responses"]["422"]


def _operation(path: str, route: InferenceRoute, schema: dict[str, Any], overload_status: int) -> dict[str, Any]:
    error = _ANTHROPIC_REF if route.speech.endpoint.startswith("anthropic") else _ERROR_REF
    refusals = {
        **{str(status): {"description": _MEANINGS[status], "content": error} for status in _OF_INFERENCE},
        str(overload_status): {"description": _BUSY, "content": error},
        "4XX": {"description": _ENGINE, "content": error},
    }
    answer: dict[str, Any] = {"application/json": {"schema": {}}}
    if route.streams:
        # Without a schema: OpenAPI 3.1 has none for an event, and who checks events takes "a string" for one.
        answer["text/event-stream"] = {}
    told = f"{_MEANINGS[200]}{', as a stream if `stream` is true' if route.streams else ''}"
    body = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    return {
        "tags": ["inference"],
        "summary": route.summary,
        "operationId": route.method.lower() + path.replace("/", "_"),
        **(body if route.method == "POST" else {}),
        "responses": {"200": {"description": told, "content": answer}, **refusals},
    }
