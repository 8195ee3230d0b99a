"""Prompt tokens that a rank has still to compute, falling with time (spec: router-core D.1; Dynamo's ``aic`` model).

Every prompt may have a predicted duration. A rank computes its prompts one after the other, so only its oldest one, the
*anchor*, says how far it is: since it became the oldest. When it is done, the next oldest is the anchor from then on.

If all prompts of the rank are predicted, what the anchor's speed makes in that time is taken from the whole sum, so a
prompt that takes less time than predicted lets the next one fall too. If a prompt is not predicted, only the anchor's
own tokens fall. Nothing falls under 0. Time is passed in, as seconds of any one clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)


class Prefill(NamedTuple):
    """A prompt that is being computed, or waits for it.

    Attributes:
        tokens: Of it, without what the rank has cached.
        duration_s: How long that takes, alone; None: not predicted.
        since: When it was sent.
    """

    tokens: int
    duration_s: float | None
    since: float


class PrefillBacklog(Generic[K]):
    """The prompts of one rank. Not safe for several threads."""

    __slots__ = ("_anchor", "_anchored_at", "_prefills", "_unpredicted", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self._prefills: dict[K, Prefill] = {}
        self._unpredicted = 0
        self._anchor: K | None = None
        self._anchored_at = 0.0

    def __len__(self) -> int:
        return len(self._prefills)

    def add(self, key: K, prefill: Prefill) -> None:
        """A prompt was sent; ``key`` is new. They may be told in any order."""
        self._prefills[key] = prefill
        self.tokens += prefill.tokens
        if prefill.duration_s is None:
            self._unpredicted += 1
        if self._anchor is None or prefill.since < self._prefills[self._anchor].since:
            self._anchor, self._anchored_at = key, prefill.since

    def remove(self, key: K, now: float) -> None:
        """It is computed, or nobody wants it any more; a key that is not there changes nothing."""
        prefill = self._prefills.pop(key, None)
        if prefill is None:
            return
        self.tokens -= prefill.tokens
        if prefill.duration_s is None:
            self._unpredicted -= 1
        if key == self._anchor:
            self._anchor = min(self._prefills, key=lambda other: self._prefills[other].since, default=None)
            self._anchored_at = now

    def tokens_at(self, now: float) -> int:
        """What is left to compute."""
        if self._anchor is None:
            return 0
        anchor = self._prefills[self._anchor]
        if anchor.duration_s is None:
            return self.tokens
        elapsed = max(now - self._anchored_at, 0.0)
        if self._unpredicted:
            return self.tokens - anchor.tokens + _remaining(anchor.tokens, elapsed, anchor.duration_s)
        return max(self.tokens - _completed(anchor.tokens, elapsed, anchor.duration_s), 0)


def _remaining(tokens: int, elapsed: float, duration_s: float) -> int:
    if duration_s <= 0:
        return 0
    return math.ceil(tokens * max(1.0 - elapsed / duration_s, 0.0))


def _completed(tokens: int, elapsed: float, duration_s: float) -> int:
    if duration_s <= 0:
        return tokens
    return math.floor(tokens * elapsed / duration_s)
