from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.frontend.parsers.json_scan import MAX_DEPTH, JsonScanner
from tests.unit.frontend.parsers.support import cut_texts

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.builds(
    lambda value, indent, ascii_only: json.dumps(value, indent=indent, ensure_ascii=ascii_only),
    st.lists(VALUES, max_size=3) | st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
)


def scan(chunks: list[str]) -> tuple[str, str, JsonScanner]:
    """Text of the value, what came after it, and the scanner."""
    scanner = JsonScanner()
    value, rest = "", ""
    for chunk in chunks:
        if scanner.done or scanner.bad:
            rest += chunk
            continue
        place, text = scanner.scan(chunk, 0)
        value += text
        rest += chunk[place:]
    return value, rest, scanner


@given(cut=cut_texts(DOCUMENTS.map(lambda text: text + "  </end> {")))
def test_a_value_ends_where_it_ends(cut: tuple[str, list[str]]) -> None:
    text, chunks = cut
    value, rest, scanner = scan(chunks)
    assert scanner.done
    assert (value, rest) == (text.removesuffix("  </end> {"), "  </end> {")


@given(cut=cut_texts(st.text('{}[]",:\\tfn01.-e /u', max_size=20)))
def test_what_is_told_complete_is_json_and_the_cut_does_not_matter(cut: tuple[str, list[str]]) -> None:
    text, chunks = cut
    value, rest, scanner = scan(chunks)
    assert (value, rest, scanner.done, scanner.bad) == (*scan([text])[:2], scan([text])[2].done, scan([text])[2].bad)
    if scanner.done and "u" not in value:
        json.loads(value)
    if scanner.bad or scanner.done:
        return
    assert rest == ""


@pytest.mark.parametrize(
    "text", ['{"a" 1}', "{a: 1}", "[1 2]", "{,}", "[1,]", '{"a": tru}', '{"a": 01}', "[+1]", "]", '{"a": 1]', "[NaN]"]
)
def test_malformed_text_is_bad_where_it_shows(text: str) -> None:
    assert scan([text])[2].bad
    assert not scan([text])[2].done


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\tz"}', {"a": "x\ny\tz"}),
        ('{"a": "\\d\\w"}', {"a": "\\d\\w"}),
        ('{"a": "\\\n"}', {"a": "\\\n"}),
        ('{"a": "\\\\d \\" \\u00e9"}', {"a": '\\d " é'}),
    ],
)
def test_strings_are_mended(text: str, value: Any) -> None:
    for chunks in ([text], list(text)):
        mended, _, scanner = scan(chunks)
        assert scanner.done
        assert json.loads(mended) == value


def test_nesting_is_bounded() -> None:
    assert scan(["[" * MAX_DEPTH + "]" * MAX_DEPTH])[2].done
    assert scan(["[" * (MAX_DEPTH + 1)])[2].bad


@given(value=st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none())
def test_a_bare_word_is_complete_at_the_end_only(value: Any) -> None:
    scanner = JsonScanner()
    scanner.scan(json.dumps(value), 0)
    assert not scanner.done
    scanner.finish()
    assert scanner.done
