"""The mock engine: an LLM worker without a model, with the scheduling, cache and timing of a real one.

It serves preprocessed requests (``token_ids``, ``stop_conditions.max_tokens``, ``sampling_options.n``) and answers
with readable text. What it caches, how long its passes take and what it publishes follow the model in spec/services
h.5 to h.7, so that a router can be tried, measured and taught on a laptop.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import Any

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
from dynamo_es.engines.mock.build import build_scheduler
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.engine_events import EngineEvents
from dynamo_es.engines.mock.event_sockets import EventSockets
from dynamo_es.engines.mock.output import EngineOutput, RecordedOutputs
from dynamo_es.engines.mock.rendezvous import HandoverServer, fetch_handover
from dynamo_es.engines.mock.text import OutputTokens, prompt_digest
from dynamo_es.engines.mock.timing import pass_seconds
from dynamo_es.engines.request_parts import lora_name_of
from dynamo_es.engines.scheduling.adapters import AdapterSet
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.engines.scheduling.scheduler import Scheduler
from dynamo_es.engines.scheduling.telemetry import EngineTelemetry
from dynamo_es.engines.scheduling.timing import TimingModel
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.publishers.scope import PublisherScope
from dynamo_es.router.hashing import block_seed

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


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
        recorded: RecordedOutputs | None = None,
        timing: TimingModel | None = None,
        adapters: Collection[str] | None = None,
    ) -> None:
        """``output_tokens`` gives the text of a request; ``recorded``, a trace's outputs, goes before it.
        ``default_max_tokens`` is for requests that do not say how much they want; None refuses them, as Dynamo does.
        ``timing``: of the modelled GPU; None: Dynamo's polynomials. ``adapters``: names of the LoRA adapters that it
        pretends to have; None: it pretends to have whichever is asked for.
        """
        self.config = config
        self._clock = clock
        self._sleep = sleep
        self._output = EngineOutput(output_tokens, config.reasoning, recorded)
        self._default_max_tokens = default_max_tokens
        self.schedulers = [build_scheduler(config, timing) for _ in range(config.dp_size)]
        self._telemetry: EngineTelemetry | None = None
        self._sockets: EventSockets | None = None
        self._handovers: HandoverServer | None = None
        self._streams = OpenStreams(self._abort)
        self._adapters = AdapterSet(adapters, self._streams, self.schedulers, self._tell_change)
        self._next_rank = 0
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._warm = False
        self._closed = False
        self.passes = 0

    def publish_to(self, scope: PublisherScope) -> EngineTelemetry:
        """Publish events, passes and load of every rank for the scope's worker. Before ``start``."""
        self._telemetry = EngineTelemetry(scope, self.config, self.schedulers)
        return self._telemetry

    def publish_over_zmq(self, host: str, port: int, replay_port: int | None = None) -> EventSockets:
        """Tell KV events as the mimicked engine does, see ``EventSockets.open``. Before ``start``.

        Raises:
            ConfigError: A port cannot be listened on.
        """
        ranks = [EngineEvents(self.config.engine_type, self.config.block_size) for _ in self.schedulers]
        sockets = EventSockets(ranks, host, self._clock)
        sockets.open(port, replay_port)
        for scheduler, events in zip(self.schedulers, ranks, strict=True):
            scheduler.blocks.listener = events
        self._sockets = sockets
        return sockets

    async def hand_over_at(self, host: str, port: int) -> int:
        """Let decode workers fetch prompts here; the port. Before ``start``. Raises ``ConfigError``."""
        server = HandoverServer(self.config.handoff_session_timeout_ms / 1000)
        await server.open(host, port)
        self._handovers = server
        return server.port

    async def load_adapter(self, name: str, folder: str) -> None:
        """As ``AdapterHost``; the folder is not read."""
        self._adapters.open(name)

    async def unload_adapter(self, name: str) -> None:
        """As ``AdapterHost``."""
        await self._adapters.close(name)

    async def warm_up(self) -> None:
        """Take ``startup_time``, once."""
        if self.config.startup_time and not self._warm:
            await self._sleep(self.config.startup_time)
        self._warm = True

    async def start(self) -> None:
        """Warm up if that was not done, then serve."""
        await self.warm_up()
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
        self._streams.fail("the mock engine was closed")
        if self._telemetry is not None:
            self._telemetry.close()
        if self._sockets is not None:
            await self._sockets.close()
        if self._handovers is not None:
            await self._handovers.close()

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
            InvalidArgument: ``max_tokens`` is missing or 0, a token is no u32, there is no such rank, ``n`` is
                not 1 to 128, or what a prefill worker handed over is of another prompt.
            StreamIncomplete: Its adapter is not here, or was unloaded and it took too long to end.
            EngineShutdown: The engine is not running.
        """
        if self._closed or self._task is None:
            raise EngineShutdown("the mock engine is not running")
        prompt = read_prompt(request)
        max_tokens = self._max_tokens(request, len(prompt))
        rank = self._rank(request)
        scheduler = self.schedulers[rank]
        refusal = scheduler.refusal(len(prompt), max_tokens)
        if refusal is not None:
            yield [{"token_ids": [], "finish_reason": {"error": refusal}}]
            return
        handed_over = self._handed_over(await self._fetch_handover(request), prompt)
        choices = self._choices(request, prompt, max_tokens, handed_over is not None)
        if handed_over is not None:
            await self._wait_for_transfer(scheduler, choices[0])
        for choice in choices:
            choice.cached_tokens = handed_over or 0
        self._adapters.check(choices[0].lora_name)
        stream = FrameStream(choices, rank, context)
        for choice in choices:
            scheduler.add(choice)
        self._streams.open(stream)
        self._work.set()
        room = self._room(request)
        try:
            while True:
                frames = await stream.take()
                if room is not None and frames:
                    self._hand_over(room, frames[0])
                    room = None
                if frames:
                    yield frames
                if stream.error is not None:
                    raise stream.error
                if stream.ended and not stream.frames:
                    return
        finally:
            self._streams.abort(stream)
            if room is not None:
                self._hand_over(room, {})

    def _choices(
        self, request: Mapping[str, Any], prompt: array[int], max_tokens: int, transferred: bool
    ) -> list[EngineRequest]:
        # Adapter and tenant of a request keep its blocks apart, as in a real engine.
        routing = request.get("routing") or {}
        lora_name, salt = lora_name_of(routing), routing.get("cache_namespace") or routing.get("cache_salt")
        seed = block_seed(lora_name, salt)
        return [
            EngineRequest(
                prompt, max_tokens, self._output.tokens(request, index, max_tokens), seed, transferred,
                lora_name=lora_name, cache_salt=salt,
            )
            for index in range(read_choice_count(request))
        ]  # fmt: skip

    def _room(self, request: Mapping[str, Any]) -> int | None:
        """Where a decode worker waits for this prompt."""
        info = request.get("bootstrap_info")
        room = info.get("bootstrap_room") if isinstance(info, dict) else None
        return room if type(room) is int and self._handovers is not None else None

    def _hand_over(self, room: int, frame: Frame) -> None:
        """A frame of a prompt's first token goes to the decode worker too; any other one is an end without it."""
        if self._handovers is None:
            return
        params = frame.get("disaggregated_params")
        details = frame.get("completion_usage", {}).get("prompt_tokens_details")
        result = None if params is None else {"disaggregated_params": params, "prompt_tokens_details": details}
        self._handovers.answer(room, result)

    async def _wait_for_transfer(self, scheduler: Scheduler, request: EngineRequest) -> None:
        """As long as its prompt's blocks are under way from the worker that computed them."""
        tokens = request.prompt_length
        if self.config.kv_transfer_timing_mode == "destination_missing":
            tokens -= scheduler.cached_tokens_of(request)
        seconds = self.config.transfer_seconds(tokens)
        if seconds:
            await self._sleep(seconds)
        if self._closed:
            raise EngineShutdown("the mock engine was closed")

    def output_room(self, prompt_length: int) -> int:
        """Most output tokens that a request with such a prompt may ask for; under 1: none."""
        return self.schedulers[0].output_room(prompt_length)

    async def _fetch_handover(self, request: Mapping[str, Any]) -> Any:
        """What the prefill worker says of the prompt; None: it is to be computed here."""
        if self.config.worker_type != "decode":
            return None
        info = request.get("bootstrap_info")
        if info is None:
            return request.get("prefill_result")
        result = await fetch_handover(info, self.config.handoff_session_timeout_ms / 1000)
        if self._closed:
            raise EngineShutdown("the mock engine was closed")
        return result

    def _handed_over(self, result: Any, prompt: array[int]) -> int | None:
        """Tokens that the prefill worker had cached; None: the prompt is to be computed here."""
        if result is None:
            return None
        params = result.get("disaggregated_params") if isinstance(result, dict) else None
        if params != _handover_params(prompt):
            raise InvalidArgument("prefill_result is not of this prompt, or not of a mock engine")
        details = result.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if isinstance(cached, int) else 0

    def reset_prefix_cache(self) -> bool:
        """Forget what is cached, in every rank; False if a rank is busy and kept its cache."""
        cleared = True
        for rank, scheduler in enumerate(self.schedulers):
            cleared = scheduler.blocks.clear() and cleared
            self._tell_change(rank)
        return cleared

    def _tell_change(self, rank: int) -> None:
        """Something changed outside of a pass."""
        if self._telemetry is not None:
            self._telemetry.on_change(rank)
        if self._sockets is not None:
            self._sockets.publish(rank)

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
            self._streams.drop_stopped()
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
            stream = self._streams.of(request)
            if token is not None:
                frame: Frame = {"token_ids": [token]}
                if request.generated == 1:
                    frame["completion_usage"] = usage_of(request, stream)
                    if self.config.worker_type == "prefill":
                        prompt = array("I", request.tokens[: request.prompt_length])
                        frame["disaggregated_params"] = _handover_params(prompt)
                self._streams.push(request, frame)
            if finish_reason is not None:
                last = {"token_ids": [], "finish_reason": finish_reason, "completion_usage": usage_of(request, stream)}
                self._streams.push(request, last)
                self._streams.end(request)
            stream.wake()
        if self._telemetry is not None:
            self._telemetry.on_pass(rank, duration_s, plan.scheduled, plan.queued)
        else:
            self.schedulers[rank].blocks.drain_events()  # Nobody else takes them, and they would pile up.
        if self._sockets is not None:
            self._sockets.publish(rank)

    def _abort(self, rank: int, choices: Sequence[EngineRequest]) -> None:
        for choice in choices:
            self.schedulers[rank].abort(choice)
        self._tell_change(rank)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.critical("the mock engine broke down", exc_info=task.exception())
        self._closed = True
        self._streams.fail("the mock engine broke down; its log tells why")


def _handover_params(prompt: array[int]) -> dict[str, Any]:
    """What a prefill worker says of a prompt that it computed, and a decode worker wants to hear."""
    return {"prompt_tokens": len(prompt), "prompt_digest": prompt_digest(prompt)}
