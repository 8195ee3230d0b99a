"""The mock engine: an LLM worker without a model, with the scheduling, cache and timing of a real one.

It serves preprocessed requests (``token_ids``, ``stop_conditions.max_tokens``, ``sampling_options.n``) and answers
with readable text. What it caches, how long its passes take and what it publishes follow the model in spec/services
h.5 to h.7, so that a router can be tried, measured and taught on a laptop.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, Protocol

from dynamo_es.clock import Clock
from dynamo_es.engines.mock.block_manager import BlockManager
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.scheduler import MockRequest, MockScheduler, PassPlan
from dynamo_es.engines.mock.telemetry import MockTelemetry
from dynamo_es.engines.mock.text import OutputTokens, prompt_digest
from dynamo_es.engines.mock.timing import pass_seconds
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.publishers.scope import PublisherScope
from dynamo_es.router.hashing import block_seed

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]
Frame = dict[str, Any]
MAX_CHOICES = 128


class RequestContext(Protocol):
    """What the engine asks of a request's context."""

    def is_stopped(self) -> bool:
        """The caller wants no more."""


class _Stream:
    """Frames of one request's choices on their way to its consumer; for each at most one a token, and the last one."""

    __slots__ = ("choices", "context", "error", "frames", "open", "rank", "waiter")

    def __init__(self, choices: Sequence[MockRequest], rank: int, context: RequestContext | None) -> None:
        self.choices = choices
        self.open = len(choices)
        self.rank = rank
        self.context = context
        self.frames: list[Frame] = []
        self.error: EngineShutdown | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """No frame will follow."""
        return self.open == 0

    def wake(self) -> None:
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)


class _Place(NamedTuple):
    """Where a choice's frames go. ``choice``: its index; None if the request has one choice only."""

    stream: _Stream
    choice: int | None


class MockEngine:
    """All ranks of one mock worker. Belongs to one event loop; ``start`` first, ``close`` last.

    Ranks compute side by side: a round ends when the slowest rank's pass does. After each round the frames of all
    requests are in their streams before any consumer runs, so a transport can send them in one message.
    """

    def __init__(
        self,
        config: MockEngineConfig,
        *,
        clock: Clock,
        output_tokens: OutputTokens,
        sleep: Sleep = asyncio.sleep,
        default_max_tokens: int | None = None,
    ) -> None:
        """``output_tokens`` gives the text of a request. ``default_max_tokens`` is for requests that do not say how
        much they want; None refuses them, as Dynamo does.
        """
        self.config = config
        self._clock = clock
        self._sleep = sleep
        self._output_tokens = output_tokens
        self._default_max_tokens = default_max_tokens
        self.schedulers = [MockScheduler(config, BlockManager(config.num_gpu_blocks)) for _ in range(config.dp_size)]
        self._telemetry: MockTelemetry | None = None
        self._places: dict[MockRequest, _Place] = {}
        self._next_rank = 0
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.passes = 0

    def publish_to(self, scope: PublisherScope) -> MockTelemetry:
        """Publish events, passes and load of every rank for the scope's worker. Before ``start``."""
        self._telemetry = MockTelemetry(scope, self.config, self.schedulers)
        return self._telemetry

    async def start(self) -> None:
        """Take ``startup_time``, then serve."""
        if self.config.startup_time:
            await self._sleep(self.config.startup_time)
        if self._telemetry is not None:
            self._telemetry.start()
        self._task = asyncio.create_task(self._run(), name="mock-engine")
        self._task.add_done_callback(self._on_done)

    async def close(self) -> None:
        """Stop. Open requests end with ``EngineShutdown``. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._fail_streams("the mock engine was closed")
        if self._telemetry is not None:
            self._telemetry.close()

    async def generate(
        self, request: Mapping[str, Any], context: RequestContext | None = None
    ) -> AsyncGenerator[Frame, None]:
        """Frames one by one; see ``generate_batches``."""
        async with aclosing(self.generate_batches(request, context)) as batches:
            async for frames in batches:
                for frame in frames:
                    yield frame

    async def generate_batches(
        self, request: Mapping[str, Any], context: RequestContext | None = None
    ) -> AsyncGenerator[list[Frame], None]:
        """Frames as they come: lists of all that are ready.

        A frame has one token (``token_ids``); the last one has none and says why it is the last (``finish_reason``
        ``length`` or ``stop``). The first and the last carry ``completion_usage``. With ``sampling_options.n`` over 1
        each choice has such frames, with its ``index``. A request that can never fit the cache gets one frame with
        ``finish_reason`` ``{"error": text}``. A stopped context ends the stream with no further frame; its blocks, and
        those of a stream that is closed early, are free by the next pass.

        Raises:
            InvalidArgument: ``max_tokens`` is missing or 0, a token is no u32, there is no such rank, ``n`` is not 1 to
                128, or what a prefill worker handed over is of another prompt.
            EngineShutdown: The engine is not running.
        """
        if self._closed or self._task is None:
            raise EngineShutdown("the mock engine is not running")
        prompt = _prompt(request)
        count = _choice_count(request)
        max_tokens = self._max_tokens(request, len(prompt))
        rank = self._rank(request)
        scheduler = self.schedulers[rank]
        refusal = scheduler.refusal(len(prompt), max_tokens)
        if refusal is not None:
            yield [{"token_ids": [], "finish_reason": {"error": refusal}}]
            return
        seed, handed_over = _seed(request), self._handed_over(request, prompt)
        choices = [
            MockRequest(prompt, max_tokens, self._output_tokens(request, index), seed, handed_over is not None)
            for index in range(count)
        ]
        for choice in choices:
            choice.cached_tokens = handed_over or 0
        stream = _Stream(choices, rank, context)
        for index, choice in enumerate(choices):
            scheduler.add(choice)
            self._places[choice] = _Place(stream, index if count > 1 else None)
        self._work.set()
        try:
            while True:
                if not stream.frames and not stream.ended:
                    stream.waiter = asyncio.get_running_loop().create_future()
                    await stream.waiter
                frames, stream.frames = stream.frames, []
                if frames:
                    yield frames
                if stream.error is not None:
                    raise stream.error
                if stream.ended and not stream.frames:
                    return
        finally:
            self._abort(stream)

    def output_room(self, prompt_length: int) -> int:
        """Most output tokens that a request with such a prompt may ask for; under 1: none."""
        return self.schedulers[0].output_room(prompt_length)

    def _handed_over(self, request: Mapping[str, Any], prompt: array[int]) -> int | None:
        """Tokens that the prefill worker had cached; None: the prompt is to be computed here."""
        if request.get("bootstrap_info") is not None:
            raise InvalidArgument("the mock engine has no bootstrap server; it hands over by prefill_result")
        result = request.get("prefill_result")
        if result is None or self.config.worker_type != "decode":
            return None
        params = result.get("disaggregated_params") if isinstance(result, dict) else None
        if params != _handover_params(prompt):
            raise InvalidArgument("prefill_result is not of this prompt, or not of a mock engine")
        cached = (result.get("prompt_tokens_details") or {}).get("cached_tokens")
        return cached if isinstance(cached, int) else 0

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached, in every rank; False if a rank is busy and kept its cache."""
        cleared = True
        for rank, scheduler in enumerate(self.schedulers):
            cleared = scheduler.blocks.clear() and cleared
            if self._telemetry is not None:
                self._telemetry.on_change(rank)
        return cleared

    def _max_tokens(self, request: Mapping[str, Any], prompt_length: int) -> int:
        max_tokens = (request.get("stop_conditions") or {}).get("max_tokens")
        if max_tokens is None and self._default_max_tokens is not None:
            return max(1, min(self._default_max_tokens, self.output_room(prompt_length)))
        if max_tokens is None:
            raise InvalidArgument("max_output_tokens must be specified for mocker")
        if max_tokens < 1:
            raise InvalidArgument("live requests must generate at least one output token")
        return int(max_tokens)

    def _rank(self, request: Mapping[str, Any]) -> int:
        rank = (request.get("routing") or {}).get("dp_rank")
        if rank is None:
            rank = request.get("dp_rank")
        if rank is None:
            rank = self._next_rank
            self._next_rank = (rank + 1) % self.config.dp_size
        if not 0 <= rank < self.config.dp_size:
            raise InvalidArgument(f"dp_rank {rank} is out of bounds for dp_size {self.config.dp_size}")
        return int(rank)

    async def _run(self) -> None:
        while True:
            if not any(scheduler.has_work for scheduler in self.schedulers):
                self._work.clear()
                await self._work.wait()
            started = self._clock.monotonic()
            self._drop_stopped()
            plans = [
                (rank, scheduler.schedule()) for rank, scheduler in enumerate(self.schedulers) if scheduler.has_work
            ]
            if not plans:
                continue
            times = [self._duration(plan) for _, plan in plans]
            # Time that the simulation itself took belongs to the pass.
            rest = max(times) - (self._clock.monotonic() - started)
            await self._sleep(max(0.0, rest))
            for (rank, plan), duration in zip(plans, times, strict=True):
                self._finish_pass(rank, plan, duration)
            self.passes += 1

    def _duration(self, plan: PassPlan) -> float:
        return pass_seconds(plan.times, self.config.speedup_ratio, self.config.decode_speedup_ratio)

    def _finish_pass(self, rank: int, plan: PassPlan, duration_s: float) -> None:
        for request, token, finish_reason in self.schedulers[rank].complete(plan):
            stream, choice = self._places[request]
            if token is not None:
                frame: Frame = {"token_ids": [token]}
                if request.generated == 1:
                    frame["completion_usage"] = _usage(request, stream)
                    if self.config.worker_type == "prefill":
                        prompt = array("I", request.tokens[: request.prompt_length])
                        frame["disaggregated_params"] = _handover_params(prompt)
                _push(stream, choice, frame)
            if finish_reason is not None:
                last = {"token_ids": [], "finish_reason": finish_reason, "completion_usage": _usage(request, stream)}
                _push(stream, choice, last)
                stream.open -= 1
                del self._places[request]
            stream.wake()
        if self._telemetry is not None:
            self._telemetry.on_pass(rank, duration_s, plan.scheduled, plan.queued)

    def _drop_stopped(self) -> None:
        stopped = [
            place.stream
            for place in self._places.values()
            if place.stream.context is not None and place.stream.context.is_stopped()
        ]
        for stream in stopped:
            self._abort(stream)
            stream.wake()

    def _abort(self, stream: _Stream) -> None:
        stream.open = 0
        aborted = [choice for choice in stream.choices if self._places.pop(choice, None) is not None]
        for choice in aborted:
            self.schedulers[stream.rank].abort(choice)
        if aborted and self._telemetry is not None:
            self._telemetry.on_change(stream.rank)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.critical("the mock engine broke down", exc_info=task.exception())
        self._closed = True
        self._fail_streams("the mock engine broke down; its log tells why")

    def _fail_streams(self, reason: str) -> None:
        for stream in {place.stream for place in self._places.values()}:
            stream.error = EngineShutdown(reason)
            stream.open = 0
            stream.wake()


def _handover_params(prompt: array[int]) -> dict[str, Any]:
    """What a prefill worker says of a prompt that it computed, and a decode worker wants to hear."""
    return {"prompt_tokens": len(prompt), "prompt_digest": prompt_digest(prompt)}


def _prompt(request: Mapping[str, Any]) -> array[int]:
    try:
        return array("I", request["token_ids"])
    except (KeyError, TypeError, OverflowError) as error:
        raise InvalidArgument("token_ids must be a list of token ids, each a u32") from error


def _choice_count(request: Mapping[str, Any]) -> int:
    count = (request.get("sampling_options") or {}).get("n")
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise InvalidArgument(f"n must be 1 to {MAX_CHOICES}, it is {str(count)[:32]}")
    return count


def _push(stream: _Stream, choice: int | None, frame: Frame) -> None:
    if choice is not None:
        frame["index"] = choice
    stream.frames.append(frame)


def _usage(request: MockRequest, stream: _Stream) -> dict[str, Any]:
    """The prompt was found in the cache as its first choice found it: the others find what that one computed."""
    generated = request.generated
    return {
        "prompt_tokens": request.prompt_length,
        "completion_tokens": generated,
        "total_tokens": request.prompt_length + generated,
        "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": stream.choices[0].cached_tokens},
    }


def _seed(request: Mapping[str, Any]) -> int:
    """Adapter and tenant of a request keep its blocks apart, as in a real engine."""
    routing = request.get("routing") or {}
    return block_seed(routing.get("lora_name"), routing.get("cache_namespace") or routing.get("cache_salt"))
