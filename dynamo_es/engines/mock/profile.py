"""Times of a pass from a profile of a real engine, as Dynamo's planner measures it (spec/services h.7). Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dynamo_es.engines.mock.timing import new_tokens
from dynamo_es.errors import ConfigError

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProfiledTiming:
    """A ``TimingModel``: between the measured points times run straight, and beyond them on in the same direction.

    Attributes:
        prefill_tokens: Ascending; prompt tokens of a pass.
        prefill_times_ms: For each of them.
        decode_tokens: Ascending; tokens in the KV cache.
        decode_contexts: Ascending; mean length of the requests.
        decode_times_ms: One row for each of ``decode_tokens``, one column for each of ``decode_contexts``.
    """

    prefill_tokens: Sequence[float]
    prefill_times_ms: Sequence[float]
    decode_tokens: Sequence[float]
    decode_contexts: Sequence[float]
    decode_times_ms: Sequence[Sequence[float]]

    def prefill_ms(self, prefixes: Sequence[int], chunks: Sequence[int]) -> float:
        tokens = new_tokens(prefixes, chunks)
        if not chunks:
            return 0.0
        return max(0.0, _along(self.prefill_tokens, self.prefill_times_ms, tokens))

    def decode_ms(self, context_tokens: int, requests: int, capacity_tokens: int) -> float:
        if not context_tokens or not requests:
            return 0.0
        mean = context_tokens / requests
        by_tokens = [_along(self.decode_contexts, row, mean) for row in self.decode_times_ms]
        return max(0.0, _along(self.decode_tokens, by_tokens, context_tokens))


def make_profile(arrays: dict[str, Numbers]) -> ProfiledTiming:
    """From the arrays of a profile's file, by name.

    Raises:
        ConfigError: One is missing, has a shape that does not fit the others, or numbers that are no measurements.
    """
    axes = {name: _axis(arrays, name) for name in ("prefill_isl", "decode_active_kv_tokens", "decode_context_length")}
    prefill = _values(arrays, "prefill_ttft_ms", (len(axes["prefill_isl"]),))
    shape = (len(axes["decode_active_kv_tokens"]), len(axes["decode_context_length"]))
    decode = _values(arrays, "decode_itl", shape)
    return ProfiledTiming(
        axes["prefill_isl"].tolist(), prefill.tolist(), axes["decode_active_kv_tokens"].tolist(),
        axes["decode_context_length"].tolist(), decode.tolist(),
    )  # fmt: skip


def _along(points: Sequence[float], values: Sequence[float], at: float) -> float:
    if len(points) == 1:
        return values[0]
    index = min(max(bisect_right(points, at), 1), len(points) - 1)
    low, high = points[index - 1], points[index]
    return values[index - 1] + (values[index] - values[index - 1]) * (at - low) / (high - low)


def _values(arrays: dict[str, Numbers], name: str, shape: tuple[int, ...]) -> Numbers:
    found = arrays.get(name)
    if found is None:
        raise ConfigError(f"the profile has no {name}")
    if found.shape != shape or not np.isfinite(found).all() or (found < 0).any():
        raise ConfigError(f"the profile's {name} must be finite numbers, at least 0, of shape {shape}")
    return found


def _axis(arrays: dict[str, Numbers], name: str) -> Numbers:
    found = arrays.get(name)
    if found is None:
        raise ConfigError(f"the profile has no {name}")
    if found.ndim != 1 or not len(found) or not np.isfinite(found).all() or (np.diff(found) <= 0).any():
        raise ConfigError(f"the profile's {name} must be a row of ascending numbers")
    return found
