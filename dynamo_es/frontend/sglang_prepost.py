"""What Dynamo's SGLang chat processor does before and after (``dynamo.frontend.sglang_prepost``), as far as it is pure.

SGLang itself is imported only where its types are made.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.frontend.utils import PreprocessError

_ALIASES = {
    "minimax_m3": "minimax-m3",
    "minimax_m3_nom": "minimax-m3",
    "minimax-m3-nom": "minimax-m3",
    "kimi-k3": "kimi_k3",
    "gemma-4": "gemma4",
}
_ON_BY_ENABLE_THINKING = ("qwen3", "glm45", "nemotron_3", "interns1")
_ON_BY_THINKING = ("kimi_k2", "kimi_k3")
_OFF_BY_THINKING = ("deepseek-v3", "deepseek-v4")
_FORCED_BY_TEMPLATE = (
    re.compile(r"<\|im_start\|>assistant(?:\\n|\n)<think>(?:\\n|\n)"),
    re.compile(r"<\|assistant\|>.{0,400}?<think>", re.DOTALL),
    re.compile(r"assistant.{0,200}?<think>", re.DOTALL),
)


def convert_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Any] | None:
    """A request's tools as SGLang's; None without any. Needs SGLang."""
    if not tools:
        return None
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    result = []
    for tool in tools:
        function = tool.get("function", {})
        made = Function(
            name=function.get("name", ""),
            description=function.get("description"),
            parameters=function.get("parameters"),
            strict=function.get("strict", False),
        )
        result.append(Tool(type=tool.get("type", "function"), function=made))
    return result


def detect_force_reasoning_from_template(chat_template: Any) -> bool:
    """Whether a chat template begins the model's answer with a thought."""
    return isinstance(chat_template, str) and any(rule.search(chat_template) for rule in _FORCED_BY_TEMPLATE)


def resolve_request_force_reasoning(
    request: Mapping[str, Any], reasoning_parser_name: str | None, template_default: bool
) -> bool:
    """Whether the answer to a request begins with a thought, for SGLang's parser of this name.

    Args:
        request: The client's, as JSON. Values are compared by identity: the text ``"false"`` turns nothing off.
        reasoning_parser_name: Of SGLang, or an alias that Dynamo knows.
        template_default: What the template says; it decides for the parsers that requests do not steer.
    """
    if not reasoning_parser_name:
        return False
    name = _ALIASES.get(reasoning_parser_name, reasoning_parser_name)
    variables = request.get("chat_template_kwargs") or request.get("chat_template_args") or {}
    if name == "mistral":
        effort = request.get("reasoning_effort") or variables.get("reasoning_effort")
        return effort is not None and effort != "none"
    rules: list[tuple[tuple[str, ...], bool]] = [
        (("gpt-oss",), True),
        (("minimax-m3",), variables.get("thinking_mode") != "disabled"),
        (_ON_BY_ENABLE_THINKING, variables.get("enable_thinking") is not False),
        (_ON_BY_THINKING, variables.get("thinking") is not False),
        (_OFF_BY_THINKING, variables.get("thinking") is True),
        (("gemma4",), variables.get("enable_thinking") is True),
    ]
    return next((forced for names, forced in rules if name in names), template_default)


def build_response_format_guided_decoding(request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The constraint that ``response_format`` stands for; None if it stands for none.

    Raises:
        PreprocessError: A JSON schema is asked for, and there is none.
    """
    form = request.get("response_format")
    kind = form.get("type") if isinstance(form, dict) else None
    if not isinstance(form, dict) or kind not in ("json_object", "json_schema", "structural_tag"):
        return None
    if kind == "json_object":
        return {"json": {"type": "object"}}
    if kind == "structural_tag":
        return {"structural_tag": form}
    return {"json": _response_schema(form)}


def _response_schema(form: Mapping[str, Any]) -> dict[str, Any]:
    named = form.get("json_schema")
    schema: Any = named.get("schema") if isinstance(named, dict) else copy.deepcopy(form.get("schema"))
    if schema is None:
        raise PreprocessError("schema is required for json_schema response format request.")
    if not isinstance(schema, dict):
        raise PreprocessError("schema must be a JSON object for json_schema response format request.")
    if not isinstance(named, dict) and isinstance(schema.get("properties"), dict):
        schema["properties"].pop("strict", None)
    return schema
