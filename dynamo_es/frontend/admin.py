"""Administrative routes, owned by FastAPI: health, metrics, models, API description (spec/frontend.md 1.4, 1.5)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, RedirectResponse
from starlette.exceptions import HTTPException

import dynamo_es
from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend.asgi import InferenceApp, may_ask
from dynamo_es.frontend.busy_threshold import METHODS, PATH, add_busy_threshold
from dynamo_es.frontend.contracts import NOT_READY, HealthSource, ServedModel
from dynamo_es.frontend.errors import ApiError, ModelNotFound, ModelNotReady, model_not_found, not_ready
from dynamo_es.frontend.extension_routes import add_extensions
from dynamo_es.frontend.metrics import CONTENT_TYPE
from dynamo_es.frontend.openapi import describe_api, responses
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.frontend.service import FrontendService
from dynamo_es.frontend.siblings import page_of_all
from dynamo_es.runtime.health import live_answer


def build_admin(
    service: FrontendService,
    inference: InferenceApp,
    health: HealthSource,
    paths: HttpPathsConfig,
    extensions: Sequence[FrontendRoute] = (),
) -> FastAPI:
    """The FastAPI application with all routes that are not inference."""
    app = FastAPI(
        title="dynamo-es OpenAI frontend",
        description="OpenAI-compatible HTTP API of dynamo-es.",
        version=dynamo_es.__version__,
        docs_url="/docs/",
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_probes(app, service, health, paths)
    _add_models(app, service, paths.models)
    if not service.config.disable_admin_api:
        add_busy_threshold(app, service)
    add_extensions(app, service, extensions)
    app.add_exception_handler(HTTPException, _http_exception)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> RedirectResponse:
        return RedirectResponse("/docs/", status_code=303)

    app.openapi = lambda: describe_api(app, inference, service.config.overload_status_code)  # type: ignore[method-assign]
    return app


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _error(error: ApiError, headers: dict[str, str] | None = None) -> Response:
    return Response(error.body(), error.status, headers, media_type="application/json")


def _add_probes(app: FastAPI, service: FrontendService, health: HealthSource, paths: HttpPathsConfig) -> None:
    @app.get(paths.health, tags=["operations"], summary="Health and readiness", responses=responses(503, error=False))
    async def get_health() -> Response:
        if service.draining:
            return _json({"status": NOT_READY, "stage": "draining", "message": "Service is not ready"}, 503)
        report = {"status": "healthy", "endpoints": [], "instances": [], **health.report()}
        return _json(report, 503 if report["status"] == NOT_READY else 200)

    @app.get(paths.live, tags=["operations"], summary="Liveness", responses=responses(503, error=False))
    async def get_live() -> Response:
        status, body = live_answer(health.dead_tasks(), draining=service.draining)
        return _json(body, status)

    @app.get(
        paths.metrics, tags=["operations"], summary="Prometheus metrics", responses=responses(),
        response_class=PlainTextResponse,
    )  # fmt: skip
    async def get_metrics() -> Response:
        page = await page_of_all(service.siblings, service.metrics.text())
        return Response(page, headers={"content-type": CONTENT_TYPE})


def _add_models(app: FastAPI, service: FrontendService, path: str) -> None:
    directory = service.directory

    def as_anthropic(request: Request) -> bool:
        return service.config.enable_anthropic_api and "anthropic-version" in request.headers

    def sees(request: Request, name: str) -> bool:
        return may_ask(request.scope, name, directory.primary_name(name))

    @app.get(path, tags=["models"], summary="Models that are ready", responses=responses())
    async def list_models(request: Request) -> Response:
        seen = [(name, model) for name, model in directory.models() if may_ask(request.scope, name, model.name)]
        if as_anthropic(request):
            models = [_anthropic_model(name, model) for name, model in seen]
            ends = [models[place]["id"] if models else None for place in (0, -1)]
            return _json({"data": models, "has_more": False, "first_id": ends[0], "last_id": ends[1]})
        return _json({"object": "list", "data": [_model(name, model) for name, model in seen]})

    @app.get(
        path + "/{model_id:path}/ready", tags=["models"], summary="Readiness of a model",
        responses={**responses(404), **responses(503, error=False)},
    )  # fmt: skip
    async def model_ready(model_id: str, request: Request) -> Response:
        status = directory.statuses().get(model_id)
        if status is None or not sees(request, model_id):
            return _error(model_not_found())
        body: dict[str, Any] = {"model": model_id, "ready": status.ready}
        if not status.ready:
            body["reason"] = status.reason
        body["namespaces"] = status.namespaces
        return _json(body, 200 if status.ready else 503)

    @app.get(path + "/{model_id:path}", tags=["models"], summary="One model", responses=responses(404, 503))
    async def get_model(model_id: str, request: Request) -> Response:
        try:
            if not sees(request, model_id):
                return _error(model_not_found())
            model = directory.find(model_id)
        except ModelNotFound:
            return _error(model_not_found())
        except ModelNotReady as error:
            return _error(not_ready(error.name))
        return _json(_anthropic_model(model_id, model) if as_anthropic(request) else _model(model_id, model))


def _model(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "nvidia",
        "context_window": model.card.context_length,
    }


def _anthropic_model(name: str, model: ServedModel) -> dict[str, Any]:
    return {
        "id": name,
        "display_name": name,
        "type": "model",
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": model.card.context_length,
    }


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    echoed = request.headers.get("x-request-id")
    headers = {} if echoed is None else {"x-request-id": echoed}
    if error.status_code == 405:
        text = f"Method not allowed: {request.method} {request.url.path}"
        allowed = METHODS if request.url.path == PATH else "GET,HEAD"
        return _error(ApiError(405, text, code="method_not_allowed"), headers | {"allow": allowed})
    if error.status_code == 404:
        text = f"Route not found: {request.method} {request.url.path}"
        return _error(ApiError(404, text, code="route_not_found"), headers)
    return _error(ApiError(error.status_code, str(error.detail)), headers)
