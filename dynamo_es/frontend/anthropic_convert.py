"""Anthropic's messages as a chat request (spec/frontend.md 1.9). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import msgspec

from dynamo_es.frontend.anthropic_requests import ROLES, AnthropicMessage, AnthropicTool, CountRequest, MessagesRequest
from dynamo_es.frontend.errors import ApiError, model_not_found
from dynamo_es.frontend.requests import (
    AssistantMessage,
    CalledFunction,
    ChatRequest,
    FunctionSpec,
    ImagePart,
    JsonSchema,
    JsonSchemaFormat,
    Message,
    NamedFunction,
    NamedTool,
    NvExt,
    ReasoningEffort,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
    UserPart,
)
from dynamo_es.frontend.token_estimate import estimate, texts_of
from dynamo_es.frontend.validation import refuse

_BILLING = "x-anthropic-billing-header"
_THINKING = ("enabled", "disabled", "adaptive")
_EFFORTS = get_args(ReasoningEffort)
_IGNORED_BLOCKS = ("redacted_thinking",)
_IMAGE_TYPE = re.compile(r"image/[a-z0-9.+-]{1,32}")


def chat_request(source: MessagesRequest, *, strip_preamble: bool) -> ChatRequest:
    """The chat request that a body stands for.

    Args:
        source: The body.
        strip_preamble: Drop a billing preamble from the system prompt: it differs in every session, and prompts that
            begin differently share no cache.

    Raises:
        ApiError: 400, 404 or 501 with the field.
    """
    if source.max_tokens == 0:
        raise _refuse("max_tokens: must be greater than 0", "max_tokens")
    if not source.messages:
        raise _refuse("messages: field required", "messages")
    if not source.model.strip():
        raise model_not_found()
    choice, parallel = _choice(source.tool_choice)
    thinking = source.thinking or {}
    mode = thinking.get("type") if thinking.get("type") in _THINKING else None
    budget = thinking.get("budget_tokens")
    return ChatRequest(
        model=source.model,
        messages=list(_messages(source, strip_preamble)),
        max_tokens=source.max_tokens,
        temperature=source.temperature,
        top_p=source.top_p,
        top_k=source.top_k,
        stop=list(source.stop_sequences) if source.stop_sequences else None,
        stream=source.stream,
        tools=[_tool(place, tool) for place, tool in enumerate(source.tools)] if source.tools else None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        thinking=None if mode is None else {"type": mode},
        thinking_token_budget=budget if mode == "enabled" and type(budget) is int and 0 <= budget < 2**32 else None,
        reasoning_effort=_effort(source.output_config),
        response_format=_format(source.output_config),
        nvext=NvExt(extra_fields=["stop_reason"]),
    )


def estimated_tokens(source: CountRequest) -> int:
    """About how many tokens a body has: messages with their roles, system prompt and tools."""
    return estimate(_texts(source))


def _texts(source: CountRequest) -> Iterator[str]:
    if source.system is not None:
        yield from texts_of(source.system)
    for message in source.messages:
        yield message.role
        yield from texts_of(message.content)
    for tool in source.tools or ():
        yield tool.name
        yield tool.description or ""
        if tool.input_schema is not None:
            yield msgspec.json.encode(tool.input_schema).decode()


def _messages(source: MessagesRequest, strip_preamble: bool) -> Iterator[Message]:
    system = _system(source.system, strip_preamble)
    if system is not None:
        yield SystemMessage(system)
    for place, message in enumerate(source.messages):
        field = f"messages[{place}]"
        if message.role not in ROLES:
            raise _refuse(f"{field}.role: must be `user`, `assistant` or `system`", "messages")
        if message.role == "assistant":
            yield _assistant(message, field)
        elif isinstance(message.content, str):
            yield SystemMessage(message.content) if message.role == "system" else UserMessage(message.content)
        elif message.role == "system":
            yield SystemMessage("".join(_text(block, field) for block in message.content))
        else:
            yield from _user(message.content, field)


def _system(system: str | Sequence[Any] | None, strip_preamble: bool) -> str | None:
    if system is None:
        return None
    if isinstance(system, str):
        if strip_preamble and system.startswith(_BILLING):
            system = system.partition("\n")[2]
        return system
    texts = [_text(block, "system") for block in system]
    if strip_preamble:
        texts = [text for text in texts if not text.startswith(_BILLING)]
    return "\n".join(texts)


def _user(blocks: Sequence[Any], field: str) -> Iterator[Message]:
    """Results of tools are messages of their own, in their place."""
    said: list[Any] = []
    for block in blocks:
        if _kind(block) == "tool_result":
            if said:
                yield UserMessage(_content(said, field))
                said = []
            yield ToolMessage(_member(block, "tool_use_id", str, field), _result(block.get("content"), field))
        else:
            said.append(block)
    if said:
        yield UserMessage(_content(said, field))


def _result(content: Any, field: str) -> str | list[UserPart]:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise _refuse(f"{field}: the content of a tool_result must be a string or an array of blocks", "messages")
    return _content(content, field)


def _content(blocks: Sequence[Any], field: str) -> str | list[UserPart]:
    """One text, or parts if there are images among it."""
    if not any(_kind(block) == "image" for block in blocks):
        return "".join(_text(block, field) for block in blocks)
    return [
        ImagePart({"url": _image_url(block, field)}) if _kind(block) == "image" else TextPart(_text(block, field))
        for block in blocks
    ]


def _image_url(block: Mapping[str, Any], field: str) -> str:
    source = _member(block, "source", dict, field)
    kind, url, data, form = (source.get(name) for name in ("type", "url", "data", "media_type"))
    if kind == "url" and isinstance(url, str):
        return url
    if kind == "base64" and isinstance(data, str) and isinstance(form, str) and _IMAGE_TYPE.fullmatch(form):
        return f"data:{form};base64,{data}"
    why = "must have the type `base64`, with `media_type` and `data`, or `url`, with `url`"
    raise _refuse(f"{field}: the source of an image {why}", "messages")


def _assistant(message: AnthropicMessage, field: str) -> AssistantMessage:
    if isinstance(message.content, str):
        return AssistantMessage(message.content)
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for block in message.content:
        kind = _kind(block)
        if kind == "thinking":
            thoughts.append(_member(block, "thinking", str, field))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(_member(block, "input", dict, field)).decode()
            function = CalledFunction(_member(block, "name", str, field), arguments)
            calls.append(ToolCall(_member(block, "id", str, field), function))
        elif kind not in _IGNORED_BLOCKS:
            texts.append(_text(block, field))
    return AssistantMessage(
        "".join(texts) if texts else None,
        reasoning_content="\n".join(thoughts) or None,
        tool_calls=calls or None,
    )


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _text(block: Any, field: str) -> str:
    if _kind(block) != "text":
        raise _refuse(f'{field}: content block type "{str(_kind(block))[:64]}" is not supported', "messages")
    return str(_member(block, "text", str, field))


def _member(block: Mapping[str, Any], name: str, form: type, field: str) -> Any:
    value = block.get(name)
    if not isinstance(value, form):
        article = "an" if block["type"][:1] in "aeiou" else "a"
        raise _refuse(f"{field}: {article} {block['type']} block needs `{name}`", field.partition("[")[0])
    return value


def _tool(place: int, tool: AnthropicTool) -> Tool:
    if tool.type not in (None, "custom"):
        message = f'tools[{place}]: server tool type "{tool.type[:64]}" is not supported'
        raise refuse(message, "tools", prefix="", status=501)
    if tool.input_schema is None:
        raise _refuse(f"tools[{place}].input_schema: field required for client tools", "tools")
    return Tool("function", FunctionSpec(tool.name, tool.description, tool.input_schema))


def _choice(choice: Mapping[str, Any] | None) -> tuple[Any, bool | None]:
    """The choice, and whether calls may come together (None: not said)."""
    if choice is None:
        return None, None
    kind, name = choice.get("type"), choice.get("name")
    parallel = False if choice.get("disable_parallel_tool_use") is True else None
    if kind == "tool" and isinstance(name, str):
        return NamedTool(NamedFunction(name)), parallel
    known = {"auto": "auto", "none": "none", "any": "required"}.get(str(kind))
    if known is None:
        raise _refuse("tool_choice.type: must be `auto`, `any`, `tool` (with a `name`) or `none`", "tool_choice")
    return known, parallel


def _effort(config: Mapping[str, Any] | None) -> Any:
    effort = (config or {}).get("effort")
    if effort is not None and effort not in _EFFORTS:
        raise _refuse(f"output_config.effort: must be one of {', '.join(_EFFORTS)}", "output_config")
    return effort


def _format(config: Mapping[str, Any] | None) -> JsonSchemaFormat | None:
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        raise _refuse("output_config.format: must have the type `json_schema` and a `schema`", "output_config")
    return JsonSchemaFormat(JsonSchema("output", form["schema"]))


def _refuse(message: str, field: str) -> ApiError:
    return refuse(message, field, prefix="")
