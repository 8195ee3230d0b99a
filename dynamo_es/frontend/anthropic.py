"""``POST /v1/messages`` and ``/v1/messages/count_tokens`` (spec/frontend.md 1.9), served if they are switched on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_es.frontend.anthropic_convert import chat_request, estimated_tokens
from dynamo_es.frontend.anthropic_errors import error_body
from dynamo_es.frontend.anthropic_requests import CountRequest, MessagesRequest, count_kind, messages_kind
from dynamo_es.frontend.anthropic_writer import MessageWriter
from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.dialects import Writer
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.prepare import Prepared
from dynamo_es.frontend.requests import ChatRequest


class AnthropicDialect:
    """A ``Dialect``.

    Args:
        new_id: Makes UUIDs.
        strip_preamble: Drop billing preambles from system prompts.
    """

    family: Family = "chat"
    endpoint = "anthropic_messages"

    def __init__(self, new_id: Callable[[], str], *, strip_preamble: bool) -> None:
        self.kind = messages_kind()
        self._new_id = new_id
        self._strip_preamble = strip_preamble

    def source_model(self, source: MessagesRequest) -> str:
        return source.model

    def source_stream(self, source: MessagesRequest) -> bool:
        return source.stream

    def generation_request(self, source: MessagesRequest) -> ChatRequest:
        return chat_request(source, strip_preamble=self._strip_preamble)

    def writer(self, prepared: Prepared, source: MessagesRequest, request_id: str, created: int) -> Writer:
        return MessageWriter(
            request_id.replace("-", ""),
            prepared.model.name,
            lambda: estimated_tokens(source),
            lambda: self._new_id().replace("-", ""),
        )

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error_body(error, status, model)


class MessageCountRoute:
    """A ``LocalRoute``."""

    family: Family = "chat"
    endpoint = "anthropic_count_tokens"

    def __init__(self) -> None:
        self.kind = count_kind()

    def reply(self, source: CountRequest) -> dict[str, Any]:
        if not source.messages:
            raise ApiError(400, "messages: field required", param="messages", code="invalid_value")
        return {"input_tokens": estimated_tokens(source)}

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error_body(error, status, model)
