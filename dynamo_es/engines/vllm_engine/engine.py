"""vLLM's async engine in this process, as ``dynamo.vllm`` runs it: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_es.engines.vllm_engine.translation import Frame, OutputReader, prompt_of, sampling_arguments
from dynamo_es.errors import ConfigError, EngineShutdown, InvalidArgument
from dynamo_es.frontend.extras import import_extra
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded

_INSTEAD = "dynamo-es worker attach, for a vLLM that runs in an environment of its own"


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of the engine after a step."""

    kv_used_blocks: int
    total_kv_blocks: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine settled on. ``kv_events``, ``kv_replay``: addresses of its event sockets; None: it has none."""

    block_size: int
    total_kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_events: str | None
    kv_replay: str | None


def engine_arguments(model_path: str, arguments: Sequence[str], socket_folder: Path) -> Any:
    """vLLM's ``AsyncEngineArgs`` from its own command line, with KV events on.

    Args:
        model_path: The model.
        arguments: vLLM's flags, as for ``vllm serve``.
        socket_folder: Where the sockets of KV events are made, unless ``--kv-events-config`` says otherwise.

    Raises:
        ConfigError: vLLM is not installed, or the arguments make no single-rank engine.
        SystemExit: vLLM's parser refused a flag; it has told why.
    """
    arg_utils = import_extra("vllm.engine.arg_utils", "vllm", _INSTEAD)
    parsers = import_extra("vllm.utils.argparse_utils", "vllm", _INSTEAD)
    config = import_extra("vllm.config", "vllm", _INSTEAD)
    parser = arg_utils.AsyncEngineArgs.add_cli_args(parsers.FlexibleArgumentParser(prog="dynamo-es worker vllm ... --"))
    made = arg_utils.AsyncEngineArgs.from_cli_args(parser.parse_args([*arguments, "--model", model_path]))
    if made.data_parallel_size > 1:
        raise ConfigError("--data-parallel-size: a worker in this process has one rank; start one worker for each")
    if made.kv_events_config is None:
        made.kv_events_config = config.KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"ipc://{socket_folder}/kv-events",
            replay_endpoint=f"ipc://{socket_folder}/kv-replay",
        )
    return made


class VllmEngine:
    """Belongs to one event loop. Constructing it loads the model; then ``generate``, at the end ``close``."""

    def __init__(self, arguments: Any, on_load: Callable[[EngineLoad], None]) -> None:
        """``on_load`` is called on the event loop, after each step of the engine.

        Raises:
            ConfigError: vLLM refused the arguments or the model.
        """
        vllm = import_extra("vllm.v1.engine.async_llm", "vllm", _INSTEAD)
        self._params = import_extra("vllm.sampling_params", "vllm", _INSTEAD)
        self._dead = import_extra("vllm.v1.engine.exceptions", "vllm", _INSTEAD).EngineDeadError
        self._refusals = import_extra("vllm.exceptions", "vllm", _INSTEAD)
        try:
            self._engine: Any = vllm.AsyncLLM.from_engine_args(arguments, stat_loggers=[_logger_class(on_load)])
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM does not start: {error}") from error
        config = self._engine.vllm_config
        self._defaults: Mapping[str, Any] = config.model_config.get_diff_sampling_param()
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()
        events = arguments.kv_events_config
        known = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
        self.facts = EngineFacts(
            block_size=config.cache_config.block_size,
            total_kv_blocks=config.cache_config.num_gpu_blocks or 0,
            max_model_len=config.model_config.max_model_len,
            max_num_seqs=config.scheduler_config.max_num_seqs,
            max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            kv_events=_connectable(events.endpoint) if known else None,
            kv_replay=_connectable(events.replay_endpoint) if known and events.replay_endpoint else None,
        )

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[list[Frame], None]:
        """Frames as they come. A context that stops, or a generator that is closed, aborts the request in the engine.

        Raises:
            InvalidArgument: vLLM refuses the request.
            Overloaded: Its queue is full.
            EngineShutdown: The engine broke down, or gave the request up.
        """
        prompt = prompt_of(request, self.facts.max_model_len)
        params = self._sampling_params(request)
        # Two attempts of one request may be here at a time.
        name = f"{context.id()}-{next(self._numbers)}"
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        salt = (request.get("routing") or {}).get("cache_salt")
        if salt is not None:
            given["cache_salt"] = salt

        def abort() -> None:
            task = asyncio.get_running_loop().create_task(self._engine.abort(name))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

        reader = OutputReader(request)
        context.add_stop_callback(abort)
        try:
            async with aclosing(self._engine.generate(given, params, name)) as outputs:
                async for output in outputs:
                    if context.is_stopped():
                        return
                    frames = reader.read(output)
                    if frames:
                        yield frames
        except self._dead as error:
            raise EngineShutdown("vLLM's engine broke down") from error
        except (ValueError, self._refusals.VLLMClientError) as error:
            raise InvalidArgument(f"vLLM: {error}") from error
        except self._refusals.GracefulHTTPError as error:
            raise Overloaded("overloaded: vLLM's queue is full") from error
        finally:
            context.remove_stop_callback(abort)

    def _sampling_params(self, request: Mapping[str, Any]) -> Any:
        arguments, guide = sampling_arguments(request, self._defaults, self.facts.max_model_len)
        try:
            if guide is not None:
                arguments["structured_outputs"] = self._params.StructuredOutputsParams(**guide)
            return self._params.SamplingParams(
                **arguments, detokenize=False, output_kind=self._params.RequestOutputKind.DELTA
            )
        except (ValueError, TypeError, self._refusals.VLLMClientError) as error:
            raise InvalidArgument(f"vLLM: {error}") from error

    async def check(self) -> None:
        """Raises ``EngineShutdown``: the engine broke down; it does not come back."""
        try:
            await self._engine.check_health()
        except self._dead as error:
            raise EngineShutdown("vLLM's engine broke down") from error

    async def close(self) -> None:
        """Stop the engine's processes. Safe to call twice."""
        if self._aborts:
            await asyncio.wait(self._aborts)
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _connectable(endpoint: str) -> str:
    return endpoint.replace("*", "127.0.0.1")


def _logger_class(on_load: Callable[[EngineLoad], None]) -> Any:
    base: Any = import_extra("vllm.v1.metrics.loggers", "vllm", _INSTEAD).StatLoggerBase

    class LoadLogger(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._config = vllm_config.cache_config

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                total = self._config.num_gpu_blocks or 0
                used = round(scheduler_stats.kv_cache_usage * total)
                waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
                on_load(EngineLoad(used, total, scheduler_stats.num_running_reqs, waiting))

        def log_engine_initialized(self) -> None:
            """Nothing to tell."""

    return LoadLogger
