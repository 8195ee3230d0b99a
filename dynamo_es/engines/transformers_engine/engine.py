"""The Transformers engine: continuous batching and prefix reuse around a model, on one event loop and one thread.

Scheduler, blocks, events and metrics are those of ``engines.scheduling``; here the blocks hold a real cache, and a pass
is the model's. The loop plans a pass, the thread computes it, the loop hands out its tokens:
requests come, go and are cancelled between two passes, and nothing ever waits on the loop for the model.

The library's own continuous batching is not used: it tells nobody which blocks it keeps, and of a request's sampling
options it takes temperature, top_k and top_p (transformers 5.17).
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynamo_es.clock import Clock
from dynamo_es.engines.frame_stream import (
    Frame,
    FrameStream,
    OpenStreams,
    RequestContext,
    read_choice_count,
    read_prompt,
    usage_of,
)
from dynamo_es.engines.request_parts import lora_name_of, section
from dynamo_es.engines.scheduling.adapters import AdapterSet
from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.engines.scheduling.config import SchedulerConfig
from dynamo_es.engines.scheduling.length import check_length
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.engines.scheduling.scheduler import Scheduler
from dynamo_es.engines.scheduling.telemetry import EngineTelemetry
from dynamo_es.engines.transformers_engine.limits import check_supported
from dynamo_es.engines.transformers_engine.sampler import Choice, Sampler
from dynamo_es.engines.transformers_engine.sampling_options import SamplingOptions, read_options
from dynamo_es.engines.transformers_engine.work import GenerationRequest, ModelRunner, works_of
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.publishers.scope import PublisherScope

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What of a model the engine goes by.

    Attributes:
        context_length: Tokens of prompt and answer together.
        vocab_size: Token ids are below it.
        eos_token_ids: End an answer of requests that name no such tokens themselves.
        defaults: Of sampling, by name, as in the model's generation_config.json.
        adapters: Names of LoRA adapters that are loaded from the start.
    """

    context_length: int
    vocab_size: int
    eos_token_ids: Collection[int] = ()
    defaults: Mapping[str, float] = field(default_factory=dict)
    adapters: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Sizes of the engine: KV blocks, tokens a block, requests and tokens of a pass."""

    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True


class TransformersEngine:
    """One worker's engine. Belongs to one event loop; ``start`` first, ``close`` last."""

    def __init__(
        self,
        settings: EngineSettings,
        limits: ModelLimits,
        runner: ModelRunner,
        executor: Executor,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """``executor``: of one thread, the model's; the caller shuts it down after ``close``. ``rng``: for requests
        without a seed.
        """
        self.limits = limits
        self.config = SchedulerConfig(
            num_gpu_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_prefix_caching=settings.enable_prefix_caching,
            max_model_len=limits.context_length,
        )
        self._clock = clock
        self._rng = rng
        self._runner = runner
        self._executor = executor
        self.scheduler = Scheduler(self.config, BlockManager(self.config.num_gpu_blocks))
        self._streams = OpenStreams(self._abort)
        self._adapters = AdapterSet(limits.adapters, self._streams, [self.scheduler], self._tell_change)
        self._telemetry: EngineTelemetry | None = None
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.passes = 0

    def publish_to(self, scope: PublisherScope) -> EngineTelemetry:
        """Publish events, passes and load for the scope's worker. Before ``start``."""
        self._telemetry = EngineTelemetry(scope, self.config, [self.scheduler])
        return self._telemetry

    async def start(self) -> None:
        """Serve."""
        if self._telemetry is not None:
            self._telemetry.start()
        self._task = asyncio.create_task(self._run(), name="transformers-engine")

    async def broken(self) -> None:
        """Wait for the end of the engine. Raises what it broke down with; returns after ``close``."""
        assert self._task is not None
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def close(self) -> None:
        """Stop; a pass that is under way is computed to its end in the thread. Open requests end with
        ``EngineShutdown``. Idempotent.
        """
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._streams.fail("the engine was closed")
        if self._telemetry is not None:
            self._telemetry.close()

    async def load_adapter(self, name: str, folder: str) -> None:
        """As ``AdapterHost``, between two passes."""
        await self._on_thread(self._runner.load_adapter, name, folder)
        self._adapters.open(name)

    async def unload_adapter(self, name: str) -> None:
        """As ``AdapterHost``."""
        await self._adapters.close(name)
        await self._on_thread(self._runner.unload_adapter, name)

    async def _on_thread(self, work: Callable[..., None], *arguments: str) -> None:
        if self._closed:
            raise EngineShutdown("the engine is not running")
        await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    async def generate_batches(
        self, request: Mapping[str, Any], context: RequestContext | None = None
    ) -> AsyncGenerator[list[Frame], None]:
        """Frames as they come: lists of all that are ready.

        A frame has one token (``token_ids``), with ``log_probs``, ``top_logprobs`` and ``cum_log_probs`` if log
        probabilities are wanted; the last one says why it is the last (``finish_reason`` ``length``, or ``stop`` with
        the token that stopped it). The first and the last carry ``completion_usage``. With ``n`` over 1 each choice
        has such frames, with its ``index``. A stopped context ends the stream with no further frame before the next
        pass; so does closing it.

        Raises:
            InvalidArgument: The request is malformed, asks for what the engine does not do, is longer than the
                model's context, or can never fit the KV pool.
            StreamIncomplete: Its adapter is not here, or was unloaded and it took too long to end.
            EngineShutdown: The engine is not running, or broke down; its log tells why.
        """
        if self._closed or self._task is None:
            raise EngineShutdown("the engine is not running")
        stream = FrameStream(self._choices(request), 0, context)
        for choice in stream.choices:
            self.scheduler.add(choice)
        self._streams.open(stream)
        self._work.set()
        try:
            while True:
                frames = await stream.take()
                if frames:
                    yield frames
                if stream.error is not None:
                    raise stream.error
                if stream.ended and not stream.frames:
                    return
        finally:
            self._streams.abort(stream)

    def _choices(self, request: Mapping[str, Any]) -> list[GenerationRequest]:
        check_supported(request)
        prompt = read_prompt(request)
        limits = self.limits
        if not prompt:
            raise InvalidArgument("token_ids is empty: there is nothing to go on from")
        if max(prompt) >= limits.vocab_size:
            raise InvalidArgument(f"token_ids: {max(prompt)} is no token id below {limits.vocab_size}")
        capacity = self.config.num_gpu_blocks * self.config.block_size
        check_length(request, self.scheduler.output_room, limits.context_length, capacity)
        options = read_options(
            request,
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            defaults=limits.defaults,
        )
        max_tokens = section(request, "stop_conditions").get("max_tokens")
        room = self.scheduler.output_room(len(prompt))
        if max_tokens is None:
            max_tokens = room
        if type(max_tokens) is not int or max_tokens < 1:
            raise InvalidArgument(f"max_tokens must be at least 1, it is {str(max_tokens)[:32]}")
        routing = section(request, "routing")
        lora_name = lora_name_of(routing)
        self._adapters.check(lora_name)
        salt = routing.get("cache_namespace") or routing.get("cache_salt")
        return [
            GenerationRequest(
                prompt, max_tokens, self._sampler(options, prompt, index), lora_name=lora_name, cache_salt=salt
            )
            for index in range(read_choice_count(request))
        ]

    def _sampler(self, options: SamplingOptions, prompt: Sequence[int], index: int) -> Sampler:
        """Each choice has random numbers of its own, the same ones for the same seed."""
        seed = self._rng.getrandbits(64) if options.seed is None else options.seed % 2**64
        return Sampler(options, prompt, np.random.default_rng([seed, index]))

    async def _run(self) -> None:
        try:
            while True:
                if not self.scheduler.has_work:
                    self._work.clear()
                    await self._work.wait()
                self._streams.drop_stopped()
                if self.scheduler.has_work:
                    await self._pass()
        except Exception as error:
            # Nobody gets an answer from it any more; whoever runs it learns from ``broken``.
            logger.critical("the Transformers engine broke down: %s", type(error).__name__)
            self._closed = True
            self._streams.fail("the engine broke down; its log tells why")
            raise

    async def _pass(self) -> None:
        started = self._clock.monotonic()
        plan = self.scheduler.schedule()
        works = works_of(plan)
        choices = await asyncio.get_running_loop().run_in_executor(self._executor, self._runner.run, works)
        self.passes += 1
        self._finish(plan, choices, self._clock.monotonic() - started)

    def _finish(self, plan: PassPlan, choices: Sequence[Choice | None], duration_s: float) -> None:
        for request, choice in zip(plan.work, choices, strict=True):
            assert isinstance(request, GenerationRequest)
            if choice is not None:
                request.take(choice)
        for request, _, finish_reason in self.scheduler.complete(plan):
            assert isinstance(request, GenerationRequest)
            stream = self._streams.of(request)
            frame = _frame(request)
            if finish_reason is not None:
                frame["finish_reason"] = finish_reason
            if finish_reason is not None or request.generated == 1:
                frame["completion_usage"] = usage_of(request, stream)
            self._streams.push(request, frame)
            if finish_reason is not None:
                self._streams.end(request)
            stream.wake()
        if self._telemetry is not None:
            self._telemetry.on_pass(0, duration_s, plan.scheduled, plan.queued)

    def _abort(self, _rank: int, choices: Sequence[EngineRequest]) -> None:
        for choice in choices:
            self.scheduler.abort(choice)
        self._tell_change(0)

    def _tell_change(self, rank: int) -> None:
        """Something changed outside of a pass."""
        if self._telemetry is not None:
            self._telemetry.on_change(rank)


def _frame(request: GenerationRequest) -> Frame:
    choice = request.last
    assert choice is not None
    frame: Frame = {"token_ids": [choice.token_id]}
    if choice.logprob is not None:
        frame["log_probs"] = [choice.logprob]
        frame["top_logprobs"] = [
            [{"rank": rank, "token_id": token, "logprob": value} for rank, (token, value) in enumerate(choice.top, 1)]
        ]
        frame["cum_log_probs"] = request.cumulative_logprob
    return frame
