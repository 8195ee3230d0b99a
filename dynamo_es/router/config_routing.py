"""How requests are routed, and when a worker counts as overloaded (Dynamo's classes; spec: router-core D.10, F.2)."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Self

from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.config_arguments import optional, to_boolean, to_real, to_text, to_u64
from dynamo_es.router.modes import RouterMode

_MAX_AFFINITY_S = 31_536_000
_AFFINITY_MODES = ("hard", "soft")


class LoadThresholdConfig:
    """When a worker is overloaded and gets no new requests: while all of its ranks are above one of the thresholds.

    Args (keywords only; None, the default, does not ask):
        active_decode_blocks_threshold: Fraction of a rank's KV blocks that are in use; 0 to 1.
        active_prefill_tokens_threshold: Prompt tokens booked on a rank; 0 to 2^64 - 1.
        active_prefill_tokens_threshold_frac: The same as a multiple of its ``max_num_batched_tokens``; finite, at
            least 0.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: A value is refused.
    """

    __slots__ = ("_decode_blocks", "_prefill_tokens", "_prefill_tokens_frac")
    _decode_blocks: float | None
    _prefill_tokens: int | None
    _prefill_tokens_frac: float | None

    def __new__(
        cls,
        *,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
    ) -> Self:
        try:
            return cls._checked(
                active_decode_blocks_threshold, active_prefill_tokens_threshold, active_prefill_tokens_threshold_frac
            )
        except ValueError as error:
            raise ValueError(f"invalid load threshold config: {error}") from error

    @property
    def active_decode_blocks_threshold(self) -> float | None:
        """Fraction of a rank's KV blocks."""
        return self._decode_blocks

    @property
    def active_prefill_tokens_threshold(self) -> int | None:
        """Prompt tokens."""
        return self._prefill_tokens

    @property
    def active_prefill_tokens_threshold_frac(self) -> float | None:
        """Multiple of a rank's ``max_num_batched_tokens``."""
        return self._prefill_tokens_frac

    @classmethod
    def _checked(cls, decode_blocks: object, prefill_tokens: object, prefill_tokens_frac: object) -> Self:
        config = object.__new__(cls)
        config._decode_blocks = optional(to_real)("active_decode_blocks_threshold", decode_blocks)
        config._prefill_tokens = optional(to_u64)("active_prefill_tokens_threshold", prefill_tokens)
        config._prefill_tokens_frac = optional(to_real)("active_prefill_tokens_threshold_frac", prefill_tokens_frac)
        blocks, fraction = config._decode_blocks, config._prefill_tokens_frac
        if blocks is not None and not 0 <= blocks <= 1:
            raise ValueError(f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {_shown(blocks)}")
        if fraction is not None and not (math.isfinite(fraction) and fraction >= 0):
            raise ValueError(
                "active_prefill_tokens_threshold_frac must be a finite value greater than or equal to 0.0, "
                f"got {_shown(fraction)}"
            )
        return config


class RouterConfig:
    """How to route requests.

    Args:
        mode: How a worker is chosen.
        config: Values of the KV router, of which a copy is kept; None (default): all defaults.
        active_decode_blocks_threshold, active_prefill_tokens_threshold, active_prefill_tokens_threshold_frac: As in
            ``LoadThresholdConfig``.
        enforce_disagg: Deprecated and ignored: what workers registered as decides.
        session_affinity_ttl_secs: Seconds for which an idle session keeps its worker; 1 to 31,536,000; None (default):
            sessions are not kept together.
        session_affinity_mode: What happens when that worker cannot take a request of the session: ``hard`` (default) it
            fails, ``soft`` the session moves.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: A value is refused.
    """

    __slots__ = ("_affinity_mode", "_affinity_ttl_secs", "_kv", "_load_thresholds", "_mode")
    _mode: RouterMode
    _kv: KvRouterConfig
    _load_thresholds: LoadThresholdConfig
    _affinity_ttl_secs: int | None
    _affinity_mode: str

    def __new__(
        cls,
        mode: RouterMode,
        config: KvRouterConfig | None = None,
        active_decode_blocks_threshold: float | None = None,
        active_prefill_tokens_threshold: int | None = None,
        active_prefill_tokens_threshold_frac: float | None = None,
        enforce_disagg: bool = False,
        session_affinity_ttl_secs: int | None = None,
        session_affinity_mode: str = "hard",
    ) -> Self:
        self = object.__new__(cls)
        self._mode = _to_mode("mode", mode)
        self._kv = KvRouterConfig() if config is None else _to_kv_config("config", config).copy()
        self._load_thresholds = LoadThresholdConfig._checked(
            active_decode_blocks_threshold, active_prefill_tokens_threshold, active_prefill_tokens_threshold_frac
        )
        to_boolean("enforce_disagg", enforce_disagg)
        self._affinity_ttl_secs = optional(to_u64)("session_affinity_ttl_secs", session_affinity_ttl_secs)
        self._affinity_mode = to_text("session_affinity_mode", session_affinity_mode)
        if self._affinity_ttl_secs is not None and not 1 <= self._affinity_ttl_secs <= _MAX_AFFINITY_S:
            raise ValueError(f"session_affinity_ttl_secs must be between 1 and {_MAX_AFFINITY_S}")
        if self._affinity_mode not in _AFFINITY_MODES:
            raise ValueError(f"invalid session affinity mode \"{self._affinity_mode}\"; expected 'hard' or 'soft'")
        return self

    @property
    def router_mode(self) -> RouterMode:
        """How a worker is chosen."""
        return self._mode

    @router_mode.setter
    def router_mode(self, value: RouterMode) -> None:
        self._mode = _to_mode("value", value)

    @property
    def kv_router_config(self) -> KvRouterConfig:
        """A copy of the values of the KV router; assigning replaces them."""
        return self._kv.copy()

    @kv_router_config.setter
    def kv_router_config(self, value: KvRouterConfig) -> None:
        self._kv = _to_kv_config("value", value).copy()

    @property
    def load_thresholds(self) -> LoadThresholdConfig:
        """When a worker is overloaded."""
        return self._load_thresholds

    @property
    def session_affinity_ttl_secs(self) -> int | None:
        """Seconds for which an idle session keeps its worker."""
        return self._affinity_ttl_secs

    @property
    def session_affinity_mode(self) -> str:
        """``hard`` or ``soft``."""
        return self._affinity_mode


def _to_mode(argument: str, value: object) -> RouterMode:
    if not isinstance(value, RouterMode):
        raise TypeError(f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'RouterMode'")
    return value


def _to_kv_config(argument: str, value: object) -> KvRouterConfig:
    if not isinstance(value, KvRouterConfig):
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object cannot be converted to 'KvRouterConfig'"
        )
    return value


def _shown(value: float) -> str:
    """A number in full, without an exponent, as Dynamo's messages show it."""
    if math.isnan(value):
        return "NaN"
    return str(value) if math.isinf(value) else format(Decimal(repr(value)), "f").removesuffix(".0")
