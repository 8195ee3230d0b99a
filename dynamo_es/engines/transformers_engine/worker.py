"""The Transformers worker process: one engine, registered and served, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.transformers_options import TransformersConfig
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.engines.lora.doors import adapter_routes, serve_adapters
from dynamo_es.engines.lora.service import adapter_service
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.engines.transformers_engine.assembly import Material, load_material
from dynamo_es.engines.transformers_engine.engine import EngineSettings, TransformersEngine
from dynamo_es.engines.transformers_engine.limits import UNSUPPORTED
from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.frontend.capabilities import UNSUPPORTED_FIELDS
from dynamo_es.frontend.parsers.model import REASONING_PARSER, TOOL_CALL_PARSER
from dynamo_es.log.base import EventLog
from dynamo_es.models.card_json import slug
from dynamo_es.models.errors import LoraError
from dynamo_es.models.lora import LoRADownloader, is_adapter
from dynamo_es.models.taint_route import TAINTS_ROUTE, taints_route
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.model_card import make_card
from dynamo_es.runtime.request_server import Batch
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)
_DEFAULT_ENDPOINT = "dynamo.backend.generate"
Load = Callable[[str, TransformersConfig, Mapping[str, str], Mapping[str, str]], Material]


@dataclass(frozen=True, slots=True)
class TransformersWorkerSettings:
    """Everything that a Transformers worker process is configured by."""

    process: RuntimeSettings
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    engine: TransformersConfig = field(default_factory=TransformersConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


class TransformersWorker:
    """One engine behind an endpoint. ``run`` once."""

    def __init__(
        self,
        settings: TransformersWorkerSettings,
        material: Material,
        executor: ThreadPoolExecutor,
        core: RuntimeCore,
    ) -> None:
        self._settings = settings
        self._material = material
        self._core = core
        self.endpoint = Endpoint(core, settings.worker.endpoint or _DEFAULT_ENDPOINT)
        config = settings.engine
        self.engine = TransformersEngine(
            EngineSettings(
                material.num_blocks,
                config.block_size,
                config.max_num_seqs,
                config.max_num_batched_tokens,
                config.enable_prefix_caching,
            ),
            material.limits,
            material.runner,
            executor,
            clock=core.clock,
            rng=core.rng,
        )
        adapters = {name: uri for name, uri in map(split_lora, config.loras) if name in material.limits.adapters}
        self.adapters = adapter_service(
            self.endpoint,
            self.engine,
            settings.lora,
            limit=max(settings.lora.max_gpu_lora_count, len(adapters)),
            loaded=adapters,
        )

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Register and serve until the core shuts down; open streams run to their end.

        Raises:
            DynamoException: It cannot start; nothing stays registered.
            Exception: What the engine broke down with.
        """
        core = self._core
        await core.start()
        scope = self.endpoint.publisher_scope()
        telemetry = self.engine.publish_to(scope)
        scope.add_renewal(telemetry.begin_incarnation)
        await core.registration.register(key_model(*self.endpoint.parts, core.instance_id), self._card())
        await self.adapters.register_loaded()
        await self.engine.start()
        core.add_cleanup(self.engine.close)  # It ends before what was registered does.
        on_ready(core.instance_id)
        core.add_cleanup(self.adapters.close)
        serving = asyncio.create_task(self._serve(), name="transformers-endpoint")
        broken = asyncio.create_task(self.engine.broken(), name="transformers-watch")
        try:
            await asyncio.wait([serving, broken], return_when=asyncio.FIRST_COMPLETED)
            if broken.done():
                broken.result()  # Without an engine it takes no more requests: the process ends.
            await serving
        finally:
            broken.cancel()
            if not serving.done() and not core.shutdown_event.is_set():
                serving.cancel()
            await asyncio.gather(serving, broken, return_exceptions=True)

    async def _serve(self) -> None:
        await asyncio.gather(
            self.endpoint.serve_endpoint(self._handle),
            *([serve_adapters(self.adapters)] if self._settings.lora.enabled else []),
        )

    async def _handle(self, request: Any, context: Context) -> AsyncGenerator[Batch, None]:
        if not isinstance(request, dict):
            raise InvalidArgument("the request must be a map with token_ids")
        async with aclosing(self.engine.generate_batches(request, context)) as batches:
            async for frames in batches:
                yield Batch(frames)

    def _card(self) -> ModelCard:
        config, worker = self._settings.engine, self._settings.worker
        context_length = self._material.limits.context_length
        return make_card(
            self._material.facts,
            self.endpoint.parts,
            self._core.instance_id,
            name=worker.model_name or self._material.name,
            block_size=config.block_size,
            runtime_config={
                "context_length": context_length,
                "total_kv_blocks": self._material.num_blocks,
                "max_num_seqs": config.max_num_seqs,
                "max_num_batched_tokens": config.max_num_batched_tokens,
                "data_parallel_start_rank": 0,
                "data_parallel_size": 1,
                TOOL_CALL_PARSER: worker.tool_call_parser,
                REASONING_PARSER: worker.reasoning_parser,
                UNSUPPORTED_FIELDS: dict(UNSUPPORTED),
            },
        )


def split_lora(item: str) -> tuple[str, str]:
    """Name and URI of ``NAME=URI``."""
    name, _, uri = item.partition("=")
    return name, uri


async def fetch_adapters(loras: tuple[str, ...]) -> dict[str, str]:
    """Folders of ``NAME=URI``, by name; fetched if they are not on this machine. Raises ``ConfigError``."""
    downloader, found = LoRADownloader(), dict[str, str]()
    for item in loras:
        name, uri = split_lora(item)
        if not slug(name):
            raise ConfigError(f"--lora {name}: a name must not be slashes alone")
        if slug(name) in {slug(known) for known in found}:
            raise ConfigError(f"--lora {name}: there are two of this name")
        try:
            folder = await downloader.download_if_needed(uri)
        except LoraError as error:
            raise ConfigError(f"--lora {name}: {error}") from error
        if not is_adapter(folder):
            raise ConfigError(f"--lora {name}: {folder} has no adapter_config.json with weights beside it")
        found[name] = folder
    return found


async def run_transformers_worker(
    settings: TransformersWorkerSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[int], None] = lambda worker_id: None,
    load: Load = load_material,
) -> None:
    """Load the model, then serve it until ``stop`` is set, and drain.

    Raises:
        DynamoException: It cannot start.
        Exception: What the engine broke down with.
    """
    loop = asyncio.get_running_loop()
    executor = ThreadPoolExecutor(1, "transformers-engine")
    try:
        adapters = await fetch_adapters(settings.engine.loras)
        made = partial(load, settings.worker.model_path, settings.engine, adapters, os.environ)
        material = await loop.run_in_executor(executor, made)
        core = RuntimeCore(settings.process, loop=loop, clock=clock, rng=rng, log=log)
        worker = TransformersWorker(settings, material, executor, core)
        core.engine_routes[TAINTS_ROUTE] = taints_route([worker.endpoint])
        if settings.lora.enabled:
            core.system_routes += adapter_routes([worker.adapters])
        await run_until_stopped(stop, [core], [worker.run(on_ready)])
    finally:
        await asyncio.to_thread(executor.shutdown)
