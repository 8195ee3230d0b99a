"""Who encodes text: the ``tokenizers`` library, or fastokens (``--tokenizer``, spec/frontend.md section 7)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dynamo_es.errors import DynamoException
from dynamo_es.frontend.extras import MissingExtra, import_extra
from dynamo_es.frontend.tokenizer_cache import CacheTally

logger = logging.getLogger(__name__)

DEFAULT, FASTOKENS = "default", "fastokens"
CACHE_BYTES = 64 * 1024 * 1024
_INSTEAD = "another --tokenizer"
_PROBES = (
    "The quick brown fox, 12345 of them; it's 3.14!",
    "  white\t space \n\n\r\n around  ",
    "naïve Ångström 東京 привет 😀👍🏽 é",
    "def f(x):\n    return {'a': [1, 2], \"b\": x != None}\n",
    "<|im_start|>user\nhi<|im_end|>\n<s>[INST] a [/INST]</s>",
)
"""What an encoder must encode as the library does before it is used: words, white space, scripts, code, marks."""

Encode = Callable[[str, bool], list[int]]
"""Ids of a text, with or without the tokens that a tokenizer puts around it."""


class TokenizerUnsupported(DynamoException):
    """The chosen tokenizer cannot take a model.

    Attributes:
        backend: Its name.
    """

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(
            f"--tokenizer {backend} cannot be used: {reason}; choose default, or allow it (--tokenizer-fallback)"
        )
        self.backend = backend


@dataclass(frozen=True, slots=True)
class TokenizerOptions:
    """How the tokenizer of a model is made.

    Attributes:
        backend: ``default``, ``fastokens`` or ``basetenkenizer``.
        fallback: The default takes what the chosen one cannot; it is logged.
        cache_bytes: Bound of the cache of tokenized pieces; 0: none.
        tally: Counts what the cache finds.
    """

    backend: str = DEFAULT
    fallback: bool = True
    cache_bytes: int = CACHE_BYTES
    tally: CacheTally = field(default_factory=CacheTally)


class TokenizerConfig(Protocol):
    """The options of a frontend about tokenizers."""

    @property
    def tokenizer(self) -> str | None:
        """For all models; None: what each model's card says."""

    @property
    def tokenizer_fallback(self) -> bool:
        """Whether the default takes what the chosen one cannot."""

    @property
    def tokenizer_cache_mb(self) -> int:
        """Bound of each model's cache, MiB."""


def check_backend(config: TokenizerConfig) -> None:
    """What can be told before there is a model.

    Raises:
        MissingExtra: fastokens was asked for and is not installed.
    """
    if config.tokenizer == FASTOKENS and find_spec(FASTOKENS) is None:
        raise MissingExtra(FASTOKENS, FASTOKENS, _INSTEAD)


def options_for(config: TokenizerConfig, runtime_config: Mapping[str, Any], tally: CacheTally) -> TokenizerOptions:
    """The options of one model: the flag goes before ``tokenizer_backend`` of its card."""
    told = runtime_config.get("tokenizer_backend")
    backend = config.tokenizer or (told if isinstance(told, str) else DEFAULT)
    return TokenizerOptions(backend, config.tokenizer_fallback, config.tokenizer_cache_mb * 1024 * 1024, tally)


def chosen_encoder(options: TokenizerOptions, file: Path | None, library: Encode | None) -> Encode | None:
    """The encoder that is asked for; None: the default.

    Args:
        options: What is asked for.
        file: The model's ``tokenizer.json``; None: it has none.
        library: The default encoder of that file, which the other must agree with.

    Raises:
        TokenizerUnsupported: The one that is asked for cannot take the model, and nothing may stand for it.
    """
    if options.backend == DEFAULT:
        return None
    try:
        if options.backend != FASTOKENS:
            raise TokenizerUnsupported(options.backend, "it is not in this version")
        if file is None or library is None:
            raise TokenizerUnsupported(FASTOKENS, "the model has no tokenizer.json")
        return _fastokens(file, library)
    except TokenizerUnsupported as error:
        if not options.fallback:
            raise
        logger.warning("the default tokenizer is used: %s", error)
        return None


def _fastokens(file: Path, library: Encode) -> Encode:
    try:
        made = import_extra(FASTOKENS, FASTOKENS, _INSTEAD).Tokenizer.from_file(str(file))
    except MissingExtra as error:
        raise TokenizerUnsupported(FASTOKENS, str(error)) from error
    except Exception as error:  # the library raises nothing more specific for a file that it cannot take
        raise TokenizerUnsupported(FASTOKENS, f"it cannot take {file} ({error})") from error

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = made.encode(text, add_special_tokens).ids
        return ids

    for probe in _PROBES:
        for around in (False, True):
            if encode(probe, around) != library(probe, around):
                raise TokenizerUnsupported(FASTOKENS, f"for {file} it gives other tokens than the tokenizers library")
    return encode
