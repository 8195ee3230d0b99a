from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import (
    BytesTokenizer,
    DecodeStream,
    Tokenizer,
    WindowDecodeStream,
    byte_alphabet,
)
from dynamo_es.frontend.tokenizer_files import TokenizerNotFound, load_tokenizer
from tests.unit.frontend.conftest import MODEL_DIR

BYTES = BytesTokenizer()


def window_stream() -> DecodeStream:
    return WindowDecodeStream(lambda ids: BYTES.decode(ids, True), BYTES.special_ids)


@pytest.fixture(params=["bytes", "window"])
def stream(request: pytest.FixtureRequest) -> DecodeStream:
    return BYTES.stream(True) if request.param == "bytes" else window_stream()


def test_PROTO_08_character_over_two_tokens_arrives_whole(stream: DecodeStream) -> None:
    assert [stream.push([value]) for value in "😀".encode()] == ["", "", "", "😀"]
    assert stream.finish() == ""


def test_PROTO_08_invalid_byte_is_one_replacement_and_does_not_stall(stream: DecodeStream) -> None:
    texts = [stream.push([0xFF]), stream.push([ord("a")]), stream.push([ord("b")])]
    assert "".join(texts) == "�ab"
    assert texts[2] == "b"


def test_PROTO_08_run_of_invalid_bytes_is_bounded(stream: DecodeStream) -> None:
    emitted = "".join(stream.push([0xFF]) for _ in range(40))
    assert len(emitted) >= 36


def test_PROTO_08_pending_bytes_at_the_end_are_one_replacement(stream: DecodeStream) -> None:
    assert stream.push([ord("x")]) == "x"
    assert stream.push([0xE4]) + stream.push([0xB8]) == ""
    assert stream.finish() == "�"
    assert stream.finish() == ""


@settings(deadline=None)
@given(st.binary(max_size=60), st.randoms(use_true_random=False))
def test_PROTO_08_streamed_text_equals_one_shot_at_any_split(data: bytes, rng: random.Random) -> None:
    stream = BYTES.stream(True)
    parts, place = [], 0
    while place < len(data):
        step = rng.randint(1, 4)
        parts.append(stream.push(list(data[place : place + step])))
        place += step
    assert "".join(parts) + stream.finish() == data.decode("utf-8", "replace")


@settings(deadline=None)
@given(st.text(max_size=60))
def test_window_stream_gives_valid_text_whole(text: str) -> None:
    stream = window_stream()
    assert "".join(stream.push([value]) for value in text.encode()) + stream.finish() == text


def test_text_before_a_split_character_waits_for_it(smollm: tuple[Tokenizer, ChatRenderer]) -> None:
    tokenizer = smollm[0]
    stream = tokenizer.stream(True)
    parts = [stream.push([token]) for token in tokenizer.encode("hi 😀🎉 ok", False)]
    assert [part for part in parts if part] == ["hi", " 😀", "🎉", " ok"]


@settings(deadline=None)
@given(text=st.text(max_size=200))
def test_stream_equals_library_decode(smollm: tuple[Tokenizer, ChatRenderer], text: str) -> None:
    tokenizer = smollm[0]
    ids = tokenizer.encode(text, False)
    stream = tokenizer.stream(True)
    assert stream.push(ids) + stream.finish() == tokenizer.decode(ids, True)


def test_special_tokens_are_hidden_unless_asked_for(smollm: tuple[Tokenizer, ChatRenderer]) -> None:
    tokenizer = smollm[0]
    ids = [19556, 1, 665]
    assert tokenizer.stream(True).push(ids) == "Hello there"
    assert tokenizer.stream(False).push(ids) == "Hello<|im_start|> there"
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152


def test_byte_alphabet_is_a_bijection() -> None:
    alphabet = byte_alphabet()
    assert sorted(alphabet.values()) == list(range(256))
    assert alphabet["Ġ"] == 0x20


def test_builtin_tokenizer_round_trip_and_marks() -> None:
    text = "<|user|>héllo<|end|>"
    ids = BYTES.encode(text, False)
    assert ids[0] == 259
    assert ids[-1] == 262
    assert BYTES.decode(ids, False) == text
    assert BYTES.decode(ids, True) == "héllo"
    assert BYTES.encode("a", True) == [256, 97]


def test_missing_tokenizer_names_directory_and_files(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match=r"tokenizer\.json, tokenizer\.model") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(TokenizerNotFound, match="--model-path"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerNotFound, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(str(tmp_path))


def test_eos_and_template_come_from_the_model_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((MODEL_DIR / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5, "vocab_size": 50000}))
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}"}]
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>", "chat_template": templates}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, renderer = load_tokenizer(str(tmp_path))
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.vocab_size == 50000
    assert renderer is not None
    assert renderer.render([]) == "D<s>"
