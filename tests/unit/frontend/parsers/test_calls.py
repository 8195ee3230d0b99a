"""Every tool-call format: what a model writes in it is what a client gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from dynamo_es.frontend.parsers.registry import TOOL_PARSERS
from tests.unit.frontend.parsers.support import (
    WRITERS,
    Call,
    arguments_of,
    babble,
    calls,
    distinct,
    parser_of,
    parsing,
    read,
    whole,
)

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOOL_NAMES = distinct(TOOL_PARSERS)
TWO = [("get_weather", {"s": "Paris", "n": 3}), ("get_time", {})]
# Dynamo's names (spec/frontend.md 4.4).
# fmt: off
NAMES = (
    "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseek-v4", "deepseekv4", "deepseek_v41",
    "default", "gemma4", "gemma-4", "glm45", "glm47", "harmony", "hermes", "inkling", "jamba", "kimi_k2", "kimi_k25",
    "kimi_k3", "kimi-k3", "llama3_json", "minimax_m2", "minimax_m3", "minimax-m3", "minimax_m3_nom",
    "minimax-m3-nom", "mistral", "muse", "muse_glimmer", "nemotron_deci", "nemotron_nano", "phi4", "pythonic",
    "qwen25", "qwen3", "qwen3_coder",
)
# fmt: on
# These drop marks that stand alone: they are framing, not text.
FRAMED = {"harmony", "inkling", "kimi-k3", "muse", "pythonic", "deepseek_v3", "deepseek_v3_1", "kimi_k2"}


def test_all_names_of_dynamo_are_known() -> None:
    assert sorted(TOOL_PARSERS) == sorted(NAMES)
    assert sorted(WRITERS) == sorted(NAMES)


@pytest.mark.parametrize("name", TOOL_NAMES)
@QUICK
@given(said=calls())
def test_calls_come_through_as_they_were_meant(name: str, said: list[Call]) -> None:
    found = whole(parsing(name), WRITERS[name](said))
    assert arguments_of(found) == said
    assert found.content.strip() == ""
    assert found.reasoning == ""


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_what_an_escape_names_can_be_sent(name: str) -> None:
    written = WRITERS[name]([("get_\u2603", {"s\u2603": "a\u2603b"})]).replace("\u2603", "\\ud800")
    found = whole(parsing(name), written)
    json.dumps([found.content, found.calls], ensure_ascii=False).encode()


@pytest.mark.parametrize("name", NAMES)
def test_parallel_calls_with_text_before(name: str) -> None:
    bare = name in ("llama3_json", "pythonic")
    before = "" if bare else "I look. "
    found = whole(parsing(name), before + WRITERS[name](TWO))
    assert arguments_of(found) == TWO
    assert found.content.strip() == before.strip()
    assert len(set(found.ids)) == 2


@pytest.mark.parametrize("name", NAMES)
def test_only_the_first_call_without_parallel_calls(name: str) -> None:
    found = whole(parsing(name, single=True), WRITERS[name](TWO))
    assert arguments_of(found) == TWO[:1]


@pytest.mark.parametrize("name", NAMES)
def test_PROTO_02_arguments_are_the_same_in_one_delta_in_two_and_by_token(name: str) -> None:
    text = WRITERS[name](TWO)
    expected = whole(parsing(name), text)
    assert all(arguments for _, arguments in expected.calls)
    for size in (1, 4, len(text) // 2):
        chunks = [text[place : place + size] for place in range(0, len(text), size)]
        assert read(parsing(name), chunks) == expected


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_PROTO_03_long_arguments_are_streamed(name: str) -> None:
    said = [("get_weather", {"s": "lorem ipsum " * 170})]
    text = WRITERS[name](said)
    parser = parser_of(parsing(name))
    steps = [parser.feed(text[place : place + 10]) for place in range(0, len(text), 10)]
    deltas = [one for step in steps for one in step.calls]
    assert [one.call for one in deltas if one.id is not None] == [0]
    assert deltas[0].name == "get_weather"
    assert len(deltas) > (100 if name != "muse" else 1), "a value that may be any JSON is known at its end"
    first = next(place for place, step in enumerate(steps) if step.calls)
    assert first < len(steps) / 4 or name == "muse"
    assert json.loads("".join(one.arguments for one in deltas) + _rest(parser)) == said[0][1]


def _rest(parser: Any) -> str:
    return "".join(one.arguments for one in parser.feed("", over=True).calls)


@pytest.mark.parametrize("name", [name for name in TOOL_NAMES if name not in FRAMED])
@QUICK
@given(text=babble(("<tool_call>", "[TOOL_CALLS]", "{", "}")))
def test_nothing_is_lost_of_a_text_without_calls(name: str, text: str) -> None:
    found = whole(parsing(name), text)
    if not found.calls:
        rest = text.removeprefix(found.content)
        assert rest.strip() in ("", *TOOL_PARSERS[name].markers), "only a mark at the very end says nothing"


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_text_without_marks_is_content_as_it_stands(name: str) -> None:
    text = "  a < b, {x} and [y](z) | 'q'\n\n```json\n{\"k\": [1]}\n```  \n"
    assert whole(parsing(name), text).content == text


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_an_incomplete_call_stays_incomplete(name: str) -> None:
    text = WRITERS[name]([("get_weather", {"s": "rm -rf /tmp/build"})])
    found = whole(parsing(name), text[: text.index("/tmp") + 1])
    for _, arguments in found.calls:
        with pytest.raises(ValueError):
            json.loads(arguments)


def test_PROTO_01_marks_of_a_call_never_come_out() -> None:
    from dynamo_es.frontend.parsers.choice import Parsing
    from dynamo_es.frontend.parsers.json_blocks import JsonBlocks
    from dynamo_es.frontend.parsers.registry import ToolFormat

    blocks = JsonBlocks(("<|tool|>",), ("<|/tool|>",))
    how = Parsing(tools=ToolFormat(lambda tape, tools: blocks(tape), blocks.markers), choice="auto")
    text = 'Hi<|tool|>{"name":"f","arguments":{"a":1}}<|/tool|>'
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            found = read(how, [text[:first], text[first:second], text[second:]])
            assert (found.content, found.calls) == ("Hi", [("f", '{"a":1}')])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [("f", '{"a": 1}')]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', [("f", "{}")]),
        ("hermes", '<tool_call>{"name":"f","arguments":{}}{"name":"g","arguments":{}}</tool_call>', ["f", "g"]),
        (
            "hermes",
            '<tool_call>{"id": 1, "name": "f", "arguments": {"a": 1}, "x": [2]}</tool_call>',
            [("f", '{"a": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"r": "\\d+\t"}}', [("f", '{"r": "\\\\d+\\t"}')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', ["f", "g"]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ("llama3_json", '{"name": "Bob", "age": 3}', []),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ("mistral", '[{"name": "f", "arguments": {"a": 1}}]', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', [("f", '{"a": 1}'), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]x1y2z3w4v[ARGS]{"a": 1}', [("f", '{"a": 1}')]),
        ("phi4", "import functools\nfunctools.reduce()", []),
        ("kimi_k2", '<|tool_call_begin|>functions.f:3<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', ["f"]),
        (
            "qwen3_coder",
            "<function=f>\n<parameter=s>\na\n</parameter>\n</function>\n</tool_call>",
            [("f", '{"s":"a"}')],
        ),
        ("minimax_m2", '<invoke name="f"><parameter name="s">a</parameter></invoke>', [("f", '{"s":"a"}')]),
        ("deepseek_v4", '<｜DSML｜invoke name="f"/>', [("f", "{}")]),
        (
            "deepseek_v41",
            '<｜DSML｜ calls><｜DSML｜ invoke name="f">{"a": 1}</｜DSML｜ invoke></｜DSML｜ calls>',
            ["f"],
        ),
        ("pythonic", "<|python_start|>[get_time()]<|python_end|>", [("get_time", "{}")]),
        ("pythonic", "See [link](http://x) and [foo(a=1)]", []),
        ("pythonic", "[get_weather(s='it\\'s \\u00e9', a=[1, (2,)], o={'k': None})]", ["get_weather"]),
        ("harmony", "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", [("f", "{}")]),
        ("harmony", " to=functions.f<|channel|>commentary<|message|>{}<|call|>", [("f", "{}")]),
    ],
)
def test_ways_of_writing(name: str, text: str, expected: list[Any]) -> None:
    found = whole(parsing(name), text)
    if expected and isinstance(expected[0], str):
        assert [call[0] for call in found.calls] == expected
    else:
        assert found.calls == expected
    if not expected:
        assert found.content == text
    for _, arguments in found.calls:
        json.loads(arguments)


def test_kimi_calls_have_the_ids_that_the_model_gave_them() -> None:
    assert whole(parsing("kimi_k2"), WRITERS["kimi_k2"](TWO)).ids == ["functions.get_weather:0", "functions.get_time:1"]
    assert whole(parsing("kimi_k3"), WRITERS["kimi_k3"](TWO)).ids == ["get_weather:0", "get_time:1"]


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "deepseek_v3_1", "harmony", "mistral", "inkling"])
def test_marks_within_json_strings_are_text(name: str) -> None:
    said = [("get_weather", {"s": " ".join(TOOL_PARSERS[name].markers) + " <think>x</think>"})]
    reasoning = {"harmony": "gpt_oss", "inkling": "inkling"}.get(name, "qwen3")
    found = whole(parsing(name, reasoning), WRITERS[name](said))
    assert arguments_of(found) == said


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "deepseek_v4", "gemma4", "pythonic"])
def test_marks_of_thoughts_within_arguments_are_text(name: str) -> None:
    said = [("get_weather", {"s": "write <think> before </think>", "n": 2})]
    found = whole(parsing(name, "qwen3"), WRITERS[name](said))
    assert arguments_of(found) == said
    assert found.reasoning == ""


def test_an_end_of_a_value_counts_only_before_what_may_follow_it() -> None:
    said = [("get_weather", {"s": "x </parameter> y\n</function> z", "t": "<parameter=q>"})]
    assert arguments_of(whole(parsing("qwen3_coder"), WRITERS["qwen3_coder"](said))) == said
    forgot = "<tool_call>\n<function=get_weather>\n<parameter=s>\na\n<parameter=t>\nb\n</function>\n</tool_call>"
    assert arguments_of(whole(parsing("qwen3_coder"), forgot)) == [("get_weather", {"s": "a", "t": "b"})]
    glm = "<tool_call>get_weather<arg_key>s</arg_key><arg_value>a </tool_call> b</arg_value></tool_call>"
    assert arguments_of(whole(parsing("glm47"), glm)) == [("get_weather", {"s": "a </tool_call> b"})]
