"""The vLLM worker process: an engine, registered and served, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import random
import tempfile
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.engines.vllm_engine.engine import EngineLoad, VllmEngine, engine_arguments
from dynamo_es.engines.vllm_engine.translation import UNSUPPORTED
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.capabilities import UNSUPPORTED_FIELDS
from dynamo_es.frontend.parsers.model import REASONING_PARSER, TOOL_CALL_PARSER
from dynamo_es.log.base import EventLog
from dynamo_es.models.taint_route import TAINTS_ROUTE, taints_route
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)
DEFAULT_ENDPOINT = "dynamo.backend.generate"
_HEALTH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class VllmWorkerSettings:
    """Everything that such a worker process is configured by. ``engine``: vLLM's own flags."""

    process: RuntimeSettings
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    engine: tuple[str, ...] = ()


class VllmWorker:
    """One engine behind one endpoint. ``run`` once."""

    def __init__(
        self,
        settings: VllmWorkerSettings,
        facts: ModelFacts,
        core: RuntimeCore,
        engine: VllmEngine,
        metrics: WorkerMetricsPublisher,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._core = core
        self._engine = engine
        self._metrics = metrics
        self.endpoint = Endpoint(core, settings.worker.endpoint or DEFAULT_ENDPOINT)

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Register and serve until the core shuts down; open streams run to their end.

        Raises:
            DynamoException: It cannot start, or its engine broke down; nothing stays registered.
        """
        core, known = self._core, self._engine.facts
        await core.start()
        await self._metrics.create_endpoint(self.endpoint)
        if known.kv_events is not None:
            KvEventPublisher(
                self.endpoint,
                kv_block_size=known.block_size,
                zmq_endpoint=known.kv_events,
                zmq_replay_endpoint=known.kv_replay,
            )
        where = self.endpoint.parts
        await core.registration.register(key_model(*where, core.instance_id), self._card())
        serving = asyncio.create_task(self.endpoint.serve_endpoint(self.handle), name="vllm-worker")
        watching = asyncio.create_task(self._watch(), name="vllm-health")
        try:
            on_ready(core.instance_id)
            done, _ = await asyncio.wait([serving, watching], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            watching.cancel()
            if not serving.done():
                core.shutdown_event.set()
            await asyncio.gather(serving, watching, return_exceptions=True)

    async def handle(self, request: Any, context: Context) -> AsyncGenerator[Batch, None]:
        """Answer one request. Raises what ``VllmEngine.generate`` does."""
        async with aclosing(self._engine.generate(request, context)) as batches:
            async for frames in batches:
                yield Batch(frames)

    async def _watch(self) -> None:
        while True:
            await self._engine.check()
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    def _card(self) -> ModelCard:
        known, worker = self._engine.facts, self._settings.worker
        runtime_config: dict[str, Any] = {
            "total_kv_blocks": known.total_kv_blocks,
            "max_num_seqs": known.max_num_seqs,
            "max_num_batched_tokens": known.max_num_batched_tokens,
            "context_length": known.max_model_len,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            TOOL_CALL_PARSER: worker.tool_call_parser,
            REASONING_PARSER: worker.reasoning_parser,
            UNSUPPORTED_FIELDS: dict(UNSUPPORTED),
        }
        return make_card(
            self._facts,
            self.endpoint.parts,
            self._core.instance_id,
            name=worker.model_name,
            block_size=known.block_size,
            runtime_config=runtime_config,
        )


async def run_vllm_worker(
    settings: VllmWorkerSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[int], None] = lambda worker_id: None,
) -> None:
    """Load the model and serve until ``stop`` is set, then drain. While it loads, the event loop stands still.

    Raises:
        DynamoException: It cannot start, or broke down.
    """
    path = settings.worker.model_path
    if path == BUILTIN_MODEL:
        raise ConfigError("--model-path is missing: give the model's directory")
    facts = await asyncio.to_thread(read_model_facts, path)
    metrics = WorkerMetricsPublisher()

    def on_load(load: EngineLoad) -> None:
        metrics.publish(
            kv_used_blocks=load.kv_used_blocks,
            total_kv_blocks=load.total_kv_blocks,
            running=load.running,
            waiting=load.waiting,
        )

    with tempfile.TemporaryDirectory(prefix="dynamo-es-vllm-") as folder:
        # Here and not in a thread: vLLM ties its sockets and tasks to the loop that is running.
        engine = VllmEngine(engine_arguments(path, settings.engine, Path(folder)), on_load)
        core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
        worker = VllmWorker(settings, facts, core, engine, metrics)
        core.engine_routes[TAINTS_ROUTE] = taints_route([worker.endpoint])
        try:
            await run_until_stopped(stop, [core], [worker.run(on_ready)])
        finally:
            await engine.close()
