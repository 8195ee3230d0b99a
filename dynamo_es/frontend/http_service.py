"""An HTTP frontend over engines of the same process (Dynamo's ``HttpService``; spec/services j.1, frontend 8.5)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from dynamo_es.clock import Clock, SystemClock
from dynamo_es.config.access_log_options import AccessLogConfig
from dynamo_es.config.options import load
from dynamo_es.config.security_options import ApiKeysConfig, TlsConfig
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend import media
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.asgi import FrontendApp, Scope, send_error
from dynamo_es.frontend.engine_service import EngineService
from dynamo_es.frontend.errors import no_model
from dynamo_es.frontend.http_exchange import Send
from dynamo_es.frontend.in_process import InProcessEngine
from dynamo_es.frontend.local_models import LocalHealth, LocalModels, TextFamily
from dynamo_es.frontend.main import FrontendSettings, run_frontend
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.python_engine import PythonAsyncEngine
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.models.errors import ModelError
from dynamo_es.router.config_arguments import instance_of, optional, to_boolean, to_text, to_u16
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.runtime import DistributedRuntime

DEFAULT_PORT = 8080
_ENDPOINTS = (
    "chat", "completion", "embedding", "images", "audios", "videos", "realtime", "classify", "pooling", "rerank",
    "responses", "anthropic_messages", "generate", "batch",
)  # fmt: skip
_ON_AT_FIRST = ("embedding", "responses")
_WHOLE_DAY_MS = 86_400_000


class HttpAsyncEngine(PythonAsyncEngine):
    """A ``PythonAsyncEngine`` that an ``HttpService`` takes: it gets OpenAI requests and yields OpenAI chunks.

    Args:
        generator: An async generator function. Called with the request as the client sent it, without members that are
            not set, and with ``context=`` if it has a parameter of that name. Its chunks reach the client as they are;
            an answer that is no stream is put together from them. ``HttpError``, ``InvalidArgument``, ValueError and
            TypeError before the first chunk become statuses; any other error, and any later one, is a 500.
        event_loop: Where it runs; the service's.
    """


class HttpService(EngineService):
    """OpenAI's API over Python engines: no fleet, no log. Belongs to one event loop.

    Routes are Dynamo's, those of chat and completions only from ``enable_endpoint`` on. Options beside the port are
    those of the frontend, from the environment (``DYN_HTTP_HOST``, ``DYN_TLS_CERT_PATH``, ``DYN_ES_API_KEYS_FILE``...).
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        wait_for_first_item: bool = False,
        env: Mapping[str, str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """``port``: 0 takes a free one, None is 8080. ``wait_for_first_item``: a stream's status waits for its first
        chunk, so that an early error gets a status of its own. ``env``: the environment; None: this process's, at
        ``run``. ``clock``: tells when a model came. Neither is in Dynamo.

        Raises:
            TypeError, OverflowError: An argument is of the wrong type or out of range.
        """
        given = optional(to_u16)("port", port)
        self._port = DEFAULT_PORT if given is None else given
        self._waits = to_boolean("wait_for_first_item", wait_for_first_item)
        self._env = env
        time = clock if clock is not None else SystemClock()
        self._models = LocalModels(lambda: time.now_ms() / 1000)
        self._enabled = set(_ON_AT_FIRST)
        super().__init__(self._models)

    def add_chat_completions_model(self, model: str, checksum: str, engine: HttpAsyncEngine) -> None:
        """``engine`` answers chat completions for ``model``. ``checksum`` is accepted for Dynamo's sake.

        Raises:
            TypeError: An argument is of the wrong type.
            ModelError: There is one of this name.
        """
        self._add("chat", model, checksum, engine)

    def add_completions_model(self, model: str, checksum: str, engine: HttpAsyncEngine) -> None:
        """The same for text completions."""
        self._add("completions", model, checksum, engine)

    def enable_endpoint(self, endpoint_type: str, enabled: bool) -> None:
        """Serve a kind of routes, or answer 404 there, from now on. ``embedding`` and ``responses`` are on at first.

        Raises:
            TypeError: An argument is of the wrong type.
            ModelError: No kind of this name.
        """
        name, on = to_text("endpoint_type", endpoint_type), to_boolean("enabled", enabled)
        if name not in _ENDPOINTS:
            raise ModelError(f"Invalid endpoint type: '{name}'. Valid types are: {', '.join(_ENDPOINTS)}")
        if on:
            self._enabled.add(name)
        else:
            self._enabled.discard(name)

    async def run(
        self, runtime: DistributedRuntime, *, on_ready: Callable[[FrontendServer], None] | None = None
    ) -> tuple[()]:
        """Serve until ``shutdown``, or the runtime's; running requests end first. The runtime is not closed. Once.

        ``on_ready``: told of the server when it serves. Not in Dynamo.

        Raises:
            TypeError: It is no runtime.
            DynamoException: It cannot start, for one because the port is taken.
        """
        core = instance_of("runtime", runtime, DistributedRuntime).core
        self._loop = asyncio.get_running_loop()
        settings = self._settings(core)
        ends = asyncio.ensure_future(self._end_with(core))

        async def build(core: RuntimeCore, metrics: FrontendMetrics, executor: Executor) -> FrontendApp:
            core.open_tracing()
            app = build_app(
                settings.frontend, self._models, LocalHealth(self._models), metrics, core.clock, executor,
                paths=settings.paths, tracing=core.tracing,
            )  # fmt: skip
            return _Gated(app, settings.paths, self._enabled)

        try:
            await run_frontend(
                settings, self._stop, clock=core.clock, rng=core.rng, core=core, build=build, on_ready=on_ready
            )
        finally:
            ends.cancel()
            await asyncio.gather(ends, return_exceptions=True)
        return ()

    def _add(self, family: TextFamily, model: Any, checksum: Any, engine: Any) -> None:
        name = to_text("model", model)
        to_text("checksum", checksum)
        taken = instance_of("engine", engine, HttpAsyncEngine)
        self._models.add(family, name, InProcessEngine(taken))

    def _settings(self, core: RuntimeCore) -> FrontendSettings:
        env = os.environ if self._env is None else self._env
        frontend = replace(
            load(FrontendConfig, None, env),
            http_port=self._port,
            # Its models have no workers that could be busy; the messages route is there to be enabled.
            disable_admin_api=True,
            enable_anthropic_api=True,
        )
        if self._waits:
            frontend = replace(frontend, pre_commit_error_peek_ms=_WHOLE_DAY_MS)
        return FrontendSettings(
            core.settings, frontend, paths=load(HttpPathsConfig, None, env), tls=load(TlsConfig, None, env),
            api_keys=load(ApiKeysConfig, None, env), access_log=load(AccessLogConfig, None, env),
        )  # fmt: skip


class _Gated(FrontendApp):
    """The application behind what is enabled."""

    def __init__(self, app: FrontendApp, paths: HttpPathsConfig, enabled: set[str]) -> None:
        super().__init__(app.service, app.inference, app.admin)
        self._kinds = _kinds(paths)
        self._enabled = enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            kind = self._kinds.get(scope["path"])
            if kind is not None and kind not in self._enabled:
                await send_error(send, no_model(scope["path"]))
                return
        await super().__call__(scope, receive, send)


def _kinds(paths: HttpPathsConfig) -> Mapping[str, str]:
    """Endpoint types by path."""
    return {
        paths.chat: "chat",
        paths.completions: "completion",
        paths.embeddings: "embedding",
        paths.responses: "responses",
        f"{paths.responses}/input_tokens": "responses",
        paths.anthropic: "anthropic_messages",
        f"{paths.anthropic}/count_tokens": "anthropic_messages",
        paths.classify: "classify",
        paths.pooling: "pooling",
        paths.rerank: "rerank",
        media.IMAGES: "images",
        media.IMAGE_EDITS: "images",
        media.VIDEOS: "videos",
        media.VIDEO_STREAM: "videos",
        media.SPEECH: "audios",
        media.REALTIME: "realtime",
    }
