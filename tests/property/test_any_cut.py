"""What parsers find does not depend on how the text is cut, for every name, over good calls and bad ones."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_es.frontend.parsers.choice import Parsing
from dynamo_es.frontend.parsers.registry import REASONING_PARSERS, TOOL_PARSERS, ChannelFormat
from tests.unit.frontend.parsers.support import (
    PLAIN,
    WRITERS,
    Call,
    babble,
    calls,
    cut_texts,
    distinct,
    parsing,
    pieces,
    read,
    whole,
)

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
TOOL_NAMES = distinct(TOOL_PARSERS)
REASONING_NAMES = distinct(REASONING_PARSERS)
ODD_PAIRS = [("hermes", "gpt_oss"), ("harmony", "qwen3"), ("kimi_k3", "deepseek_r1"), ("pythonic", "inkling")]


def marks_of(name: str | None) -> tuple[str, ...]:
    if name is None:
        return ()
    found = REASONING_PARSERS[name]
    return found.markers if isinstance(found, ChannelFormat) else (*found.marks.opens, *found.marks.closes)


def all_choices(how: Parsing) -> st.SearchStrategy[Parsing]:
    """The same for every ``tool_choice``, within a thought or not."""
    return st.builds(
        lambda choice, thinking, bound, single: Parsing(
            reasoning=how.reasoning,
            tools=how.tools,
            choice=choice,
            function="get_weather",
            schemas=how.schemas,
            thinking=thinking,
            bound=bound,
            single=single,
        ),
        st.sampled_from(["auto", "auto", "required", "named"]),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    )


@pytest.mark.parametrize("name", TOOL_NAMES)
@QUICK
@given(data=st.data())
def test_babble_with_a_tool_parser(name: str, data: st.DataObject) -> None:
    how = data.draw(all_choices(parsing(name, "qwen3")))
    text, chunks = data.draw(cut_texts(babble((*TOOL_PARSERS[name].markers, "<think>", "</think>"))))
    assert read(how, chunks) == whole(how, text)
    assert read(how, list(text)) == whole(how, text)


@pytest.mark.parametrize("name", REASONING_NAMES)
@QUICK
@given(data=st.data())
def test_babble_with_a_reasoning_parser(name: str, data: st.DataObject) -> None:
    how = data.draw(all_choices(parsing("hermes", name)))
    text, chunks = data.draw(cut_texts(babble((*marks_of(name), "<tool_call>", "</tool_call>"))))
    assert read(how, chunks) == whole(how, text)
    assert read(how, list(text)) == whole(how, text)


@pytest.mark.parametrize(("tool", "reasoning"), ODD_PAIRS)
@QUICK
@given(data=st.data())
def test_babble_with_formats_that_do_not_belong_together(tool: str, reasoning: str, data: st.DataObject) -> None:
    how = data.draw(all_choices(parsing(tool, reasoning)))
    text, chunks = data.draw(cut_texts(babble((*marks_of(reasoning), *TOOL_PARSERS[tool].markers))))
    assert read(how, chunks) == whole(how, text)


@pytest.mark.parametrize("name", TOOL_NAMES)
@QUICK
@given(data=st.data(), said=calls(), before=PLAIN, after=PLAIN)
def test_calls_between_texts(name: str, data: st.DataObject, said: list[Call], before: str, after: str) -> None:
    text = before + WRITERS[name](said) + after
    _, chunks = data.draw(cut_texts(st.just(text)))
    how = parsing(name)
    assert read(how, chunks) == whole(how, text)


@pytest.mark.parametrize("name", TOOL_NAMES)
def test_every_single_cut_and_every_pair_of_near_cuts(name: str) -> None:
    text = "Hi " + WRITERS[name]([("get_weather", {"s": "a<b", "n": 3, "o": {"k": 1}}), ("get_time", {})])
    how = parsing(name, "qwen3")
    expected = whole(how, text)
    for place in range(len(text) + 1):
        assert read(how, pieces(text, [place])) == expected
        assert read(how, pieces(text, [place, min(place + 3, len(text))])) == expected


@pytest.mark.parametrize("name", TOOL_NAMES)
@QUICK
@given(data=st.data())
def test_a_text_that_breaks_off_anywhere(name: str, data: st.DataObject) -> None:
    text = "Hi " + WRITERS[name]([("get_weather", {"s": "a b", "n": 3, "a": [1, 2]}), ("get_time", {})])
    text = text[: data.draw(st.integers(0, len(text)))]
    _, chunks = data.draw(cut_texts(st.just(text)))
    how = parsing(name, "qwen3")
    assert read(how, chunks) == whole(how, text)
