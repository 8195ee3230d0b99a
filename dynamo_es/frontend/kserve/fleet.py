"""KServe's gRPC in front of a fleet (the input ``grpc``; spec/services e, h.3).

Completions go through the frontend's own application, as HTTP requests do. Tensor models, which have nothing to
tokenize, go straight to the workers that registered them, in turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.errors import ConfigError, DynamoException
from dynamo_es.frontend.app_caller import Answer, post_json
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import families_of
from dynamo_es.frontend.errors import ModelNotFound, ModelNotReady
from dynamo_es.frontend.kserve.models import EngineFault, FrameEngine, KserveModels, TensorModel
from dynamo_es.frontend.kserve.texts import METADATA
from dynamo_es.frontend.main import BuildApp, FrontendSettings, process_metrics, recover, unless_stopped
from dynamo_es.frontend.preprocess_pool import PreprocessPool
from dynamo_es.frontend.servable import serves_namespace
from dynamo_es.frontend.terminal_chat import problem_of, read_events
from dynamo_es.frontend.tokenizer_backends import check_backend
from dynamo_es.http_listen import StatusListener
from dynamo_es.models.kinds import ModelInput
from dynamo_es.runtime.client import Client
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint
from schemas.registry import ModelCard, key_instance

logger = logging.getLogger(__name__)
_TENSORS = "tensorbased"


class FleetModels(KserveModels):
    """The models of an application, and the tensor models of the registry view behind it."""

    def __init__(self, app: FrontendApp, core: RuntimeCore, settings: FrontendSettings) -> None:
        """``core``: has no tensor models if it is not started."""
        self._app = app
        self._core = core
        self._config: FrontendConfig = settings.frontend
        self._texts = AppFrames(app, settings.paths.completions)
        self._clients: dict[tuple[str, str, str], asyncio.Future[Client]] = {}

    def tensor(self, name: str) -> TensorModel | None:
        card = self._tensor_card(name)
        if card is None:
            return None
        where = card.namespace, card.component, card.endpoint
        return TensorModel(WorkerFrames(lambda: self._client(where)), card.details.get("tensor_model_config"))

    def completions(self, name: str) -> FrameEngine | None:
        return self._texts if self._completes(name) else None

    def config(self, name: str) -> Mapping[str, Any] | None:
        card = self._tensor_card(name)
        if card is not None:
            config: Mapping[str, Any] | None = card.details.get("tensor_model_config")
            return config
        return METADATA if self._completes(name) else None

    def is_ready(self, name: str) -> bool:
        if self._tensor_card(name) is not None:
            return True
        status = self._app.service.directory.statuses().get(name)
        return status is not None and status.ready

    def _completes(self, name: str) -> bool:
        try:
            return "completions" in self._app.service.directory.find(name).families
        except (ModelNotFound, ModelNotReady):
            return False

    def _tensor_card(self, name: str) -> ModelCard | None:
        """Of a worker that takes requests."""
        if not self._core.started:
            return None
        state = self._core.registry.state
        for card in state.models.values():
            if (
                name not in (card.display_name, *card.aliases)
                or card.model_input != ModelInput.Tensor.name
                or _TENSORS not in families_of(card.model_type)
                or not serves_namespace(self._config, card.namespace)
            ):
                continue
            key = key_instance(card.namespace, card.component, card.endpoint, card.instance_id)
            instance = state.instances.get(key)
            if instance is not None and instance.state == "serving":
                return card
        return None

    async def _client(self, where: tuple[str, str, str]) -> Client:
        """One for each endpoint, so that its workers are asked in turn."""
        if where not in self._clients:
            self._clients[where] = asyncio.ensure_future(Endpoint(self._core, ".".join(where)).client())
        return await asyncio.shield(self._clients[where])


class AppFrames:
    """A ``FrameEngine`` over an application's route of text completions."""

    def __init__(self, app: FrontendApp, path: str) -> None:
        self._app = app
        self._path = path

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[Any, None]:
        """See ``FrameEngine``."""
        answer, held = Answer(), b""
        async with aclosing(post_json(self._app, self._path, msgspec.json.encode(request), answer)) as parts:
            async for part in parts:
                held += part
                if answer.status != 200:
                    continue
                *events, held = held.split(b"\n\n")
                for event in read_events(events):
                    problem = problem_of(event)
                    if problem is not None:
                        raise EngineFault(problem)
                    yield event
        if answer.status != 200:
            raise EngineFault(problem_of(msgspec.json.decode(held)) or f"status {answer.status}")


class WorkerFrames:
    """A ``FrameEngine`` over the workers of an endpoint."""

    def __init__(self, client: Callable[[], Any]) -> None:
        """``client``: gives an awaitable of the endpoint's ``Client``."""
        self._client = client

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[Any, None]:
        """See ``FrameEngine``."""
        try:
            client: Client = await self._client()
            async for frame in await client.generate(request, annotated=False, context=context):
                yield frame
        except (DynamoException, ValueError) as error:
            raise EngineFault(str(error)) from error


async def run_kserve(
    settings: FrontendSettings,
    stop: asyncio.Event,
    core: RuntimeCore,
    *,
    metrics_port: int | None = None,
    build: BuildApp | None = None,
    on_ready: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve gRPC at the HTTP address of ``settings`` until ``stop`` is set; calls may end within the drain limit.

    Args:
        settings: Those of an HTTP frontend.
        core: Not started; the caller closes it.
        metrics_port: Where probes and metrics are served over HTTP; None: nowhere.
        build: Makes the application instead of ``recover``.
        on_ready: Told the port.

    Raises:
        DynamoException: It cannot start; says why and what to do.
    """
    # gRPC is slow to import, and only this needs it.
    from dynamo_es.frontend.kserve.server import KserveServer

    frontend = settings.frontend
    if settings.tls.cert_path is not None or settings.api_keys.file is not None:
        raise ConfigError("gRPC is served without TLS and API keys: leave both out, and guard it by what stands before")
    check_backend(frontend)
    plan = settings.routing()
    metrics = process_metrics(core, frontend.metrics_prefix)
    executor = PreprocessPool(frontend.preprocess_threads, frontend.preprocess_queue)
    make = build if build is not None else partial(recover, settings, plan)
    server: KserveServer | None = None
    probes: StatusListener | None = None
    try:
        app = await unless_stopped(stop, make(core, metrics, executor))
        if app is None:
            return
        if metrics_port is not None:
            page = Starlette()
            page.mount("/", _Probes(app, settings.paths))
            probes = StatusListener(page, frontend.http_host, metrics_port, "http_metrics_port")
            await probes.start()
        server = KserveServer(FleetModels(app, core, settings))
        await server.start(frontend.http_host, frontend.http_port)
        on_ready(server.port)
        await stop.wait()
    finally:
        if server is not None:
            await server.stop(frontend.graceful_shutdown_timeout_s)
        if probes is not None:
            await probes.close()
        executor.shutdown(wait=False, cancel_futures=True)


class _Probes:
    """Of an application, the routes of probes and metrics; nothing else."""

    def __init__(self, app: ASGIApp, paths: HttpPathsConfig) -> None:
        self._app = app
        self._paths = frozenset((paths.health, paths.live, paths.metrics))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] in self._paths:
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
