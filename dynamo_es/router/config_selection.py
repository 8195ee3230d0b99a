"""Bounds of the selection service's memory of selections (Dynamo's ``SelectionCacheConfig``; spec: router-core F.3)."""

from __future__ import annotations

import math
from typing import Self

from dynamo_es.router.config_arguments import optional, to_real, to_u64

_MAX_TTL_SECS = 2.0**64


class SelectionCacheConfig:
    """How long and how many selections are remembered, so that a later reservation needs only their id.

    The oldest are forgotten first, when one of the bounds is passed.

    Args (keywords only; None, the default, takes the one given here):
        ttl_secs: Seconds for which a selection can be reserved; at least 0, below 2^64, default 120.
        max_entries: Selections; default 4096. 0 remembers none.
        max_bytes: Bytes of all of them; default 268,435,456 (256 MiB).

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: ``ttl_secs`` is negative, not a number, or too large. (In Dynamo this ends the call with a panic,
            which ``except Exception`` does not catch.)
    """

    __slots__ = ("_max_bytes", "_max_entries", "_ttl_secs")
    _ttl_secs: float
    _max_entries: int
    _max_bytes: int

    def __new__(
        cls, *, ttl_secs: float | None = None, max_entries: int | None = None, max_bytes: int | None = None
    ) -> Self:
        self = object.__new__(cls)
        ttl = optional(to_real)("ttl_secs", ttl_secs)
        entries = optional(to_u64)("max_entries", max_entries)
        size = optional(to_u64)("max_bytes", max_bytes)
        self._ttl_secs = 120.0 if ttl is None else _check_duration(ttl)
        self._max_entries = 4096 if entries is None else entries
        self._max_bytes = 256 * 1024 * 1024 if size is None else size
        return self

    @property
    def ttl_secs(self) -> float:
        """Seconds."""
        return self._ttl_secs

    @property
    def max_entries(self) -> int:
        """Selections."""
        return self._max_entries

    @property
    def max_bytes(self) -> int:
        """Bytes."""
        return self._max_bytes


def _check_duration(seconds: float) -> float:
    if seconds < 0:
        raise ValueError("cannot convert float seconds to Duration: value is negative")
    if math.isnan(seconds) or seconds >= _MAX_TTL_SECS:
        raise ValueError("cannot convert float seconds to Duration: value is either too big or NaN")
    return seconds
