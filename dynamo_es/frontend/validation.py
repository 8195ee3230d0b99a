"""What a well-typed request may hold (spec/frontend.md 2.1 stages 7 to 10, 2.3, 2.4), with Dynamo's messages.

Pure functions, in the order in which Dynamo checks; the first failure is raised. ``param`` of the error is the field.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import (
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedTool,
    Tool,
)

MAX_TOKENS = 1_048_576
MAX_STOPS = 32
MAX_TOOLS = 1536
MAX_CHOICES = 128
_FUNCTION_NAME = re.compile(r"[A-Za-z0-9_-]+")
_TOKEN_ID_LIMIT = 2**32

Common = ChatRequest | CompletionRequest


class _Range(NamedTuple):
    field: str
    label: str
    low: float
    high: float


_FREQUENCY = _Range("frequency_penalty", "Frequency penalty", -2, 2)
_PRESENCE = _Range("presence_penalty", "Presence penalty", -2, 2)
_TOP_LOGPROBS = _Range("top_logprobs", "Top_logprobs", 0, 20)
_TEMPERATURE = _Range("temperature", "Temperature", 0, 2)
_TOP_P = _Range("top_p", "Top_p", 0, 1)
_MIN_P = _Range("min_p", "Min_p", 0, 1)
_REPETITION = _Range("repetition_penalty", "Repetition penalty", 0, 2)
_LOGPROBS = _Range("logprobs", "Logprobs", 0, 5)
_BEST_OF = _Range("best_of", "Best_of", 0, 20)


def refuse(message: str, param: str | None, *, prefix: str = "Validation: ", status: int = 400) -> ApiError:
    """The error for one wrong field."""
    return ApiError(status, prefix + message, param=param, code="invalid_value")


def validate_chat(request: ChatRequest, unknown: Sequence[str]) -> None:
    """Raises ApiError for the first thing that is wrong."""
    for name in ("function_call", "functions"):
        if bytes(getattr(request, name)) not in (b"", b"null"):
            instead = "tool_choice" if name == "function_call" else "tools"
            raise refuse(f"`{name}` is deprecated. Please migrate to use `{instead}` instead.", name, status=501)
    if not request.messages:
        raise refuse("The 'messages' field cannot be empty. At least one message is required.", "messages")
    _check_head(request, unknown)
    _check_template_arguments(request)
    _check_range(request, _FREQUENCY)
    _check_logit_bias(request)
    _check_range(request, _TOP_LOGPROBS)
    _check_max_tokens(request.max_tokens, "max_tokens", "Max tokens")
    _check_max_tokens(request.max_completion_tokens, "max_completion_tokens", "Max completion tokens")
    _check_n(request)
    _check_range(request, _PRESENCE)
    _check_response_format(request)
    _check_stop(request)
    _check_sampling(request)
    _check_tools(request)
    _check_tail(request)
    _check_history(request)
    _check_guided(request, response_format=request.response_format)


def validate_completion(request: CompletionRequest, unknown: Sequence[str]) -> None:
    """Raises ApiError for the first thing that is wrong."""
    _check_head(request, unknown)
    _check_prompt(request.prompt)
    _check_range(request, _FREQUENCY)
    _check_logit_bias(request)
    _check_range(request, _LOGPROBS)
    _check_max_tokens(request.max_tokens, "max_tokens", "Max tokens")
    _check_n(request)
    _check_batch(request)
    _check_range(request, _BEST_OF)
    n = request.n or 1
    if request.best_of is not None and request.best_of < n:
        raise refuse(f"Best_of must be greater than or equal to n, got best_of={request.best_of} and n={n}", "best_of")
    _check_range(request, _PRESENCE)
    _check_stop(request)
    _check_sampling(request)
    _check_tail(request)
    _check_guided(request, response_format=None)


def _check_head(request: Common, unknown: Sequence[str]) -> None:
    if request.stream_options is not None and not request.stream:
        raise refuse("The 'stream_options' field is only allowed when 'stream' is set to true.", "stream_options")
    if unknown:
        raise refuse(f"Unsupported parameter(s): {', '.join(f'`{name}`' for name in unknown)}", unknown[0])
    _check_extensions(request)
    if not request.model.strip():
        raise refuse("Model cannot be empty", "model")


def _check_extensions(request: Common) -> None:
    for name in ("stop_token_ids", "allowed_token_ids"):
        value = getattr(request, name)
        if value is not None and not _is_token_ids(value):
            raise refuse(f"`{name}` must be an array of token IDs", name)
    value = request.bad_words_token_ids
    if value is not None and not (isinstance(value, list) and all(map(_is_token_ids, value))):
        raise refuse("`bad_words_token_ids` must be an array of token ID arrays", "bad_words_token_ids")
    if request.detokenize is not None and not isinstance(request.detokenize, bool):
        raise refuse("`detokenize` must be a boolean", "detokenize")
    if request.cache_salt is not None and not isinstance(request.cache_salt, str):
        raise refuse("`cache_salt` must be a string", "cache_salt")


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _TOKEN_ID_LIMIT for item in value)


def _check_template_arguments(request: ChatRequest) -> None:
    if request.chat_template_args is not None and request.chat_template_kwargs is not None:
        raise refuse(
            "duplicate field `chat_template_args`",
            "chat_template_args",
            prefix="Failed to deserialize the JSON body into the target type: ",
        )
    for name in ("chat_template_args", "chat_template_kwargs"):
        if "chat_template" in (getattr(request, name) or ()):
            raise refuse(f"`chat_template` cannot be set in `{name}`", name)
    thinking = request.thinking
    if isinstance(thinking, dict) and "type" in thinking:
        if thinking["type"] not in ("enabled", "disabled", "adaptive"):
            raise refuse("`thinking.type` must be `enabled`, `disabled`, or `adaptive`", "thinking")
    elif thinking is not None and not isinstance(thinking, bool):
        raise refuse(
            "`thinking` must be a boolean or an object with `type` set to `enabled`, `disabled`, or `adaptive`",
            "thinking",
        )
    if request.continue_final_message and request.add_generation_prompt is not False:
        raise refuse(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )


def _check_range(request: Common, rule: _Range) -> None:
    value = getattr(request, rule.field)
    if value is not None and not rule.low <= value <= rule.high:
        raise refuse(
            f"{rule.label} must be between {rule.low:g} and {rule.high:g}, got {number_text(value)}", rule.field
        )


def number_text(value: float) -> str:
    """A number as Dynamo writes it: ``9``, ``2.1``."""
    return str(int(value)) if float(value).is_integer() else repr(value)


def _check_logit_bias(request: Common) -> None:
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and int(key) < _TOKEN_ID_LIMIT):
            raise refuse("Logit bias key must be a non-negative 32-bit integer token id", "logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refuse(f"Logit bias value for token '{key}' must be a number, got {_debug(value)}", "logit_bias")
        if not -100 <= value <= 100:
            raise refuse(f"Logit bias for token '{key}' must be between -100 and 100, got {value}", "logit_bias")


def _debug(value: Any) -> str:
    if isinstance(value, str):
        return f"String({json.dumps(value[:64], ensure_ascii=False)})"
    if isinstance(value, bool):
        return f"Bool({str(value).lower()})"
    return "Null" if value is None else "Array" if isinstance(value, list) else "Object"


def _check_max_tokens(value: int | None, field: str, label: str) -> None:
    if value is None:
        return
    if value == 0:
        raise refuse(f"{label} must be greater than 0, got 0", field)
    if value > MAX_TOKENS:
        raise refuse(f"{label} must be at most {MAX_TOKENS}, got {value}", field)


def _check_n(request: Common) -> None:
    if request.n is not None and not 1 <= request.n <= MAX_CHOICES:
        raise refuse(f"n must be between 1 and {MAX_CHOICES}, got {request.n}", "n")


def _check_response_format(request: ChatRequest) -> None:
    form = request.response_format
    if not isinstance(form, JsonSchemaFormat):
        return
    if not form.json_schema.name:
        raise refuse("`response_format.json_schema.name` cannot be empty", "response_format")
    if not isinstance(form.json_schema.schema, dict):
        kind = _json_kind(form.json_schema.schema)
        raise refuse(f"`response_format.json_schema.schema` must be a JSON object, got {kind}", "response_format")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _check_stop(request: Common) -> None:
    stop = request.stop
    if stop is None:
        return
    if isinstance(stop, str):
        if not stop:
            raise refuse("Stop sequence cannot be empty", "stop")
        return
    if not stop:
        raise refuse("Stop sequences array cannot be empty", "stop")
    if len(stop) > MAX_STOPS:
        raise refuse(f"Maximum of {MAX_STOPS} stop sequences allowed, got {len(stop)}", "stop", prefix="")
    for place, item in enumerate(stop):
        if item == "":
            raise refuse(f"Stop sequence at index {place} cannot be empty", "stop")


def _check_sampling(request: Common) -> None:
    _check_range(request, _TEMPERATURE)
    if (request.n or 1) > 1 and request.temperature is not None and request.temperature <= 0:
        raise refuse(
            "When n > 1, temperature must be greater than 0 to ensure diverse outputs. "
            f"Got n={request.n}, temperature={number_text(request.temperature)}",
            "temperature",
        )
    _check_range(request, _TOP_P)


def _check_tools(request: ChatRequest) -> None:
    tools = request.tools
    if tools is not None:
        if not tools:
            raise refuse("tools array cannot be empty; omit the field entirely to disable tool use", "tools")
        if len(tools) > MAX_TOOLS:
            raise refuse(f"Maximum of {MAX_TOOLS} tools are supported, got {len(tools)}", "tools")
        for place, tool in enumerate(tools):
            _check_tool(place, tool)
    choice = request.tool_choice
    if choice == "required" and not tools:
        raise refuse('tool_choice is "required" but tools is empty', "tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        if name not in {tool.function.name for tool in tools or ()}:
            raise refuse(f'tool named "{name}" in tool_choice is not present in tools', "tool_choice")


def _check_tool(place: int, tool: Tool) -> None:
    function = tool.function
    if not _FUNCTION_NAME.fullmatch(function.name):
        raise refuse(
            f'Function at index {place} has an invalid name: "{function.name}". Only a-z, A-Z, 0-9, underscores, and '
            "dashes are allowed.",
            "tools",
        )
    schema = function.parameters
    if schema is not None and not isinstance(schema, dict):
        raise refuse(
            f'Function parameters at index {place} for "{function.name}" must be a JSON Schema object', "tools"
        )
    if function.strict and isinstance(schema, dict) and schema.get("additionalProperties") is not False:
        raise refuse(
            f"Invalid schema for function '{function.name}': In context=#, object schemas require "
            "additionalProperties: false",
            "tools",
        )


def _check_tail(request: Common) -> None:
    if request.user is not None and not request.user.strip():
        raise refuse("User cannot be empty", "user")
    if request.top_k is not None and request.top_k < -1:
        raise refuse("Top_k must be null or greater than or equal to -1", "top_k")
    _check_range(request, _MIN_P)
    if request.repetition_penalty == 0:
        raise refuse("Repetition penalty must be between 0 and 2, got 0", "repetition_penalty")
    _check_range(request, _REPETITION)


def _check_history(request: ChatRequest) -> None:
    for place, message in enumerate(request.messages):
        if not isinstance(message, AssistantMessage):
            continue
        for call_place, call in enumerate(message.tool_calls or ()):
            problem = _object_problem(call.function.arguments)
            if problem is not None:
                field = f"messages[{place}].tool_calls[{call_place}].function.arguments"
                raise refuse(f"`{field}` must be a valid JSON object string: {problem}", field)


def _object_problem(text: str) -> str | None:
    if not text:
        return None
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    return None if isinstance(value, dict) else f"invalid type: {_json_kind(value)}, expected a map"


def guided_constraints(request: Common, response_format: object) -> list[str]:
    """Names of the guided-decoding constraints that are set, in Dynamo's order."""
    names = []
    if isinstance(response_format, JsonObjectFormat | JsonSchemaFormat):
        names.append("json")
    if request.guided_json is not None:
        names.append("json")
    if request.guided_regex is not None:
        names.append("regex")
    if request.guided_choice:
        names.append("choice")
    if request.guided_grammar is not None:
        names.append("grammar")
    return names


def _check_guided(request: Common, response_format: object) -> None:
    names = guided_constraints(request, response_format)
    if len(names) > 1:
        field = "guided_json" if request.guided_json is not None else f"guided_{names[-1]}"
        raise refuse(f"Only one guided-decoding constraint can be set; received: {', '.join(names)}", field, prefix="")


def _check_prompt(prompt: str | list[Any]) -> None:
    if isinstance(prompt, str):
        if not prompt:
            raise refuse("Prompt string cannot be empty", "prompt")
        return
    if not prompt:
        raise refuse("Prompt string array cannot be empty", "prompt")
    for place, item in enumerate(prompt):
        if isinstance(item, str) and not item:
            raise refuse(f"Prompt string at index {place} cannot be empty", "prompt")
        if isinstance(item, list) and not item:
            raise refuse(f"Prompt token array at index {place} cannot be empty", "prompt")


def _check_batch(request: CompletionRequest) -> None:
    prompt = request.prompt
    batch = 1 if isinstance(prompt, str) or isinstance(prompt[0], int) else len(prompt)
    n = request.n or 1
    if batch * n > MAX_CHOICES:
        raise refuse(
            f"Total choices (batch_size × n = {batch} × {n} = {batch * n}) exceeds maximum of {MAX_CHOICES}", "prompt"
        )
