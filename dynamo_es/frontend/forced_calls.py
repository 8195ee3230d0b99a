"""The JSON schema that binds the output of a request which demands a call (spec/frontend.md 4.4). Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.requests import ChatRequest, NamedTool, Tool

_DEFINITIONS = ("$defs", "definitions")


def forced_call_schema(request: ChatRequest) -> dict[str, Any] | None:
    """A named function's parameters; for ``required`` a list of calls; None if the model may choose.

    Raises:
        ApiError: 400; two functions define different things under one name of ``$defs``.
    """
    choice, tools = request.tool_choice, request.tools or ()
    if isinstance(choice, NamedTool):
        found = next(tool for tool in tools if tool.function.name == choice.function.name)
        return _parameters(found)
    return _list_of_calls(tools) if choice == "required" and tools else None


def _parameters(tool: Tool) -> dict[str, Any]:
    schema = tool.function.parameters
    return dict(schema) if schema is not None else {"type": "object", "properties": {}}


def _list_of_calls(tools: Sequence[Tool]) -> dict[str, Any]:
    """References in a function's schema begin at its root, so what they refer to moves to the root of the list's."""
    definitions: dict[str, dict[str, Any]] = {}
    options = []
    for tool in tools:
        parameters = _parameters(tool)
        for kind in _DEFINITIONS:
            defined = parameters.pop(kind, None)
            if isinstance(defined, Mapping):
                _merge(definitions.setdefault(kind, {}), defined)
        options.append(
            {
                "properties": {"name": {"type": "string", "enum": [tool.function.name]}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    return {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": options}, **definitions}


def _merge(into: dict[str, Any], defined: Mapping[str, Any]) -> None:
    for name, schema in defined.items():
        if into.setdefault(name, schema) != schema:
            raise ApiError(
                400,
                f'Validation: tool_choice is "required" and two tools define `{name[:64]}` differently in `$defs`; '
                "rename one",
                param="tools",
                code="invalid_value",
            )
