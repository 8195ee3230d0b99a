"""How long a pass takes on a GPU that is modelled. Pure; milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Modelled time of a pass, before speedups."""

    prefill_ms: float
    decode_ms: float


class TimingModel(Protocol):
    """How long the two parts of a pass take on a GPU, in milliseconds. Pure and fast: it is asked in every pass."""

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        """Time to compute ``chunks`` tokens of each prefilling request after ``prefixes`` tokens; 0 without any."""

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        """Time to give a token to each of ``requests``, ``context_tokens`` long together; 0 without any.

        ``capacity_tokens``: what the KV cache holds.
        """


class NoTiming:
    """Of an engine that computes: nothing is modelled. A ``TimingModel``."""

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        return 0.0

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        return 0.0
