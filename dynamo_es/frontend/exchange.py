"""One request for generated text over HTTP, whichever dialect it speaks: read, prepare, generate, write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any

from dynamo_es.frontend.access_log import AccessEntry
from dynamo_es.frontend.agent_context import add_agent_context
from dynamo_es.frontend.chat_media import NO_MEDIA, count_media
from dynamo_es.frontend.chunk_writer import ChunkWriter
from dynamo_es.frontend.contracts import LocatingEngine, ServedModel
from dynamo_es.frontend.dialects import Dialect, OpenAiDialect, OpenAiWriter, Writer
from dynamo_es.frontend.errors import WORKERS_BUSY, ApiError, overloaded
from dynamo_es.frontend.generation import Generation, Sink, Take, failure_of_engine, run_all
from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.http_exchange import Header, HttpExchange, Send
from dynamo_es.frontend.media_decoding import decode_media, decodes
from dynamo_es.frontend.metrics import RequestMeter
from dynamo_es.frontend.output import KEEP_ALIVE, UnaryAnswer, cached_tokens, encoder_of, total_usage
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.prepare import Prepared, prepare
from dynamo_es.frontend.processed_chat import ProcessedGeneration, prepare_processed
from dynamo_es.frontend.reading import ClientGone, Receive, decode_request
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest, NvExt, StreamOptions
from dynamo_es.frontend.response_extras import LocatedExtras, ResponseExtras, asks_where, wanted_extras
from dynamo_es.frontend.responses import DONE, ChoiceText
from dynamo_es.frontend.routing_headers import with_headers
from dynamo_es.frontend.service import OFFLOAD_BYTES, TOKENIZE_APART_BYTES, FrontendService
from dynamo_es.frontend.text_generation import PassingWriter, TextGeneration, finish_reasons
from dynamo_es.frontend.text_requests import Folded
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.placement import Placement

_SSE: tuple[Header, ...] = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))
Write = Callable[[Delta, Mapping[str, Any] | None], bytes]


class Exchange(HttpExchange):
    """Answers one request. ``run`` once; ``interrupt`` at any time from the same loop."""

    def __init__(
        self, service: FrontendService, dialect: Dialect, receive: Receive, send: Send, headers: RequestHeaders
    ) -> None:
        super().__init__(service, dialect, receive, send, headers)
        self._dialect = dialect
        self._source: Any = None
        self._writer: Writer | None = None
        self._committed = False
        self._commit_lock = asyncio.Lock()
        self._commit_timer: asyncio.TimerHandle | None = None
        self._sent_at = self._start
        self._meter: RequestMeter | None = None
        self._generations: list[Generation] = []
        self._located = False

    async def _answer(self) -> int:
        try:
            prepared = await self._prepare()
            if self._trace is not None:
                self._trace.preprocessed(prepared.prompt_tokens)
            if self._admission.stream and prepared.model.is_overloaded():
                raise overloaded(WORKERS_BUSY)
            writer = self._open(prepared)
            await self._locate(prepared, writer)
            if not self._admission.stream:
                body = await self._unary(prepared, writer)
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            return await self._refuse(error)
        if self._admission.stream:
            return await self._stream(prepared, writer)
        await self._respond(200, body)
        return 200

    async def _prepare(self) -> Prepared:
        body = await self._read()
        kind = self._dialect.kind
        if len(body) < OFFLOAD_BYTES:
            source, unknown = decode_request(body, kind)
            self._enter(source)
            request = self._dialect.generation_request(source)
            apart = self._service.executor if len(body) >= TOKENIZE_APART_BYTES else None
            return await self._prepared(request, self._admit(request, unknown), apart)
        loop, executor = asyncio.get_running_loop(), self._service.executor
        source, unknown = await loop.run_in_executor(executor, decode_request, body, kind)
        del body
        self._enter(source)
        request = await loop.run_in_executor(executor, self._dialect.generation_request, source)
        model = self._admit(request, unknown)
        return await self._prepared(request, model, executor)

    async def _prepared(
        self, request: ChatRequest | CompletionRequest, model: ServedModel, executor: Executor | None
    ) -> Prepared:
        """Checked, rendered and tokenized: by the model's chat processor, or here, or on ``executor``."""
        clock = self._service.clock
        if model.processor is not None and isinstance(request, ChatRequest):
            return await prepare_processed(request, model, model.processor, clock)
        if executor is None:
            prepared = prepare(request, model, clock)
        else:
            prepared = await asyncio.get_running_loop().run_in_executor(executor, prepare, request, model, clock)
        if prepared.media is not None and decodes(model.card):
            await decode_media(prepared.requests[0], prepared.media, model.card, self._service.media_slots)
        return prepared

    def _enter(self, source: Any) -> None:
        """What is refused before anybody looks at the fields."""
        self._source = source
        self._asked_model = self._dialect.source_model(source)
        self._admission.enter(self._asked_model, stream=self._dialect.source_stream(source))
        if self._headers.metadata_error is not None:
            raise self._headers.metadata_error

    def _admit(self, request: ChatRequest | CompletionRequest, unknown: list[str]) -> ServedModel:
        config = self._service.config
        if config.ignore_unsupported_fields:
            unknown = []
        if config.force_include_usage and request.stream:
            request.stream_options = _with_usage(request.stream_options)
        if self._headers.routing is not None:
            request.nvext = with_headers(request.nvext, self._headers.routing)
        if config.disable_nvext and request.nvext is not None:
            request.nvext = NvExt(cache_salt=request.nvext.cache_salt)
        return self._admission.admit(request, unknown)

    def _open(self, prepared: Prepared) -> Writer:
        model = self._begin()
        metrics = self._service.metrics
        metrics.tokenize_seconds.observe(prepared.tokenize_s)
        if prepared.formatted_prompt is not None:
            metrics.template_seconds.observe(prepared.template_s)
        meter = self._meter = RequestMeter(model, self._start)
        asked = prepared.request
        media = count_media(asked.messages) if isinstance(asked, ChatRequest) else NO_MEDIA
        meter.open(prepared.prompt_tokens, media)
        add_agent_context(prepared.requests, prepared.request, self._headers.agent)
        several = len(prepared.requests) > 1
        if prepared.model.takes_text:
            return self._open_text(prepared, meter)
        writer = self._writer = self._dialect.writer(prepared, self._source, self._id, self._created)
        shown = wanted_extras(prepared.request.nvext) if isinstance(writer, OpenAiWriter) else None
        for place, request in enumerate(prepared.requests):
            context = self._routed = self._context.child(f"{self._id}-{place}") if several else self._context
            extras = self._extras(shown, context) if shown else None
            reads = prepared.open_output
            make = Generation if reads is None else partial(ProcessedGeneration, reads())
            self._generations.append(
                make(
                    prepared.model, request, prepared.options, context, meter, self._service.clock,
                    self._service.new_id, extras,
                )
            )  # fmt: skip
        if isinstance(writer, OpenAiWriter) and self._generations[0].extras is not None:
            writer.show(self._generations[0].extras)
        return writer

    def _open_text(self, prepared: Prepared, meter: RequestMeter) -> Writer:
        """The same for workers that get text and send chunks."""
        stream, passes = self._admission.stream, isinstance(self._dialect, OpenAiDialect)
        folded = Folded()
        self._generations.append(
            TextGeneration(
                prepared.model, prepared.requests[0], self._context, meter, self._service.clock,
                passes=passes and stream, folded=None if stream else folded,
            )
        )  # fmt: skip
        own = self._dialect.writer(prepared, self._source, self._id, self._created) if not passes else None
        writer = self._writer = PassingWriter(folded) if own is None else own
        return writer

    def _extras(self, shown: frozenset[str], context: Context) -> ResponseExtras:
        clock = self._service.clock
        context.placement = Placement()
        received_ms = clock.now_ms() - round((clock.monotonic() - self._start) * 1000)
        return ResponseExtras(shown, context.placement, received_ms, self._start, clock)

    async def _locate(self, prepared: Prepared, writer: Writer) -> None:
        """Find out where the request would go, if that is all that it asks for and somebody knows."""
        engine = prepared.model.engine
        if not (asks_where(prepared.request.nvext) and isinstance(writer, OpenAiWriter)):
            return
        if isinstance(engine, LocatingEngine):
            request = prepared.requests[0]
            try:
                placement = await engine.locate(request, self._context)
            except Exception as error:
                raise failure_of_engine(error, self._id, started=False) from error
            if placement is not None:
                self._located = True
                writer.show(LocatedExtras(placement, request["token_ids"]))

    # -- unary -----------------------------------------------------------------------------------------------------

    async def _unary(self, prepared: Prepared, writer: Writer) -> bytes:
        if self._located:
            return writer.body([ChoiceText(0)], None)
        answers = [UnaryAnswer(place, prepared.options.n) for place in range(len(self._generations))]
        if len(answers) == 1:
            await self._collect(self._generations[0], answers[0])
        else:
            await run_all([self._collect(*pair) for pair in zip(self._generations, answers, strict=True)])
        pipelines = [generation.pipeline for generation in self._generations]
        finished = all(pipeline.any_finished for pipeline in pipelines)
        usage = total_usage(pipelines, [generation.prompt_tokens for generation in self._generations])
        choices = [choice for answer in answers for choice in answer.choices()]
        return writer.body(choices, usage if finished else None)

    async def _collect(self, generation: Generation, answer: UnaryAnswer) -> None:
        sink = _AnswerSink(answer)

        async def take(deltas: list[Delta]) -> None:
            sink.put(deltas)

        await generation.run(self._noting(take), sink)

    def _noting(self, take: Take) -> Take:
        """``take``, and the access log learns how choices end; it is for every token, so only if there is one."""
        entry = self._entry
        if entry is None:
            return take

        def noted(deltas: list[Delta]) -> Awaitable[None]:
            for delta in deltas:
                if delta.finish_reason is not None or delta.__class__ is not Delta:
                    for reason in finish_reasons(delta):
                        entry.note_finish(reason)
            return take(deltas)

        return noted

    # -- streams ---------------------------------------------------------------------------------------------------

    async def _stream(self, prepared: Prepared, writer: Writer) -> int:
        peek_ms = self._service.config.pre_commit_error_peek_ms
        status = 200
        try:
            if peek_ms:
                self._commit_timer = asyncio.get_running_loop().call_later(peek_ms / 1000, self._commit_soon)
            else:
                await self._commit()
            tail = await self._stream_output(prepared, writer)
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            failure = error if isinstance(error, ApiError) else self._internal(error)
            if not await self._settle_commit():
                return await self._refuse(failure)
            self._told = failure
            tail, status = writer.failure(failure), failure.status
        await self._commit()
        await self._finish_stream(tail)
        return status

    def _commit_soon(self) -> None:
        self._side_tasks.append(asyncio.create_task(self._commit()))

    async def _commit(self) -> None:
        """Tell the client that a stream follows, once; from then on errors are part of it."""
        async with self._commit_lock:
            if self._committed:
                return
            if self._entry is not None:
                self._entry.note_status(200, sent=True)
            await self._send({"type": "http.response.start", "status": 200, "headers": self._response_headers(_SSE)})
            self._committed = True
            keep_alive_ms = self._service.config.sse_keep_alive_ms
            if keep_alive_ms is not None:
                self._side_tasks.append(asyncio.create_task(self._keep_alive(keep_alive_ms / 1000)))
            assert self._writer is not None
            head = self._writer.head()
            if head:
                await self._send_block(head)

    async def _settle_commit(self) -> bool:
        """Whether a stream was committed; if not, it will not be."""
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        async with self._commit_lock:
            return self._committed

    async def _finish_stream(self, tail: bytes) -> None:
        await self._send({"type": "http.response.body", "body": tail + DONE, "more_body": False})
        self._over = True

    async def _stream_output(self, prepared: Prepared, writer: Writer) -> bytes:
        """Sends all chunks; returns what comes after them."""
        if self._located:
            return writer.chunk(Delta(0, "", None, first=True, tokens=0), None)
        if len(self._generations) == 1:
            write = self._chunks_by(self._generations[0], writer.chunk, writer.running_usage)

            async def send(deltas: list[Delta]) -> None:
                if not self._committed:
                    await self._commit()
                if block := write(deltas):
                    await self._send_block(block)

            await self._generations[0].run(self._noting(send), self._sink(write))
        else:
            await self._stream_batch(prepared, writer.running_usage)
        pipelines = [generation.pipeline for generation in self._generations]
        return writer.tail(total_usage(pipelines, [generation.prompt_tokens for generation in self._generations]))

    def _sink(self, write: Callable[[list[Delta]], bytes]) -> Sink | None:
        return None if self._chunk_writer is None else _ChunkSink(self, self._chunk_writer, write)

    def wrote(self) -> None:
        """A block went out just now."""
        self._sent_at = self._service.clock.monotonic()

    async def _stream_batch(self, prepared: Prepared, running_usage: bool) -> None:
        """Prompts run together; what a later one produces waits until those before it are over."""
        lanes: list[asyncio.Queue[bytes | None]] = [asyncio.Queue() for _ in self._generations]

        async def fill(place: int) -> None:
            encoder = encoder_of(prepared, f"{self._id}-{place}", self._created, place)
            generation = self._generations[place]
            encoder.extras = generation.extras
            write = self._chunks_by(generation, encoder.chunk, running_usage)
            await generation.run(self._noting(lambda deltas: lanes[place].put(write(deltas))))
            await lanes[place].put(None)

        async def forward() -> None:
            for lane in lanes:
                while (block := await lane.get()) is not None:
                    await self._send_chunks(block)

        await run_all([forward(), *(fill(place) for place in range(len(lanes)))])

    @staticmethod
    def _chunks_by(generation: Generation, chunk: Write, running_usage: bool) -> Callable[[list[Delta]], bytes]:
        if not running_usage:
            return lambda deltas: (
                chunk(deltas[0], None) if len(deltas) == 1 else b"".join([chunk(delta, None) for delta in deltas])
            )

        counted = 0

        def write(deltas: list[Delta]) -> bytes:
            nonlocal counted
            blocks = []
            for delta in deltas:
                counted += delta.tokens
                usage = generation.pipeline.usage(generation.prompt_tokens)
                usage |= {"completion_tokens": counted, "total_tokens": usage["prompt_tokens"] + counted}
                blocks.append(chunk(delta, usage))
            return b"".join(blocks)

        return write

    async def _send_chunks(self, block: bytes) -> None:
        if not self._committed:
            await self._commit()
        if block:
            await self._send_block(block)

    async def _send_block(self, block: bytes) -> None:
        await self._send({"type": "http.response.body", "body": block, "more_body": True})
        self.wrote()

    async def _keep_alive(self, interval_s: float) -> None:
        while not self._over:
            silent = self._service.clock.monotonic() - self._sent_at
            if silent < interval_s:
                await asyncio.sleep(interval_s - silent)
            else:
                await self._send_block(KEEP_ALIVE)

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _farewell(self, error: ApiError) -> None:
        if await self._settle_commit():
            assert self._writer is not None
            await self._finish_stream(self._writer.failure(error))
        else:
            await self._refuse(error)

    def _close_meters(self, now: float) -> None:
        if self._commit_timer is not None:
            self._commit_timer.cancel()
        if self._meter is not None:
            self._meter.close(now, cached_tokens([generation.pipeline for generation in self._generations]))

    def _describe(self, entry: AccessEntry, status: int) -> None:
        super()._describe(entry, status)
        meter = self._meter
        if meter is not None:
            entry.prompt_tokens = sum(generation.prompt_tokens for generation in self._generations)
            entry.output_tokens = meter.generated
            entry.cached_tokens = cached_tokens([generation.pipeline for generation in self._generations])
            if meter.first_token_s is not None:
                entry.ttft_ms = round(meter.first_token_s * 1000, 3)


class _AnswerSink:
    """A ``Sink`` that collects a unary answer."""

    __slots__ = ("_answer",)

    def __init__(self, answer: UnaryAnswer) -> None:
        self._answer = answer

    def is_ready(self) -> bool:
        return True

    def put(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            self._answer.choice(delta.choice).add(delta)


class _ChunkSink:
    """A ``Sink`` that writes chunks to an exchange's client."""

    __slots__ = ("_exchange", "_write", "_writer", "is_ready")

    def __init__(self, exchange: Exchange, writer: ChunkWriter, write: Callable[[list[Delta]], bytes]) -> None:
        self._exchange = exchange
        self._writer = writer
        self._write = write
        self.is_ready = writer.is_ready

    def put(self, deltas: list[Delta]) -> None:
        if block := self._write(deltas):
            self._writer.write(block)
            self._exchange.wrote()


def _with_usage(options: StreamOptions | None) -> StreamOptions:
    running = None if options is None else options.continuous_usage_stats
    return StreamOptions(include_usage=True, continuous_usage_stats=running)
