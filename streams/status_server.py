"""``/health``, ``/live`` and ``/metrics`` of a stream processor's worker; off unless ``DYN_SYSTEM_PORT`` is set."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.http_listen import StatusListener
from streams.pool_upkeep import Health

logger = logging.getLogger(__name__)


class StatusServer:
    """Serves one worker. Belongs to its event loop; ``start`` once, ``close`` at the end."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._listener = StatusListener(self._app(), host, port)
        self._registry = registry
        self._health = health

    @property
    def port(self) -> int:
        """Where it listens; known after ``start`` if it was 0."""
        return self._listener.port

    async def start(self) -> None:
        """Listen; port 0 takes a free one. Raises ``AddressUnavailable``."""
        await self._listener.start()
        logger.info("status of this worker on port %d", self.port)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        await self._listener.close()

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._get_health),
                Route("/live", self._get_live),
                Route("/metrics", self._get_metrics),
            ]
        )

    async def _get_health(self, request: Request) -> Response:
        found = self._health()
        body = {"status": "ready" if found.ready else "notready", "reasons": found.reasons}
        return Response(msgspec.json.encode(body), 200 if found.ready else 503, media_type="application/json")

    async def _get_live(self, request: Request) -> Response:
        return Response(b'{"status":"live"}', media_type="application/json")

    async def _get_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST})
