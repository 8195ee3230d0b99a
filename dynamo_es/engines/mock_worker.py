"""The mock worker process: engines, registered and served, until told to stop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from dynamo_es.clock import Clock
from dynamo_es.config.lora_options import LoraConfig
from dynamo_es.config.text_checks import model_type_of
from dynamo_es.config.tree import MockConfig, SystemConfig, WorkerConfig
from dynamo_es.engines.lora.doors import adapter_routes, serve_adapters
from dynamo_es.engines.lora.service import adapter_service
from dynamo_es.engines.mock.args import MockEngineArgs
from dynamo_es.engines.mock.embedding import embed_request, is_embedding_request
from dynamo_es.engines.mock.engine import MockEngine
from dynamo_es.engines.mock.files import load_outputs, load_timing, read_arguments
from dynamo_es.engines.mock.limits import UNSUPPORTED, check_supported
from dynamo_es.engines.mock.output import RecordedOutputs
from dynamo_es.engines.mock.setup import make_args, stagger_s
from dynamo_es.engines.mock.text import OutputTokens, SentenceTokens
from dynamo_es.engines.roles import DEFAULT_ENDPOINTS, NEEDS
from dynamo_es.engines.scheduling.length import check_length
from dynamo_es.engines.scheduling.timing import TimingModel
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.frontend.capabilities import UNSUPPORTED_FIELDS
from dynamo_es.frontend.parsers.model import REASONING_PARSER, TOOL_CALL_PARSER
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from dynamo_es.log.base import EventLog
from dynamo_es.models.registration import with_template
from dynamo_es.models.taint_route import TAINTS_ROUTE, taints_route
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint, parse_endpoint_path
from dynamo_es.runtime.model_card import BUILTIN_MODEL, ModelFacts, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from schemas.registry import ModelCard, key_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MockWorkerSettings:
    """Everything that a mock worker process is configured by."""

    process: RuntimeSettings
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    mock: MockConfig = field(default_factory=MockConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, slots=True)
class Material:
    """What all workers of a process share: the model's facts, what they say, and how long it takes them.

    ``template``: the chat template that they register instead of the model's own, as ``read_template`` gives it.
    """

    facts: ModelFacts
    output_tokens: OutputTokens
    recorded: RecordedOutputs | None = None
    timing: TimingModel | None = None
    template: Mapping[str, Any] | None = None


class MockWorker:
    """One worker: an engine behind an endpoint. ``run`` once."""

    def __init__(
        self, settings: MockWorkerSettings, args: MockEngineArgs, material: Material, core: RuntimeCore
    ) -> None:
        """Raises ``ConfigError``: ``args`` make no engine."""
        self._settings = settings
        self._facts = facts = material.facts
        self._template = material.template
        self._core = core
        self._args = args
        self.endpoint = Endpoint(core, settings.worker.endpoint or DEFAULT_ENDPOINTS[args.worker_type])
        config = args.engine_config()
        if facts.context_length:
            config = replace(
                config, max_model_len=min(facts.context_length, config.max_model_len or facts.context_length)
            )
        self._config = config
        self._bootstrap_port: int | None = None
        self._engine = MockEngine(
            config,
            clock=core.clock,
            output_tokens=material.output_tokens,
            default_max_tokens=settings.mock.default_max_tokens,
            recorded=material.recorded,
            timing=material.timing,
            adapters=() if settings.lora.enabled else None,
        )
        self.adapters = adapter_service(self.endpoint, self._engine, settings.lora) if settings.lora.enabled else None

    async def run(self, on_ready: Callable[[int], None]) -> None:
        """Register and serve until the core shuts down; open streams run to their end.

        Raises:
            DynamoException: It cannot start; nothing stays registered.
        """
        core = self._core
        await core.start()
        core.add_cleanup(self._engine.close)  # Its ports are open before anything is registered.
        await self._open_ports()
        await self._engine.warm_up()
        scope = self.endpoint.publisher_scope()
        telemetry = self._engine.publish_to(scope)
        scope.add_renewal(telemetry.begin_incarnation)
        await core.registration.register(self._key(), self.card())
        await self._engine.start()
        core.drop_cleanup(self._engine.close)
        core.add_cleanup(self._engine.close)  # It ends before what was registered does.
        serving: list[Awaitable[Any]] = [self.endpoint.serve_endpoint(self.handle)]
        if self.adapters is not None:
            core.add_cleanup(self.adapters.close)
            serving.append(serve_adapters(self.adapters))
        on_ready(core.instance_id)
        await asyncio.gather(*serving)

    async def _open_ports(self) -> None:
        args, host = self._args, self._settings.process.runtime.host
        if args.zmq_kv_events_port is not None:
            sockets = self._engine.publish_over_zmq(host, args.zmq_kv_events_port, args.zmq_replay_port)
            logger.info("KV events at %s, replay at %s", sockets.endpoints, sockets.replay_endpoints or "no port")
        if args.bootstrap_port is not None and args.worker_type == "prefill":
            self._bootstrap_port = await self._engine.hand_over_at(host, args.bootstrap_port)

    async def start_apart(self) -> None:
        """Only the engine, for ``handle``: nothing is registered, published or listened on. ``close`` ends it."""
        await self._engine.start()

    async def close(self) -> None:
        """Undo ``start_apart``. Open requests end with ``EngineShutdown``."""
        await self._engine.close()

    async def handle(self, request: Any, context: Context) -> AsyncGenerator[Batch, None]:
        """Answer one request, as the endpoint does. Raises ``InvalidArgument``, ``EngineShutdown``."""
        if not isinstance(request, dict):
            raise InvalidArgument("the request must be a map with token_ids")
        if is_embedding_request(request):
            if not _serves(self._settings.mock, "Embedding"):
                raise InvalidArgument("this worker makes no embeddings; see its --model-type")
            yield Batch([embed_request(request, self._settings.mock.embedding_dimensions)])
            return
        check_supported(request)
        cache_tokens = self._config.num_gpu_blocks * self._config.block_size
        limit = self._config.max_model_len or 0
        check_length(request, self._engine.output_room, limit, cache_tokens)
        async with aclosing(self._engine.generate_batches(request, context)) as batches:
            async for frames in batches:
                yield Batch(frames)

    def card(self) -> ModelCard:
        """What is registered."""
        mock = self._config
        runtime_config: dict[str, Any] = {
            "total_kv_blocks": mock.num_gpu_blocks,
            "max_num_seqs": mock.max_num_seqs,
            "max_num_batched_tokens": mock.prefill_budget,
            "data_parallel_start_rank": 0,
            "data_parallel_size": mock.dp_size,
            TOOL_CALL_PARSER: self._settings.worker.tool_call_parser,
            REASONING_PARSER: self._settings.worker.reasoning_parser,
            UNSUPPORTED_FIELDS: dict(UNSUPPORTED),
        }
        if self._bootstrap_port is not None:
            runtime_config["disaggregated_endpoint"] = {
                "bootstrap_host": urlsplit(self._core.address).hostname,
                "bootstrap_port": self._bootstrap_port,
            }
        card = make_card(
            self._facts,
            self.endpoint.parts,
            self._core.instance_id,
            name=self._settings.worker.model_name,
            block_size=mock.block_size,
            runtime_config=runtime_config,
            worker_type=mock.worker_type,
            needs=[list(kinds) for kinds in NEEDS[mock.worker_type]],
            # A prefill worker answers no client.
            model_type="" if mock.worker_type == "prefill" else model_type_of(self._settings.mock.model_type),
        )
        return card if self._template is None else with_template(card, self._template)

    def _key(self) -> bytes:
        return key_model(*self.endpoint.parts, self._core.instance_id)


def _serves(mock: MockConfig, kind: str) -> bool:
    return kind in model_type_of(mock.model_type).split(" | ")


def _check_worker(worker: WorkerConfig) -> None:
    try:
        parse_endpoint_path(worker.endpoint or DEFAULT_ENDPOINTS["aggregated"])
    except ValueError as error:
        raise ConfigError(f"--endpoint: {error}") from error
    if worker.model_name is not None and not worker.model_name.strip():
        raise ConfigError(
            f"--model-name must be a non-empty string, got {worker.model_name!r}; leave it out for the directory's name"
        )
    if not worker.model_path.strip():
        raise ConfigError(f"--model-path must be a model directory or {BUILTIN_MODEL}, got {worker.model_path!r}")


def load_material(model_path: str, args: MockEngineArgs) -> Material:
    """Read everything that the workers need. Blocks. Raises ``ConfigError``."""
    facts = read_model_facts(model_path)
    tokenizer, _ = load_tokenizer(model_path)
    return Material(
        facts,
        SentenceTokens(lambda text: tokenizer.encode(text, False)),
        load_outputs(args.response_replay_trace_path) if args.response_replay_trace_path else None,
        load_timing(args, model_path),
    )


async def _run_after(delay_s: float, worker: MockWorker, on_ready: Callable[[int], None]) -> None:
    if delay_s:
        await asyncio.sleep(delay_s)
    await worker.run(on_ready)


async def run_mock_workers(
    settings: MockWorkerSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[int], None] = lambda worker_id: None,
) -> None:
    """Run ``num_workers`` workers until ``stop`` is set, then drain them.

    Raises:
        DynamoException: One of them cannot start or broke down; the others are stopped.
    """
    _check_worker(settings.worker)
    mock = settings.mock
    extra = await asyncio.to_thread(read_arguments, mock.extra_engine_args) if mock.extra_engine_args else None
    args = [make_args(mock, extra, number) for number in range(mock.num_workers)]
    for own in args:
        own.engine_config()
    material = await asyncio.to_thread(load_material, settings.worker.model_path, args[0])
    loop = asyncio.get_running_loop()
    # One process, one log, one registry view, one system status server: the first worker's, which speaks for all.
    first = RuntimeCore(settings.process, loop=loop, clock=clock, rng=rng, log=log)
    others = replace(settings.process, system=SystemConfig())
    cores = [first, *(RuntimeCore(others, loop=loop, clock=clock, rng=rng, host=first) for _ in args[1:])]
    first.companions.extend(cores[1:])
    workers = [MockWorker(settings, own, material, core) for own, core in zip(args, cores, strict=True)]
    first.engine_routes[TAINTS_ROUTE] = taints_route([worker.endpoint for worker in workers])
    if settings.lora.enabled:
        first.system_routes += adapter_routes([worker.adapters for worker in workers if worker.adapters is not None])
    delay = stagger_s(mock)
    runs = [_run_after(number * delay, worker, on_ready) for number, worker in enumerate(workers)]
    await run_until_stopped(stop, cores, runs)
