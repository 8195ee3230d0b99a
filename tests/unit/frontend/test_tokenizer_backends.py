"""``--tokenizer``: fastokens where it is installed and agrees with the library; else the default, or an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.extras import MissingExtra
from dynamo_es.frontend.tokenizer_backends import TokenizerOptions, TokenizerUnsupported, check_backend, options_for
from dynamo_es.frontend.tokenizer_cache import CacheTally
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from tests.unit.frontend.small_tokenizer import small_tokenizer

TEXT = "<|im_start|>user\nHello, wörld 😀<|im_end|>\n"
STRICT = TokenizerOptions("fastokens", fallback=False)
LOOSE = TokenizerOptions("fastokens")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("model")
    (made / "tokenizer.json").write_text(json.dumps(small_tokenizer()))
    return str(made)


def plain(folder: str) -> list[int]:
    return load_tokenizer(folder)[0].encode(TEXT, False)


def stand_in(monkeypatch: pytest.MonkeyPatch, encode: Callable[..., list[int]]) -> None:
    class Stand:
        @staticmethod
        def from_file(path: str) -> Any:
            assert json.loads(Path(path).read_text())
            return SimpleNamespace(encode=lambda *arguments: SimpleNamespace(ids=encode(*arguments)))

    module = ModuleType("fastokens")
    module.Tokenizer = Stand  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)


def test_fastokens_gives_the_same_ids(folder: str) -> None:
    pytest.importorskip("fastokens", reason="the extra fastokens")
    tokenizer, _ = load_tokenizer(folder, options=STRICT)
    assert tokenizer.encode(TEXT, False) == plain(folder)


def test_fastokens_is_who_encodes(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    library = load_tokenizer(folder)[0]

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        asked.append(text)
        return library.encode(text, add_special_tokens)

    stand_in(monkeypatch, encode)
    tokenizer, _ = load_tokenizer(folder, options=STRICT)
    asked.clear()
    assert tokenizer.encode(TEXT, False) == plain(folder)
    assert asked[0] == "user\nHello, wörld 😀"


def test_one_that_disagrees_with_the_library_is_not_used(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch, lambda text, add_special_tokens: [1])
    with pytest.raises(TokenizerUnsupported, match="other tokens than the tokenizers library"):
        load_tokenizer(folder, options=STRICT)
    assert load_tokenizer(folder, options=LOOSE)[0].encode(TEXT, False) == plain(folder)
    assert "the default tokenizer is used" in caplog.text


def test_without_the_extra(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    monkeypatch.setattr("dynamo_es.frontend.tokenizer_backends.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"dynamo-es\[fastokens\].* another --tokenizer"):
        check_backend(FrontendConfig(tokenizer="fastokens"))
    with pytest.raises(TokenizerUnsupported, match=r"dynamo-es\[fastokens\]"):
        load_tokenizer(folder, options=STRICT)
    assert load_tokenizer(folder, options=LOOSE)[0].encode(TEXT, False) == plain(folder)


@pytest.mark.parametrize("backend", ["fastokens", "basetenkenizer"])
def test_models_that_it_cannot_take(backend: str) -> None:
    with pytest.raises(TokenizerUnsupported, match=f"--tokenizer {backend}"):
        load_tokenizer("builtin:bytes", options=TokenizerOptions(backend, fallback=False))
    assert load_tokenizer("builtin:bytes", options=TokenizerOptions(backend))[0].encode("a", False) == [97]


def test_the_flag_goes_before_the_card() -> None:
    card, tally = {"tokenizer_backend": "fastokens"}, CacheTally()
    assert options_for(FrontendConfig(), card, tally).backend == "fastokens"
    assert options_for(FrontendConfig(tokenizer="default"), card, tally).backend == "default"
    made = options_for(FrontendConfig(tokenizer_fallback=False, tokenizer_cache_mb=0), {}, tally)
    assert (made.backend, made.fallback, made.cache_bytes, made.tally) == ("default", False, 0, tally)
