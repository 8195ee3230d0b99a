"""Places of faults in bodies."""

from __future__ import annotations

import pytest

from dynamo_es.frontend.json_places import fault_offset, open_member, value_end


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"a": "x", "b": 1}', b'{"a": "x"'),
        (b'{"a": "x\\"y"}', b'{"a": "x\\"y"'),
        (b'{"a": true}', b'{"a": true'),
        (b'{"a": 15, "b": 1}', b'{"a": 15,'),
        (b'{"a": [1]}  ', b'{"a": [1]}'),
        (b'{"b": 1}', b'{"b": 1}'),
    ],
)
def test_error_of_a_plain_member_is_behind_its_value(body: bytes, expected: bytes) -> None:
    assert body[: value_end(body, "a")] == expected.ljust(len(expected))


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a":', "a"),
        (b'{"a": {"b": [1,', "a"),
        (b'{"a": 1, "b": tru', "b"),
        (b'{"a": ":,{", "b', None),
        (b'{"a": 1,', None),
        (b"{", None),
        (b"[1,", None),
        (b"", None),
    ],
)
def test_broken_json_breaks_off_within_a_member(body: bytes, name: str | None) -> None:
    assert open_member(body) == name


def test_error_within_a_structure_of_its_own_is_behind_what_is_wrong() -> None:
    body = b'{"foo": 1, "nvext": {"foo": 1, "x": "y"}, "b": 2}'
    assert body[: fault_offset(body, "nvext", "unknown field `foo`, expected")].endswith(b'"nvext": {"foo"')
    assert body[: fault_offset(body, "nvext", 'invalid type: string "y", expected')].endswith(b'"x": "y"')
    assert fault_offset(body, "nvext", "unknown field `zz`") == len(body)
    assert fault_offset(body, "b", "unknown field `foo`") == len(body)
    assert fault_offset(body + b" \n", None, "missing field `c`") == len(body)
