"""How a route that generates speaks: its bodies as a chat or completion request, its answers, its errors.

All such routes share one way through the frontend (``exchange``); what differs between OpenAI's chat, completions and
responses and Anthropic's messages is a ``Dialect`` each, and a ``Writer`` for each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.http_exchange import Speech
from dynamo_es.frontend.output import annotation_frames, encoder_of
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.prepare import Prepared
from dynamo_es.frontend.reading import RequestKind, chat_kind, completion_kind
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest
from dynamo_es.frontend.response_extras import Extras
from dynamo_es.frontend.responses import ChatStyle, ChoiceText


class Writer(Protocol):
    """Writes the answer to one request. Pure; belongs to the request.

    As a stream: ``head`` once, ``chunk`` for every delta in order, then ``tail`` or ``failure``; ``[DONE]`` is the
    caller's. As a whole: ``body`` alone.
    """

    @property
    def running_usage(self) -> bool:
        """Whether ``chunk`` wants the token counts so far."""

    def head(self) -> bytes:
        """Blocks before the first chunk."""

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        """Blocks for one delta; ``usage`` if ``running_usage``."""

    def tail(self, usage: Mapping[str, Any]) -> bytes:
        """Blocks after the last chunk, with all token counts."""

    def failure(self, error: ApiError) -> bytes:
        """Blocks in place of ``tail``."""

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        """The whole unary answer; ``usage`` None: no choice came to a regular end."""


class Dialect(Speech, Protocol):
    """One route's way of speaking; shared by its requests. No state."""

    def source_model(self, source: Any) -> str:
        """The model that a decoded body asks for; empty: none."""

    def source_stream(self, source: Any) -> bool:
        """Whether it asks for a stream."""

    def generation_request(self, source: Any) -> ChatRequest | CompletionRequest:
        """A decoded body as the request that is validated and prepared. May run in a thread.

        Raises:
            ApiError: It asks for what cannot be said in such a request.
        """

    def writer(self, prepared: Prepared, source: Any, request_id: str, created: int) -> Writer:
        """A writer for the answer. ``request_id`` is the request's UUID, ``created`` Unix seconds."""


class OpenAiDialect:
    """Chat completions and completions: bodies are requests as they are."""

    def __init__(self, family: Family, endpoint: str, kind: RequestKind[Any], style: ChatStyle) -> None:
        self._style = style
        self.family = family
        self.endpoint = endpoint
        self.kind = kind

    def source_model(self, source: ChatRequest | CompletionRequest) -> str:
        return source.model

    def source_stream(self, source: ChatRequest | CompletionRequest) -> bool:
        return bool(source.stream)

    def generation_request(self, source: ChatRequest | CompletionRequest) -> ChatRequest | CompletionRequest:
        return source

    def writer(self, prepared: Prepared, source: Any, request_id: str, created: int) -> Writer:
        return OpenAiWriter(prepared, request_id, created, self._style)

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


class OpenAiWriter:
    """Chunks and bodies by the encoder of the request."""

    def __init__(self, prepared: Prepared, request_id: str, created: int, style: ChatStyle) -> None:
        options = prepared.request.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self.running_usage = self._include_usage and options is not None and bool(options.continuous_usage_stats)
        self._prepared = prepared
        self._request_id = request_id
        self._encoder = encoder = encoder_of(prepared, request_id, created, style=style)
        self._usage_chunk = encoder.usage_chunk
        self.chunk = encoder.chunk
        self.body = encoder.body

    def show(self, extras: Extras) -> None:
        """Show these beside the answer."""
        self._encoder.extras = extras

    def head(self) -> bytes:
        return annotation_frames(self._prepared, self._request_id)

    def tail(self, usage: Mapping[str, Any]) -> bytes:
        return self._usage_chunk(usage) if self._include_usage else b""

    def failure(self, error: ApiError) -> bytes:
        return error.frame()


def chat_dialect(style: ChatStyle) -> Dialect:
    """Of ``/v1/chat/completions``."""
    return OpenAiDialect("chat", "chat_completions", chat_kind(), style)


def completion_dialect() -> Dialect:
    """Of ``/v1/completions``."""
    return OpenAiDialect("completions", "completions", completion_kind(), ChatStyle())
