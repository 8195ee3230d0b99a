"""Engines of this process behind its own frontend: no fleet, no log, nothing is registered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from dynamo_es.config.tree import MockConfig, WorkerConfig
from dynamo_es.engines.mock_worker import MockWorker, MockWorkerSettings
from dynamo_es.entrypoint.args import EngineType
from dynamo_es.entrypoint.echo import DEFAULT_DELAY_MS, DELAY_VARIABLE, EchoEngine
from dynamo_es.entrypoint.engine_config import EngineConfig
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import ServedModel, TokenEngine
from dynamo_es.frontend.local_models import LocalHealth, LocalModels
from dynamo_es.frontend.main import FrontendSettings
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.tokenizer_backends import options_for
from dynamo_es.frontend.tokenizer_cache import CacheTally
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.frontend.traced_engine import TracedEngine
from dynamo_es.models.card_json import custom_template
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint

_MAX_DELAY_MS = 60_000.0


class LocalEngine:
    """The engine of an ``EngineConfig`` that is no fleet. ``open`` first, ``close`` last."""

    def __init__(self, engine: EngineConfig, core: RuntimeCore) -> None:
        """``core`` gives clock and settings; it is not started."""
        self._engine = engine
        self._core = core
        self._worker: MockWorker | None = None
        self._models = LocalModels(lambda: core.clock.now_ms() / 1000)

    async def open(self, settings: FrontendSettings) -> None:
        """Read the model and start. Raises ``DynamoException``; nothing is left open then."""
        if self._engine.kind is EngineType.Echo:
            echo = echo_engine(self._engine, self._core)
            assert self._engine.name is not None
            self._models.add("chat", self._engine.name, echo)
            self._models.add("completions", self._engine.name, echo)
            return
        self._worker = mock_worker(self._engine, self._core, None)
        self._models.put(await self._served(self._worker, settings))
        await self._worker.start_apart()

    def build(self, settings: FrontendSettings, metrics: FrontendMetrics, executor: Executor) -> FrontendApp:
        """The application over it. Raises ``MissingExtra``: traces are asked for and their library is not there."""
        self._core.open_tracing()
        # No model of it has workers that could be busy.
        config = replace(settings.frontend, disable_admin_api=True)
        return build_app(
            config, self._models, LocalHealth(self._models), metrics, self._core.clock, executor,
            paths=settings.paths, extensions=settings.extensions, tracing=self._core.tracing,
        )  # fmt: skip

    async def close(self) -> None:
        """Requests that run end with an error."""
        if self._worker is not None:
            await self._worker.close()

    async def _served(self, worker: MockWorker, settings: FrontendSettings) -> ServedModel:
        card = worker.card()
        assert self._engine.folder is not None
        options = options_for(settings.frontend, card.runtime_config, CacheTally())
        tokenizer, renderer = await asyncio.to_thread(
            load_tokenizer, self._engine.folder, custom_template(card), options
        )
        created = self._core.clock.now_ms() // 1000
        return ServedModel(card.display_name, card, tokenizer, renderer, TracedEngine(_MockTokens(worker)), created)


class _MockTokens(TokenEngine):
    """A mock worker without a request plane before it."""

    def __init__(self, worker: MockWorker) -> None:
        self._worker = worker

    async def generate(self, request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
        async with aclosing(self._worker.handle(request, context)) as batches:
            async for batch in batches:
                yield list(batch)


def echo_engine(engine: EngineConfig, core: RuntimeCore) -> EchoEngine:
    """The echo engine, as fast as the environment says (``DYN_TOKEN_ECHO_DELAY_MS``). Raises ``ConfigError``."""
    return EchoEngine(lambda: core.clock.now_ms() / 1000, _delay_ms(engine.env))


def _delay_ms(env: Mapping[str, str]) -> float:
    text = env.get(DELAY_VARIABLE, "").strip()
    if not text:
        return DEFAULT_DELAY_MS
    try:
        delay_ms = float(text)
    except ValueError:
        delay_ms = -1.0
    if not 0 <= delay_ms <= _MAX_DELAY_MS:
        raise ConfigError(f"{DELAY_VARIABLE}={text}: it must be a number of milliseconds, 0 to {_MAX_DELAY_MS:g}")
    return delay_ms


def mock_worker(engine: EngineConfig, core: RuntimeCore, endpoint: Endpoint | None) -> MockWorker:
    """The mock engine as a worker of ``endpoint``, not started; None: of none that matters."""
    args, material, folder = engine.mock, engine.material, engine.folder
    assert args is not None
    assert material is not None
    assert folder is not None
    runtime_config = engine.values["runtime_config"]
    parsers = {} if runtime_config is None else runtime_config.card_body()
    worker = WorkerConfig(
        endpoint=None if endpoint is None else ".".join(endpoint.parts),
        model_path=folder,
        model_name=engine.name,
        tool_call_parser=parsers.get("tool_call_parser"),
        reasoning_parser=parsers.get("reasoning_parser"),
    )
    settings = MockWorkerSettings(core.settings, worker, MockConfig())
    return MockWorker(settings, args, material, core)
