"""vLLM's async engine in this process, as ``dynamo.vllm`` runs it: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from dynamo_es.engines.request_parts import lora_name_of, section
from dynamo_es.engines.vllm_engine.adapters import VllmAdapters
from dynamo_es.engines.vllm_engine.arguments import INSTEAD
from dynamo_es.engines.vllm_engine.handover import decode_arguments, handed_over, prefill_arguments
from dynamo_es.engines.vllm_engine.stats import EngineLoad, logger_class
from dynamo_es.engines.vllm_engine.translation import Frame, OutputReader, prompt_of, sampling_arguments
from dynamo_es.errors import ConfigError, EngineShutdown, InvalidArgument, StreamIncomplete
from dynamo_es.frontend.extras import import_extra
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded

logger = logging.getLogger(__name__)
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine settled on.

    Attributes:
        first_rank, ranks: Data-parallel ranks that it has.
        max_loras: LoRA adapters that it holds; 0: it takes none.
        kv_events, kv_replay: Addresses of the event sockets of rank 0; None: it has none.
    """

    block_size: int
    total_kv_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    first_rank: int
    ranks: int
    max_loras: int
    kv_events: str | None
    kv_replay: str | None


@dataclass(slots=True)
class _OpenRequest:
    """A request in vLLM. ``given_up``: why it is ended before its end."""

    lora_name: str | None
    given_up: str | None = None


class VllmEngine:
    """Belongs to one event loop. Constructing it loads the model; then ``generate``, at the end ``close``."""

    def __init__(self, arguments: Any, on_load: Callable[[EngineLoad], None], stage: str = "aggregated") -> None:
        """``on_load`` is called on the event loop, after each step of a rank. ``stage``: ``prefill`` answers with what
        a ``decode`` engine takes over.

        Raises:
            ConfigError: vLLM refused the arguments or the model.
        """
        vllm = import_extra("vllm.v1.engine.async_llm", "vllm", INSTEAD)
        self._params = import_extra("vllm.sampling_params", "vllm", INSTEAD)
        self._dead = import_extra("vllm.v1.engine.exceptions", "vllm", INSTEAD).EngineDeadError
        self._refusals = import_extra("vllm.exceptions", "vllm", INSTEAD)
        self._stage = stage
        transfer = arguments.kv_transfer_config
        self._connector = None if transfer is None else transfer.kv_connector
        try:
            self._engine: Any = vllm.AsyncLLM.from_engine_args(arguments, stat_loggers=[logger_class(on_load)])
        except (ValueError, OSError, RuntimeError) as error:
            raise ConfigError(f"vLLM does not start: {error}") from error
        self._defaults: Mapping[str, Any] = self._engine.vllm_config.model_config.get_diff_sampling_param()
        self._numbers = itertools.count()
        self._open: dict[str, _OpenRequest] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._adapters = VllmAdapters(self._engine, self._dead, self._give_up)
        self.facts = _facts(self._engine.vllm_config, arguments.kv_events_config)

    async def generate(self, request: Any, context: Context) -> AsyncGenerator[list[Frame], None]:
        """Frames as they come; the last one of a prefill engine has ``disaggregated_params``.

        A context that stops, or a generator that is closed, aborts the request in the engine. While a prompt's blocks
        are on their way to a decode engine that waits for its first token: the other side still writes.

        Raises:
            InvalidArgument: vLLM refuses the request, or there is no such rank.
            Overloaded: Its queue is full.
            StreamIncomplete: Its adapter is not here, or was unloaded and it took too long to end.
            EngineShutdown: The engine broke down, or gave the request up.
        """
        prompt = prompt_of(request, self.facts.max_model_len)
        params, arrives = self._sampling_params(request)
        rank = self._rank(request)
        routing = section(request, "routing")
        # Two attempts of one request may be here at a time.
        name = f"{context.id()}-{next(self._numbers)}"
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        salt = routing.get("cache_salt")
        if salt is not None:
            given["cache_salt"] = salt
        mine = _OpenRequest(lora_name_of(routing))
        held = self._adapters.enter(mine.lora_name)
        self._open[name] = mine

        def abort() -> None:
            self._abort_soon(name)

        try:
            if not arrives:
                context.add_stop_callback(abort)
            more = {} if rank is None else {"data_parallel_rank": rank}
            lora = None if held is None else held.request
            outputs = self._engine.generate(given, params, name, lora_request=lora, **more)
            async with aclosing(self._frames(outputs, request, mine, context)) as batches:
                async for frames in batches:
                    if arrives:
                        arrives = False
                        context.add_stop_callback(abort)
                    yield frames
        finally:
            context.remove_stop_callback(abort)
            del self._open[name]
            self._adapters.leave(held)

    async def _frames(
        self, outputs: AsyncGenerator[Any, None], request: Mapping[str, Any], mine: _OpenRequest, context: Context
    ) -> AsyncGenerator[list[Frame], None]:
        reader = OutputReader(request)
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    if context.is_stopped():
                        return
                    if mine.given_up is not None:
                        raise StreamIncomplete(mine.given_up)
                    frames = reader.read(output)
                    if self._stage == "prefill" and output.finished and frames:
                        frames[-1]["disaggregated_params"] = handed_over(output.kv_transfer_params)
                    if frames:
                        yield frames
        except self._dead as error:
            raise EngineShutdown("vLLM's engine broke down") from error
        except (ValueError, self._refusals.VLLMClientError) as error:
            raise InvalidArgument(f"vLLM: {error}") from error
        except self._refusals.GracefulHTTPError as error:
            raise Overloaded("overloaded: vLLM's queue is full") from error

    def _sampling_params(self, request: Mapping[str, Any]) -> tuple[Any, bool]:
        """vLLM's parameters, and whether the prompt comes from another worker."""
        arguments, guide = sampling_arguments(request, self._defaults, self.facts.max_model_len)
        arrives = False
        if self._stage == "prefill":
            arguments, guide = prefill_arguments(arguments, self._connector), None
        elif self._stage == "decode":
            arguments, arrives = decode_arguments(arguments, request)
        try:
            if guide is not None:
                arguments["structured_outputs"] = self._params.StructuredOutputsParams(**guide)
            made = self._params.SamplingParams(
                **arguments, detokenize=False, output_kind=self._params.RequestOutputKind.DELTA
            )
        except (ValueError, TypeError, self._refusals.VLLMClientError) as error:
            raise InvalidArgument(f"vLLM: {error}") from error
        return made, arrives

    def _rank(self, request: Mapping[str, Any]) -> int | None:
        """Place of the wanted rank among the engine's own; None: vLLM chooses."""
        rank = section(request, "routing").get("dp_rank")
        if rank is None:
            rank = request.get("dp_rank")
        if rank is None:
            return None
        place = rank - self.facts.first_rank if type(rank) is int else -1
        if not 0 <= place < self.facts.ranks:
            first, last = self.facts.first_rank, self.facts.first_rank + self.facts.ranks - 1
            raise InvalidArgument(f"dp_rank {str(rank)[:32]} is none of this worker's, {first} to {last}")
        return place if self.facts.ranks > 1 else None

    def _abort_soon(self, name: str) -> None:
        if self._engine is None:
            return
        task = asyncio.get_running_loop().create_task(self._engine.abort(name))
        self._aborts.add(task)
        task.add_done_callback(self._aborted)

    def _aborted(self, task: asyncio.Task[None]) -> None:
        self._aborts.discard(task)
        error = None if task.cancelled() else task.exception()
        # What an engine that broke down had to do is done; ``check`` tells of it.
        if error is not None and not isinstance(error, self._dead):
            logger.warning("vLLM did not abort a request: %s", type(error).__name__)

    async def _give_up(self, lora_name: str) -> None:
        """End the open requests of an adapter."""
        for name, mine in list(self._open.items()):
            if mine.lora_name == lora_name:
                mine.given_up = f"the LoRA adapter {lora_name!r} is being unloaded here"
                await self._engine.abort(name)

    async def load_adapter(self, name: str, folder: str) -> None:
        """As ``AdapterHost``. Raises ``AdapterConflict`` and ``Unknown`` too."""
        await self._adapters.load(name, folder)

    async def unload_adapter(self, name: str) -> None:
        """As ``AdapterHost``. Raises ``Unknown`` too: vLLM did not drop it, call again."""
        await self._adapters.unload(name)

    async def check(self) -> None:
        """Raises ``EngineShutdown``: the engine broke down; it does not come back."""
        try:
            await self._engine.check_health()
        except self._dead as error:
            raise EngineShutdown("vLLM's engine broke down") from error

    async def close(self) -> None:
        """Stop the engine's processes. Safe to call twice."""
        if self._aborts:
            _, late = await asyncio.wait(self._aborts, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()


def _facts(config: Any, events: Any) -> EngineFacts:
    known = events is not None and events.enable_kv_cache_events and events.publisher == "zmq"
    parallel, lora = config.parallel_config, config.lora_config
    # One that is told its rank, or the first of some, has those on this machine; any other one has all.
    own = parallel.local_engines_only
    return EngineFacts(
        block_size=config.cache_config.block_size,
        total_kv_blocks=config.cache_config.num_gpu_blocks or 0,
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        first_rank=parallel.data_parallel_rank if own else 0,
        ranks=parallel.data_parallel_size_local if own else parallel.data_parallel_size,
        max_loras=0 if lora is None else lora.max_cpu_loras or lora.max_loras,
        kv_events=events.endpoint if known else None,
        kv_replay=events.replay_endpoint if known else None,
    )
