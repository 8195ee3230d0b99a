from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.frontend.parsers.schema import ALL, STRING, ToolSchemas, is_text, json_of, types_of

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("field", "raw", "value"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, " a\n", " a\n"),
        (INTEGER, "42", 42),
        (INTEGER, "9007199254740993", 9007199254740993),
        (INTEGER, "x", "x"),
        ({"type": "number"}, "1e2", 100.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "+1", 1),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{'a': True}", {"a": True}),
        ({"type": "array"}, "[1, null]", [1, None]),
        ({"type": "array"}, "[1, __import__('os')]", "[1, __import__('os')]"),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "7", 7),
        ({"type": "string", "nullable": True}, "null", None),
        ({"anyOf": [INTEGER, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"type": "null"}, INTEGER]}, "7", 7),
        ({"anyOf": [{"type": "string"}, INTEGER]}, "42", "42"),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "42", 42),
        ({"anyOf": [{"const": "auto"}, INTEGER]}, "auto", "auto"),
        ({"anyOf": [{"type": "string"}, {"type": "object"}]}, '{"a": 1}', {"a": 1}),
        ({"allOf": [{"type": ["string", "integer"]}, INTEGER]}, "7", 7),
        ({"allOf": [{"type": "number"}, INTEGER]}, "7", 7),
        ({"type": ["string", "null"], "enum": ["null"]}, "null", "null"),
        ({"enum": [1, 2]}, "2", 2),
        ({"$ref": "#/$defs/S"}, "42", 42),
        ({"$ref": "#/$defs/a~1b"}, "42", "42"),
        ({"$ref": "#/$defs/missing"}, "42", "42"),
        ({"$ref": "https://example.invalid/x"}, "42", "42"),
        ({"$ref": "#/$defs/loop"}, "42", "42"),
        ({}, "42", "42"),
        (True, "42", "42"),
        (None, "42", "42"),
    ],
)
def test_value_of_bare_text(field: Any, raw: str, value: Any) -> None:
    root = {
        "$defs": {"S": INTEGER, "a/b": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}},
        "properties": {"x": field},
    }
    types = ToolSchemas({"f": root}).types("f", "x")
    found = json.loads(json_of(raw, types))
    assert (found, type(found)) == (value, type(value))


def test_what_the_schema_leaves_open_is_a_string() -> None:
    schemas = ToolSchemas({"f": {"properties": {"x": INTEGER}}, "g": None})
    assert schemas.types("f", "y") == schemas.types("g", "x") == schemas.types("other", "x") == ALL
    assert is_text(ALL)
    assert is_text(STRING)
    assert not is_text(schemas.types("f", "x"))


def test_a_schema_that_refers_to_itself_many_times_costs_little() -> None:
    root: dict[str, Any] = {"$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}] * 32}}}
    assert types_of(root, {"$ref": "#/$defs/A"}) == ALL


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["string", "#", "#/anyOf/0"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "anyOf", "allOf", "oneOf", "enum", "const", "$ref", "properties", "items", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(schema=JUNK, raw=st.text(max_size=8))
def test_any_schema_gives_json(schema: Any, raw: str) -> None:
    json.loads(json_of(raw, ToolSchemas({"f": {"properties": {"x": schema}}}).types("f", "x")))
    json.loads(json_of(raw, types_of(schema, schema)))
