"""Bounds of the parsers, and what happens there."""

from __future__ import annotations

import json
import time

import pytest

from dynamo_es.frontend.parsers.tape import MAX_UNDECIDED, Machine
from dynamo_es.frontend.parsers.writer import MAX_VALUE
from tests.unit.frontend.parsers.support import arguments_of, parser_of, parsing, read, whole


def chunked(text: str, size: int) -> list[str]:
    return [text[place : place + size] for place in range(0, len(text), size)]


def held(how: object) -> int:
    """Characters that a parser's stages hold back."""
    machines: list[Machine] = how._machines  # type: ignore[attr-defined]
    return sum(len(machine._tape.text) - machine._tape.pos for machine in machines)


def test_what_cannot_be_decided_within_the_bound_is_content() -> None:
    text = '<tool_call>{"x": "' + "a" * (2 * MAX_UNDECIDED) + '", "name": "f", "arguments": {}}</tool_call>'
    for chunks in ([text], chunked(text, 1000)):
        found = read(parsing("hermes"), chunks)
        assert (found.calls, found.content) == ([], text)


def test_a_parser_holds_no_more_than_the_bound() -> None:
    parser = parser_of(parsing("hermes", "qwen3"))
    parser.feed('<tool_call>{"x": "')
    most = 0
    for _ in range(200):
        parser.feed("a" * 1000)
        most = max(most, held(parser))
    assert most <= MAX_UNDECIDED + 1000
    assert held(parser) == 0


def test_a_value_beyond_the_bound_becomes_a_string_and_is_handed_on() -> None:
    value = "[" + "1, " * (MAX_VALUE // 2) + "1]"
    text = f"<tool_call>\n<function=get_weather>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    expected = [("get_weather", {"a": value})]
    assert arguments_of(whole(parsing("qwen3_coder"), text)) == expected
    assert arguments_of(read(parsing("qwen3_coder"), chunked(text, 65536))) == expected
    small = text.replace(value, "[1, 2]")
    assert arguments_of(whole(parsing("qwen3_coder"), small)) == [("get_weather", {"a": [1, 2]})]


@pytest.mark.parametrize("name", ["pythonic", "gemma4"])
def test_nesting_is_bounded(name: str) -> None:
    deep = "[" * 100_000
    text = {"pythonic": f"[get_weather(a={deep}", "gemma4": f"<|tool_call>call:f{{a:{deep}"}[name]
    for chunks in ([text], chunked(text, 1000)):
        found = read(parsing(name), chunks)
        assert len(found.calls) == 1
        assert len(found.content) > 99_000


def test_deeply_nested_arguments_are_handed_on_as_they_are() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000 + "</tool_call>x"
    found = whole(parsing("hermes"), text)
    assert found.calls == [("f", '{"a": ' + "[" * 5000)]
    assert found.content == "x"


def per_token(tokens: int) -> float:
    """Best of three: seconds a token through thoughts, text and a call with long arguments."""
    third = tokens // 3
    call = '<tool_call>{"name": "f", "arguments": {"s": "'
    chunks = ["<think>", *["word "] * third, "</think>", *["word "] * third, call, *["word "] * third]
    chunks += ['"}}', "</tool_call>"]
    best = float("inf")
    for _ in range(3):
        parser = parser_of(parsing("hermes", "qwen3"))
        start = time.process_time()
        for chunk in chunks:
            parser.feed(chunk)
        parser.feed("", over=True)
        best = min(best, time.process_time() - start)
    return best / tokens


def test_SCALE_11_time_a_token_does_not_grow_with_the_output() -> None:
    per_token(1000)
    assert per_token(50_000) < 2 * per_token(3000)


def test_long_streams_of_marks_that_are_none_stay_cheap() -> None:
    parser = parser_of(parsing("pythonic", "qwen3"))
    start = time.process_time()
    for _ in range(20_000):
        parser.feed("[x(<")
    assert time.process_time() - start < 5
    assert json.dumps(parser.feed("", over=True).content) is not None
