"""The frontend's application while its state is being recovered: probes and metrics answer, everything else is 503."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend.asgi import FrontendApp, Scope, send_error
from dynamo_es.frontend.contracts import NOT_READY
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.http_exchange import Send
from dynamo_es.frontend.metrics import CONTENT_TYPE, FrontendMetrics
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.service import FrontendService
from dynamo_es.frontend.siblings import Siblings, page_of_all
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.health import folds_entry, live_answer, log_entry

RECOVERING = "recovering"


class StartingApp:
    """An ASGI application that becomes another one when that is there. Belongs to one event loop."""

    def __init__(
        self, core: RuntimeCore, metrics: FrontendMetrics, paths: HttpPathsConfig, siblings: Siblings | None = None
    ) -> None:
        """``core`` may be starting or not be started."""
        self._siblings = siblings
        self._paths = paths
        self._core = core
        self._metrics = metrics
        self._app: FrontendApp | None = None

    @property
    def service(self) -> FrontendService | None:
        """That of the whole application, once it is there."""
        return self._app.service if self._app is not None else None

    def become(self, app: FrontendApp) -> None:
        """From now on every request is ``app``'s."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path == self._paths.live:
            await _send_json(send, *live_answer(self._core.tasks.dead, draining=False))
        elif path == self._paths.health:
            await _send_json(send, 503, self._health())
        elif path == self._paths.metrics:
            page = await page_of_all(self._siblings, self._metrics.text())
            await _send(send, 200, page, CONTENT_TYPE.encode())
        else:
            percent = self._percent()
            error = ApiError(503, f"The frontend is recovering its state ({percent} %)", code="index_recovering")
            await send_error(send, error, ((b"retry-after", b"1"),))

    def _health(self) -> dict[str, Any]:
        return {
            "status": NOT_READY,
            "stage": RECOVERING,
            "message": "Service is not ready: its state is being recovered",
            "progress_percent": self._percent(),
            "endpoints": [],
            "instances": [],
            "log": log_entry(self._core),
            "views": folds_entry(self._core),
        }

    def _percent(self) -> float:
        """The mean over all views; 0 while there is none."""
        shares = [entry.get("progress_percent", 100.0) for entry in folds_entry(self._core).values()]
        return round(sum(shares) / len(shares), 1) if shares else 0.0


async def _send_json(send: Send, status: int, body: Any) -> None:
    await _send(send, status, msgspec.json.encode(body), b"application/json")


async def _send(send: Send, status: int, body: bytes, kind: bytes) -> None:
    head = ((b"content-type", kind), (b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body, "more_body": False})
