"""The cache of tokenization gives what the library gives, and keeps its bound."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as RustTokenizer

from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.template import ChatRenderer
from dynamo_es.frontend.tokenizer import Tokenizer
from dynamo_es.frontend.tokenizer_backends import TokenizerOptions
from dynamo_es.frontend.tokenizer_cache import CacheTally, SegmentCache, exact_cuts
from dynamo_es.frontend.tokenizer_files import HuggingFaceTokenizer, load_tokenizer
from tests.unit.frontend.conftest import MODEL_DIR
from tests.unit.frontend.small_tokenizer import WORDS, small_tokenizer

SMALL = small_tokenizer()
MARKS = ("<|a|>", "<|a|>b", "|>c", "<t>", "<t")
"""They overlap: which of them is found depends on the order in which they are looked for."""
PIECES = (*MARKS, "<|", "|>", "b", "t>", " ", "  ", "\n", "user", " hello", "A b  c", "e\u0301", "é😀", "ﬁ", "'s 12345")


def _settings(normalized: bool = False, **changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(SMALL)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "special": True}
    for place, mark in enumerate(MARKS):
        # Some are looked for after normalization, some before it.
        late = normalized and place % 2 == 1
        made["added_tokens"].append({"id": WORDS + place, "content": mark, "normalized": late, **flags})
    return {**made, **changes}


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
KINDS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "as it is": _settings,
    "marks of two rounds": lambda: _settings(normalized=True),
    "NFC": lambda: _settings(normalized=True, normalizer={"type": "NFC"}),
    "NFKC, lower case": lambda: _settings(
        normalized=True, normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}, {"type": "Lowercase"}]}
    ),
    "prefix space": lambda: _settings(pre_tokenizer=BYTE_LEVEL),
    "prepended": lambda: _settings(normalizer={"type": "Prepend", "prepend": "x"}),
    "whole pieces": lambda: _settings(pre_tokenizer=None),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[RustTokenizer, SegmentCache]:
    """A library tokenizer, and a cache over it that others of this module's tests have filled."""
    made = KINDS[request.param]()
    rust = RustTokenizer.from_str(json.dumps(made))
    cuts = exact_cuts(json.loads(rust.to_str()))
    assert cuts is not None
    return rust, SegmentCache(lambda text: rust.encode(text, add_special_tokens=False).ids, cuts, 64 * 1024)


@settings(deadline=None, max_examples=60)
@given(pieces=st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=30))
def test_any_text_has_the_ids_that_the_library_gives(
    pair: tuple[RustTokenizer, SegmentCache], pieces: list[str]
) -> None:
    rust, cache = pair
    text = "".join(pieces)
    plain = rust.encode(text, add_special_tokens=False).ids
    assert cache.ids(text) == plain
    assert cache.ids(text) == plain
    assert cache.size <= 64 * 1024


@settings(deadline=None, max_examples=40)
@given(rng=st.randoms(use_true_random=False))
def test_growing_chats_have_the_same_ids_with_and_without_a_cache(
    both: tuple[Tokenizer, Tokenizer, ChatRenderer], rng: random.Random
) -> None:
    cached, plain, renderer = both
    chats: list[list[dict[str, str]]] = [[{"role": "system", "content": rng.choice(("", "Be brief.", "Sois bref."))}]]
    for _ in range(12):
        chat = rng.choice(chats)
        role = "assistant" if chat[-1]["role"] == "user" else "user"
        longer = [*chat, {"role": role, "content": "".join(rng.choices(PIECES, k=rng.randint(0, 8)))}]
        chats.append(longer)  # the shorter one may go on elsewhere, too
        text = renderer.render(longer, add_generation_prompt=role == "user")
        assert cached.encode(text, False) == plain.encode(text, False)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer, ChatRenderer]:
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(MODEL_DIR, folder, dirs_exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(SMALL))
    cached, renderer = load_tokenizer(str(folder))
    plain, _ = load_tokenizer(str(folder), options=TokenizerOptions(cache_bytes=0))
    assert isinstance(cached, HuggingFaceTokenizer)
    assert isinstance(plain, HuggingFaceTokenizer)
    assert cached.cache is not None
    assert plain.cache is None
    assert renderer is not None
    return cached, plain, renderer


def _greedy(name: str) -> dict[str, Any]:
    made = _settings()
    made["added_tokens"][-1][name] = True
    return made


TRUNCATION = {"max_length": 5, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


@pytest.mark.parametrize(
    "made",
    [
        *(_greedy(name) for name in ("lstrip", "rstrip", "single_word")),
        _settings(truncation=TRUNCATION),
        _settings(padding={"strategy": {"Fixed": 9}}),
        _settings(pre_tokenizer=METASPACE),
        _settings(pre_tokenizer={"type": "Sequence", "pretokenizers": [BYTE_LEVEL, METASPACE]}),
        _settings(pre_tokenizer={"type": "NewInTheLibrary"}),
        _settings(model={"type": "BPE", "dropout": 0.1}),
        _settings(model={"type": "NewInTheLibrary"}),
    ],
)
def test_nothing_is_cut_where_pieces_may_not_add_up(made: dict[str, Any]) -> None:
    assert exact_cuts(made) is None


def test_cache_keeps_its_bound_and_drops_the_oldest() -> None:
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    cache = SegmentCache(encode, [{"|": 1}], 8 * 1024)
    for number in range(100):
        cache.ids(f"prompt {number:03}")
    assert cache.size <= 8 * 1024
    made = len(seen)
    assert cache.ids("prompt 099|prompt 099") == [*b"prompt 099", 1, *b"prompt 099"]
    assert len(seen) == made
    cache.ids("prompt 000")
    assert seen[-1] == "prompt 000"
    for _ in range(2):
        cache.ids("x" * 2000)
    assert seen[-2:] == ["x" * 2000] * 2


def test_a_growing_chat_pays_for_its_new_part_only() -> None:
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return list(text.encode())

    tally = CacheTally()
    cache = SegmentCache(encode, [{"|": 1}], 1024 * 1024, tally)
    cache.ids("system|question|")
    cache.ids("system|question|answer|another|")
    assert seen == ["system", "question", "answer", "another"]
    assert (tally.hits, tally.misses, tally.cached_tokens, tally.uncached_tokens) == (1, 1, 14, 27)


def test_a_model_that_is_loaded_again_goes_on_counting() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry, "p")
    for _ in range(2):
        cache = SegmentCache(lambda text: list(text.encode()), [{"|": 1}], 8192, metrics.tokenizer_cache_of("m"))
        for _ in range(2):
            cache.ids("|12345678")
    values = {
        name: registry.get_sample_value(f"p_tokenizer_cache_{name}_total", labels)
        for name, labels in (
            *(("hits", {}), ("misses", {})),
            *(("cached_tokens", {"model": "m"}), ("uncached_tokens", {"model": "m"})),
        )
    }
    assert values == {"hits": 2, "misses": 2, "cached_tokens": 16, "uncached_tokens": 16}


def test_models_with_a_normalizer_are_cached(tmp_path: Path) -> None:
    """Qwen's models have NFC."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(_settings(normalizer={"type": "NFC"})))
    tokenizer, _ = load_tokenizer(str(tmp_path))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert tokenizer.cache is not None
    assert tokenizer.max_token_chars is None
