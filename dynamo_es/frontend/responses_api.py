"""``POST /v1/responses``: bodies, and how they become chat requests (spec/frontend.md 1.8).

Nothing is stored: what would need an earlier response is refused with 501. Tools are functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from dynamo_es.clock import Clock
from dynamo_es.frontend import serde
from dynamo_es.frontend.contracts import Family
from dynamo_es.frontend.dialects import Writer
from dynamo_es.frontend.direct import given
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.prepare import Prepared
from dynamo_es.frontend.reading import RequestKind
from dynamo_es.frontend.requests import (
    U32,
    ChatRequest,
    FunctionSpec,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    NvExt,
    ReasoningEffort,
    Tool,
)
from dynamo_es.frontend.responses_api_input import chat_messages
from dynamo_es.frontend.responses_api_writer import ResponseWriter
from dynamo_es.frontend.token_estimate import estimate, texts_of
from dynamo_es.frontend.validation import refuse

_ONLY_FUNCTIONS = (
    "the Chat Completions adapter supports only function tools and none, auto, required, named function, or "
    "function-only allowed_tools choices"
)
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields of chat requests by the names that they have here."""
_CHOICES = ("none", "auto", "required")


class Reasoning(msgspec.Struct):
    """How much the model is to think."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses``; other members are dropped."""

    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: U32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    nvext: NvExt | None = None


class TokenCountRequest(msgspec.Struct, kw_only=True):
    """Body of ``POST /v1/responses/input_tokens``; other members are dropped."""

    input: str | list[Any] | None = None
    model: Raw = msgspec.field(default_factory=Raw)


def _check_input(value: Any) -> str | None:
    return None if isinstance(value, str | list) else "input must be a string or an array of input items"


def responses_kind() -> RequestKind[ResponsesRequest]:
    """Bodies of ``/v1/responses``."""
    return RequestKind(
        ResponsesRequest,
        msgspec.json.Decoder(ResponsesRequest),
        frozenset(ResponsesRequest.__struct_fields__),
        (),
        {
            "input": _check_input,
            **dict.fromkeys(("model", "instructions", "previous_response_id"), serde.TEXT),
            **dict.fromkeys(("stream", "parallel_tool_calls", "store", "background"), serde.BOOL),
            **dict.fromkeys(("temperature", "top_p"), serde.SINGLE),
            **dict.fromkeys(("text", "metadata"), serde.MAP),
            "max_output_tokens": serde.UNSIGNED_32,
            "truncation": lambda value: serde.variant(value, ("auto", "disabled")) or serde.TEXT(value),
            "tools": serde.LIST,
            "nvext": serde.check_nvext,
        },
        ("input",),
        "NvCreateResponse",
    )


class ResponsesDialect:
    """OpenAI's responses.

    Args:
        clock: For the time when a response is complete.
        new_id: Makes UUIDs.
    """

    family: Family = "chat"
    endpoint = "responses"

    def __init__(self, clock: Clock, new_id: Callable[[], str]) -> None:
        self.kind = responses_kind()
        self._clock = clock
        self._new_id = new_id

    def source_model(self, source: ResponsesRequest) -> str:
        return source.model or ""

    def source_stream(self, source: ResponsesRequest) -> bool:
        return bool(source.stream)

    def generation_request(self, source: ResponsesRequest) -> ChatRequest:
        return chat_request(source)

    def writer(self, prepared: Prepared, source: ResponsesRequest, request_id: str, created: int) -> Writer:
        wants_reasoning = source.reasoning is not None and source.reasoning.effort != "none"
        return ResponseWriter(
            echoed(source),
            prepared.model.name,
            created,
            now_s=lambda: self._clock.now_ms() // 1000,
            new_id=lambda: self._new_id().replace("-", ""),
            response_id=request_id.replace("-", ""),
            wants_reasoning=wants_reasoning,
        )

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.in_terms_of(_FIELDS).body(status)


class InputCountRoute:
    """A ``LocalRoute``: ``/v1/responses/input_tokens``."""

    family: Family = "chat"
    endpoint = "responses_input_tokens"

    def __init__(self) -> None:
        self.kind: RequestKind[TokenCountRequest] = RequestKind(
            TokenCountRequest,
            msgspec.json.Decoder(TokenCountRequest),
            frozenset(TokenCountRequest.__struct_fields__),
            (),
            {"input": _check_input},
            (),
            "NvCreateResponse",
        )

    def reply(self, source: TokenCountRequest) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": estimate(_texts(source.input))}

    def error_body(self, error: ApiError, status: int, model: str | None) -> bytes:
        return error.body(status)


def _texts(value: str | Sequence[Any] | None) -> Iterator[str]:
    if isinstance(value, str):
        yield from ("user", value)
    for item in value or () if not isinstance(value, str) else ():
        if isinstance(item, dict):
            yield item["role"] if isinstance(item.get("role"), str) else ""
            yield from texts_of([item])


def chat_request(source: ResponsesRequest) -> ChatRequest:
    """The chat request that a body stands for.

    Raises:
        ApiError: 400 or 501 with the field.
    """
    if source.previous_response_id is not None:
        raise refuse("`previous_response_id` is not supported.", "previous_response_id", status=501)
    if source.background:
        raise refuse("`background: true` is not supported.", "background", status=501)
    if not (source.model or "").strip():
        raise refuse("Model cannot be empty", "model", prefix="")
    if not source.input and isinstance(source.input, list):
        raise refuse("Messages array cannot be empty", "input", prefix="")
    tools = [_tool(tool) for tool in source.tools or ()]
    choice, tools = _choice(source.tool_choice, tools)
    return ChatRequest(
        model=source.model or "",
        messages=chat_messages(source.input, source.instructions),
        max_tokens=source.max_output_tokens,
        temperature=source.temperature,
        top_p=source.top_p,
        stream=source.stream,
        tools=tools or None,
        tool_choice=choice,
        parallel_tool_calls=source.parallel_tool_calls,
        response_format=_format(source.text),
        reasoning_effort=source.reasoning.effort if source.reasoning is not None else None,
        nvext=source.nvext,
    )


def _tool(tool: Mapping[str, Any]) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise _not_converted("tools", kind)
    name, description = tool.get("name"), tool.get("description")
    if not isinstance(name, str) or not isinstance(description, str | None):
        raise refuse("a function tool needs a `name`, and its `description` is text", "tools")
    strict = tool.get("strict")
    return Tool("function", FunctionSpec(name, description, tool.get("parameters"), strict is True or None))


def _choice(choice: Any, tools: list[Tool]) -> tuple[Any, list[Tool]]:
    """The choice, and the tools that may be called."""
    if choice is None or choice in _CHOICES:
        return choice, tools
    if not isinstance(choice, dict):
        raise _not_converted("tool_choice", choice)
    kind = choice.get("type")
    if kind == "function" and isinstance(choice.get("name"), str):
        return NamedTool(NamedFunction(choice["name"])), tools
    if kind == "allowed_tools" and choice.get("mode") in ("auto", "required"):
        entries = choice.get("tools")
        allowed = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
        if all(entry.get("type") == "function" for entry in allowed):
            names = {entry.get("name") for entry in allowed}
            return choice["mode"], [tool for tool in tools if tool.function.name in names]
    raise _not_converted("tool_choice", kind)


def _not_converted(field: str, kind: Any) -> ApiError:
    text = f"Failed to convert responses request: Unsupported Responses {field} type '{kind}': {_ONLY_FUNCTIONS}"
    return refuse(text, field, prefix="")


def _format(text: Mapping[str, Any] | None) -> JsonObjectFormat | JsonSchemaFormat | None:
    form = (text or {}).get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "json_object":
        return JsonObjectFormat()
    if kind == "json_schema":
        return JsonSchemaFormat(JsonSchema(str(form.get("name") or ""), form.get("schema"), strict=form.get("strict")))
    if kind != "text":
        raise refuse("`text.format.type` must be `text`, `json_object` or `json_schema`", "text")
    return None


def echoed(source: ResponsesRequest) -> dict[str, Any]:
    """Members of a response that repeat the request."""
    return {
        "instructions": source.instructions,
        "max_output_tokens": source.max_output_tokens,
        "metadata": source.metadata or {},
        "parallel_tool_calls": source.parallel_tool_calls is not False,
        "reasoning": _echoed_reasoning(source.reasoning),
        "temperature": source.temperature,
        "text": {"format": (source.text or {}).get("format") or {"type": "text"}},
        "tool_choice": "auto" if source.tool_choice is None else source.tool_choice,
        "tools": _echoed_tools(source.tools or ()),
        "top_p": source.top_p,
        "truncation": source.truncation or "disabled",
        "store": bool(source.store),
    }


def _echoed_reasoning(reasoning: Reasoning | None) -> dict[str, Any] | None:
    return None if reasoning is None else given(reasoning)


def _echoed_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    result = []
    for tool in tools:
        shown = {
            "type": "function",
            "name": tool["name"],
            "parameters": tool.get("parameters"),
            "strict": tool.get("strict") is not False,
        }
        if tool.get("description") is not None:
            shown["description"] = tool["description"]
        result.append(shown)
    return result
