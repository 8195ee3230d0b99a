"""Dynamo's ``MockEngineArgs`` and what belongs to it (spec/services h.4).

Names, defaults, exception types and texts are Dynamo's, except that every refused value is a ``ConfigError``.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Self

from dynamo_es.engines.mock.args_checks import ENUMS, RANGES, check_rates, check_values
from dynamo_es.engines.mock.args_json import read_json
from dynamo_es.engines.mock.config import MockEngineConfig, ReasoningOutput, SglangConfig
from dynamo_es.errors import ConfigError
from dynamo_es.router.config_aic import AicPerfConfig
from dynamo_es.router.config_arguments import (
    Reader,
    optional,
    to_boolean,
    to_path,
    to_real,
    to_text,
    to_u16,
    to_u32,
    to_u64,
)

DEFAULT_GPU_BLOCKS = 16_384
_BLOCK_SIZES = {"vllm": 64, "sglang": 1, "trtllm": 32}


class ReasoningConfig:
    """Thoughts in every answer: a share ``thinking_ratio`` of it, at least two tokens, between two token ids (u32)."""

    def __init__(self, start_thinking_token_id: int, end_thinking_token_id: int, thinking_ratio: float) -> None:
        """Raises TypeError, OverflowError."""
        self.start_thinking_token_id = to_u32("start_thinking_token_id", start_thinking_token_id)
        self.end_thinking_token_id = to_u32("end_thinking_token_id", end_thinking_token_id)
        self.thinking_ratio = to_real("thinking_ratio", thinking_ratio)


class SglangArgs:
    """Settings of SGLang's scheduler; None: its own default, see ``SglangConfig``. Raises TypeError, OverflowError."""

    def __init__(
        self,
        schedule_policy: str | None = None,
        page_size: int | None = None,
        max_prefill_tokens: int | None = None,
        chunked_prefill_size: int | None = None,
        clip_max_new_tokens: int | None = None,
        schedule_conservativeness: float | None = None,
    ) -> None:
        size = optional(to_u64)
        self.schedule_policy = optional(to_text)("schedule_policy", schedule_policy)
        self.page_size = size("page_size", page_size)
        self.max_prefill_tokens = size("max_prefill_tokens", max_prefill_tokens)
        self.chunked_prefill_size = size("chunked_prefill_size", chunked_prefill_size)
        self.clip_max_new_tokens = size("clip_max_new_tokens", clip_max_new_tokens)
        self.schedule_conservativeness = optional(to_real)("schedule_conservativeness", schedule_conservativeness)

    def config(self) -> SglangConfig:
        """What the scheduler takes. Raises ConfigError."""
        names = [field.name for field in dataclasses.fields(SglangConfig)]
        return SglangConfig(**{name: getattr(self, name) for name in names if getattr(self, name) is not None})


class TrtllmArgs:
    """TensorRT-LLM's policy: ``guaranteed_no_evict``, the only one and the default."""

    def __init__(self, capacity_scheduler_policy: str | None = None) -> None:
        """Raises TypeError."""
        self.capacity_scheduler_policy = optional(to_text)("capacity_scheduler_policy", capacity_scheduler_policy)


def _instance(kind: type) -> Reader:
    def read(argument: str, value: Any) -> Any:
        if not isinstance(value, kind):
            found = type(value).__name__
            raise TypeError(f"argument '{argument}': '{found}' object cannot be converted to '{kind.__name__}'")
        return value

    return read


_TEXT, _SIZE, _REAL, _PATH, _PORT = (optional(read) for read in (to_text, to_u64, to_real, to_path, to_u16))
_NO_DEFAULT: tuple[str, ...] = (
    "aic_backend", "aic_system", "aic_backend_version", "aic_model_path", "aic_nextn_accept_rates", "aic_gemm_dtype",
    "aic_moe_dtype", "aic_fmha_dtype", "aic_kv_cache_dtype", "aic_comm_dtype",
)  # fmt: skip
ARGUMENTS: Mapping[str, tuple[Any, Callable[[str, Any], Any]]] = {
    "engine_type": ("vllm", to_text),
    "num_gpu_blocks": (None, _SIZE),
    "block_size": (0, to_u64),
    "max_num_seqs": (256, _SIZE),
    "max_num_batched_tokens": (8192, _SIZE),
    "enable_prefix_caching": (True, to_boolean),
    "enable_chunked_prefill": (True, to_boolean),
    "speedup_ratio": (1.0, to_real),
    "decode_speedup_ratio": (1.0, to_real),
    "dp_size": (1, to_u32),
    "startup_time": (None, _REAL),
    "worker_type": ("aggregated", to_text),
    "planner_profile_data": (None, _PATH),
    **dict.fromkeys(_NO_DEFAULT, (None, _TEXT)),
    "aic_tp_size": (None, _SIZE),
    "aic_moe_tp_size": (None, _SIZE),
    "aic_moe_ep_size": (None, _SIZE),
    "aic_attention_dp_size": (None, _SIZE),
    "aic_nextn": (None, _SIZE),
    "aic_mtp_seed": (42, to_u64),
    "gpu_memory_utilization": (None, _REAL),
    "mem_fraction_static": (None, _REAL),
    "free_gpu_memory_fraction": (None, _REAL),
    "enable_local_indexer": (False, to_boolean),
    "bootstrap_port": (None, _PORT),
    "handoff_session_timeout_ms": (300_000, to_u64),
    "kv_bytes_per_token": (None, _SIZE),
    "kv_transfer_bandwidth": (None, _REAL),
    "kv_transfer_timing_mode": ("full_prompt", to_text),
    "reasoning": (None, optional(_instance(ReasoningConfig))),
    "response_replay_trace_path": (None, _PATH),
    "zmq_kv_events_port": (None, _PORT),
    "zmq_replay_port": (None, _PORT),
    "preemption_mode": ("lifo", to_text),
    "router_queue_policy": (None, _TEXT),
    "sglang": (None, optional(_instance(SglangArgs))),
    "trtllm": (None, optional(_instance(TrtllmArgs))),
    "max_model_len": (None, _SIZE),
}
"""Every argument with its default and the conversion of its values."""
_AIC_SYSTEM = "h200_sxm"
AIC_FAILED = "Failed to create AIC callback (--aic-perf-model was requested)"
"""Dynamo's text."""


class MockEngineArgs:
    """What a mock engine is; arguments by name, see ``ARGUMENTS`` and ``MockEngineConfig``. Values are attributes.

    ``block_size`` 0: SGLang's page size, or the engine's own default (vLLM 64, SGLang 1, TensorRT-LLM 32).
    ``num_gpu_blocks`` None: 16,384. The memory fractions, ``router_queue_policy``, ``enable_local_indexer`` and
    ``aic_mtp_seed`` are checked and change nothing here. With ``aic_backend`` the engine takes its times from AIC
    (``aic_config``).

    Raises:
        TypeError, OverflowError: An argument is of the wrong type, or does not fit its number type.
        ConfigError: A value is refused.
    """

    _values: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """As Dynamo's, whose arguments may stand by place too."""
        given = dict(zip(ARGUMENTS, args, strict=False))
        for name in kwargs:
            if name not in ARGUMENTS:
                raise TypeError(f"MockEngineArgs.__new__() got an unexpected keyword argument '{name}'")
        if len(args) > len(ARGUMENTS) or given.keys() & kwargs.keys():
            raise TypeError("MockEngineArgs.__new__() got too many positional arguments")
        given |= kwargs
        self = object.__new__(cls)
        self._values = {name: read(name, given.get(name, default)) for name, (default, read) in ARGUMENTS.items()}
        for name, check in ENUMS.items():
            check(self._values[name])
        self._normalize()
        return self

    @staticmethod
    def from_json(config_json: str) -> MockEngineArgs:
        """From a JSON object by the same names. Raises ConfigError, TypeError."""
        return MockEngineArgs(**arguments_of_json(to_text("config_json", config_json)))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"'MockEngineArgs' object has no attribute '{name}'")
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_values":
            object.__setattr__(self, name, value)
        elif name in ("num_gpu_blocks", "enable_prefix_caching") or name.startswith("aic_"):
            self._values[name] = ARGUMENTS[name][1](name, value)
        else:
            raise AttributeError(f"attribute '{name}' of 'MockEngineArgs' objects is not writable")

    def copy(self) -> MockEngineArgs:
        """Another one with the same values."""
        return self.with_overrides()

    def with_overrides(self, **changes: Any) -> MockEngineArgs:
        """A copy with other values. Raises as the constructor does."""
        return MockEngineArgs(**{**self._values, **{name: new for name, new in changes.items() if new is not None}})

    def is_prefill(self) -> bool:
        """Whether it computes prompts for others."""
        return bool(self.worker_type == "prefill")

    def is_decode(self) -> bool:
        """Whether it generates for prompts that others computed."""
        return bool(self.worker_type == "decode")

    def engine_config(self) -> MockEngineConfig:
        """What the engine takes.

        Raises:
            ConfigError: A value makes no sense to the engine, which Dynamo finds out later or never.
        """
        values = {
            field.name: self._values[field.name]
            for field in dataclasses.fields(MockEngineConfig)
            if field.name not in ("sglang", "reasoning")
        }
        thoughts = self.reasoning
        if thoughts is not None:
            start, end = thoughts.start_thinking_token_id, thoughts.end_thinking_token_id
            values["reasoning"] = ReasoningOutput(start, end, thoughts.thinking_ratio)
        return MockEngineConfig(sglang=(self.sglang or SglangArgs()).config(), **values)

    def aic_config(self, model_path: str) -> AicPerfConfig | None:
        """The deployment whose times AIC is to predict; None without ``aic_backend``.

        Args:
            model_path: The model, where ``aic_model_path`` names no other.

        Raises:
            ConfigError: A value is refused, or there is a profile with times as well.
        """
        values = {name: self._values[name] for name in AicPerfConfig.FIELDS}
        if values["aic_backend"] is None:
            return None
        if self.planner_profile_data is not None:
            raise ConfigError("times come from planner_profile_data or from AIC (aic_backend); leave one of them out")
        values["aic_system"] = values["aic_system"] or _AIC_SYSTEM
        values["aic_model_path"] = values["aic_model_path"] or model_path
        values["aic_tp_size"] = values["aic_tp_size"] or 1
        try:
            return AicPerfConfig(**values)
        except ValueError as error:
            raise ConfigError(f"{AIC_FAILED}: {error}") from error

    def _normalize(self) -> None:
        values = self._values
        page = values["sglang"].page_size if values["sglang"] is not None else None
        policy = values["trtllm"].capacity_scheduler_policy if values["trtllm"] is not None else None
        if not values["block_size"]:
            is_page = values["engine_type"] == "sglang" and page is not None
            values["block_size"] = page if is_page else _BLOCK_SIZES[values["engine_type"]]
        if values["num_gpu_blocks"] is None:
            values["num_gpu_blocks"] = DEFAULT_GPU_BLOCKS
        check_values(values, page, policy)
        check_rates(values["aic_nextn_accept_rates"])


def arguments_of_json(text: str) -> dict[str, Any]:
    """The arguments in a JSON text. Raises ConfigError."""
    values = read_json(text, tuple(ARGUMENTS))
    for name, kind in (("reasoning", ReasoningConfig), ("sglang", SglangArgs), ("trtllm", TrtllmArgs)):
        if values.get(name) is not None:
            values[name] = _nested(kind, name, values[name])
    return values


def parse_reasoning(text: str) -> ReasoningConfig:
    """From the JSON of a command line. Raises ConfigError."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"reasoning: expected a JSON object: {error}") from error
    found = _nested(ReasoningConfig, "reasoning", value)
    assert isinstance(found, ReasoningConfig)
    if not math.isfinite(found.thinking_ratio):
        raise ConfigError("reasoning: thinking_ratio must be between 0 and 1")
    return found


def _nested(kind: type, name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ConfigError(f"Failed to parse MockEngineArgs JSON: {name}: expected an object")
    needed = ("start_thinking_token_id", "end_thinking_token_id", "thinking_ratio") if kind is ReasoningConfig else ()
    for field in needed:
        if field not in value:
            raise ConfigError(f"Failed to parse MockEngineArgs JSON: {name}: missing field `{field}`")
    names = kind.__init__.__code__.co_varnames[1 : kind.__init__.__code__.co_argcount]  # type: ignore[misc]
    try:
        return kind(**{field: value[field] for field in names if field in value})
    except (TypeError, OverflowError) as error:
        raise ConfigError(f"Failed to parse MockEngineArgs JSON: {name}: {error}") from error


__all__ = ("ARGUMENTS", "RANGES", "MockEngineArgs", "ReasoningConfig", "SglangArgs", "TrtllmArgs")
