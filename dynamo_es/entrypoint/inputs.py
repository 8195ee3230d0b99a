"""Where an engine's requests come from (Dynamo's ``run_input``; spec/services h.3)."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_es.entrypoint.args import EngineType
from dynamo_es.entrypoint.engine_config import EngineConfig
from dynamo_es.entrypoint.local_engine import LocalEngine, echo_engine, mock_worker
from dynamo_es.entrypoint.settings import frontend_settings
from dynamo_es.errors import ConfigError, DynamoException, InvalidArgument
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.interactive import run_interactive
from dynamo_es.frontend.kserve.fleet import run_kserve
from dynamo_es.frontend.main import BuildApp, FrontendSettings, run_frontend
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.route_extensions import FrontendRoute, check_duplicates
from dynamo_es.frontend.routes import taken_paths
from dynamo_es.frontend.server import FrontendServer
from dynamo_es.frontend.terminal_lines import typed_lines, whole_input, written
from dynamo_es.models.endpoint_id import parse_endpoint_id
from dynamo_es.models.registration import with_template
from dynamo_es.router.config_arguments import instance_of
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import ModelFacts, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from dynamo_es.runtime.runtime import DistributedRuntime
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)

_SCHEME = "dyn://"
_INPUTS = ("http", "grpc", "text", "stdin")
OnReady = Callable[[FrontendServer], None]


def run_input(
    distributed_runtime: DistributedRuntime,
    input: str,  # noqa: A002 - Dynamo's name
    engine_config: EngineConfig,
    frontend_route_extensions: Sequence[FrontendRoute] | None = None,
    *,
    on_ready: OnReady | None = None,
    on_grpc_ready: Callable[[int], None] = lambda port: None,
) -> Awaitable[None]:
    """Connect an engine to an input; await what it returns. It runs until the runtime is shut down, or the input ends.

    Inputs: ``http``, the frontend with all its options from the environment; ``grpc``, KServe; ``text``, a chat in the
    terminal; ``stdin``, all of standard input as one message, whose answer is written; ``dyn://ns.component.endpoint``,
    a worker (of ``Echo`` or ``Mocker``) that the fleet finds there, with Dynamo's defaults for missing parts.

    ``Dynamic`` asks the fleet's workers over the runtime, which is closed at the end. ``Echo`` and ``Mocker`` behind
    ``http``, ``text`` and ``stdin`` are of this process alone; nothing of the runtime is used but its shutdown.

    ``on_ready``: told of the HTTP server when it serves, ``on_grpc_ready`` of gRPC's port. Not in Dynamo.

    Raises:
        DynamoException: ``Invalid in= option``.
        TypeError: An argument is of the wrong type.
        ValueError: Two routes have the same path, or ``frontend_route_extensions`` are for another input than HTTP.
        DynamoException: When awaited: it cannot start; says why and what to do.
    """
    _check(distributed_runtime, engine_config, frontend_route_extensions)
    core = distributed_runtime.core
    if input.startswith(_SCHEME):
        return _serve_endpoint(core, input, engine_config)
    if input not in _INPUTS:
        raise DynamoException(f"Invalid in= option '{input}'")
    routes = list(frontend_route_extensions or ())
    if routes and input != "http":
        raise ValueError(f"frontend_route_extensions are only supported by the input http, not by {input}")
    settings = frontend_settings(engine_config, core.settings, routes)
    check_duplicates(routes, taken_paths(settings.paths))
    if input == "http":
        return _Front(core, engine_config, settings).serve(on_ready)
    if input == "grpc":
        return _Front(core, engine_config, settings).serve_grpc(on_grpc_ready)
    return _Front(core, engine_config, settings).talk(once=input == "stdin")


def _check(runtime: Any, engine: Any, routes: Sequence[Any] | None) -> None:
    instance_of("distributed_runtime", runtime, DistributedRuntime)
    instance_of("engine_config", engine, EngineConfig)
    for route in routes or ():
        if not isinstance(route, FrontendRoute):
            raise TypeError(f"'{type(route).__name__}' object cannot be converted to 'FrontendRoute'")


class _Front:
    """The frontend's own code before an engine. One of its coroutines, once."""

    def __init__(self, core: RuntimeCore, engine: EngineConfig, settings: FrontendSettings) -> None:
        self._core = core
        self._engine = engine
        self._settings = settings

    async def serve(self, on_ready: OnReady | None) -> None:
        core = self._core

        async def run(build: BuildApp | None) -> None:
            await run_frontend(
                self._settings, core.shutdown_event, clock=core.clock, rng=core.rng, on_ready=on_ready, core=core,
                build=build,
            )  # fmt: skip

        await self._with_engine(run)

    async def serve_grpc(self, on_ready: Callable[[int], None]) -> None:
        core = self._core

        async def run(build: BuildApp | None) -> None:
            await run_kserve(
                self._settings, core.shutdown_event, core, on_ready=on_ready, build=build,
                metrics_port=self._engine.values["http_metrics_port"],
            )  # fmt: skip

        await self._with_engine(run)

    async def talk(self, *, once: bool) -> None:
        core = self._core
        prompt = await whole_input() if once else ""

        async def run(build: BuildApp | None) -> None:
            await run_interactive(
                self._settings, core.shutdown_event, clock=core.clock, rng=core.rng,
                lines=None if once else typed_lines(), write=written, model=self._engine.name, core=core, build=build,
                prompt=prompt,
            )  # fmt: skip

        await self._with_engine(run)

    async def _with_engine(self, run: Callable[[BuildApp | None], Coroutine[Any, Any, None]]) -> None:
        if self._engine.kind is EngineType.Dynamic:
            try:
                await run(None)
            finally:
                if self._core.started:
                    await self._core.close()
            return
        local = LocalEngine(self._engine, self._core)

        async def build(core: RuntimeCore, metrics: FrontendMetrics, executor: Executor) -> FrontendApp:
            await local.open(self._settings)
            return local.build(self._settings, metrics, executor)

        try:
            await run(build)
        finally:
            await local.close()


async def _serve_endpoint(core: RuntimeCore, path: str, engine: EngineConfig) -> None:
    """A worker at ``path``."""
    endpoint = Endpoint(core, ".".join(parse_endpoint_id(path)))
    if engine.kind is EngineType.Mocker:
        worker = mock_worker(engine, core, endpoint)
        await worker.run(lambda worker_id: logger.info("worker %d serves %s", worker_id, path))
        return
    if engine.kind is EngineType.Dynamic:
        raise ConfigError(f"{path}: EngineType.Dynamic asks workers and is none; take Echo or Mocker, or another input")
    await _serve_echo(core, endpoint, engine)


async def _serve_echo(core: RuntimeCore, endpoint: Endpoint, engine: EngineConfig) -> None:
    echo = echo_engine(engine, core)

    async def handler(request: Any, context: Context) -> AsyncGenerator[Batch, None]:
        if not isinstance(request, dict):
            raise InvalidArgument("the request must be a map with messages or a prompt")
        async with aclosing(echo.generate(request, context)) as chunks:
            async for chunk in chunks:
                yield Batch(chunk)

    card = _echo_card(endpoint, engine)
    key = key_model(*endpoint.parts, core.instance_id)
    await core.start()
    await core.registration.register(key, card)
    try:
        await endpoint.serve_endpoint(handler)
    finally:
        if not core.shutdown_event.is_set():
            await core.registration.unregister(key)


def _echo_card(endpoint: Endpoint, engine: EngineConfig) -> ModelCard:
    facts = ModelFacts("", "", 0) if engine.folder is None else read_model_facts(engine.folder)
    card = make_card(
        facts,
        endpoint.parts,
        endpoint.core.instance_id,
        name=engine.name,
        block_size=engine.values["kv_cache_block_size"] or 0,
        runtime_config={},
        model_type="Chat",
    )
    card = msgspec.structs.replace(card, model_input="Text")
    return card if engine.template is None else with_template(card, engine.template)
