"""Where token ids are known, only special tokens are marks; text that spells them is text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.frontend.parsers.model import parsers_of
from dynamo_es.frontend.parsers.shield import BREAK, Shield
from dynamo_es.frontend.pipeline import Delta, OutputOptions, OutputPipeline
from dynamo_es.frontend.tokenizer import NONE_SHOWN, ByteDecodeStream, BytesTokenizer, DecodeStream, ShownTable
from tests.unit.frontend.parsers.support import parsing

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<tool_call>", "</tool_call>")


class MarkTokenizer(BytesTokenizer):
    """Bytes, and these marks as special tokens from id 1000 on."""

    def __init__(self) -> None:
        super().__init__()
        self.marks = {1000 + place: mark for place, mark in enumerate(MARKS)}
        self.special_ids = BytesTokenizer.special_ids | frozenset(self.marks)

    def decode(self, token_ids: Any, skip_special_tokens: bool) -> str:
        if len(token_ids) == 1 and token_ids[0] in self.marks:
            return "" if skip_special_tokens else self.marks[token_ids[0]]
        return super().decode(token_ids, skip_special_tokens)

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        everything = {value: bytes((value,)) for value in range(256)}
        everything |= {token_id: mark.encode() for token_id, mark in self.marks.items()}
        if not skip_special_tokens:
            return ByteDecodeStream(everything)
        visible = {key: value for key, value in everything.items() if key < 256}
        return ByteDecodeStream(ShownTable(visible, everything, shown))

    def ids(self, *parts: str) -> list[int]:
        """A part that is a mark by itself is its token; any other is bytes."""
        known = {mark: token_id for token_id, mark in self.marks.items()}
        return [one for part in parts for one in ([known[part]] if part in known else part.encode())]


def run(tool: str | None, reasoning: str | None, ids: list[int], size: int = 1, **options: Any) -> Delta:
    tokenizer = MarkTokenizer()
    names = {"tool_call_parser": tool, "reasoning_parser": reasoning}
    found = parsers_of(names, tokenizer)
    how = parsing(tool, reasoning, specials={**found.tool_specials, **found.reasoning_specials})
    pipeline = OutputPipeline(tokenizer, OutputOptions(parsing=how, **options), lambda: "id")
    deltas = [pipeline.push({"token_ids": ids[place : place + size]}) for place in range(0, len(ids), size)]
    deltas += [pipeline.push({"token_ids": [], "finish_reason": "stop"})]
    told = [delta for delta in deltas if delta is not None]
    return Delta(
        0,
        "".join(delta.text for delta in told),
        told[-1].finish_reason,
        told[0].first,
        sum(delta.tokens for delta in told),
        None,
        None,
        "".join(delta.reasoning for delta in told),
        [call for delta in told for call in delta.calls],
    )


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_harmony_by_token_ids(size: int) -> None:
    tokenizer = MarkTokenizer()
    ids = tokenizer.ids(
        *("<|channel|>", "analysis", "<|message|>", "I must not write <|", "call|> or <|channel|>final.", "<|end|>"),
        *("<|start|>", "assistant", "<|channel|>", "commentary to=functions.f", "<|message|>"),
        *('{"s": "<|call|>"}', "<|call|>"),
    )
    found = run("harmony", "gpt_oss", ids, size)
    assert found.reasoning == "I must not write <|call|> or <|channel|>final."
    assert "".join(call.arguments for call in found.calls) == '{"s": "<|call|>"}'
    assert (found.text, found.calls[0].name, found.finish_reason) == ("", "f", "tool_calls")


@pytest.mark.parametrize("size", [1, 1000])
def test_a_mark_that_is_spelled_is_text(size: int) -> None:
    tokenizer = MarkTokenizer()
    spelled = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = run("hermes", None, tokenizer.ids("Write ", *spelled.partition("tool_call>{"), ", so."), size)
    assert (found.text, found.calls) == (f"Write {spelled}, so.", [])
    found = run("hermes", None, tokenizer.ids("<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"), size)
    assert (found.text, found.calls[0].name) == ("", "f")


def test_any_other_code_point_comes_through() -> None:
    said = "a\ufdd0b\ufffe\U0010ffffc"
    ids = MarkTokenizer().ids(said, "<tool_call>", f'{{"name": "f", "arguments": {{"s": "{said}"}}}}', "</tool_call>")
    found = run("hermes", None, ids)
    assert found.text == said
    assert "".join(call.arguments for call in found.calls) == f'{{"s": "{said}"}}'


def test_marks_are_seen_although_special_tokens_are_hidden_and_others_stay_hidden() -> None:
    tokenizer = MarkTokenizer()
    ids = [*tokenizer.ids("a", "<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"), 1000]
    assert run("hermes", None, ids).text == "a"
    assert run(None, "qwen3", ids).text == 'a{"name": "f", "arguments": {}}'


def test_stop_strings_come_before_marks() -> None:
    tokenizer = MarkTokenizer()
    ids = tokenizer.ids("ab STOP", "<tool_call>", '{"name": "f", "arguments": {}}')
    found = run("hermes", None, ids, stops=["STOP"])
    assert (found.text, found.calls, found.finish_reason) == ("ab ", [], "stop")


@given(text=st.text("<|cal>é", max_size=30), data=st.data())
def test_ordinary_text_is_only_broken_where_it_spells_a_mark(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    shield = Shield({7: "<|call|>", 8: "<|c"})
    given_text = shield.push(1, text[:cut]) + shield.push(1, text[cut:]) + shield.finish("")
    assert given_text.replace(BREAK, "") == text
    assert "<|c" not in given_text
    if "<|c" not in text:
        assert given_text == text


def test_a_special_token_keeps_its_text_after_bytes_that_were_left() -> None:
    shield = Shield({7: "<|call|>"})
    assert shield.push(1, "a <|") == "a "
    assert shield.push(7, "�<|call|>") == "<|�<|call|>"
