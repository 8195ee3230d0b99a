"""How long a pass takes on the modelled GPU (spec/services h.7). Pure; milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Modelled time of a pass, before speedups."""

    prefill_ms: float
    decode_ms: float


def prefill_ms(prefixes: Sequence[int], chunks: Sequence[int]) -> float:
    """Time to compute ``chunks`` tokens of each prefilling request after ``prefixes`` tokens; 0 without any."""
    count = len(chunks)
    if not count:
        return 0.0
    prefix = sum(prefixes)
    tokens = count * ((prefix + sum(chunks)) // count - prefix // count)
    return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 1.650142e01


def decode_ms(context_tokens: int, capacity_tokens: int) -> float:
    """Time to give a token to requests that are ``context_tokens`` long together; 0 without any."""
    if not context_tokens:
        return 0.0
    load = min(1.0, context_tokens / capacity_tokens)
    return max(1.0, -25.74 * load**2 + 54.01 * load + 5.74)


def pass_seconds(times: PassTimes, speedup_ratio: float, decode_speedup_ratio: float) -> float:
    """Simulated duration; a speedup of 0 means that the part takes no time."""
    if not speedup_ratio:
        return 0.0
    decode = times.decode_ms / decode_speedup_ratio if decode_speedup_ratio else 0.0
    return (times.prefill_ms + decode) / speedup_ratio / 1000
