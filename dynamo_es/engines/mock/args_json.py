"""``MockEngineArgs`` as JSON: the object's fields, with Dynamo's texts for what is wrong with them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dynamo_es.errors import ConfigError

_FAILED = "Failed to parse MockEngineArgs JSON: "
_FLAGS = frozenset(
    {"enable_prefix_caching", "enable_chunked_prefill", "enable_local_indexer", "is_prefill", "is_decode"}
)
_REALS = frozenset(
    {"speedup_ratio", "decode_speedup_ratio", "startup_time", "gpu_memory_utilization", "mem_fraction_static",
     "free_gpu_memory_fraction", "kv_transfer_bandwidth"}
)  # fmt: skip
_TEXTS = frozenset(
    {"engine_type", "worker_type", "kv_transfer_timing_mode", "preemption_mode", "router_queue_policy",
     "planner_profile_data", "response_replay_trace_path", "aic_backend", "aic_system", "aic_backend_version",
     "aic_model_path", "aic_nextn_accept_rates", "aic_gemm_dtype", "aic_moe_dtype", "aic_fmha_dtype",
     "aic_kv_cache_dtype", "aic_comm_dtype"}
)  # fmt: skip
_NESTED = frozenset({"reasoning", "sglang", "trtllm", "timing_model"})
# In the order in which Dynamo lists what it expects.
FIELDS = (
    "engine_type", "num_gpu_blocks", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "enable_prefix_caching", "enable_chunked_prefill", "speedup_ratio", "decode_speedup_ratio", "dp_size",
    "startup_time", "worker_type", "is_prefill", "is_decode", "planner_profile_data", "aic_backend", "aic_system",
    "aic_backend_version", "aic_tp_size", "aic_model_path", "aic_moe_tp_size", "aic_moe_ep_size",
    "aic_attention_dp_size", "aic_gemm_dtype", "aic_moe_dtype", "aic_fmha_dtype", "aic_kv_cache_dtype",
    "aic_comm_dtype", "aic_nextn", "aic_nextn_accept_rates", "aic_mtp_seed", "gpu_memory_utilization",
    "mem_fraction_static", "free_gpu_memory_fraction", "enable_local_indexer", "bootstrap_port",
    "handoff_session_timeout_ms", "kv_bytes_per_token", "kv_transfer_bytes_per_token", "kv_cache_bytes_per_token",
    "kv_transfer_bandwidth", "kv_transfer_timing_mode", "reasoning", "response_replay_trace_path",
    "zmq_kv_events_port", "zmq_replay_port", "preemption_mode", "router_queue_policy", "sglang", "trtllm",
    "timing_model", "has_perf_model",
)  # fmt: skip


def read_json(text: str, arguments: Sequence[str]) -> dict[str, Any]:
    """The fields that the constructor takes; ``[]`` is an empty object. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_FAILED}{error}") from error
    if value == []:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{_FAILED}invalid type: {_kind(value)}, expected struct MockEngineArgsSerde")
    for name, field in value.items():
        _check_field(name, field)
    return _constructor_arguments(value, arguments)


def _constructor_arguments(value: dict[str, Any], arguments: Sequence[str]) -> dict[str, Any]:
    found = {name: field for name, field in value.items() if name in arguments}
    if value.get("is_prefill") and value.get("is_decode"):
        raise ConfigError(f"{_FAILED}Invalid worker configuration: is_prefill and is_decode cannot both be true.")
    for role in ("prefill", "decode"):
        if value.get(f"is_{role}"):
            found.setdefault("worker_type", role)
    earlier_name = value.get("kv_transfer_bytes_per_token")
    if earlier_name is not None:
        found.setdefault("kv_bytes_per_token", earlier_name)
    # A null means the default where None is no value.
    none_counts = ("max_num_seqs", "max_num_batched_tokens")
    return {name: field for name, field in found.items() if field is not None or name in none_counts}


def _check_field(name: str, value: Any) -> None:
    if name not in FIELDS:
        expected = ", ".join(f"`{field}`" for field in FIELDS)
        raise ConfigError(f"{_FAILED}{name}: unknown field `{name}`, expected one of {expected}")
    if value is None or name == "has_perf_model":
        return
    if name in _FLAGS:
        good, expected = isinstance(value, bool), "a boolean"
    elif name in _TEXTS:
        good, expected = isinstance(value, str), "a string"
    elif name in _NESTED:
        good, expected = isinstance(value, dict), "an object"
    elif name in _REALS:
        good, expected = isinstance(value, int | float) and not isinstance(value, bool), "f64"
    else:
        good, expected = isinstance(value, int) and not isinstance(value, bool), "usize"
        if good and value < 0:
            raise ConfigError(f"{_FAILED}{name}: invalid value: integer `{value}`, expected usize")
    if not good:
        raise ConfigError(f"{_FAILED}{name}: invalid type: {_kind(value)}, expected {expected}")
    if name == "timing_model":
        raise ConfigError(f"{_FAILED}timing_model: not in this version; use planner_profile_data")


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f'string "{value[:64]}"'
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    return "sequence" if isinstance(value, list) else "map" if isinstance(value, dict) else "null"
