"""What Dynamo's vLLM chat processor does before and after (``dynamo.frontend.prepost``).

Rendering, parsers and schemas are vLLM's own. It is the extra ``vllm`` and is imported only inside the functions that
need it; what decides about them is pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_es.errors import InvalidArgument
from dynamo_es.frontend.extras import import_extra
from dynamo_es.frontend.guidance import (
    Constraint,
    StructuralTags,
    attempts_structural_tag,
    is_forced,
    legacy_guided_decoding,
    named_constraint,
    named_function,
)
from dynamo_es.frontend.processor_messages import chat_variables
from dynamo_es.frontend.utils import PreprocessError, extract_mm_urls
from dynamo_es.frontend.vllm_output import StreamingPostProcessor, request_parser

if TYPE_CHECKING:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser.abstract_parser import Parser
    from vllm.reasoning import ReasoningParser
    from vllm.renderers.base import BaseRenderer
    from vllm.tokenizers import TokenizerLike
    from vllm.tool_parsers import ToolParser

__all__ = (
    "PreprocessResult",
    "StreamingPostProcessor",
    "build_tool_call_guided_decoding",
    "preprocess_chat_request",
)

_PROTOCOL = "vllm.entrypoints.openai.chat_completion.protocol"
_STRUCTURED = ("json", "regex", "choice", "grammar", "structural_tag")
_FORCED = (
    "tool_choice forces a tool call and cannot be combined with an explicit guided_* or structured_outputs constraint."
)


@dataclass
class PreprocessResult:
    """A chat request that is ready for a worker, and how its output is read.

    Attributes:
        request_for_sampling: The request as vLLM has it, adjusted by its parsers, without what binds the output.
        tool_parser: vLLM's for this request, or None.
        chat_template_kwargs: Variables of the template.
        engine_prompt: As vLLM's renderer made it.
        prompt_token_ids: The prompt.
        guided_decoding: What binds the output, or None.
        uses_dynamo_json_tool_call_fallback: A demanded call is bound to JSON that vLLM's parser does not read itself.
    """

    request_for_sampling: ChatCompletionRequest
    tool_parser: ToolParser | None
    chat_template_kwargs: dict[str, Any]
    engine_prompt: dict[str, Any]
    prompt_token_ids: list[int]
    guided_decoding: Constraint | None = None
    uses_dynamo_json_tool_call_fallback: bool = False


def build_tool_call_guided_decoding(
    request: ChatCompletionRequest,
    tool_parser: ToolParser | None,
    *,
    parser_guided_decoding: Constraint | None = None,
    structural_tag_mode: str = "off",
    structural_tag_scope: str = "auto",
    structural_tag_schema: str = "auto",
) -> Constraint | None:
    """The constraint of a request's tools.

    Args:
        request: vLLM's.
        tool_parser: The model's, or None.
        parser_guided_decoding: What the parser itself asked for, or None.
        structural_tag_mode, structural_tag_scope, structural_tag_schema: See ``guidance.StructuralTags``.

    Returns:
        A structural tag where one is wanted and the parser has it; else what the parser asked for; else the JSON
        schema of a demanded call. None if nothing binds the output.
    """
    plain = request.model_dump(include={"tools", "tool_choice", "parallel_tool_calls"}, exclude_unset=True)
    choice, tools = plain.get("tool_choice"), plain.get("tools") or []
    if not tools or choice == "none":
        return None
    tags = StructuralTags(structural_tag_mode, structural_tag_scope, structural_tag_schema)
    if tool_parser is not None and attempts_structural_tag(plain, tags):
        tag = _structural_tag(request, tool_parser, tags)
        if tag is not None:
            return tag
    if parser_guided_decoding is not None:
        return parser_guided_decoding
    if not is_forced(choice) or (tool_parser is not None and not tool_parser.supports_required_and_named):
        return None
    named = named_function(choice)
    if named is not None:
        return named_constraint(tools, named)
    return _list_constraint(request, plain.get("parallel_tool_calls") is False)


def _list_constraint(request: ChatCompletionRequest, single: bool) -> Constraint | None:
    utils = import_extra("vllm.tool_parsers.utils", "vllm")
    schema = utils.get_json_schema_from_tools(request.tool_choice, request.tools)
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is None:
        return None
    return {"json": {**schema, "maxItems": 1} if single else schema}


def _structural_tag(request: ChatCompletionRequest, parser: ToolParser, tags: StructuralTags) -> Constraint | None:
    """The tag of the parser's own format; None if it has none for these tools."""
    if parser.structural_tag_model is None:
        return None
    levels = import_extra("vllm.tool_parsers.structural_tag_registry", "vllm").ToolStrictLevel
    level = levels.from_name("parameter" if tags.schema == "strict" else "auto")
    try:
        tag = parser.get_structural_tag(request, reasoning=False, strict_level=level)
    except (ValueError, TypeError, KeyError):
        return None
    return None if tag is None else {"structural_tag": tag.model_dump(by_alias=True)}


async def preprocess_chat_request(
    request: dict[str, Any] | ChatCompletionRequest,
    *,
    tokenizer: TokenizerLike,
    renderer: BaseRenderer[Any],
    tool_parser_class: type[ToolParser] | None,
    exclude_tools_when_tool_choice_none: bool = True,
    enable_auto_tool_choice: bool = False,
    default_chat_template_kwargs: dict[str, Any] | None = None,
    default_thinking_mode: str | None = None,
    structural_tag_mode: str = "off",
    structural_tag_scope: str = "auto",
    structural_tag_schema: str = "auto",
    reasoning_parser_class: type[ReasoningParser] | None = None,
) -> PreprocessResult:
    """Check, render and tokenize a chat request; the renderer does it on its own thread.

    Args:
        request: The client's, as JSON, or vLLM's.
        tokenizer: The model's.
        renderer: vLLM's, of the model.
        tool_parser_class: vLLM's parser of calls, or None.
        exclude_tools_when_tool_choice_none: Templates see no tools if none may be called.
        enable_auto_tool_choice: Whether the model may call where the request does not demand it.
        default_chat_template_kwargs: Variables of the template that requests may override.
        default_thinking_mode: ``enabled``, ``disabled`` or None: what holds if the request does not say.
        structural_tag_mode, structural_tag_scope, structural_tag_schema: See ``guidance.StructuralTags``.
        reasoning_parser_class: vLLM's parser of thoughts, or None.

    Raises:
        InvalidArgument: vLLM does not take the request, or two things are to bind the output.
        PreprocessError: It has media.
    """
    plain = dict(request) if isinstance(request, dict) else request.model_dump(exclude_unset=True)
    explicit = _explicit_constraint(plain)
    if is_forced(plain.get("tool_choice")):
        if explicit is not None:
            raise InvalidArgument(_FORCED)
        plain.pop("response_format", None)
    _check_media(plain)
    forced = is_forced(plain.get("tool_choice"))
    made = _vllm_request(
        plain, {**(default_chat_template_kwargs or {}), **chat_variables(plain, default_thinking_mode)}
    )
    reads_calls = tool_parser_class is not None and _reads_calls(made, enable_auto_tool_choice)
    parser = request_parser(tool_parser_class if reads_calls else None, reasoning_parser_class, tokenizer, made)
    by_format = _taken(made)
    adjusted = _adjusted(made, parser)
    tool_parser = None if parser is None else parser.tool_parser
    by_parser = _taken(adjusted)
    by_tools = build_tool_call_guided_decoding(
        adjusted,
        tool_parser,
        parser_guided_decoding=by_parser if reads_calls else None,
        structural_tag_mode=structural_tag_mode,
        structural_tag_scope=structural_tag_scope,
        structural_tag_schema=structural_tag_schema,
    )
    guided = by_tools if forced else explicit or by_format or by_tools
    tools = None if adjusted.tools is None else [tool.model_dump(exclude_none=True) for tool in adjusted.tools]
    if adjusted.tool_choice == "none" and exclude_tools_when_tool_choice_none:
        tools = None
    prompt = await _rendered(adjusted, renderer, tools)
    return PreprocessResult(
        request_for_sampling=adjusted,
        tool_parser=tool_parser,
        chat_template_kwargs=adjusted.chat_template_kwargs or {},
        engine_prompt=prompt,
        prompt_token_ids=list(prompt["prompt_token_ids"]),
        guided_decoding=guided,
        uses_dynamo_json_tool_call_fallback=forced and (guided is None or "structural_tag" not in guided),
    )


def _adjusted(request: ChatCompletionRequest, parser: Parser | None) -> ChatCompletionRequest:
    """The request as each parser wants it; tags for calls are settled here, by the deployment's options."""
    if parser is None:
        return request
    for part in (parser.tool_parser, parser.reasoning_parser):
        if part is not None:
            request = part.adjust_request(request)
    return request


def _explicit_constraint(request: Mapping[str, Any]) -> Constraint | None:
    """What ``guided_*`` or ``structured_outputs`` bind the output to."""
    legacy = legacy_guided_decoding(request)
    structured = request.get("structured_outputs")
    if not isinstance(structured, Mapping):
        return legacy
    found = {name: structured[name] for name in _STRUCTURED if structured.get(name) is not None}
    return legacy or found or None


def _check_media(request: Mapping[str, Any]) -> None:
    try:
        media, _ = extract_mm_urls(request.get("messages") or ())
    except ValueError as error:
        raise PreprocessError(str(error)) from error
    if media is not None:
        # vLLM's renderer would fetch what a client names from inside the fleet.
        raise PreprocessError("images, audio and video are not taken by the vLLM chat processor; send text")


def _vllm_request(request: Mapping[str, Any], variables: dict[str, Any]) -> ChatCompletionRequest:
    model = import_extra(_PROTOCOL, "vllm").ChatCompletionRequest
    errors = import_extra("vllm.exceptions", "vllm")
    given = {name: value for name, value in request.items() if name in model.model_fields and value is not None}
    given.pop("structured_outputs", None)
    given["chat_template_kwargs"] = variables
    try:
        made: ChatCompletionRequest = model.model_validate(given)
    except (errors.VLLMClientError, ValueError) as error:
        raise InvalidArgument(f"Validation: {_first_message(error)}") from error
    return made


def _first_message(error: Exception) -> str:
    """What is wrong, without the values: a whole message of pydantic's repeats the request."""
    if hasattr(error, "errors"):
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"{place}: {first['msg']}" if place else str(first["msg"])
    return str(error)


def _reads_calls(request: ChatCompletionRequest, automatic: bool) -> bool:
    choice = request.tool_choice
    if not request.tools or choice in ("none", None):
        return False
    return automatic or choice != "auto"


def _taken(request: ChatCompletionRequest) -> Constraint | None:
    """What binds a request's output as vLLM has it; taken out of it, since the worker is told and not vLLM here."""
    structured = request.extract_structured_outputs()
    request.structured_outputs = None
    request.response_format = None
    if structured is None:
        return None
    if getattr(structured, "json_object", None):
        return {"json": {"type": "object"}}
    found = {name: getattr(structured, name, None) for name in _STRUCTURED}
    told = {name: _parsed(value) for name, value in found.items() if value is not None}
    return told or None


def _parsed(value: Any) -> Any:
    """A schema or tag that vLLM holds as text, as an object."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


async def _rendered(
    request: ChatCompletionRequest, renderer: BaseRenderer[Any], tools: list[dict[str, Any]] | None
) -> dict[str, Any]:
    params = request.build_chat_params(None, "auto").with_defaults({"tools": tools})
    errors = import_extra("vllm.exceptions", "vllm")
    try:
        _, prompts = await renderer.render_chat_async(
            [request.messages], params, request.build_tok_params(renderer.model_config)
        )
    except (errors.VLLMClientError, ValueError, TypeError) as error:
        raise PreprocessError(str(error)) from error
    prompt: dict[str, Any] = prompts[0]
    return prompt
