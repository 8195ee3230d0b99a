"""What a preprocessed request asks of sampling, checked. Pure.

Names and meanings are vLLM's. What a request does not say is as the model's generation_config.json has it, and else
neutral: temperature 1, everything that restricts or punishes off.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.errors import InvalidArgument

# From here on a distribution is so flat or so sharp that numbers stop meaning anything.
_MAX_TEMPERATURE = 100.0
_GREEDY_BELOW = 1e-5
MAX_LOGPROBS = 20
_MAX_IDS = 10_000
_U32 = 2**32
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options that a model's generation_config.json may have a value for."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: 0: the most probable token is taken.
        top_p, top_k, min_p: What is left to choose from; 1, 0 and 0: everything.
        presence_penalty, frequency_penalty: Taken from the logits of tokens of the answer.
        repetition_penalty: Divides or multiplies the logits of tokens of prompt and answer; 1: does not.
        seed: Of the request's own random numbers; None: any.
        logit_bias: Added to logits, by token.
        allowed: Tokens that there are to choose from; None: all.
        bad_words: Sequences of tokens that must not appear.
        stop_ids: Tokens that end the answer.
        min_tokens: Before it has so many tokens, nothing of ``stop_ids`` is chosen.
        logprobs: Log probabilities of how many tokens are told beside the chosen one's; None: none at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        """No chance is involved."""
        return self.temperature < _GREEDY_BELOW

    @property
    def is_plain(self) -> bool:
        """The most probable token as the model gives it, and nothing else, is wanted."""
        return (
            self.is_greedy and self.logprobs is None and not self.logit_bias and self.allowed is None
            and not self.bad_words and not self.min_tokens and self.repetition_penalty == 1.0
            and not self.presence_penalty and not self.frequency_penalty
        )  # fmt: skip


def read_options(
    request: Mapping[str, Any],
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    defaults: Mapping[str, float] | None = None,
) -> SamplingOptions:
    """The options of a preprocessed request.

    Args:
        request: As frontends send it.
        vocab_size: Token ids are below it.
        eos_token_ids: The model's own, for requests that name none.
        defaults: By names of ``DEFAULTED``.

    Raises:
        InvalidArgument: A value is of the wrong type or out of range; names it.
    """
    sampling, stop = section(request, "sampling_options"), section(request, "stop_conditions")
    extra = section(section(request, "extra_args"), "sampling_options")
    given = {name: value for name, value in sampling.items() if value is not None}
    merged = {**(defaults or {}), **given}
    top_k = _integer(merged, "top_k", -1, 2**31)
    return SamplingOptions(
        temperature=_number(merged, "temperature", 0.0, _MAX_TEMPERATURE, 1.0),
        top_p=_number(merged, "top_p", 0.0, 1.0, 1.0, above=True),
        top_k=0 if top_k in (None, -1) else int(top_k or 0),
        min_p=_number(merged, "min_p", 0.0, 1.0, 0.0),
        presence_penalty=_number(merged, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=_number(merged, "frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=_number(merged, "repetition_penalty", 0.0, 100.0, 1.0, above=True),
        seed=_integer(merged, "seed", -(2**63), 2**64 - 1),
        logit_bias=_bias(sampling.get("logit_bias"), vocab_size),
        allowed=_token_ids(extra.get("allowed_token_ids"), "allowed_token_ids", vocab_size) or None,
        bad_words=_bad_words(extra.get("bad_words_token_ids"), vocab_size),
        stop_ids=_stop_ids(request, stop, eos_token_ids, vocab_size),
        min_tokens=_integer(stop, "min_tokens", 0, 2**31) or 0,
        logprobs=_integer(section(request, "output_options"), "logprobs", 0, MAX_LOGPROBS),
    )


def section(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A part of a request; empty if it is not there."""
    value = request.get(name)
    return value if isinstance(value, dict) else {}


def _stop_ids(
    request: Mapping[str, Any], stop: Mapping[str, Any], eos_token_ids: Collection[int], vocab_size: int
) -> frozenset[int]:
    """Those that the model can come to: a tokenizer may have more tokens than its model."""
    names = ["stop_token_ids", "stop_token_ids_visible"]
    found: list[int] = []
    if not stop.get("ignore_eos"):
        names.append("stop_token_ids_hidden")
        own = request.get("eos_token_ids")
        found += eos_token_ids if own is None else _token_ids(own, "eos_token_ids", _U32)
    for name in names:
        found += _token_ids(stop.get(name), name, _U32)
    return frozenset(token for token in found if token < vocab_size)


def _bias(value: Any, vocab_size: int) -> Mapping[int, float]:
    if not value:
        return {}
    if not isinstance(value, dict) or len(value) > _MAX_IDS:
        raise InvalidArgument(f"logit_bias must be a map of at most {_MAX_IDS} token ids")
    found = {}
    for key, bias in value.items():
        text = str(key)
        if not text.isascii() or not text.isdecimal() or int(text) >= vocab_size:
            raise InvalidArgument(f"logit_bias: {text[:32]!r} is no token id below {vocab_size}")
        found[int(text)] = _number({"logit_bias": bias}, "logit_bias", -100.0, 100.0, 0.0)
    return found


def _bad_words(value: Any, vocab_size: int) -> Sequence[Sequence[int]]:
    if not value:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_IDS:
        raise InvalidArgument(f"bad_words_token_ids must be a list of at most {_MAX_IDS} lists of token ids")
    words = [_token_ids(word, "bad_words_token_ids", vocab_size) for word in value]
    return tuple(word for word in words if word)


def _token_ids(value: Any, name: str, vocab_size: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > _MAX_IDS:
        raise InvalidArgument(f"{name} must be a list of at most {_MAX_IDS} token ids")
    for token in value:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise InvalidArgument(f"{name}: {str(token)[:32]} is no token id below {vocab_size}")
    return tuple(value)


def _number(
    values: Mapping[str, Any], name: str, low: float, high: float, default: float, *, above: bool = False
) -> float:
    """``above``: ``low`` itself is not allowed."""
    value = values.get(name)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not low <= value <= high or (above and value == low):
        bounds = f"over {low:g} and at most {high:g}" if above else f"between {low:g} and {high:g}"
        raise InvalidArgument(f"{name} must be {bounds}, it is {str(value)[:32]}")
    return float(value)


def _integer(values: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = values.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:
        raise InvalidArgument(f"{name} must be a whole number between {low} and {high}, it is {str(value)[:32]}")
    return value
