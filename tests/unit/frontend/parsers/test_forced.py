"""``tool_choice`` required and a function's name: JSON without markers, the model's own format, or text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from dynamo_es.frontend.parsers.registry import TOOL_PARSERS
from tests.unit.frontend.parsers.support import WRITERS, arguments_of, cut_texts, distinct, parsing, read, whole
from tests.unit.frontend.parsers.support import babble as babbled

LIST = '[{"name": "get_weather", "parameters": {"s": "Rome"}}, {"name": "get_time", "arguments": {}}]'
TWO = [("get_weather", {"s": "Rome"}), ("get_time", {})]


@pytest.mark.parametrize("tool", [None, "hermes", "harmony", "llama3_json"])
@pytest.mark.parametrize("text", [LIST, "\n " + LIST + "\n", '{"name": "get_weather", "parameters": {"s": "Rome"}}'])
def test_required_reads_a_list_or_one_object(tool: str | None, text: str) -> None:
    found = whole(parsing(tool, choice="required"), text)
    assert arguments_of(found) == TWO[: len(found.calls)]
    assert found.calls
    assert found.content == ""


@pytest.mark.parametrize("name", distinct(TOOL_PARSERS))
def test_required_takes_the_models_own_format_too(name: str) -> None:
    assert arguments_of(whole(parsing(name, choice="required"), WRITERS[name](TWO))) == TWO


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("text", ["no tool here", "[1, 2]", '["x"]', "  "])
def test_what_is_no_call_is_content(choice: str, text: str) -> None:
    found = whole(parsing("hermes", choice=choice, function="get_weather"), text)
    assert (found.calls, found.content) == ([], text)


def test_named_takes_everything_from_the_brace_on() -> None:
    how = parsing(None, choice="named", function="get_weather")
    assert whole(how, ' \n{"s": "Oslo"}').calls == [("get_weather", '{"s": "Oslo"}')]
    assert whole(how, '{"s": "Os').calls == [("get_weather", '{"s": "Os')]
    assert whole(how, "{oops} it").calls == [("get_weather", "{oops} it")]
    assert whole(how, "").calls == []


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "qwen3_coder", "deepseek_v3_1"])
def test_named_takes_the_models_own_format_too(name: str) -> None:
    how = parsing(name, choice="named", function="get_weather")
    assert arguments_of(whole(how, WRITERS[name](TWO[:1]))) == TWO[:1]


@pytest.mark.parametrize("choice", ["required", "named"])
@pytest.mark.parametrize("before", ["", "<think>hm</think>\n", "\n<think>hm</think>\n\n"])
def test_a_thought_may_come_first(choice: str, before: str) -> None:
    how = parsing(None, "qwen3", choice=choice, function="get_weather", bound=True)
    text = LIST if choice == "required" else '{"s": "Rome"}'
    found = whole(how, before + text)
    assert arguments_of(found)[0] == TWO[0]
    assert (found.content, found.reasoning) == ("", "hm" if before else "")


@pytest.mark.parametrize("choice", ["required", "named"])
@settings(max_examples=60, deadline=None)
@given(cut=cut_texts(babbled(("[", "]", "<think>", "</think>", '"parameters":'))))
def test_any_cut(choice: str, cut: tuple[str, list[str]]) -> None:
    how = parsing(None, "deepseek_r1", choice=choice, function="f", bound=True)
    text, chunks = cut
    assert read(how, chunks) == whole(how, text)
