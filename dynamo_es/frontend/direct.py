"""Routes whose workers answer with one item instead of a stream of tokens: embeddings, classification, pooling, ...

``DirectRoute`` is what they differ in, ``DirectExchange`` the way they share. A worker may send its answer in several
items; they are put together by the route.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from dynamo_es.frontend.access_log import AccessEntry
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import EngineFailed, OutputError, internal_error
from dynamo_es.frontend.generation import failure_of_engine
from dynamo_es.frontend.headers import RequestHeaders
from dynamo_es.frontend.http_exchange import JSON, Header, HttpExchange, Send, Speech
from dynamo_es.frontend.metrics import ModelMetrics
from dynamo_es.frontend.reading import ClientGone, Receive, decode_request
from dynamo_es.frontend.routing_headers import with_headers
from dynamo_es.frontend.service import OFFLOAD_BYTES, TOKENIZE_APART_BYTES, FrontendService

MAX_ITEMS = 4096
"""Items in which a worker may send one answer."""
_OFFLOAD_INPUTS = 8
T = TypeVar("T")


class DirectWork(NamedTuple):
    """What a worker gets.

    Attributes:
        request: A fresh mapping.
        prompt_tokens: For metrics; 0: the worker counts.
        inputs: Texts or token lists in it.
    """

    request: dict[str, Any]
    prompt_tokens: int = 0
    inputs: int = 1


class DirectAnswer(NamedTuple):
    """What a client gets."""

    body: bytes
    content_type: Header = JSON
    headers: tuple[Header, ...] = ()


class DirectRoute(Speech, Protocol):
    """One such route; shared by its requests. No state."""

    def check(self, source: Any) -> None:
        """Refuse what a well-typed body may not hold. Raises ``ApiError``."""

    def work(self, source: Any, model: ServedModel) -> DirectWork:
        """The worker request. May run in a thread. Raises ``ApiError``."""

    def answer(self, source: Any, items: Sequence[Any], model: ServedModel) -> DirectAnswer:
        """The answer from what the worker sent, at least one item. May run in a thread.

        Raises:
            OutputError: It cannot be understood.
        """


class DirectExchange(HttpExchange):
    """Answers one request. ``run`` once; ``interrupt`` at any time from the same loop."""

    def __init__(
        self, service: FrontendService, route: DirectRoute, receive: Receive, send: Send, headers: RequestHeaders
    ) -> None:
        super().__init__(service, route, receive, send, headers)
        self._route = route
        self._at_worker: ModelMetrics | None = None
        self._prompt_tokens = 0

    async def _answer(self) -> int:
        try:
            answer = await self._ask()
        except ClientGone:
            raise
        except Exception as error:  # noqa: BLE001 - the HTTP handler is a supervisor
            return await self._refuse(error)
        await self._respond(200, answer.body, *answer.headers, content_type=answer.content_type)
        return 200

    async def _ask(self) -> DirectAnswer:
        body = await self._read()
        large, apart = len(body) >= OFFLOAD_BYTES, len(body) >= TOKENIZE_APART_BYTES
        source, _ = await self._run(large, decode_request, body, self._route.kind)
        del body
        model = self._admit(source)
        metrics = self._begin()
        work = await self._run(apart, self._route.work, source, model)
        self._at_worker = metrics
        metrics.inflight.value += 1
        metrics.input.observe(work.prompt_tokens)
        self._prompt_tokens = work.prompt_tokens
        items = await self._collect(work, model)
        try:
            return await self._run(large or work.inputs > _OFFLOAD_INPUTS, self._route.answer, source, items, model)
        except OutputError as error:
            raise failure_of_engine(error, self._id, started=True) from error

    async def _run(self, in_thread: bool, work: Callable[..., T], *arguments: Any) -> T:
        if not in_thread:
            return work(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._service.executor, work, *arguments)

    def _admit(self, source: Any) -> ServedModel:
        self._asked_model = source.model
        if self._headers.routing is not None and hasattr(source, "nvext"):
            source.nvext = with_headers(source.nvext, self._headers.routing)
        model = self._admission.enter(source.model)
        if self._headers.metadata_error is not None:
            raise self._headers.metadata_error
        self._route.check(source)
        return self._admission.accept(model)

    async def _collect(self, work: DirectWork, model: ServedModel) -> list[Any]:
        items: list[Any] = []
        stream = model.engine.generate(work.request, self._context)
        try:
            async for batch in stream:
                items.extend(batch)
                if len(items) > MAX_ITEMS:
                    raise OutputError(f"more than {MAX_ITEMS} items")
            if not items:
                raise OutputError("no answer")
            for item in items:
                if isinstance(item, Mapping) and item.get("error") is not None:
                    raise EngineFailed.of(item["error"])
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise internal_error() from error  # a task of the engine was cancelled, not this one
        except Exception as error:
            raise failure_of_engine(error, self._id, started=bool(items)) from error
        finally:
            await stream.aclose()
        return items

    def _close_meters(self, now: float) -> None:
        if self._model is not None:
            self._model.duration.observe(now - self._start)
        if self._at_worker is not None:
            self._at_worker.inflight.value -= 1

    def _describe(self, entry: AccessEntry, status: int) -> None:
        super()._describe(entry, status)
        entry.prompt_tokens = self._prompt_tokens or None


def read_item(item: Any, form: type[T]) -> T:
    """A worker's item as a structure; members that it does not have are dropped.

    Raises:
        OutputError: It is something else.
    """
    try:
        return msgspec.convert(item, form)
    except msgspec.ValidationError as error:
        raise OutputError(f"an item that cannot be understood: {error}") from error


def given(request: msgspec.Struct) -> dict[str, Any]:
    """The members of a request that are set, as plain values."""
    return {
        name: given(value) if isinstance(value, msgspec.Struct) else value
        for name in request.__struct_fields__
        if (value := getattr(request, name)) is not None
    }
