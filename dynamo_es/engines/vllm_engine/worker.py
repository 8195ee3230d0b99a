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
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.config.vllm_options import VllmConfig
from dynamo_es.engines.lora.doors import adapter_routes, serve_adapters
from dynamo_es.engines.lora.service import adapter_service
from dynamo_es.engines.roles import DEFAULT_ENDPOINTS, NEEDS
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.engines.vllm_engine.arguments import engine_arguments, of_rank
from dynamo_es.engines.vllm_engine.engine import VllmEngine
from dynamo_es.engines.vllm_engine.metrics import EngineMetrics
from dynamo_es.engines.vllm_engine.translation import UNSUPPORTED
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.capabilities import UNSUPPORTED_FIELDS
from dynamo_es.frontend.parsers.model import REASONING_PARSER, TOOL_CALL_PARSER
from dynamo_es.log.base import EventLog
from dynamo_es.models.taint_route import TAINTS_ROUTE, taints_route
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)
_HEALTH_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class VllmWorkerSettings:
    """Everything that such a worker process is configured by. ``engine``: vLLM's own flags; ``vllm``: ours for it."""

    process: RuntimeSettings
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    engine: tuple[str, ...] = ()
    vllm: VllmConfig = field(default_factory=VllmConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)

    @property
    def stage(self) -> str:
        """``aggregated``, ``prefill`` or ``decode``."""
        kind = self.vllm.worker_type
        return "aggregated" if kind == "agg" else kind


class VllmWorker:
    """One engine behind one endpoint. ``run`` once."""

    def __init__(
        self,
        settings: VllmWorkerSettings,
        facts: ModelFacts,
        core: RuntimeCore,
        engine: VllmEngine,
        metrics: EngineMetrics,
    ) -> None:
        self._settings = settings
        self._facts = facts
        self._core = core
        self._engine = engine
        self._metrics = metrics
        self.endpoint = Endpoint(core, settings.worker.endpoint or DEFAULT_ENDPOINTS[settings.stage])
        self.adapters = adapter_service(self.endpoint, engine, settings.lora, limit=engine.facts.max_loras)

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Register and serve until the core shuts down; open streams run to their end.

        Raises:
            DynamoException: It cannot start, or its engine broke down; nothing stays registered.
        """
        core, known = self._core, self._engine.facts
        await core.start()
        await self._metrics.publish_to(self.endpoint, known)
        if known.kv_events is not None:
            for rank in range(known.first_rank, known.first_rank + known.ranks):
                KvEventPublisher(
                    self.endpoint,
                    kv_block_size=known.block_size,
                    dp_rank=rank,
                    zmq_endpoint=of_rank(known.kv_events, rank),
                    zmq_replay_endpoint=None if known.kv_replay is None else of_rank(known.kv_replay, rank),
                )
        where = self.endpoint.parts
        await core.registration.register(key_model(*where, core.instance_id), self._card())
        core.add_cleanup(self.adapters.close)
        serving = asyncio.create_task(self._serve(), name="vllm-worker")
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

    async def _serve(self) -> None:
        await asyncio.gather(
            self.endpoint.serve_endpoint(self.handle),
            *([serve_adapters(self.adapters)] if self._settings.lora.enabled else []),
        )

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
        known, worker, stage = self._engine.facts, self._settings.worker, self._settings.stage
        runtime_config: dict[str, Any] = {
            "total_kv_blocks": known.total_kv_blocks,
            "max_num_seqs": known.max_num_seqs,
            "max_num_batched_tokens": known.max_num_batched_tokens,
            "context_length": known.max_model_len,
            "data_parallel_start_rank": known.first_rank,
            "data_parallel_size": known.ranks,
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
            worker_type=stage,
            needs=[list(kinds) for kinds in NEEDS[stage]],
            # A prefill worker answers no client.
            **({"model_type": ""} if stage == "prefill" else {}),
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
    metrics = EngineMetrics()
    with tempfile.TemporaryDirectory(prefix="dynamo-es-vllm-") as folder:
        # Here and not in a thread: vLLM ties its sockets and tasks to the loop that is running.
        arguments = engine_arguments(
            path, settings.engine, Path(folder), stage=settings.stage, lora=settings.lora.enabled
        )
        engine = VllmEngine(arguments, metrics.on_load, settings.stage)
        core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
        worker = VllmWorker(settings, facts, core, engine, metrics)
        core.engine_routes[TAINTS_ROUTE] = taints_route([worker.endpoint])
        if settings.lora.enabled:
            core.system_routes += adapter_routes([worker.adapters])
        try:
            await run_until_stopped(stop, [core], [worker.run(on_ready)])
        finally:
            await engine.close()
