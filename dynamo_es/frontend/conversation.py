"""From the messages and tools of a request to what a chat template sees (spec/frontend.md 4.5, 4.7). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from dynamo_es.frontend.chat_media import placeholder
from dynamo_es.frontend.requests import (
    AssistantMessage,
    ChatRequest,
    FunctionMessage,
    Message,
    RefusalPart,
    TextPart,
    Tool,
    ToolMessage,
)
from dynamo_es.frontend.thinking import apply_default_thinking_mode_to_template_kwargs


class Parts(list[dict[str, Any]]):
    """Content with media in it. A template that takes it for text is stopped, or its prompt would show Python lists."""

    def __str__(self) -> str:
        raise TypeError("content with media is no text")

    __repr__ = __str__


def template_messages(
    messages: Sequence[Message], *, takes_parts: bool, without_media: bool = False
) -> list[dict[str, Any]]:
    """Messages as plain mappings; unknown members are gone, null content too.

    Args:
        messages: Of the request.
        takes_parts: The template wants content as a list of parts; otherwise text parts are joined by newlines, except
            where there are media among them.
        without_media: Leave out media.
    """
    return [_template_message(message, takes_parts, without_media) for message in messages]


def _template_message(message: Message, takes_parts: bool, without_media: bool) -> dict[str, Any]:
    result: dict[str, Any] = {"role": message.__struct_config__.tag}
    content = message.content
    if content is not None:
        result["content"] = content if isinstance(content, str) else _content(content, takes_parts, without_media)
    if isinstance(message, AssistantMessage):
        _add_assistant(result, message)
    elif isinstance(message, ToolMessage):
        result["tool_call_id"] = message.tool_call_id
        return result
    elif isinstance(message, FunctionMessage):
        result["name"] = message.name
        return result
    if message.name is not None:
        result["name"] = message.name
    return result


def _content(parts: Sequence[Any], takes_parts: bool, without_media: bool) -> Any:
    result: list[dict[str, Any]] = []
    has_media = False
    for part in parts:
        if isinstance(part, TextPart):
            result.append({"type": "text", "text": part.text})
        elif isinstance(part, RefusalPart):
            result.append({"type": "text", "text": part.refusal})
        elif (medium := placeholder(part)) is not None:
            has_media = True
            if not without_media:
                result.append(medium)
    if has_media:
        return Parts(result)
    return result if takes_parts else "\n".join(part["text"] for part in result)


def _add_assistant(result: dict[str, Any], message: AssistantMessage) -> None:
    if message.reasoning_content:
        thought, said = f"<think>{message.reasoning_content}</think>", result.get("content", "")
        result["content"] = thought + said if isinstance(said, str) else [{"type": "text", "text": thought}, *said]
    if message.tool_calls:
        result["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": msgspec.json.decode(call.function.arguments or "{}"),
                },
            }
            for call in message.tool_calls
        ]


def template_tools(request: ChatRequest, *, always: bool = False) -> list[dict[str, Any]] | None:
    """Tools as a template sees them; None without tools, or with ``tool_choice`` none unless ``always``."""
    if not request.tools or (request.tool_choice == "none" and not always):
        return None
    return [_template_tool(tool) for tool in request.tools]


def _template_tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    if tool.function.parameters is not None:
        function["parameters"] = tool.function.parameters
    return {"type": "function", "function": function}


class SaysThinking(Protocol):
    """The members of a chat request that steer thinking."""

    @property
    def thinking(self) -> Any: ...
    @property
    def reasoning_effort(self) -> str | None: ...
    @property
    def chat_template_args(self) -> dict[str, Any] | None: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


def template_variables(request: SaysThinking, default_thinking_mode: str | None = None) -> dict[str, Any] | None:
    """``chat_template_kwargs`` plus the thinking variables that ``thinking`` and ``reasoning_effort`` stand for.

    The request's own members win over the mapping's. ``enable_thinking`` alone sets all three variables. A request
    that says nothing about thinking gets those of ``default_thinking_mode``.
    """
    given = request.chat_template_args or request.chat_template_kwargs
    if request.thinking is None and request.reasoning_effort is None:
        given = apply_default_thinking_mode_to_template_kwargs(given or {}, default_thinking_mode) or given
    if given is None and request.thinking is None and request.reasoning_effort is None:
        return None
    variables = dict(given or ())
    mode = _thinking_mode(request)
    if mode is None and isinstance(variables.get("enable_thinking"), bool):
        mode = "enabled" if variables["enable_thinking"] else "disabled"
    if mode is not None:
        variables["thinking_mode"] = mode
        if mode != "adaptive":
            variables["enable_thinking"] = variables["thinking"] = mode == "enabled"
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
    return variables


def _thinking_mode(request: SaysThinking) -> str | None:
    thinking = request.thinking
    if isinstance(thinking, bool):
        return "enabled" if thinking else "disabled"
    if isinstance(thinking, dict):
        return str(thinking["type"])
    if request.reasoning_effort is not None:
        return "disabled" if request.reasoning_effort == "none" else "enabled"
    return None
