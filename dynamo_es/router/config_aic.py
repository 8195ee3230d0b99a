"""What AIC's performance model is asked about (Dynamo's ``AicPerfConfig``; spec: router-core F.3, services i)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from dynamo_es.router.config_arguments import Reader, optional, to_text, to_u64

_TEXT, _SIZE = optional(to_text), optional(to_u64)
_READERS: Mapping[str, Reader] = {
    "aic_backend": to_text,
    "aic_system": to_text,
    "aic_model_path": to_text,
    "aic_tp_size": to_u64,
    "aic_backend_version": _TEXT,
    "aic_moe_tp_size": _SIZE,
    "aic_moe_ep_size": _SIZE,
    "aic_attention_dp_size": _SIZE,
    "aic_nextn": _SIZE,
    "aic_nextn_accept_rates": _TEXT,
    "aic_gemm_dtype": _TEXT,
    "aic_moe_dtype": _TEXT,
    "aic_fmha_dtype": _TEXT,
    "aic_kv_cache_dtype": _TEXT,
    "aic_comm_dtype": _TEXT,
}
_NOT_EMPTY = ("aic_backend", "aic_system", "aic_model_path")
_AT_LEAST_ONE = ("aic_tp_size", "aic_moe_tp_size", "aic_moe_ep_size", "aic_attention_dp_size")


class AicPerfConfig:
    """The deployment whose prefill times the model predicts. Names and dtypes are not checked before the model runs.

    Args:
        aic_backend: Engine: ``vllm``, ``sglang``, ``trtllm``.
        aic_system: Kind of machine, such as ``h200_sxm``.
        aic_model_path: Model name or directory.
        aic_tp_size: Tensor-parallel ranks; at least 1, default 1.
        aic_backend_version: Version of the engine; None (default): the newest that the model knows.
        aic_moe_tp_size, aic_moe_ep_size: Tensor- and expert-parallel ranks of the experts; at least 1.
        aic_attention_dp_size: Data-parallel ranks of attention; at least 1.
        aic_nextn: Tokens that speculative decoding drafts, 1 to 5; None (default): it is off.
        aic_nextn_accept_rates: How often each of them is accepted: numbers of 0 to 1, separated by commas.
        aic_gemm_dtype, aic_moe_dtype, aic_fmha_dtype, aic_kv_cache_dtype, aic_comm_dtype: Number formats; None
            (default): the model's own.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: A value is refused.
    """

    FIELDS = tuple(_READERS)
    __slots__ = ("_values",)
    _values: Mapping[str, Any]

    def __new__(
        cls,
        aic_backend: str,
        aic_system: str,
        aic_model_path: str,
        aic_tp_size: int = 1,
        aic_backend_version: str | None = None,
        aic_moe_tp_size: int | None = None,
        aic_moe_ep_size: int | None = None,
        aic_attention_dp_size: int | None = None,
        aic_nextn: int | None = None,
        aic_nextn_accept_rates: str | None = None,
        aic_gemm_dtype: str | None = None,
        aic_moe_dtype: str | None = None,
        aic_fmha_dtype: str | None = None,
        aic_kv_cache_dtype: str | None = None,
        aic_comm_dtype: str | None = None,
    ) -> Self:
        given = locals()  # every argument, in the order in which Dynamo converts them
        self = object.__new__(cls)
        self._values = {name: read(name, given[name]) for name, read in _READERS.items()}
        _check(self._values)
        return self

    def values(self) -> dict[str, Any]:
        """All values by argument name, as the model takes them."""
        return dict(self._values)


def _check(values: Mapping[str, Any]) -> None:
    for name in _NOT_EMPTY:
        if not values[name]:
            raise ValueError(f"{name} must be non-empty")
    for name in _AT_LEAST_ONE:
        if values[name] is not None and values[name] < 1:
            raise ValueError(f"{name} must be >= 1")
    if values["aic_nextn"] is not None and not 1 <= values["aic_nextn"] <= 5:
        raise ValueError("aic_nextn must be 1..=5 when set (omit to disable spec dec)")
