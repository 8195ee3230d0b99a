"""The standalone KV indexer over HTTP, with its metrics and access log (spec/services f.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.clock import Clock
from dynamo_es.router.hashing import to_unsigned
from dynamo_es.runtime.health import tasks_entry
from dynamo_es.runtime.metrics_runtime import TasksCollector
from dynamo_es.services.json_app import OK, Answer, Call, JsonRoute, Manners, Seen, build_json_app, health_answer
from dynamo_es.services.json_bodies import BodyShape, Member, hash_list, text, token_list, u32, u64
from dynamo_es.services.kv_indexer import KvIndexer
from dynamo_es.services.refusals import ServiceRefusal
from dynamo_es.services.slot_tracker_http import names_of, tenant_of

BODY_LIMIT = 8 * 1024 * 1024
_METRICS_TYPE = "text/plain; version=0.0.4"
_TENANT: Mapping[str, Member] = {"model_name": text(required=True), "routing_group": text()}
_INSTANCE: Mapping[str, Member] = {"instance_id": u64(required=True)}
_REGISTER = BodyShape(
    "RegisterRequest",
    {
        **_INSTANCE,
        "endpoint": text(required=True),
        **_TENANT,
        "block_size": u32(required=True),
        "dp_rank": u32(),
        "replay_endpoint": text(),
    },
)
_UNREGISTER = BodyShape("UnregisterRequest", {**_INSTANCE, **_TENANT, "dp_rank": u32()})
_QUERY = BodyShape(
    "QueryRequest", {"token_ids": token_list(required=True), **_TENANT, "lora_name": text(), "cache_salt": text()}
)
_HASHED = BodyShape("QueryByHashRequest", {"block_hashes": hash_list(required=True), **_TENANT, "cache_salt": text()})
_PEER = BodyShape("PeerRequest", {"url": text(required=True)})
_LISTENER = BodyShape("ListenerRequest", {**_INSTANCE, "dp_rank": u32()})
_SALTED = "cache_salt is not accepted by /query_by_hash; block_hashes must already include the intended cache salt"


class AccessLines:
    """The access log: a JSON object a line (``ts, trace_id, method, path, model, status, duration_ms``).

    Args:
        write: Takes a line, without its line feed; must not block.
        clock: Time.
        trace_header: Header of the trace id.
        local: Time stamps of this machine's zone instead of UTC.
    """

    def __init__(self, write: Callable[[bytes], None], clock: Clock, trace_header: str, *, local: bool) -> None:
        self._write = write
        self._clock = clock
        self._trace_header = trace_header.lower()
        self._local = local

    def note(self, seen: Seen) -> None:
        """A request was answered."""
        moment = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC)
        model = seen.body.get("model_name")
        line = {
            "ts": (moment.astimezone() if self._local else moment).isoformat(timespec="milliseconds"),
            "trace_id": seen.headers.get(self._trace_header, "-"),
            "method": seen.method,
            "path": seen.path,
            "model": model if isinstance(model, str) else None,
            "status": seen.status,
            "duration_ms": round(seen.seconds * 1000, 3),
        }
        self._write(msgspec.json.encode(line))


class IndexerPage:
    """``/metrics``: requests by route, and what is registered."""

    def __init__(self, indexer: KvIndexer) -> None:
        self._indexer = indexer
        self.registry = CollectorRegistry()
        self.registry.register(TasksCollector(indexer.tasks))
        self._errors = Counter(
            "dynamo_kvindexer_errors", "HTTP error responses (4xx/5xx)", ("endpoint", "status_class"),
            registry=self.registry,
        )  # fmt: skip
        self._durations = Histogram(
            "dynamo_kvindexer_request_duration_seconds", "HTTP request duration", ("endpoint", "method"),
            registry=self.registry,
        )  # fmt: skip
        self._gauges = [
            Gauge(f"dynamo_kvindexer_{name}", text, registry=self.registry)
            for name, text in (
                ("models", "Models with an index"),
                ("workers", "Registered instances"),
                ("listeners", "Listeners to KV events"),
            )
        ]

    def note(self, seen: Seen) -> None:
        """A request was answered; those for no route count as one."""
        endpoint = seen.endpoint or "unknown"
        self._durations.labels(endpoint, seen.method).observe(seen.seconds)
        if seen.status >= 400:
            self._errors.labels(endpoint, f"{seen.status // 100}xx").inc()

    def text(self) -> bytes:
        """The page."""
        for gauge, count in zip(self._gauges, self._indexer.counts(), strict=True):
            gauge.set(count)
        return generate_latest(self.registry)


def build_indexer_app(
    indexer: KvIndexer,
    *,
    access: AccessLines | None = None,
    test_endpoints: bool = False,
) -> Starlette:
    """The ASGI application.

    Args:
        indexer: Belongs to its event loop.
        access: Told of every request.
        test_endpoints: Serve ``/test/pause_listener`` and ``/test/resume_listener``.
    """
    page = IndexerPage(indexer)

    def on_seen(seen: Seen) -> None:
        page.note(seen)
        if access is not None:
            access.note(seen)

    async def metrics(request: Request) -> Response:
        return Response(page.text(), headers={"content-type": _METRICS_TYPE})

    routes = [
        JsonRoute("GET", "/health", lambda call: health_answer(tasks_entry(indexer.tasks.dead), None)),
        JsonRoute("GET", "/workers", lambda call: (200, indexer.workers(*names_of(call)))),
        JsonRoute("GET", "/dump", lambda call: (200, indexer.dump())),
        # A file that was moved away is made anew without being told to.
        JsonRoute("POST", "/reopen_logs", lambda call: (200, OK)),
        *_registration_routes(indexer),
        *_query_routes(indexer),
        *_peer_routes(indexer),
        *(_test_routes(indexer) if test_endpoints else ()),
    ]
    manners = Manners(BODY_LIMIT, json_errors=False, on_seen=on_seen)
    return build_json_app(routes, manners, [Route("/metrics", metrics)])


def _registration_routes(indexer: KvIndexer) -> list[JsonRoute]:
    def register(call: Call) -> Answer:
        body = call.body
        indexer.register(
            tenant_of(body), body["instance_id"], body["endpoint"], body["block_size"], body.get("dp_rank") or 0,
            body.get("replay_endpoint"),
        )  # fmt: skip
        return 201, OK

    def unregister(call: Call) -> Answer:
        body = call.body
        indexer.unregister(body["model_name"], body.get("routing_group"), body["instance_id"], body.get("dp_rank"))
        return 200, OK

    return [
        JsonRoute("POST", "/register", register, _REGISTER),
        JsonRoute("POST", "/unregister", unregister, _UNREGISTER),
    ]


def _query_routes(indexer: KvIndexer) -> list[JsonRoute]:
    def query(call: Call) -> Answer:
        body = call.body
        return 200, indexer.query(tenant_of(body), body["token_ids"], body.get("lora_name"), body.get("cache_salt"))

    def query_by_hash(call: Call) -> Answer:
        if call.body.get("cache_salt") is not None:
            raise ServiceRefusal(400, _SALTED)
        hashes = [to_unsigned(value) for value in call.body["block_hashes"]]
        return 200, indexer.query_by_hash(tenant_of(call.body), hashes)

    return [
        JsonRoute("POST", "/query", query, _QUERY),
        JsonRoute("POST", "/query_by_hash", query_by_hash, _HASHED),
    ]


def _peer_routes(indexer: KvIndexer) -> list[JsonRoute]:
    def register(call: Call) -> Answer:
        indexer.add_peer(call.body["url"])
        return 201, OK

    def deregister(call: Call) -> Answer:
        indexer.remove_peer(call.body["url"])
        return 200, OK

    return [
        JsonRoute("GET", "/peers", lambda call: (200, indexer.peers())),
        JsonRoute("POST", "/register_peer", register, _PEER),
        JsonRoute("POST", "/deregister_peer", deregister, _PEER),
    ]


def _test_routes(indexer: KvIndexer) -> list[JsonRoute]:
    def route(path: str, change: Callable[[int, Any], None]) -> JsonRoute:
        def answer(call: Call) -> Answer:
            change(call.body["instance_id"], call.body.get("dp_rank"))
            return 200, OK

        return JsonRoute("POST", path, answer, _LISTENER)

    return [route("/test/pause_listener", indexer.pause), route("/test/resume_listener", indexer.resume)]
