"""Medians and percentiles, the same way in every benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Row = tuple[str, float, str]


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` (0..1) of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def rounds(what: str, values: Sequence[float], unit: str) -> list[Row]:
    """Median of some rounds, with the smallest and the largest."""
    return [
        (f"{what}, median of {len(values)}", statistics.median(values), unit),
        (f"{what}, smallest", min(values), unit),
        (f"{what}, largest", max(values), unit),
    ]


def latencies(what: str, values: Sequence[float], unit: str) -> list[Row]:
    """Median, 99th percentile and maximum of single measurements."""
    return [
        (f"{what}, p50 of {len(values)}", percentile(values, 0.5), unit),
        (f"{what}, p99", percentile(values, 0.99), unit),
        (f"{what}, largest", max(values), unit),
    ]
