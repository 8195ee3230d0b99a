"""What ``MockEngineArgs`` accepts, and Dynamo's texts for what it does not. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_es.errors import ConfigError

_NORMALIZE = "Failed to normalize MockEngineArgs: "
VALIDATE = "Failed to validate MockEngineArgs: "
_POLICIES = ("fcfs", "lcfs", "wspt")
_NO_EVICT = "guaranteed_no_evict"
RANGES: Mapping[str, tuple[float, float | None]] = {
    **dict.fromkeys(
        ("num_gpu_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "dp_size"), (1, None)
    ),
    **dict.fromkeys(("aic_tp_size", "aic_moe_tp_size", "aic_moe_ep_size", "aic_attention_dp_size"), (1, None)),
    **dict.fromkeys(("speedup_ratio", "decode_speedup_ratio", "startup_time", "kv_transfer_bandwidth"), (0.0, None)),
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static", "free_gpu_memory_fraction"), (0.0, 1.0)),
    "aic_nextn": (1, 5),
    "handoff_session_timeout_ms": (1, None),
}
"""Least and greatest value of a number; None: there is no greatest."""


def _engine_type(value: str) -> None:
    if value not in ("vllm", "sglang", "trtllm"):
        raise ConfigError(f"engine_type must be one of 'vllm', 'sglang', or 'trtllm', got '{value}'")


def _worker_type(value: str) -> None:
    if value not in ("aggregated", "prefill", "decode"):
        raise ConfigError(f"worker_type must be one of 'aggregated', 'prefill', or 'decode', got '{value}'")


def _preemption_mode(value: str) -> None:
    if value not in ("lifo", "fifo"):
        raise ConfigError(f"preemption_mode must be either 'lifo' or 'fifo', got '{value}'")


def _timing_mode(value: str) -> None:
    if value not in ("full_prompt", "destination_missing"):
        raise ConfigError(f"Invalid kv_transfer_timing_mode '{value}'. Must be 'full_prompt' or 'destination_missing'.")


def _queue_policy(value: str | None) -> None:
    if value is not None and value not in _POLICIES:
        raise ConfigError(
            f'invalid router_queue_policy "{value}": unknown queue policy: "{value}", '
            "expected 'fcfs', 'lcfs', or 'wspt'"
        )


ENUMS: Mapping[str, Callable[[Any], None]] = {
    "engine_type": _engine_type,
    "worker_type": _worker_type,
    "preemption_mode": _preemption_mode,
    "kv_transfer_timing_mode": _timing_mode,
    "router_queue_policy": _queue_policy,
}
"""Checks of arguments that are one of a few words."""


def check_values(values: Mapping[str, Any], page_size: int | None, policy: str | None) -> None:
    """Ranges first, then what must fit together. ``block_size`` is the one that is used. Raises ConfigError."""
    for name, (least, greatest) in RANGES.items():
        value = values[name]
        if value is None or (least <= value and (greatest is None or value <= greatest)):
            continue
        if math.isnan(value):
            raise ConfigError(f"{_NORMALIZE}{VALIDATE}{name}: it must be a number")
        bounds = {"min": least, "max": greatest, "value": value}
        shown = ", ".join(f'"{key}": Number({bound!r})' for key, bound in bounds.items() if bound is not None)
        raise ConfigError(f"{_NORMALIZE}{VALIDATE}{name}: Validation error: range [{{{shown}}}]")
    problem = _contradiction(values, page_size, policy)
    if problem is not None:
        raise ConfigError(f"{_NORMALIZE}{VALIDATE}__all__: {problem}")


def check_rates(text: str | None) -> None:
    """Accept rates of speculative decoding: numbers of 0 to 1 joined by commas. Raises ConfigError."""
    for place, part in enumerate(text.split(",") if text else ()):
        try:
            rate = float(part)
        except ValueError as error:
            raise ConfigError(
                f'{_NORMALIZE}invalid aic_nextn_accept_rates value "{part}": invalid float literal'
            ) from error
        if not 0 <= rate <= 1:
            raise ConfigError(f"{_NORMALIZE}aic_nextn_accept_rates[{place}] must be finite and in [0, 1], got {rate:g}")


def _contradiction(values: Mapping[str, Any], page_size: int | None, policy: str | None) -> str | None:
    engine_type, block_size = values["engine_type"], values["block_size"]
    if policy is not None and policy != _NO_EVICT:
        return f"engine_type=trtllm v1 supports only capacity_scheduler_policy='{_NO_EVICT}', got '{policy}'"
    if engine_type == "sglang" and page_size not in (None, block_size):
        return (
            "engine_type=sglang requires block_size and sglang.page_size to match when both are set, "
            f"got block_size={block_size} and sglang.page_size={page_size}"
        )
    if block_size < 1:
        return "block_size must be greater than 0"
    if engine_type != "sglang" and block_size < 2:
        return (
            "the vLLM/TRT-LLM scheduler requires block_size to be at least 2 for "
            f"engine_type={engine_type.capitalize()}, got block_size={block_size}"
        )
    if values["aic_nextn_accept_rates"] is not None and values["aic_nextn"] is None:
        return "aic_nextn_accept_rates requires aic_nextn"
    return None
