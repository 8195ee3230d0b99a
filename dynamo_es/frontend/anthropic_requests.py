"""Bodies of Anthropic's Messages API (spec/frontend.md 1.9); members that are not here are dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dynamo_es.frontend import serde
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import U32

ROLES = ("user", "assistant", "system")
M = TypeVar("M", bound="CountRequest")


class AnthropicMessage(msgspec.Struct):
    """One message; content blocks are looked at later."""

    role: str
    content: str | list[Any]


class AnthropicTool(msgspec.Struct):
    """A tool; client tools have no type or ``custom``."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Any = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/messages/count_tokens``."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Any] | None = None
    tools: list[AnthropicTool] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """Body of ``POST /v1/messages``."""

    max_tokens: U32
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: U32 | None = None
    stop_sequences: list[str] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


def _check_messages(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"invalid type: {serde.unexpected(value)}, expected a sequence"
    for message in value:
        if not isinstance(message, dict):
            return f"invalid type: {serde.unexpected(message)}, expected struct AnthropicMessage"
        missing = next((name for name in ("role", "content") if name not in message), None)
        if missing is not None:
            return f"missing field `{missing}`"
        if wrong := serde.variant(message["role"], ROLES):
            return wrong
        if not isinstance(message["content"], str | list):
            return "data did not match any variant of untagged enum AnthropicMessageContent"
    return None


def _check_system(value: Any) -> str | None:
    if value is None or isinstance(value, str | list):
        return None
    return "data did not match any variant of untagged enum SystemPrompt"


_CHECKS: Mapping[str, serde.Check] = {
    "model": serde.typed(str, "a string", null=False),
    "messages": _check_messages,
    "system": _check_system,
    "tools": serde.LIST,
    "max_tokens": serde.integer(0, 2**32 - 1, "u32"),
    "stream": serde.typed(bool, "a boolean", null=False),
    "temperature": serde.SINGLE,
    "top_p": serde.SINGLE,
    "top_k": serde.UNSIGNED_32,
    "stop_sequences": serde.LIST,
    "tool_choice": serde.MAP,
    "thinking": serde.MAP,
    "output_config": serde.MAP,
}


def messages_kind() -> RequestKind[MessagesRequest]:
    """Bodies of ``/v1/messages``."""
    return _kind(MessagesRequest, ("model", "max_tokens", "messages"))


def count_kind() -> RequestKind[CountRequest]:
    """Bodies of ``/v1/messages/count_tokens``."""
    return _kind(CountRequest, ("model", "messages"))


def _kind(form: type[M], required: tuple[str, ...]) -> RequestKind[M]:
    return RequestKind(
        form,
        msgspec.json.Decoder(form),
        frozenset(form.__struct_fields__),
        (),
        _CHECKS,
        required,
        "AnthropicCreateMessageRequest",
        plain=True,
        by_path=True,
    )
