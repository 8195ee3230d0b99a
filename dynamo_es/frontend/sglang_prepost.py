"""What Dynamo's SGLang chat processor does before and after (``dynamo.frontend.sglang_prepost``).

Rendering, parsers and constraints are SGLang's own. It is the extra ``sglang`` and is imported only inside the
functions that need it; what decides about them is pure.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import jinja2

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.guidance import (
    EMPTY_ARGUMENTS,
    Constraint,
    function_of,
    is_forced,
    legacy_guided_decoding,
    named_function,
    takes_nothing,
)
from dynamo_es.frontend.processor_messages import chat_variables, normal_messages
from dynamo_es.frontend.sglang_output import SglangStreamingPostProcessor, known_parser_name
from dynamo_es.frontend.utils import PreprocessError

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import Tool as SglangTool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.json_array_parser import JsonArrayParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    ToolCallParserType: TypeAlias = FunctionCallParser | JsonArrayParser

__all__ = (
    "SglangPreprocessResult",
    "SglangStreamingPostProcessor",
    "build_response_format_guided_decoding",
    "build_tool_call_guided_decoding",
    "convert_tools",
    "create_parsers",
    "detect_force_reasoning_from_template",
    "preprocess_chat_request",
    "resolve_request_force_reasoning",
)

_FUNCTION_CALL = "sglang.srt.function_call"
_PROTOCOL = "sglang.srt.entrypoints.openai.protocol"
_ON_BY_ENABLE_THINKING = ("qwen3", "glm45", "nemotron_3", "interns1")
_ON_BY_THINKING = ("kimi_k2", "kimi_k3")
_OFF_BY_THINKING = ("deepseek-v3", "deepseek-v4")
_FORCED_BY_TEMPLATE = (
    re.compile(r"<\|im_start\|>assistant(?:\\n|\n)<think>(?:\\n|\n)"),
    re.compile(r"<\|assistant\|>.{0,400}?<think>", re.DOTALL),
    re.compile(r"assistant.{0,200}?<think>", re.DOTALL),
)


@dataclass
class SglangPreprocessResult:
    """A chat request that is ready for a worker, and how its output is read.

    Attributes:
        prompt_token_ids: The prompt.
        tool_call_parser: SGLang's, or None.
        reasoning_parser: SGLang's, or None.
        guided_decoding: What binds the output, or None.
        request: The client's, with the thinking variables that apply.
        force_reasoning: The output begins within a thought.
        named_zero_arg_tool: The function that is demanded and takes nothing, whose output is ``{}`` alone.
    """

    prompt_token_ids: list[int]
    tool_call_parser: ToolCallParserType | None
    reasoning_parser: ReasoningParser | None
    guided_decoding: Constraint | None
    request: dict[str, Any]
    force_reasoning: bool = False
    named_zero_arg_tool: str | None = None


def convert_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[SglangTool] | None:
    """A request's tools as SGLang's; None without any. Needs SGLang."""
    if not tools:
        return None
    protocol = import_extra(_PROTOCOL, "sglang")
    result = []
    for tool in tools:
        function = tool.get("function", {})
        made = protocol.Function(
            name=function.get("name", ""),
            description=function.get("description"),
            parameters=function.get("parameters"),
            strict=function.get("strict", False),
        )
        result.append(protocol.Tool(type=tool.get("type", "function"), function=made))
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
    name = known_parser_name(reasoning_parser_name)
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


def build_response_format_guided_decoding(request: Mapping[str, Any]) -> Constraint | None:
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


def build_tool_call_guided_decoding(
    request: Mapping[str, Any], *, tool_call_parser_name: str | None, sglang_tools: list[SglangTool] | None
) -> Constraint | None:
    """The constraint of a request's tools: SGLang's JSON schema of demanded calls; for strict functions that may be
    called, the structural tag of the model's own format, if SGLang has one.

    Returns:
        ``{"json"}``, ``{"regex"}`` or ``{"structural_tag"}``; None if nothing binds the output.
    """
    choice = request.get("tool_choice") or "auto"
    if not sglang_tools or choice == "none":
        return None
    named = named_function(choice)
    if named is not None and _zero_argument_tool(request) is not None:
        return {"regex": EMPTY_ARGUMENTS}
    parallel = request.get("parallel_tool_calls") is not False
    if is_forced(choice):
        asked = choice if named is None else _sglang_choice(named)
        utils = import_extra(f"{_FUNCTION_CALL}.utils", "sglang")
        schema = utils.get_json_schema_constraint(sglang_tools, asked, parallel_tool_calls=parallel)
        return None if schema is None else {"json": schema}
    if not tool_call_parser_name or choice != "auto":
        return None
    parser = _function_call_parser(sglang_tools, tool_call_parser_name)
    constraint = parser.get_structure_constraint("auto", parallel_tool_calls=parallel)
    return None if constraint is None else _structural_tag(*constraint)


def _structural_tag(kind: str, value: Any) -> Constraint | None:
    """A tag of SGLang's in the form that all its grammar backends take; None for the older form and other kinds."""
    legacy = import_extra(_PROTOCOL, "sglang").LegacyStructuralTagResponseFormat
    if kind != "structural_tag" or isinstance(value, legacy):
        return None
    return {"structural_tag": value.model_dump(by_alias=True) if hasattr(value, "model_dump") else value}


def _sglang_choice(name: str) -> Any:
    protocol = import_extra(_PROTOCOL, "sglang")
    return protocol.ToolChoice(function=protocol.ToolChoiceFuncName(name=name))


def _function_call_parser(tools: list[SglangTool], name: str) -> FunctionCallParser:
    module = import_extra(f"{_FUNCTION_CALL}.function_call_parser", "sglang")
    known = known_parser_name(name)
    try:
        parser: FunctionCallParser = module.FunctionCallParser(tools=tools, tool_call_parser=known)
    except ValueError as error:
        raise PreprocessError(f"SGLang has no tool call parser {name!r}") from error
    return parser


def create_parsers(
    request: Mapping[str, Any],
    *,
    tool_call_parser_name: str | None,
    reasoning_parser_name: str | None,
    sglang_tools: list[SglangTool] | None = None,
    force_reasoning: bool = False,
    guided_decoding: Constraint | None = None,
) -> tuple[ToolCallParserType | None, ReasoningParser | None]:
    """SGLang's parsers for the output of one request: of calls, and of thoughts.

    Args:
        request: The client's, as JSON.
        tool_call_parser_name: The model's, or None.
        reasoning_parser_name: The model's, or None.
        sglang_tools: The request's tools if they are converted already.
        force_reasoning: The output begins within a thought.
        guided_decoding: What binds the output. A demanded call is a JSON list, unless a structural tag makes the model
            write calls in its own format.
    """
    choice = request.get("tool_choice")
    forced = is_forced(choice)
    tools = sglang_tools if sglang_tools is not None else convert_tools(request.get("tools"))
    calls: ToolCallParserType | None = None
    if tools and choice != "none":
        native = guided_decoding is not None and not ({"json", "regex"} & set(guided_decoding))
        if forced and not (native and tool_call_parser_name):
            calls = import_extra(f"{_FUNCTION_CALL}.json_array_parser", "sglang").JsonArrayParser()
        elif tool_call_parser_name:
            calls = _function_call_parser(tools, tool_call_parser_name)
    thoughts = None
    if reasoning_parser_name and (not forced or force_reasoning):
        module = import_extra("sglang.srt.parser.reasoning_parser", "sglang")
        known = known_parser_name(reasoning_parser_name)
        try:
            thoughts = module.ReasoningParser(
                model_type=known, stream_reasoning=True, force_reasoning=force_reasoning,
                tool_call_parser_active=calls is not None,
            )  # fmt: skip
        except ValueError as error:
            raise PreprocessError(f"SGLang has no reasoning parser {reasoning_parser_name!r}") from error
    return calls, thoughts


def preprocess_chat_request(
    request: dict[str, Any],
    *,
    tokenizer: Any,
    tool_call_parser_name: str | None,
    reasoning_parser_name: str | None,
    exclude_tools_when_tool_choice_none: bool = True,
    template_force_reasoning: bool = False,
    default_thinking_mode: str | None = None,
) -> SglangPreprocessResult:
    """Check, render and tokenize a chat request. Synchronous; may run in a thread or in another process.

    Args:
        request: The client's, as JSON; not changed.
        tokenizer: The model's, Hugging Face's, with its chat template.
        tool_call_parser_name: SGLang's parser of calls, or None.
        reasoning_parser_name: SGLang's parser of thoughts, or None.
        exclude_tools_when_tool_choice_none: Templates see no tools if none may be called.
        template_force_reasoning: ``detect_force_reasoning_from_template`` of the template.
        default_thinking_mode: ``enabled``, ``disabled`` or None: what holds if the request does not say.

    Raises:
        PreprocessError: The template or SGLang cannot take the request.
        InvalidArgument: Two things are to bind the output.
        ValueError: ``tool_choice`` names a function that is not there.
    """
    request = {**request, "chat_template_kwargs": chat_variables(request, default_thinking_mode)}
    _check_choice(request)
    sglang_tools = convert_tools(request.get("tools"))
    guided = _guided_decoding(request, tool_call_parser_name, sglang_tools)
    force_reasoning = resolve_request_force_reasoning(request, reasoning_parser_name, template_force_reasoning)
    calls, thoughts = create_parsers(
        request,
        tool_call_parser_name=tool_call_parser_name,
        reasoning_parser_name=reasoning_parser_name,
        sglang_tools=sglang_tools,
        force_reasoning=force_reasoning,
        guided_decoding=guided,
    )
    return SglangPreprocessResult(
        prompt_token_ids=_tokenize(request, tokenizer, exclude_tools_when_tool_choice_none),
        tool_call_parser=calls,
        reasoning_parser=thoughts,
        guided_decoding=guided,
        request=request,
        force_reasoning=force_reasoning,
        named_zero_arg_tool=_zero_argument_tool(request),
    )


def _check_choice(request: Mapping[str, Any]) -> None:
    choice, tools = request.get("tool_choice"), request.get("tools") or ()
    if choice == "required" and not tools:
        raise PreprocessError('tool_choice is "required" but tools is empty')
    named = named_function(choice)
    if named is not None and all(function_of(tool).get("name") != named for tool in tools):
        raise ValueError(f"tool named {named!r} in tool_choice is not present in tools")


def _zero_argument_tool(request: Mapping[str, Any]) -> str | None:
    named = named_function(request.get("tool_choice"))
    if named is None:
        return None
    schemas = [function_of(one).get("parameters") for one in request.get("tools") or () if _name(one) == named]
    return named if schemas and takes_nothing(schemas[0]) else None


def _name(tool: Any) -> Any:
    return function_of(tool).get("name")


def _guided_decoding(
    request: Mapping[str, Any], parser_name: str | None, tools: list[SglangTool] | None
) -> Constraint | None:
    """What binds the output. A demanded call wins over ``response_format``, and bears no other constraint beside it."""
    legacy = legacy_guided_decoding(request)
    by_format = build_response_format_guided_decoding(request)
    by_tools = build_tool_call_guided_decoding(request, tool_call_parser_name=parser_name, sglang_tools=tools)
    if not is_forced(request.get("tool_choice")):
        return legacy or by_format or by_tools
    if by_format is not None and "structural_tag" in by_format:
        raise InvalidArgument(
            "tool_choice forces a tool call and cannot be combined with a structural_tag response format"
        )
    if legacy is not None and legacy != by_tools:
        raise InvalidArgument(
            "tool_choice forces a tool call and cannot be combined with an explicit guided_* constraint."
        )
    return by_tools


def _tokenize(request: Mapping[str, Any], tokenizer: Any, excludes_tools: bool) -> list[int]:
    choice, tools = request.get("tool_choice"), request.get("tools") or None
    named = named_function(choice)
    if choice == "none" and excludes_tools:
        tools = None
    elif tools is not None and named is not None:
        tools = [tool for tool in tools if _name(tool) == named]
    template = getattr(tokenizer, "chat_template", None)
    continues = bool(request.get("continue_final_message"))
    try:
        messages = normal_messages(
            request["messages"], takes_parts=_takes_parts(template if isinstance(template, str) else None)
        )
        made = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=not continues and request.get("add_generation_prompt") is not False,
            continue_final_message=continues,
            **(request.get("chat_template_kwargs") or {}),
        )
    except (jinja2.TemplateError, TypeError) as error:
        raise PreprocessError(f"the chat template refused the conversation: {error}") from error
    return list(made)


@lru_cache(maxsize=64)
def _takes_parts(template: str | None) -> bool:
    """Whether SGLang would hand a template content as a list of parts. Finding out takes as long as compiling it."""
    if template is None:
        return False
    module = import_extra("sglang.srt.parser.jinja_template_utils", "sglang")
    return bool(module.detect_jinja_template_content_format(template) == "openai")
