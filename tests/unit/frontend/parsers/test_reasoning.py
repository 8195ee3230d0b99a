"""Every format of thoughts, and thoughts together with calls."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from dynamo_es.frontend.parsers.registry import REASONING_PARSERS, ChannelFormat
from tests.unit.frontend.parsers.support import PLAIN, WRITERS, distinct, parser_of, parsing, pieces, read, whole

QUICK = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
# Dynamo's names (spec/frontend.md 4.5).
# fmt: off
NAMES = (
    "basic", "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "deepseek_v4", "deepseek-v4",
    "deepseekv4", "deepseek_v41", "gemma4", "gemma-4", "glm45", "glm47", "gpt_oss", "granite", "inkling", "kimi",
    "kimi_k2", "kimi_k25", "kimi_k3", "kimi-k3", "minimax_append_think", "minimax_m2", "minimax_m3", "minimax-m3",
    "mistral", "muse", "muse_glimmer", "nemotron3", "nemotron_deci", "nemotron_nano", "nemotron_v3", "qwen3",
    "qwen3_coder", "step3",
)
# fmt: on
# fmt: off
FORCED = (
    "deepseek_r1", "deepseek_v3", "deepseek_v3_1", "deepseek_v3_2", "kimi_k25", "minimax_append_think", "minimax_m2",
    "mistral", "nemotron3", "nemotron_nano", "nemotron_v3", "step3",
)
# fmt: on
MARKED = [
    name
    for name in distinct(REASONING_PARSERS)
    if not isinstance(REASONING_PARSERS[name], ChannelFormat) and name not in FORCED
]


def thought(name: str, text: str, answer: str) -> str:
    """An output in the format."""
    if name == "gpt_oss":
        answer = f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        return f"<|channel|>analysis<|message|>{text}<|end|>{answer}"
    if name.startswith("kimi") and name.endswith("k3"):
        return (
            f"<|open|>think<|sep|>{text}<|close|>think<|sep|><|open|>response<|sep|>{answer}<|close|>response<|sep|>"
            "<|end_of_msg|>"
        )
    if name.startswith("muse"):
        return f" to=self<|message|>{text}<|eom|><|start|>assistant to=user<|message|>{answer}<|eom|>"
    if name == "inkling":
        return (
            f"<|content_thinking|>{text}<|end_message|><|message_model|><|content_text|>{answer}<|end_message|>"
            "<|content_model_end_sampling|>"
        )
    found = REASONING_PARSERS[name]
    assert not isinstance(found, ChannelFormat)
    return f"{found.marks.opens[0]}{found.marks.label}{text}{found.marks.closes[0]}{answer}"


def test_all_names_of_dynamo_are_known() -> None:
    assert sorted(REASONING_PARSERS) == sorted(NAMES)
    forced = [name for name, one in REASONING_PARSERS.items() if not isinstance(one, ChannelFormat) and one.forced]
    assert sorted(forced) == sorted(FORCED)


@pytest.mark.parametrize("name", NAMES)
def test_thoughts_are_told_from_the_answer(name: str) -> None:
    found = whole(parsing(None, name), thought(name, "\nI ponder.\n", "\n\nThe answer < is 4."))
    assert (found.reasoning, found.content.lstrip()) == ("\nI ponder.\n", "The answer < is 4.")


@pytest.mark.parametrize("name", distinct(REASONING_PARSERS))
@QUICK
@given(text=PLAIN, answer=PLAIN)
def test_any_thought_and_answer(name: str, text: str, answer: str) -> None:
    if not text.strip() or not answer.strip() or set(text + answer) & set("<|◁["):
        return
    found = whole(parsing(None, name), thought(name, text, answer))
    assert (found.reasoning, found.content.strip()) == (text, answer.strip())


@pytest.mark.parametrize("name", FORCED)
def test_forced_thoughts_need_no_opening_mark_and_may_lack_the_end(name: str) -> None:
    close = REASONING_PARSERS[name].marks.closes[0]  # type: ignore[union-attr]
    assert whole(parsing(None, name), f"I ponder.{close}The answer")[:2] == ("The answer", "I ponder.")
    assert whole(parsing(None, name), "I ponder and")[:2] == ("", "I ponder and")


@pytest.mark.parametrize("name", MARKED)
def test_without_marks_all_is_content(name: str) -> None:
    assert whole(parsing(None, name), "  plain < answer \n")[:2] == ("  plain < answer \n", "")


@pytest.mark.parametrize("name", [name for name in MARKED if name != "granite"])
def test_a_closing_mark_that_stands_alone_goes(name: str) -> None:
    close = REASONING_PARSERS[name].marks.closes[0]  # type: ignore[union-attr]
    assert whole(parsing(None, name), f"I ponder.{close}The answer")[:2] == ("I ponder.The answer", "")


def test_PROTO_05_a_lone_bracket_is_held_and_delivered() -> None:
    how = parsing(None, "deepseek_r1")
    text = "I think<" + "/think>\nAnswer"
    for place in range(len(text) + 1):
        assert read(how, pieces(text, [place]))[:2] == ("\nAnswer", "I think")
    parser = parser_of(parsing(None, "qwen3"))
    assert parser.feed("a <").content == "a "
    assert parser.feed(" b").content == "< b"
    assert parser.feed(" <", over=True).content == " <"


def test_PROTO_05_only_a_real_beginning_of_a_mark_is_held() -> None:
    parser = parser_of(parsing("hermes", "qwen3"))
    for text in ("a<b", "x < y", "</div>", "<tools>"):
        assert parser.feed(text).content == text
    assert parser.feed("<tool_cal").content == ""
    assert parser.feed("X").content == "<tool_calX"


def test_PROTO_04_end_of_a_thought_and_a_whole_call_in_one_delta_give_one_call() -> None:
    parser = parser_of(parsing("hermes", "qwen3"))
    first = parser.feed('<think>use it</think>\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>')
    last = parser.feed("", over=True)
    again = parser.feed("", over=True)
    assert [(one.call, one.name, one.arguments) for one in first.calls] == [(0, "f", '{"a": 1}')]
    assert (first.reasoning, first.content) == ("use it", "\n")
    assert not last
    assert not again


@pytest.mark.parametrize(
    ("tool", "reasoning"),
    [
        *(("hermes", "qwen3"), ("qwen3_coder", "qwen3"), ("glm47", "glm45"), ("deepseek_v3_1", "deepseek_v3_1")),
        *(("deepseek_v4", "deepseek_v4"), ("deepseek_v41", "deepseek_v41"), ("kimi_k2", "kimi_k25")),
        *(("kimi_k3", "kimi_k3"), ("minimax_m2", "minimax_m2"), ("minimax_m3", "minimax_m3"), ("gemma4", "gemma4")),
        *(("harmony", "gpt_oss"), ("mistral", "mistral"), ("nemotron_deci", "nemotron_deci"), ("muse", "muse")),
        *(("nemotron_nano", "nemotron_nano"), ("inkling", "inkling"), ("llama3_json", "basic"), ("pythonic", "step3")),
    ],
)
def test_a_thought_then_calls(tool: str, reasoning: str) -> None:
    said = [("get_weather", {"s": "Paris", "n": 2}), ("get_time", {})]
    text = thought(reasoning, "I need it.", "") + WRITERS[tool](said)
    if reasoning == "gpt_oss":
        text = text.replace("<|start|>assistant<|channel|>final<|message|><|return|>", "")
    found = whole(parsing(tool, reasoning), text)
    assert (found.reasoning, found.content.strip(), len(found.calls)) == ("I need it.", "", 2)


@pytest.mark.parametrize(
    ("tool", "reasoning"),
    [
        *(("kimi_k2", "kimi_k25"), ("deepseek_v4", "deepseek_v4"), ("minimax_m2", "minimax_m2")),
        *(("minimax_m3", "minimax_m3"), ("deepseek_v41", "deepseek_v41")),
    ],
)
def test_a_call_ends_a_thought_that_was_not_closed(tool: str, reasoning: str) -> None:
    open_mark = REASONING_PARSERS[reasoning].marks.opens[0]  # type: ignore[union-attr]
    found = whole(parsing(tool, reasoning), open_mark + "I need it." + WRITERS[tool]([("get_time", {})]))
    assert (found.reasoning, len(found.calls)) == ("I need it.", 1)


def test_a_call_that_a_thought_only_mentions_is_none() -> None:
    text = '<think>I write <tool_call>{"name": "f", "arguments": {}}</tool_call> later.</think>Done'
    found = whole(parsing("hermes", "qwen3"), text)
    assert (found.calls, found.content) == ([], "Done")
    assert found.reasoning == text[7 : text.index("</think>")]


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1"])
def test_output_that_is_bound_to_be_json_is_content_from_its_first_character(name: str) -> None:
    how = parsing(None, name, bound=True)
    assert whole(how, '{"a": "<b>"}')[:2] == ('{"a": "<b>"}', "")
    assert whole(how, '<think>so</think>{"a": 1}')[:2] == ('{"a": 1}', "so")


def test_forced_thoughts_may_come_before_bound_output() -> None:
    how = parsing(None, "deepseek_r1", bound=True)
    assert whole(how, 'I think so.</think>{"a": 1}')[:2] == ('{"a": 1}', "I think so.")
