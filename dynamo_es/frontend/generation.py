"""Runs one worker request through its output pipeline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import OVERLOADED, ApiError, OutputError, error_of_engine, internal_error
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.metrics import RequestMeter
from dynamo_es.frontend.output import Output
from dynamo_es.frontend.pipeline import Delta, OutputOptions, OutputPipeline
from dynamo_es.frontend.response_extras import ResponseExtras
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.lane import Lane

logger = logging.getLogger(__name__)
Take = Callable[[list[Delta]], Awaitable[None]]
Read = tuple[list[Delta], int, OutputError | None]
"""What an arrival came to: deltas, number of tokens, and what fails the request after them."""


class Sink(Protocol):
    """Takes deltas of the middle of a stream in the moment in which they come, beside a ``Take``."""

    def is_ready(self) -> bool:
        """Whether it can take some now; if not, they are handed to the ``Take``."""

    def put(self, deltas: list[Delta]) -> None:
        """Take them. Only right after ``is_ready``."""


class Generation:
    """One prompt at one worker.

    Args:
        model: Whom it goes to.
        request: Preprocessed request.
        options: How the output is wanted.
        context: Stopped when a stop string ends the output, or by whoever interrupts the request.
        meter: Told of every arrival.
        clock: Time.
        new_id: Makes UUIDs, for tool calls.
        extras: Told of every frame.
    """

    __slots__ = (
        "_clock",
        "_context",
        "_failed",
        "_meter",
        "_model",
        "_pipeline",
        "_request",
        "extras",
        "pipeline",
        "prompt_tokens",
    )
    has_short_way: ClassVar[bool] = True
    """Its output is read by an ``OutputPipeline``, which knows plain frames."""

    def __init__(
        self,
        model: ServedModel,
        request: dict[str, Any],
        options: OutputOptions,
        context: Context,
        meter: RequestMeter,
        clock: Clock,
        new_id: Callable[[], str],
        extras: ResponseExtras | None = None,
    ) -> None:
        self._model = model
        self._request = request
        self._context = context
        self._meter = meter
        self._clock = clock
        self.extras = extras
        self.prompt_tokens = len(request["token_ids"])
        self._pipeline = OutputPipeline(model.tokenizer, options, lambda: f"call-{new_id()}")
        self.pipeline: Output = self._pipeline
        self._failed: Exception | None = None

    async def run(self, take: Take, sink: Sink | None = None) -> None:
        """Ask the engine and hand on what is ready, all deltas of an arrival at once, until the output ends.

        What comes in the middle of a stream goes to ``sink`` while that is ready. The engine's generator is closed on
        every way out.

        Raises:
            ApiError: What the client is to be told; deltas before it were handed on.
        """
        frames = self._ask(sink)
        started = False
        try:
            while True:
                try:
                    arrived = await anext(frames)
                except StopAsyncIteration:
                    break
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    raise internal_error() from error  # a task of the engine was cancelled, not this one
                except Exception as error:
                    raise failure_of_engine(error, self._context.id(), started=started) from error
                started = True
                if self.has_short_way and self._failed is not None:
                    raise self._failed
                deltas, count, failure = self._read(arrived)
                self._meter.tokens(self._clock.monotonic(), count)
                if deltas:
                    await take(deltas)
                if failure is not None:
                    self._context.conclude("error", type(failure).__name__)
                    raise failure_of_engine(failure, self._context.id(), started=True) from failure
                if self.pipeline.cut:
                    self._context.conclude("ok")
                    return
        finally:
            await frames.aclose()
        rest = self.pipeline.finish()
        if rest:
            await take(rest)

    def _ask(self, sink: Sink | None) -> AsyncGenerator[list[dict[str, Any]], None]:
        engine = self._model.lane_engine
        if sink is None or engine is None or not self.has_short_way or self.extras is not None:
            return self._model.engine.generate(self._request, self._context)
        return engine.generate_by(self._request, self._context, Lane(partial(self._take_now, sink)))

    def _take_now(self, sink: Sink, arrived: Sequence[Any]) -> bool:
        """The short way; see ``Lane``."""
        pipeline = self._pipeline
        if not sink.is_ready():
            return False
        before = pipeline.generated
        try:
            deltas = pipeline.plain_deltas(arrived)
        except Exception as error:  # noqa: BLE001 - the task raises it, when it is given what came
            self._failed = error
            return False
        if deltas is None:
            return False
        self._meter.tokens(self._clock.monotonic(), pipeline.generated - before)
        if deltas:
            sink.put(deltas)
        return True

    def _read(self, arrived: Sequence[dict[str, Any]]) -> Read:
        """What frames add, up to one that fails the request."""
        pipeline = self._pipeline
        before = pipeline.generated
        deltas: list[Delta] = []
        failure: OutputError | None = None
        for frame in arrived:
            counted = pipeline.generated
            try:
                delta = pipeline.push(frame)
            except OutputError as error:
                failure = error
                break
            if self.extras is not None:
                self.extras.take(frame, pipeline.generated - counted, delta)
            if delta is not None:
                deltas.append(delta)
            if pipeline.cut:
                break
        return deltas, pipeline.generated - before, failure


def failure_of_engine(error: Exception, request_id: str, *, started: bool) -> ApiError:
    """What the client is told; what is no fault of its own is logged, by class: a text may quote the prompt."""
    told = error_of_engine(error, started=started)
    if told.status >= 500 and told.status != OVERLOADED:
        cause = error.__cause__ if isinstance(error, ApiError) and error.__cause__ is not None else error
        known = isinstance(cause, DynamoException)
        name = type(cause).__name__ if known else describe(cause)
        logger.warning("request %s failed at its worker: %s; answered with %d", request_id, name, told.status)
    return told


async def run_all(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run together; the first failure cancels the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
