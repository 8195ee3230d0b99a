"""Which registered workers a frontend can serve at all, and what stands for a tokenizer where it needs none. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import DynamoException
from dynamo_es.frontend.contracts import TEXT, families_of
from dynamo_es.frontend.tokenizer import NONE_SHOWN, DecodeStream
from schemas.registry import ModelCard

TOKENS = "Tokens"
_FORWARDED = frozenset({"classify", "pooling", "rerank", "images", "videos", "audios"})
"""Families whose workers get the request as the client sent it."""
_ONE_ANSWER = _FORWARDED | {"embedding", "realtime"}


def why_unservable(card: ModelCard) -> str | None:
    """Why a worker's registration is left out altogether; None: it is not."""
    families = families_of(card.model_type)
    if card.model_input == TOKENS:
        wrong = families & _FORWARDED
        return f"workers of {_names(wrong)} get text: model_input must be {TEXT}, it is {TOKENS}" if wrong else None
    if card.model_input == TEXT:
        return None
    return f"model_input {card.model_input} is not served; {TOKENS} and {TEXT} are"


def serves_namespace(config: FrontendConfig, namespace: str) -> bool:
    """Whether a frontend with these options asks workers of the namespace."""
    if config.namespace_prefix is not None:
        return namespace.startswith(config.namespace_prefix)
    return config.namespace in (None, namespace)


def generates(card: ModelCard) -> bool:
    """Whether a model's workers generate from tokens, or help others to, so that KV caches matter for routing."""
    families = families_of(card.model_type)
    if card.model_input == TEXT:
        return False
    return not families or not families <= _ONE_ANSWER


def _names(families: frozenset[str]) -> str:
    return " and ".join(sorted(families))


class NotTokenized(DynamoException):
    """Text was to be tokenized for a model whose workers do that."""


class NoTokenizer:
    """The ``Tokenizer`` of a model whose workers get text: there is nothing to ask it."""

    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    special_tokens: Mapping[str, str] = {}
    vocab_size = 2**32
    max_token_chars = None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        _refuse()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        _refuse()

    def stream(self, skip_special_tokens: bool, shown: frozenset[int] = NONE_SHOWN) -> DecodeStream:
        _refuse()


def _refuse() -> NoReturn:
    raise NotTokenized("this model's workers get text, not tokens")
