"""The system status server of a process without HTTP of its own: ``/health``, ``/live``, ``/metrics``, ``/engine``.

Dynamo's, off unless ``DYN_SYSTEM_PORT`` is set. It is up before the log is opened and down after everything else is
closed, so that a start that takes long can be watched.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.background import DeadTask
from dynamo_es.http_listen import StatusListener
from dynamo_es.runtime.health import folds_entry, live_answer, log_entry, stall_entry, tasks_entry
from dynamo_es.runtime.metrics import MAX_MODELS, BoundsCollector, LabelBound
from dynamo_es.runtime.metrics_index import BookingsCollector, register_index
from dynamo_es.runtime.metrics_runtime import RuntimeCollector

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore
    from dynamo_es.runtime.views import RoutingViews

logger = logging.getLogger(__name__)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# What a call of /engine may send; enough for a list of taints or adapters.
_MAX_BODY_BYTES = 1024 * 1024
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound


class SystemServer:
    """Serves one process. Belongs to the event loop of its runtime; ``start`` once, ``close`` at the end.

    Attributes:
        registry: Whoever has more to show on ``/metrics`` registers a collector here.
    """

    def __init__(self, core: RuntimeCore) -> None:
        """``core.companions`` are told of as well: other runtimes of the same process."""
        self.registry = CollectorRegistry()
        self.registry.register(RuntimeCollector(self._cores))
        ProcessCollector(registry=self.registry)
        self._core = core
        self._shows_views = False
        self._listener = StatusListener(self._app(), core.settings.system.host, core.settings.system.port)

    @property
    def url(self) -> str:
        """Where it listens, as seen from this machine."""
        listener = self._listener
        host = "127.0.0.1" if listener.host in _WILDCARDS else listener.host
        return f"http://{f'[{host}]' if ':' in host else host}:{listener.port}"

    async def start(self) -> None:
        """Listen. Raises ``AddressUnavailable``."""
        await self._listener.start()
        logger.info("system status on %s", self.url)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        await self._listener.close()

    def show_views(self, views: RoutingViews) -> None:
        """Show index and bookings of a process that routes on ``/metrics``; of its first views, if it has more."""
        if self._shows_views:
            return
        self._shows_views = True
        models = LabelBound("index_model", MAX_MODELS)
        if views.kv_index is not None:
            register_index(self.registry, views.kv_index, views.snapshots, models, self._core.clock)
        self.registry.register(BookingsCollector(views.requests))
        self.registry.register(BoundsCollector(models))

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Whether the process is ready, and the body of ``/health``."""
        cores = self._cores()
        stalls = [stall for core in cores for stall in core.progress.stalls()]
        closing = any(core.shutdown_event.is_set() for core in cores)
        endpoints = _endpoints(cores)
        serves = bool(endpoints) or self._core.settings.role != "worker"
        dead = self._dead()
        well = not stalls and not closing and not dead
        ready = all(core.started and core.healthy for core in cores) and serves and well
        seconds, part = divmod(self._core.uptime_s(), 1)
        body: dict[str, Any] = {
            "status": "ready" if ready else "notready",
            "uptime": {"secs": int(seconds), "nanos": int(part * 1e9)},
            "endpoints": {path.rpartition("/")[2]: "ready" for path in sorted(endpoints)},
            "log": log_entry(self._core),
            "views": folds_entry(self._core),
            **{name: part() for name, part in self._core.health_parts.items()},
        }
        if dead:
            body |= tasks_entry(dead)
        elif stalls:
            body |= stall_entry(stalls)
        elif closing:
            body["stage"] = "draining"
        elif not ready:
            body["stage"] = "starting" if not all(core.started for core in cores) else "not-serving"
        return ready, body

    def _dead(self) -> Sequence[DeadTask]:
        return [task for core in self._cores() if core.host is None for task in core.tasks.dead]

    def _cores(self) -> Sequence[RuntimeCore]:
        return [self._core, *self._core.companions]

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._get_health),
                Route("/live", self._get_live),
                Route("/metrics", self._get_metrics),
                Route("/engine/{name:path}", self._post_engine, methods=["POST"]),
                *self._core.system_routes,
            ],
            exception_handlers={HTTPException: _http_exception},
        )

    async def _get_health(self, request: Request) -> Response:
        ready, body = self.health()
        return json_response(body, 200 if ready else 503)

    async def _get_live(self, request: Request) -> Response:
        status, body = live_answer(self._dead(), draining=self._core.shutdown_event.is_set())
        return json_response(body, status)

    async def _get_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.registry), headers={"content-type": METRICS_TYPE})

    async def _post_engine(self, request: Request) -> Response:
        """Call a registered engine route. A supervisor (engine adapter): what it raises becomes a 500."""
        name = request.path_params["name"]
        callback = self._core.engine_routes.get(name)
        if callback is None:
            return json_response({"error": "Route not found", "message": f"Route /engine/{name} not found"}, 404)
        body = await read_body(request)
        if isinstance(body, Response):
            return body
        try:
            return json_response(await callback(body))
        except Exception as error:  # supervisor
            logger.exception("engine route %s failed", name)
            return json_response({"error": "Handler failed", "message": f"{type(error).__name__}: {error}"}, 500)


def _endpoints(cores: Sequence[RuntimeCore]) -> list[str]:
    return [path for core in cores if core.started for path in core.server.endpoints()]


async def read_body(request: Request) -> Any:
    """The JSON of a request of at most 1 MiB, ``{}`` if it is empty; a response, if it must be refused."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > _MAX_BODY_BYTES:
            return json_response({"error": "Body too large", "message": f"more than {_MAX_BODY_BYTES} bytes"}, 413)
    try:
        return msgspec.json.decode(data) if data else {}
    except (msgspec.DecodeError, RecursionError) as error:
        return json_response({"error": "Invalid JSON", "message": str(error)}, 400)


def json_response(value: Any, status: int = 200) -> Response:
    """``value`` as the body."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response(
        {"error": str(error.detail), "message": f"{request.method} {request.url.path}"}, error.status_code
    )
