"""How long a pass takes on the modelled GPU (spec/services h.7). Pure; milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_es.engines.scheduling.timing import PassTimes, TimingModel


class DefaultTiming:
    """Dynamo's polynomials. A ``TimingModel``."""

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        return prefill_ms(prefixes, chunks)

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        return decode_ms(context_tokens, capacity_tokens)


class PrefillTiming:
    """Of a worker whose passes have no decode time. A ``TimingModel``."""

    def __init__(self, timing: TimingModel) -> None:
        self._timing = timing

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        return self._timing.prefill_ms(prefixes, chunks)

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        return 0.0


def prefill_ms(prefixes: Sequence[int], chunks: Sequence[int]) -> float:
    """Time to compute ``chunks`` tokens of each prefilling request after ``prefixes`` tokens; 0 without any."""
    if not chunks:
        return 0.0
    tokens = new_tokens(prefixes, chunks)
    return 4.209989e-07 * tokens**2 + 1.518344e-02 * tokens + 1.650142e01


def new_tokens(prefixes: Sequence[int], chunks: Sequence[int]) -> int:
    """Tokens that a pass computes, as Dynamo reckons them: from whole means of all requests."""
    count = len(chunks)
    prefix = sum(prefixes)
    return count * ((prefix + sum(chunks)) // count - prefix // count) if count else 0


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
