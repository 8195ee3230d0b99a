"""Messages and variables of a chat request as JSON, as a chat processor gives them to a template. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.frontend.conversation import template_variables

_PLACEHOLDERS = {"image_url": "image", "input_image": "image", "video_url": "video", "audio_url": "audio"}
_TEXTS = ("text", "input_text")


@dataclass(frozen=True, slots=True)
class _Said:
    """What a request says about thinking."""

    thinking: Any
    reasoning_effort: Any
    chat_template_args: dict[str, Any] | None
    chat_template_kwargs: dict[str, Any] | None


def chat_variables(request: Mapping[str, Any], default_thinking_mode: str | None) -> dict[str, Any]:
    """``template_variables`` of a request as JSON; empty without any."""
    names = ("thinking", "reasoning_effort", "chat_template_args", "chat_template_kwargs")
    return template_variables(_Said(*(request.get(name) for name in names)), default_thinking_mode) or {}


def normal_messages(messages: Sequence[Mapping[str, Any]], *, takes_parts: bool) -> list[dict[str, Any]]:
    """Messages as templates expect them: no null members, arguments of past calls as objects, media as placeholders.

    An assistant's message without content has an empty one: templates ask for it.

    Args:
        messages: Of the request, as JSON.
        takes_parts: Content stays a list of parts; otherwise texts are joined by blanks, and media are left out.
    """
    return [_normal(message, takes_parts) for message in messages]


def _normal(message: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
    result = {name: value for name, value in message.items() if value is not None}
    if result.get("role") == "assistant":
        result.setdefault("content", "")
    content = result.get("content")
    if isinstance(content, list):
        result["content"] = _parts(content) if takes_parts else _joined(content)
    if isinstance(result.get("tool_calls"), list):
        result["tool_calls"] = [_call(call) for call in result["tool_calls"]]
    return result


def _parts(content: Sequence[Any]) -> list[dict[str, Any]]:
    parts = []
    for part in content:
        kind = part.get("type")
        if kind in _TEXTS:
            parts.append({"type": "text", "text": part["text"]})
        elif kind in _PLACEHOLDERS:
            parts.append({"type": _PLACEHOLDERS[kind]})
        elif kind == "refusal":
            parts.append({"type": "text", "text": part["refusal"]})
    return parts


def _joined(content: Sequence[Any]) -> str:
    return " ".join(part["text"] for part in _parts(content) if part["type"] == "text")


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
