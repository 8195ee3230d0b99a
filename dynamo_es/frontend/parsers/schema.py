"""Which JSON type a parameter has that a model wrote as bare text, after its function's schema. Pure.

Formats like ``<parameter=n>42</parameter>`` do not tell 42 from "42"; the request's tools do. What the schema leaves
open is a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

Types = frozenset[str]

ALL: Types = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
STRING: Types = frozenset({"string"})
LISTED = "listed string"
"""A string that must be one of the schema's values (``enum``, ``const``): any other type that fits comes before it."""
_TEXT: Types = frozenset({"string", LISTED})
NOT_TEXT: Types = ALL - {"string"}
"""A value that is meant to be JSON; it becomes a string only if it is none."""
_MAX_DEPTH = 16
_MAX_NODES = 256
_MAX_PARTS = 32
_SPECIAL_BOOLEANS = {"true": "true", "false": "false"}


class ToolSchemas:
    """Schemas of a request's functions by name. Immutable; shared by all choices.

    Args:
        parameters: For each function the JSON schema of its parameters; None if it gave none.
    """

    __slots__ = ("_parameters",)

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = dict(parameters)

    def knows(self, name: str) -> bool:
        """Whether the request has a function of this name."""
        return name in self._parameters

    def schema(self, function: str, *path: str) -> tuple[Any, Any]:
        """Root schema of the function, and the schema at ``path`` of property names; None where there is none."""
        root = self._parameters.get(function)
        here: Any = root
        for name in path:
            here = child(root, here, name)
        return root, here

    def types(self, function: str, parameter: str) -> Types:
        """Types that the parameter may have; all of them if the schema does not say."""
        root, here = self.schema(function, parameter)
        return types_of(root, here)


def child(root: Any, schema: Any, name: str) -> Any:
    """Schema of a property; None if it is not known."""
    for option in options(root, schema):
        properties = option.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        extra = option.get("additionalProperties")
        if isinstance(extra, Mapping):
            return extra
    return None


def item(root: Any, schema: Any) -> Any:
    """Schema of an array's items; None if it is not known."""
    for option in options(root, schema):
        if isinstance(option.get("items"), Mapping):
            return option["items"]
    return None


def options(root: Any, schema: Any) -> list[Mapping[str, Any]]:
    """The schema with references followed, and all alternatives within it; bounded."""
    found: list[Mapping[str, Any]] = []
    waiting = [(schema, 0)]
    while waiting and len(found) < _MAX_NODES:
        here, depth = waiting.pop(0)
        if not isinstance(here, Mapping) or depth > _MAX_DEPTH:
            continue
        found.append(here)
        if "$ref" in here:
            waiting.append((_resolve(root, here["$ref"]), depth + 1))
        for name in ("anyOf", "oneOf", "allOf"):
            parts = here.get(name)
            if isinstance(parts, Sequence) and not isinstance(parts, str):
                waiting.extend((part, depth + 1) for part in parts[:_MAX_NODES])
    return found


def _resolve(root: Any, reference: Any) -> Any:
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    here = root
    for part in filter(None, unquote(reference[1:]).split("/")):
        key = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(here, Mapping) or key not in here:
            return None
        here = here[key]
    return here


def types_of(root: Any, schema: Any) -> Types:
    """Types that a schema allows, as far as keywords on types, values, references and combinations say."""
    return _types(root, schema, _Budget()) or ALL


class _Budget:
    """Schemas come from clients and may refer to themselves many times over: what is left open is any type."""

    __slots__ = ("depth", "nodes")

    def __init__(self) -> None:
        self.depth = _MAX_DEPTH
        self.nodes = _MAX_NODES


def _types(root: Any, schema: Any, budget: _Budget) -> Types:
    budget.nodes -= 1
    if not isinstance(schema, Mapping) or budget.nodes < 0 or budget.depth == 0:
        return ALL
    budget.depth -= 1
    allowed = _combined(root, schema, _declared(schema), budget)
    budget.depth += 1
    return allowed


def _declared(schema: Mapping[str, Any]) -> Types:
    allowed = ALL
    declared = schema.get("type")
    if declared is not None:
        names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
        allowed = frozenset(name for name in names if name in ALL) or ALL
        if "number" in allowed:
            allowed |= {"integer"}
        if schema.get("nullable") is True:
            allowed |= {"null"}
    if isinstance(schema.get("enum"), list) and schema["enum"]:
        allowed = _meet(allowed, frozenset().union(*map(_types_of_listed, schema["enum"][:_MAX_NODES])))
    elif "const" in schema:
        allowed = _meet(allowed, _types_of_listed(schema["const"]))
    return allowed


def _combined(root: Any, schema: Mapping[str, Any], allowed: Types, budget: _Budget) -> Types:
    if "$ref" in schema:
        allowed = _meet(allowed, _types(root, _resolve(root, schema["$ref"]), budget))
    for name in ("anyOf", "oneOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts:
            several = (_types(root, part, budget) for part in parts[:_MAX_PARTS])
            allowed = _meet(allowed, frozenset().union(*several))
    parts = schema.get("allOf")
    if isinstance(parts, list):
        for part in parts[:_MAX_PARTS]:
            allowed = _meet(allowed, _types(root, part, budget))
    return allowed


def _meet(some: Types, others: Types) -> Types:
    both = some & others
    if ("string" in some and LISTED in others) or ("string" in others and LISTED in some):
        both |= {LISTED}
    return both


def _types_of_listed(value: Any) -> Types:
    kind = _type_of_value(value)
    if kind == "string":
        return frozenset({LISTED})
    return frozenset({"number", "integer"}) if kind == "number" else frozenset({kind})


def _type_of_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def is_text(types: Types) -> bool:
    """Whether a value can be handed on as a string before it is read to its end."""
    return types == ALL or types <= _TEXT


def json_of(text: str, types: Types) -> str:
    """JSON text of a value that a model wrote as bare ``text``.

    A type other than string wins only if the text is of that type as a whole; where a string is possible too, only
    null does. A number keeps its spelling.
    """
    stripped = text.strip()
    if "null" in types and types != ALL and (stripped.lower() == "null" or stripped == "None"):
        return "null"
    if "string" in types and not _must_be_structure(stripped, types):
        return json.dumps(text, ensure_ascii=False)
    kind = _json_kind(stripped)
    if kind is not None and (kind in types or (kind == "number" and "integer" in types)):
        return stripped
    if (kind == "integer" and "number" in types) or kind == "string":
        return stripped
    if "boolean" in types and stripped.lower() in _SPECIAL_BOOLEANS:
        return _SPECIAL_BOOLEANS[stripped.lower()]
    literal = _python_literal(stripped, types)
    return json.dumps(text, ensure_ascii=False) if literal is None else literal


def _must_be_structure(stripped: str, types: Types) -> bool:
    """Text of an object or a list where one is allowed beside a string."""
    return types != ALL and _json_kind(stripped) in (types & {"object", "array"})


def _json_kind(text: str) -> str | None:
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return "integer"
    return _type_of_value(value)


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _python_literal(text: str, types: Types) -> str | None:
    """Models that know more Python than JSON write ``{'a': True}``, ``+1`` and ``01``."""
    if types & {"integer", "number"}:
        digits = text.removeprefix("+")
        if digits.isascii() and digits.replace(".", "", 1).isdigit():
            return str(int(digits)) if digits.isdigit() else str(float(digits))
    if not types & {"object", "array"} or text[:1] not in ("{", "["):
        return None
    try:
        value = ast.literal_eval(text)
        if _type_of_value(value) not in types or isinstance(value, set):
            return None
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
