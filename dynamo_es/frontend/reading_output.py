"""How the output of a chat request is read: its tools and choices, its model's parsers, its prompt. Pure."""

from __future__ import annotations

from typing import Any

from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.conversation import template_variables
from dynamo_es.frontend.parsers.choice import Choice, Parsing
from dynamo_es.frontend.parsers.registry import ChannelFormat, ReasoningFormat
from dynamo_es.frontend.parsers.schema import ToolSchemas
from dynamo_es.frontend.requests import ChatRequest, JsonObjectFormat, JsonSchemaFormat, NamedTool

_NOT_THINKING = ("disabled", "chat")


def parsing_of(request: ChatRequest, model: ServedModel, prompt: str | None) -> Parsing | None:
    """How the output is to be read; None: all of it is content.

    Args:
        request: Valid request.
        model: Whom it goes to.
        prompt: The rendered chat; None if the prompt came as tokens.
    """
    parsers = model.parsers
    choice, function = _choice(request)
    reasoning, thinking = parsers.reasoning, False
    if isinstance(reasoning, ChannelFormat):
        thinking = bool(reasoning.opens) and _ends_with(prompt, reasoning.opens)
    elif reasoning is not None:
        reasoning, thinking = _reasoning(request, model, reasoning, prompt)
    specials: dict[int, str] = {}
    if reasoning is not None:
        specials |= parsers.reasoning_specials
    if choice != "none":
        specials |= parsers.tool_specials
    parsing = Parsing(
        reasoning=reasoning,
        tools=parsers.tools,
        choice=choice,
        function=function,
        schemas=ToolSchemas({tool.function.name: tool.function.parameters for tool in request.tools or ()}),
        thinking=thinking,
        bound=choice in ("required", "named") or _is_bound(request),
        single=request.parallel_tool_calls is False,
        specials=specials,
    )
    return parsing if reasoning is not None or parsing.reads_calls else None


def _choice(request: ChatRequest) -> tuple[Choice, str]:
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return "none", ""
    if isinstance(choice, NamedTool):
        return "named", choice.function.name
    return ("required", "") if choice == "required" else ("auto", "")


def _is_bound(request: ChatRequest) -> bool:
    form = request.response_format
    return isinstance(form, JsonObjectFormat | JsonSchemaFormat) or request.guided_json is not None


def _reasoning(
    request: ChatRequest, model: ServedModel, reasoning: ReasoningFormat, prompt: str | None
) -> tuple[ReasoningFormat | None, bool]:
    """The format that applies, and whether the output begins within a thought.

    A prompt that ends with a mark decides it. Otherwise models whose thoughts have no opening mark begin with one,
    unless the request turns thinking off: then their output is content as it stands.
    """
    if _ends_with(prompt, reasoning.marks.opens):
        return reasoning, True
    if not reasoning.forced:
        return reasoning, False
    if _thinking_is_off(request, model.default_thinking_mode):
        return None, False
    return reasoning, not _ends_with(prompt, reasoning.marks.closes)


def _ends_with(prompt: str | None, marks: tuple[str, ...]) -> bool:
    return prompt is not None and prompt[-256:].rstrip().endswith(marks)


def _thinking_is_off(request: ChatRequest, default_mode: str | None) -> bool:
    variables: dict[str, Any] = template_variables(request, default_mode) or {}
    return (
        variables.get("enable_thinking") is False
        or variables.get("thinking") is False
        or variables.get("thinking_mode") in _NOT_THINKING
        or variables.get("force_nonempty_content") is True
    )
