"""The input of a response request as chat messages (spec/frontend.md 1.8). Pure.

Items are messages, function calls with their outputs, and thoughts of earlier turns. A call belongs to the assistant's
message right before it, as in a chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import (
    AssistantMessage,
    CalledFunction,
    DeveloperMessage,
    ImagePart,
    Message,
    RefusalPart,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
    UserPart,
)
from dynamo_es.frontend.validation import refuse

_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def chat_messages(value: str | Sequence[Any], instructions: str | None) -> list[Message]:
    """Messages in order, instructions first.

    Raises:
        ApiError: 400 with the item.
    """
    messages: list[Message] = [] if instructions is None else [SystemMessage(instructions)]
    if isinstance(value, str):
        messages.append(UserMessage(value))
        return messages
    thoughts: list[str] = []
    for place, item in enumerate(value):
        field = f"input[{place}]"
        if not isinstance(item, dict):
            raise refuse(f"`{field}` must be an object", "input")
        kind = item.get("type", "message")
        if kind == "reasoning":
            thoughts.append(_texts(item.get("content") or item.get("summary") or [], field))
            continue
        if kind == "message":
            message = _message(item, field)
        elif kind == "function_call":
            message = _called(item, field, messages)
        elif kind == "function_call_output":
            message = ToolMessage(_text_of(item, "call_id", field), _output(item, field))
        else:
            more = "; responses are not stored here, send the item itself" if kind == "item_reference" else ""
            raise refuse(f"`{field}` has the type `{str(kind)[:64]}`, which is not supported{more}", "input")
        if isinstance(message, AssistantMessage) and thoughts:
            message.reasoning_content = "\n".join(thoughts)
        thoughts.clear()
        if not messages or messages[-1] is not message:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any], field: str) -> Message:
    role, content = item.get("role"), item.get("content")
    if not isinstance(content, str | list):
        raise refuse(f"`{field}.content` must be a string or an array of parts", "input")
    if role == "user":
        return UserMessage(content if isinstance(content, str) else [_part(part, field) for part in content])
    if role == "assistant":
        return AssistantMessage(content if isinstance(content, str) else _said(content, field))
    text = content if isinstance(content, str) else _texts(content, field)
    if role == "system":
        return SystemMessage(text)
    if role == "developer":
        return DeveloperMessage(text)
    raise refuse(f"`{field}.role` must be `user`, `assistant`, `system` or `developer`", "input")


def _part(part: Any, field: str) -> UserPart:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in _TEXT_PARTS:
        return TextPart(_text_of(part, "text", field))
    if kind == "input_image":
        if not isinstance(part.get("image_url"), str):
            raise refuse(f"`{field}` has an image without `image_url`; files are not stored here", "input")
        return ImagePart({"url": part["image_url"], "detail": part.get("detail")})
    raise _unknown_part(kind, field)


def _said(parts: Sequence[Any], field: str) -> list[TextPart | RefusalPart]:
    result: list[TextPart | RefusalPart] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "refusal":
            result.append(RefusalPart(_text_of(part, "refusal", field)))
        elif kind in _TEXT_PARTS:
            result.append(TextPart(_text_of(part, "text", field)))
        else:
            raise _unknown_part(kind, field)
    return result


def _texts(parts: Any, field: str) -> str:
    if not isinstance(parts, list):
        raise refuse(f"`{field}` must have an array of parts", "input")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXT_PARTS:
            raise _unknown_part(kind, field)
        texts.append(_text_of(part, "text", field))
    return "\n".join(texts)


def _called(item: Mapping[str, Any], field: str, messages: Sequence[Message]) -> AssistantMessage:
    """The message that the call belongs to, a new one if need be."""
    function = CalledFunction(_text_of(item, "name", field), _text_of(item, "arguments", field))
    call = ToolCall(_text_of(item, "call_id", field), function)
    last = messages[-1] if messages else None
    message = last if isinstance(last, AssistantMessage) else AssistantMessage()
    message.tool_calls = [*(message.tool_calls or ()), call]
    return message


def _output(item: Mapping[str, Any], field: str) -> str | list[UserPart]:
    output = item.get("output")
    if isinstance(output, str):
        return output
    parts = output if isinstance(output, list) else ()
    if any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts):
        return [_part(part, f"{field}.output") for part in parts]
    return _texts(output, f"{field}.output")


def _text_of(item: Mapping[str, Any], name: str, field: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise refuse(f"`{field}.{name}` must be a string", "input")
    return value


def _unknown_part(kind: Any, field: str) -> ApiError:
    return refuse(f"`{field}` has a part of type `{str(kind)[:64]}`, which is not supported", "input")
