"""The view over data centres as an HTTP service. Plain HTTP without keys, JSON in and out."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.runtime.health import live_answer, tasks_entry
from dynamo_es.services.dc_relay.global_view import GlobalKvView
from dynamo_es.services.dc_relay.metrics import GlobalViewCollector
from dynamo_es.services.dc_relay.ranking import PromptQuery
from dynamo_es.services.json_app import Answer, Call, JsonRoute, Manners, build_json_app, health_answer
from dynamo_es.services.json_bodies import BodyShape, text, token_list
from dynamo_es.services.refusals import ServiceRefusal

BODY_LIMIT = 8 * 1024 * 1024
_METRICS_TYPE = "text/plain; version=0.0.4"
_QUERY = BodyShape(
    "PromptQuery",
    {
        "model": text(required=True),
        "token_ids": token_list(required=True),
        "lora_name": text(),
        "cache_salt": text(),
    },
)


def build_relay_app(view: GlobalKvView) -> Starlette:
    """The ASGI application.

    ``GET /health``: how the topics are followed, 503 if it cannot go on with one, as then ``GET /live``;
    ``GET /data_centres``: what they told;
    ``POST /query`` with ``model``, ``token_ids``, and if need be ``lora_name`` and ``cache_salt``: pools that have the
    model, the best first; ``GET /metrics``.
    """
    registry = CollectorRegistry()
    registry.register(GlobalViewCollector(view))

    def health(call: Call) -> Answer:
        topics = view.topics()
        well = all(topic["state"] == "live" for topic in topics)
        status, body = health_answer(tasks_entry(view.dead), {"status": "ok" if well else "degraded"})
        return status, {**body, "topics": topics}

    def data_centres(call: Call) -> Answer:
        return 200, {"data_centres": view.data_centres()}

    def query(call: Call) -> Answer:
        body = call.body
        found = view.find(PromptQuery(body["model"], body["token_ids"], body.get("lora_name"), body.get("cache_salt")))
        if not found:
            raise ServiceRefusal(404, f"no data centre has a model {body['model']!r}")
        return 200, {"candidates": [candidate.to_json() for candidate in found]}

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": _METRICS_TYPE})

    routes = [
        JsonRoute("GET", "/health", health),
        JsonRoute("GET", "/live", lambda call: live_answer(view.dead, draining=False)),
        JsonRoute("GET", "/data_centres", data_centres),
        JsonRoute("POST", "/query", query, _QUERY),
    ]
    return build_json_app(routes, Manners(BODY_LIMIT), extra=[Route("/metrics", metrics)])
