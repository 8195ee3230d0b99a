"""One inference request over HTTP, from its first byte to its last.

Tasks: the ASGI task does all the work; once the body is read, a watcher task is the only one that calls ``receive``.
What ends a request from outside (the client left, the drain limit passed) goes through ``interrupt``, which cancels
the ASGI task wherever it waits: in the engine, for a thread, or in a ``send`` to a client that does not read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal

from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.errors import CLIENT_CLOSED, INCOMPLETE, ApiError, internal_error
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.generation import Generation, run_all
from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.metrics import ModelMetrics, RequestMeter
from dynamo_es.frontend.output import KEEP_ALIVE, UnaryAnswer, annotation_frames, cached_tokens, encoder_of, total_usage
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.prepare import Admission, Prepared, prepare
from dynamo_es.frontend.reading import ClientGone, Receive, RequestKind, check_content_type, decode_request, read_body
from dynamo_es.frontend.responses import DONE, Encoder
from dynamo_es.frontend.service import OFFLOAD_BYTES, FrontendService
from dynamo_es.runtime.context import Context

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Cause = Literal["disconnect", "drain"]
Header = tuple[bytes, bytes]

FAREWELL_S = 0.5
"""How long an error frame to a client that does not read may take at the drain limit."""
WATCH_DELAY_S = 0.05
"""Requests that are over by then never need a watcher; a client that leaves is noticed so much later."""
_JSON: Header = (b"content-type", b"application/json")
_SSE: tuple[Header, ...] = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))


class Exchange:
    """Answers one request. ``run`` once; ``interrupt`` at any time from the same loop."""

    def __init__(
        self,
        service: FrontendService,
        family: Family,
        kind: RequestKind[Any],
        receive: Receive,
        send: Send,
        headers: RequestHeaders,
    ) -> None:
        self._service = service
        self._endpoint = "chat_completions" if family == "chat" else family
        self._kind = kind
        self._receive = receive
        self._send = send
        self._headers = headers
        self._admission = Admission(service, family)
        self._start = service.clock.monotonic()
        self._created = service.clock.now_ms() // 1000
        self._id = headers.request_id or service.new_id()
        self._context = Context(self._id, headers.metadata)
        self._task: asyncio.Task[Any] | None = None
        self._watch_timer: asyncio.TimerHandle | None = None
        self._side_tasks: list[asyncio.Task[None]] = []
        self._cause: Cause | None = None
        self._over = False
        self._committed = False
        self._sent_at = self._start
        self._model: ModelMetrics | None = None
        self._meter: RequestMeter | None = None
        self._generations: list[Generation] = []

    def interrupt(self, cause: Cause) -> None:
        """End the request from outside: its workers are told to stop, its task is cancelled."""
        if self._over or self._cause is not None or self._task is None:
            return
        self._cause = cause
        if cause == "disconnect":
            self._service.metrics.disconnected_clients.value += 1
        self._context.stop_generating()
        self._task.cancel()

    async def run(self) -> None:
        """Read, answer, count. Raises only if the server itself cancels the task."""
        self._task = asyncio.current_task()
        self._service.enter(self)
        status = 500
        try:
            status = await self._answer()
        except ClientGone:
            status = INCOMPLETE
        except asyncio.CancelledError:
            if self._cause is None:
                self._context.stop_generating()
                raise
            assert self._task is not None
            self._task.uncancel()
            status = await self._after_interrupt()
        finally:
            self._over = True
            if self._watch_timer is not None:
                self._watch_timer.cancel()
            for task in self._side_tasks:
                task.cancel()
            self._service.leave(self)
            if self._cause == "disconnect":
                self._service.metrics.disconnected_clients.value -= 1
            self._count(status)

    async def _answer(self) -> int:
        try:
            prepared = await self._prepare()
            self._open(prepared)
        except ApiError as error:
            return await self._refuse(error)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            return await self._refuse(self._internal(error))
        if self._admission.stream:
            return await self._stream(prepared)
        try:
            body = await self._unary(prepared)
        except ApiError as error:
            return await self._refuse(error)
        except Exception as error:  # noqa: BLE001
            return await self._refuse(self._internal(error))
        await self._respond(200, body)
        return 200

    async def _prepare(self) -> Prepared:
        headers = self._headers
        check_content_type(headers.content_type)
        body = await read_body(self._receive, headers.content_length, self._service.config.body_limit_mb)
        loop = asyncio.get_running_loop()
        self._watch_timer = loop.call_later(WATCH_DELAY_S, self._start_watch)
        if len(body) < OFFLOAD_BYTES:
            request, unknown = decode_request(body, self._kind)
            model = self._admit(request, unknown)
            return prepare(request, model, self._service.clock)
        executor = self._service.executor
        request, unknown = await loop.run_in_executor(executor, decode_request, body, self._kind)
        del body
        model = self._admit(request, unknown)
        return await loop.run_in_executor(executor, prepare, request, model, self._service.clock)

    def _admit(self, request: Any, unknown: list[str]) -> Any:
        if self._headers.metadata_error is not None:
            raise self._headers.metadata_error
        return self._admission.admit(request, unknown)

    def _start_watch(self) -> None:
        self._side_tasks.append(asyncio.create_task(self._watch()))

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.interrupt("disconnect")
                return

    def _open(self, prepared: Prepared) -> None:
        model = self._model = self._service.metrics.model(self._admission.model_name)
        model.started(self._endpoint, self._request_type)
        model.active.value += 1
        metrics = self._service.metrics
        metrics.tokenize_seconds.observe(prepared.tokenize_s)
        if prepared.formatted_prompt is not None:
            metrics.template_seconds.observe(prepared.template_s)
        meter = self._meter = RequestMeter(model, self._start)
        meter.open(prepared.prompt_tokens)
        several = len(prepared.requests) > 1
        for place, request in enumerate(prepared.requests):
            context = self._context.child(f"{self._id}-{place}") if several else self._context
            self._generations.append(
                Generation(prepared.model, request, prepared.options, context, meter, self._service.clock)
            )

    @property
    def _request_type(self) -> str:
        return "stream" if self._admission.stream else "unary"

    # -- unary -----------------------------------------------------------------------------------------------------

    async def _unary(self, prepared: Prepared) -> bytes:
        answers = [UnaryAnswer(place, prepared.options.n) for place in range(len(self._generations))]
        if len(answers) == 1:
            await self._collect(self._generations[0], answers[0])
        else:
            await run_all([self._collect(*pair) for pair in zip(self._generations, answers, strict=True)])
        pipelines = [generation.pipeline for generation in self._generations]
        finished = all(pipeline.any_finished for pipeline in pipelines)
        usage = total_usage(pipelines, [generation.prompt_tokens for generation in self._generations])
        choices = [choice for answer in answers for choice in answer.choices()]
        return self._encoder(prepared).body(choices, usage if finished else None)

    async def _collect(self, generation: Generation, answer: UnaryAnswer) -> None:
        async def take(deltas: list[Delta]) -> None:
            for delta in deltas:
                answer.choice(delta.choice).add(delta)

        await generation.run(take)

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, prepared: Prepared) -> int:
        await self._send({"type": "http.response.start", "status": 200, "headers": self._response_headers(_SSE)})
        self._committed = True
        keep_alive_ms = self._service.config.sse_keep_alive_ms
        if keep_alive_ms is not None:
            self._side_tasks.append(asyncio.create_task(self._keep_alive(keep_alive_ms / 1000)))
        try:
            frames = annotation_frames(prepared, self._id)
            if frames:
                await self._send_block(frames)
            tail = await self._stream_output(prepared)
            status = 200
        except ApiError as error:
            tail, status = error.frame(), error.status
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            failure = self._internal(error)
            tail, status = failure.frame(), failure.status
        await self._finish_stream(tail)
        return status

    async def _finish_stream(self, tail: bytes) -> None:
        await self._send({"type": "http.response.body", "body": tail + DONE, "more_body": False})
        self._over = True

    async def _stream_output(self, prepared: Prepared) -> bytes:
        """Sends all chunks; returns the usage block, if one is due."""
        options = prepared.request.stream_options
        include_usage = options is not None and bool(options.include_usage)
        running_usage = include_usage and options is not None and bool(options.continuous_usage_stats)
        if len(self._generations) == 1:
            writer = self._chunk_writer(self._generations[0], self._encoder(prepared), running_usage)
            await self._generations[0].run(lambda deltas: self._send_block(writer(deltas)))
        else:
            await self._stream_batch(prepared, running_usage)
        if not include_usage:
            return b""
        pipelines = [generation.pipeline for generation in self._generations]
        usage = total_usage(pipelines, [generation.prompt_tokens for generation in self._generations])
        return self._encoder(prepared).usage_chunk(usage)

    async def _stream_batch(self, prepared: Prepared, running_usage: bool) -> None:
        """Prompts run together; what a later one produces waits until those before it are over."""
        lanes: list[asyncio.Queue[bytes | None]] = [asyncio.Queue() for _ in self._generations]

        async def fill(place: int) -> None:
            encoder = self._encoder(prepared, place, suffix=f"-{place}")
            generation = self._generations[place]
            writer = self._chunk_writer(generation, encoder, running_usage)
            await generation.run(lambda deltas: lanes[place].put(writer(deltas)))
            await lanes[place].put(None)

        async def forward() -> None:
            for lane in lanes:
                while (block := await lane.get()) is not None:
                    await self._send_block(block)

        await run_all([forward(), *(fill(place) for place in range(len(lanes)))])

    @staticmethod
    def _chunk_writer(generation: Generation, encoder: Encoder, running_usage: bool) -> Callable[[list[Delta]], bytes]:
        if not running_usage:
            return lambda deltas: b"".join([encoder.chunk(delta, None) for delta in deltas])

        counted = 0

        def write(deltas: list[Delta]) -> bytes:
            nonlocal counted
            blocks = []
            for delta in deltas:
                counted += delta.tokens
                usage = generation.pipeline.usage(generation.prompt_tokens)
                usage |= {"completion_tokens": counted, "total_tokens": usage["prompt_tokens"] + counted}
                blocks.append(encoder.chunk(delta, usage))
            return b"".join(blocks)

        return write

    async def _send_block(self, block: bytes) -> None:
        await self._send({"type": "http.response.body", "body": block, "more_body": True})
        self._sent_at = self._service.clock.monotonic()

    async def _keep_alive(self, interval_s: float) -> None:
        while not self._over:
            silent = self._service.clock.monotonic() - self._sent_at
            if silent < interval_s:
                await asyncio.sleep(interval_s - silent)
            else:
                await self._send_block(KEEP_ALIVE)

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _after_interrupt(self) -> int:
        if self._cause == "disconnect":
            return CLIENT_CLOSED
        error = ApiError(503, "Service temporarily unavailable", code="draining")
        try:
            async with asyncio.timeout(FAREWELL_S):
                if self._committed:
                    await self._finish_stream(error.frame())
                else:
                    await self._refuse(error)
        except TimeoutError:
            logger.warning("request %s: its client does not read, the stream was cut without an end", self._id)
        return error.status

    async def _refuse(self, error: ApiError) -> int:
        await self._respond(error.status, error.body())
        return error.status

    async def _respond(self, status: int, body: bytes) -> None:
        headers = self._response_headers((_JSON, (b"content-length", b"%d" % len(body))))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._over = True

    def _response_headers(self, headers: tuple[Header, ...]) -> tuple[Header, ...]:
        echoed = self._headers.echoed
        return headers if echoed is None else (*headers, (b"x-request-id", echoed))

    def _internal(self, error: Exception) -> ApiError:
        logger.error("request %s failed: %s", self._id, describe(error))
        return internal_error()

    def _encoder(self, prepared: Prepared, prompt: int = 0, suffix: str = "") -> Encoder:
        return encoder_of(prepared, self._id + suffix, self._created, prompt)

    def _count(self, status: int) -> None:
        metrics, endpoint, request_type = self._service.metrics, self._endpoint, self._request_type
        model = self._model
        if model is None:
            model = metrics.model(self._admission.model_name)
            model.started(endpoint, request_type)
        elif self._meter is not None:
            model.active.value -= 1
            cached = cached_tokens([generation.pipeline for generation in self._generations])
            self._meter.close(self._service.clock.monotonic(), cached)
        if self._cause == "disconnect":
            model.cancelled(endpoint, request_type)
        metrics.finished(endpoint, model.label, request_type, status)
