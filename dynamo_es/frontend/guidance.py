"""What binds a model's output to a form, as Dynamo's chat processors settle it (spec/frontend.md 8.1, 4 and 5). Pure.

A constraint is a mapping with one of ``json``, ``regex``, ``grammar``, ``choice`` and ``structural_tag``, as workers
take it in ``sampling_options.guided_decoding``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from dynamo_es.errors import InvalidArgument

ToolChoiceKind = Literal["none", "auto", "required", "named", "other"]
Constraint = dict[str, Any]

_FORCED = ("required", "named")
_LEGACY = ("json", "regex", "grammar", "choice")
EMPTY_ARGUMENTS = r"\{\}"


class StructuralTags(NamedTuple):
    """How a deployment uses structural tags: triggers inside a model's own format of calls.

    Attributes:
        mode: ``on`` or ``off``.
        scope: ``always``, or ``auto``: where a request asks for strict calls.
        schema: How strictly arguments are bound: ``auto`` or what the parser knows besides.
    """

    mode: str = "off"
    scope: str = "auto"
    schema: str = "auto"


def legacy_guided_decoding(request: Mapping[str, Any]) -> Constraint | None:
    """The constraint of a request's ``guided_*`` members; None without one. An empty list of choices is none.

    Raises:
        InvalidArgument: There are two, or choices that are no list of texts.
    """
    found: Constraint = {}
    for name in _LEGACY:
        value = request.get(f"guided_{name}")
        if value is None or (name == "choice" and value == []):
            continue
        if name == "choice":
            _check_choices(value)
        found[name] = value
    if len(found) > 1:
        raise InvalidArgument(f"Only one guided-decoding constraint can be set; received: {', '.join(found)}")
    if found and request.get("guided_whitespace_pattern") is not None:
        found["whitespace_pattern"] = request["guided_whitespace_pattern"]
    return found or None


def _check_choices(value: Any) -> None:
    if not isinstance(value, list):
        raise InvalidArgument(f"guided_choice must be a list of strings; received {type(value).__name__}")
    if not all(isinstance(one, str) for one in value):
        raise InvalidArgument("guided_choice must be a list of strings; one of its items is none")


def runtime_structural_tag_options(runtime_config: Mapping[str, Any] | None) -> StructuralTags:
    """A model card's settings: ``structural_tag`` (an object turns them on, null off), else ``structural_tag_mode``."""
    config = runtime_config or {}
    given = config.get("structural_tag")
    if isinstance(given, Mapping):
        return StructuralTags("on", str(given.get("scope") or "auto"), str(given.get("schema") or "auto"))
    if "structural_tag" in config:
        return StructuralTags()
    return StructuralTags(str(config.get("structural_tag_mode") or "off"))


def should_attempt_structural_tag(
    *,
    mode: str,
    scope: str,
    tool_choice_kind: ToolChoiceKind,
    has_tools: bool,
    any_explicit_strict: bool,
    parallel_tool_calls_explicitly_false: bool,
) -> bool:
    """Whether a request's calls are to be bound by a structural tag, if its parser has one."""
    if mode != "on" or not has_tools:
        return False
    if tool_choice_kind in _FORCED:
        return True
    if tool_choice_kind != "auto":
        return False
    return scope == "always" or any_explicit_strict or parallel_tool_calls_explicitly_false


def tool_choice_kind(choice: Any) -> ToolChoiceKind:
    """Kind of a request's ``tool_choice``; one that is not said is ``auto``."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        return choice if choice in ("none", "auto", "required") else "other"  # type: ignore[return-value]
    return "named" if named_function(choice) is not None else "other"


def named_function(choice: Any) -> str | None:
    """The function that a ``tool_choice`` names; None if it names none."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def is_forced(choice: Any) -> bool:
    """Whether a ``tool_choice`` demands a call."""
    return tool_choice_kind(choice) in _FORCED


def attempts_structural_tag(request: Mapping[str, Any], tags: StructuralTags) -> bool:
    """``should_attempt_structural_tag`` for a request as JSON."""
    tools = request.get("tools") or ()
    return should_attempt_structural_tag(
        mode=tags.mode,
        scope=tags.scope,
        tool_choice_kind=tool_choice_kind(request.get("tool_choice")),
        has_tools=bool(tools),
        any_explicit_strict=any(function_of(tool).get("strict") is True for tool in tools),
        parallel_tool_calls_explicitly_false=request.get("parallel_tool_calls") is False,
    )


def function_of(tool: Any) -> Mapping[str, Any]:
    """The function of a tool as JSON; empty if it has none."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def named_constraint(tools: Sequence[Any], name: str) -> Constraint | None:
    """The constraint of a demanded function's arguments; a function without any must get ``{}``."""
    for tool in tools:
        function = function_of(tool)
        if function.get("name") == name:
            schema = function.get("parameters")
            return {"regex": EMPTY_ARGUMENTS} if takes_nothing(schema) else {"json": schema}
    return None


def takes_nothing(schema: Any) -> bool:
    """Whether a function's parameters are closed and there are none."""
    return (
        isinstance(schema, Mapping)
        and schema.get("type", "object") == "object"
        and not schema.get("properties")
        and schema.get("additionalProperties") is False
    )
