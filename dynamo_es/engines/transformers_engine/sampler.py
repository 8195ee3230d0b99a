"""Choosing tokens from a model's logits, with NumPy. Pure but for the random numbers that it is given.

Order, as in vLLM: what is allowed, bad words, the minimum length, bias, penalties, temperature, ``min_p``, ``top_k``,
``top_p``, chance. Log probabilities that are told are those of the model itself, before any of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dynamo_es.engines.transformers_engine.sampling_options import SamplingOptions

Logits = npt.NDArray[np.float32]
_NEVER = np.float32(-np.inf)


class Choice(NamedTuple):
    """A chosen token; only if they were asked for, its ``logprob`` and ``top``, best first and itself among them."""

    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class Sampler:
    """Chooses the tokens of one request, one after the other. Belongs to one thread at a time."""

    def __init__(self, options: SamplingOptions, prompt: Sequence[int], rng: np.random.Generator) -> None:
        """``rng``: its own; with the options' seed the same answer comes out each time."""
        self.options = options
        self._rng = rng
        self._prompt = np.unique(np.asarray(prompt, np.int64)) if options.repetition_penalty != 1.0 else None
        self._output: list[int] = []
        self._counts: dict[int, int] = {}

    @property
    def is_plain(self) -> bool:
        """Whoever has the logits may take the largest one by himself, and ``note`` it."""
        return self.options.is_plain

    def note(self, token_id: int) -> None:
        """A token that was chosen without ``choose``."""
        self._output.append(token_id)
        self._counts[token_id] = self._counts.get(token_id, 0) + 1

    def choose(self, logits: Logits) -> Choice:
        """The next token. ``logits``: of the vocabulary, float32; they are not changed."""
        scores = self._shaped(logits)
        token_id = int(scores.argmax()) if self.options.is_greedy else self._drawn(scores)
        self.note(token_id)
        count = self.options.logprobs
        if count is None:
            return Choice(token_id)
        return _told(logits, token_id, count)

    def _shaped(self, logits: Logits) -> Logits:
        options = self.options
        scores = logits.copy()
        if options.allowed is not None:
            kept = np.asarray(options.allowed, np.int64)
            scores = np.full_like(logits, _NEVER)
            scores[kept] = logits[kept]
        for word in options.bad_words:
            head = list(word[:-1])
            if not head or self._output[-len(head) :] == head:
                scores[word[-1]] = _NEVER
        if len(self._output) < options.min_tokens and options.stop_ids:
            scores[list(options.stop_ids)] = _NEVER
        for token_id, bias in options.logit_bias.items():
            scores[token_id] += np.float32(bias)
        self._punish(scores)
        return scores

    def _punish(self, scores: Logits) -> None:
        options = self.options
        used = np.fromiter(self._counts, np.int64, len(self._counts))
        if self._prompt is not None:
            seen = np.union1d(self._prompt, used)
            values = scores[seen]
            factor = np.float32(options.repetition_penalty)
            scores[seen] = np.where(values > 0, values / factor, values * factor)
        if used.size and (options.presence_penalty or options.frequency_penalty):
            counts = np.fromiter(self._counts.values(), np.float32, used.size)
            scores[used] -= np.float32(options.presence_penalty) + np.float32(options.frequency_penalty) * counts

    def _drawn(self, scores: Logits) -> int:
        options = self.options
        probabilities = _softmax(scores.astype(np.float64) / options.temperature)
        if options.min_p > 0:
            probabilities[probabilities < options.min_p * probabilities.max()] = 0.0
        tokens = np.flatnonzero(probabilities)
        if 0 < options.top_k < tokens.size:
            best = np.argpartition(probabilities[tokens], -options.top_k)[-options.top_k :]
            tokens = tokens[best]
        if options.top_p < 1.0:
            tokens = tokens[np.argsort(-probabilities[tokens], kind="stable")]
            masses = probabilities[tokens] / probabilities[tokens].sum()
            # The token that reaches the mass is one of those that are kept.
            tokens = tokens[: int(np.searchsorted(np.cumsum(masses), options.top_p)) + 1]
        sums = np.cumsum(probabilities[tokens])
        place = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
        return int(tokens[min(place, tokens.size - 1)])


def _softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    highest = scores.max()
    # If nothing is allowed, or something is infinitely likely, all that ties for the first place is equal.
    weights = np.exp(scores - highest) if np.isfinite(highest) else (scores == highest).astype(np.float64)
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result


def _told(logits: Logits, token_id: int, count: int) -> Choice:
    wide = logits.astype(np.float64)
    highest = wide.max()
    logprobs = wide - (highest + np.log(np.exp(wide - highest).sum()))
    own = float(logprobs[token_id])
    if count == 0:
        return Choice(token_id, own)
    best = np.argpartition(logprobs, -min(count, logprobs.size))[-count:]
    best = best[np.argsort(-logprobs[best], kind="stable")]
    top = [(int(token), float(logprobs[token])) for token in best]
    if token_id not in best:
        top.append((token_id, own))
    return Choice(token_id, own, top)
