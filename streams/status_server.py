"""``/health``, ``/live`` and ``/metrics`` of a stream processor's worker; off unless ``DYN_SYSTEM_PORT`` is set."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from dynamo_es.http_listen import EmbeddedServer, listen
from streams.pool_upkeep import Health

logger = logging.getLogger(__name__)
_OPTIONS = "--system-host or --system-port (DYN_SYSTEM_HOST, DYN_SYSTEM_PORT)"
_CLOSE_S = 1


class StatusServer:
    """Serves one worker. Belongs to its event loop; ``start`` once, ``close`` at the end."""

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self.port = port
        self._host = host
        self._registry = registry
        self._health = health
        self._server: EmbeddedServer | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; port 0 takes a free one. Raises ``AddressUnavailable``."""
        listener = listen(self._host, self.port, _OPTIONS)
        try:
            self.port = listener.getsockname()[1]
            config = uvicorn.Config(
                self._app(), lifespan="off", log_config=None, access_log=False, server_header=False,
                proxy_headers=False, ws="none", timeout_graceful_shutdown=_CLOSE_S,
            )  # fmt: skip
            self._server = EmbeddedServer(config)
            self._task = await self._server.begin(listener)
        except BaseException:
            listener.close()
            raise
        logger.info("status of this worker on port %d", self.port)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task
            self._server.abort_connections()
            self._server = None

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
