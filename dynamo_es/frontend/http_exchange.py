"""One inference request over HTTP: its life, whatever the route makes of it.

Tasks: the ASGI task does all the work; once the body is read, a watcher task is the only one that calls ``receive``.
What ends a request from outside (the client left, the drain limit or the deadline passed) goes through ``interrupt``,
which cancels the ASGI task wherever it waits: in the engine, for a thread, or in a ``send`` to a client that does not
read.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Literal, Protocol

from dynamo_es.frontend.access_log import AccessEntry
from dynamo_es.frontend.chunk_writer import ChunkWriter
from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.errors import CLIENT_CLOSED, INCOMPLETE, OVERLOADED, ApiError, internal_error
from dynamo_es.frontend.faults import describe
from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.metrics import ModelMetrics
from dynamo_es.frontend.prepare import Admission
from dynamo_es.frontend.reading import (
    ClientGone,
    Receive,
    RequestKind,
    check_content_type,
    encoded_body,
    read_body,
)
from dynamo_es.frontend.request_trace import RequestTrace
from dynamo_es.frontend.service import FrontendService
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.placement import Placement

logger = logging.getLogger(__name__)

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Cause = Literal["disconnect", "drain", "deadline"]
Header = tuple[bytes, bytes]

FAREWELL_S = 0.5
"""How long an error frame to a client that does not read may take at the drain limit or the deadline."""
WATCH_DELAY_S = 0.05
"""Requests that are over by then never need a watcher; a client that leaves is noticed so much later."""
JSON: Header = (b"content-type", b"application/json")
_ANTHROPIC = "anthropic"
MAX_ECHO_LOGGED = 256
"""Bytes of a client's request id that the access log shows."""


class Speech(Protocol):
    """What every route has: names, bodies, and a form for its errors. Shared by all requests of the route."""

    @property
    def endpoint(self) -> str:
        """Label of metrics."""

    @property
    def family(self) -> Family:
        """What a model must serve."""

    @property
    def kind(self) -> RequestKind[Any]:
        """Its bodies."""

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        """The body of a refusal that is sent with ``status``; ``model``: what the client asked for, if it is known."""


class HttpExchange(abc.ABC):
    """Answers one request. ``run`` once; ``interrupt`` at any time from the same loop. Subclasses say ``_answer``."""

    def __init__(
        self, service: FrontendService, speech: Speech, receive: Receive, send: Send, headers: RequestHeaders
    ) -> None:
        self._service = service
        self._speech = speech
        self._receive = receive
        self._send = send
        self._headers = headers
        self._admission = Admission(service, speech.family, headers.caller)
        self._start = service.clock.monotonic()
        self._created = service.clock.now_ms() // 1000
        self._id = headers.request_id or service.new_id()
        self._context = Context(self._id, headers.metadata)
        self._context.trace = headers.trace
        self._task: asyncio.Task[Any] | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._side_tasks: list[asyncio.Task[None]] = []
        self._cause: Cause | None = None
        self._over = False
        self._asked_model: str | None = None
        self._model: ModelMetrics | None = None
        self._told: ApiError | None = None
        self._entry: AccessEntry | None = None
        self._trace: RequestTrace | None = None
        self._routed = self._context
        self._chunk_writer: ChunkWriter | None = None

    def write_by(self, writer: ChunkWriter | None) -> None:
        """Chunks of a stream may be written by ``writer``, beside ``send``. Before ``run``."""
        self._chunk_writer = writer

    def log_to(self, entry: AccessEntry, trace: RequestTrace | None = None) -> None:
        """Fill in ``entry``, a line of the access log, as the request goes on; tell ``trace``, too. Before ``run``."""
        self._entry = entry
        context = self._context
        if trace is not None:
            self._trace, context.hops, context.trace = trace, trace, trace.context
        entry.trace_id = context.trace_id
        entry.request_id = self._id
        headers = self._headers
        if headers.echoed is not None:
            entry.x_request_id = headers.echoed[:MAX_ECHO_LOGGED].decode("latin-1")
        if headers.caller is not None:
            entry.api_key = headers.caller.entry.id
        context.placement = Placement()

    def interrupt(self, cause: Cause) -> None:
        """End the request from outside: its workers are told to stop, its task is cancelled."""
        if self._over or self._cause is not None or self._task is None:
            return
        self._cause = cause
        if cause == "disconnect":
            self._service.metrics.disconnected_clients.value += 1
        if cause == "deadline":
            self._context.conclude("error", "RequestDeadline")
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
            for timer in self._timers:
                timer.cancel()
            for task in self._side_tasks:
                task.cancel()
            # A cancelled task keeps its traceback, and so this exchange: with a way back all of a request (its body,
            # its tokens) would wait for the garbage collector.
            self._timers.clear()
            self._side_tasks.clear()
            self._service.leave(self)
            if self._cause == "disconnect":
                self._service.metrics.disconnected_clients.value -= 1
            self._count(status)

    @abc.abstractmethod
    async def _answer(self) -> int:
        """Everything from the first byte of the request to the last of the answer; returns the status.

        Raises:
            ClientGone: The body did not come to its end.
        """

    async def _farewell(self, error: ApiError) -> None:
        """Tell the client what is left to tell at the drain limit or the deadline."""
        await self._refuse(error)

    def _close_meters(self, now: float) -> None:  # noqa: B027 - a hook: not every request is in such gauges
        """Take the request out of the gauges of its model that ``_open_meters`` put it into, other than ``active``."""

    # -- reading ---------------------------------------------------------------------------------------------------

    async def _read(self) -> bytes:
        """The body; from now on a client that leaves interrupts the request."""
        headers = self._headers
        check_content_type(headers.content_type, by_path=self._speech.kind.by_path)
        if headers.encoded:
            raise encoded_body()
        config = self._service.config
        body = await read_body(self._receive, headers.content_length, config.body_limit_mb, config.receive_timeout_s)
        if self._trace is not None:
            self._trace.body_read()
        loop = asyncio.get_running_loop()
        self._timers.append(loop.call_later(WATCH_DELAY_S, self._start_watch))
        if config.request_timeout_s is not None:
            self._timers.append(loop.call_later(config.request_timeout_s, self.interrupt, "deadline"))
        return body

    def _start_watch(self) -> None:
        self._side_tasks.append(asyncio.create_task(self._watch()))

    async def _watch(self) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.interrupt("disconnect")
                return

    @property
    def _request_type(self) -> str:
        return "stream" if self._admission.stream else "unary"

    def _begin(self) -> ModelMetrics:
        """Count the request as taken, for the model that was found."""
        model = self._model = self._service.metrics.model(self._admission.model_name)
        model.started(self._speech.endpoint, self._request_type)
        model.active.value += 1
        return model

    # -- ends ------------------------------------------------------------------------------------------------------

    async def _after_interrupt(self) -> int:
        if self._cause == "disconnect":
            return CLIENT_CLOSED
        if self._cause == "deadline":
            error = ApiError(504, "Request deadline exceeded", code="deadline_exceeded")
        else:
            error = ApiError(503, "Service temporarily unavailable", code="draining")
        try:
            async with asyncio.timeout(FAREWELL_S):
                await self._farewell(error)
        except TimeoutError:
            logger.warning("request %s: its client does not read, the stream was cut without an end", self._id)
        return error.status

    async def _refuse(self, error: Exception) -> int:
        """Answer with an error; one that is no ``ApiError`` is logged and told as 500."""
        told = error if isinstance(error, ApiError) else self._internal(error)
        self._told = told
        status = self._service.config.overload_status_code if told.status == OVERLOADED else told.status
        await self._respond(status, self._speech.error_body(told, status, self._asked_model), *told.headers)
        return told.status

    async def _respond(self, status: int, body: bytes, *headers: Header, content_type: Header = JSON) -> None:
        if self._entry is not None:
            self._entry.note_status(status, sent=True)
        head = self._response_headers((content_type, (b"content-length", b"%d" % len(body)), *headers))
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self._over = True

    def _response_headers(self, headers: tuple[Header, ...]) -> tuple[Header, ...]:
        """With the request's id, by the names under which clients look for it: the client's own, or else ours."""
        known = self._headers.echoed or self._id.encode()
        if self._speech.endpoint.startswith(_ANTHROPIC):
            return (*headers, (b"x-request-id", known), (b"request-id", known))
        return (*headers, (b"x-request-id", known))

    def _internal(self, error: Exception) -> ApiError:
        logger.error("request %s failed: %s", self._id, describe(error))
        return internal_error()

    def _count(self, status: int) -> None:
        metrics, endpoint, request_type = self._service.metrics, self._speech.endpoint, self._request_type
        model = self._model
        if model is None:
            model = metrics.model(self._admission.model_name)
            model.started(endpoint, request_type)
        else:
            model.active.value -= 1
            self._close_meters(self._service.clock.monotonic())
        if self._cause == "disconnect":
            model.cancelled(endpoint, request_type)
        limit = self._told.code if self._told is not None else None
        metrics.finished(endpoint, model.label, request_type, status, limit)
        if self._entry is not None:
            self._describe(self._entry, status)
            if self._trace is not None:
                self._trace.ended(self._entry)

    def _describe(self, entry: AccessEntry, status: int) -> None:
        """Write down what the request came to, in its line of the access log."""
        entry.note_status(status, sent=False)
        if status >= 400:
            entry.note_failure(status, self._told.code if self._told is not None else None)
        entry.model = self._admission.model_name
        entry.stream = self._admission.stream
        entry.disconnected = self._cause == "disconnect"
        if self._routed.placement is not None:
            entry.note_placement(self._routed.placement)
