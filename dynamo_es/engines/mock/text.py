"""What the mock engine says: readable sentences as token ids, the same for the same prompt. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from xxhash import xxh3_64_intdigest

OutputTokens = Callable[[Mapping[str, Any], int], Iterator[int]]
"""Tokens of one choice (by index) of a request."""

SENTENCES = (
    " The router keeps a view of every worker's cache and sends each prompt where most of it is already known.",
    " A block that two prompts share is computed once and read many times.",
    " Every decision is written down, so that it can be explained later and tried again under another configuration.",
    " When a worker restarts, its cache is empty, and the view forgets what it held.",
    " A long conversation grows at its end, and its beginning stays where it is.",
    " What the log has taken is there after a crash; what it has not taken is announced again.",
    " Short requests do not wait behind long ones when the budget of a pass is shared.",
    " The oldest blocks make room when nobody needs them any more.",
)
_FIRST_PLAIN_TOKEN = 1_000
_PLAIN_TOKENS = 1_000


class SentenceTokens:
    """Endless readable text; each prompt and choice begins at its own sentence. An ``OutputTokens``."""

    def __init__(self, encode: Callable[[str], Sequence[int]], sentences: Sequence[str] = SENTENCES) -> None:
        """``encode`` must add no special tokens. Each sentence begins with a space, so that any order reads well."""
        self._sentences = [list(encode(sentence)) for sentence in sentences]
        if not any(self._sentences):
            raise ValueError("the tokenizer gives no tokens for the mock engine's sentences")

    def __call__(self, request: Mapping[str, Any], choice: int) -> Iterator[int]:
        return self._tokens((prompt_digest(request["token_ids"]) + choice) % len(self._sentences))

    def _tokens(self, number: int) -> Iterator[int]:
        while True:
            yield from self._sentences[number]
            number = (number + 1) % len(self._sentences)


class FixedText:
    """The same finite text for every prompt and choice; a request that reaches its end finishes with ``stop``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = list(tokens)

    def __call__(self, request: Mapping[str, Any], choice: int) -> Iterator[int]:
        return iter(self._tokens)


class PlainTokens:
    """Token ids 1000 to 1999, as Dynamo's mock engine draws them, but the same for the same prompt and choice."""

    def __call__(self, request: Mapping[str, Any], choice: int) -> Iterator[int]:
        return self._tokens(prompt_digest(request["token_ids"]) + choice)

    def _tokens(self, state: int) -> Iterator[int]:
        while True:
            # Knuth's MMIX generator; the high bits are the good ones.
            state = (state * 6_364_136_223_846_793_005 + 1_442_695_040_888_963_407) & 0xFFFFFFFFFFFFFFFF
            yield _FIRST_PLAIN_TOKEN + (state >> 33) % _PLAIN_TOKENS


def prompt_digest(token_ids: Sequence[int]) -> int:
    """A number that is the same for the same prompt, in every process."""
    return xxh3_64_intdigest(array("I", token_ids).tobytes())
