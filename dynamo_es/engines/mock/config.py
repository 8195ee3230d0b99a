"""Settings of the mock engine. Names and defaults are those of Dynamo's ``MockEngineArgs`` (spec/services h.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dynamo_es.engines.scheduling.config import SchedulerConfig, check_setting

ENGINE_TYPES = ("vllm", "sglang", "trtllm")
WORKER_TYPES = ("aggregated", "prefill", "decode")
TRANSFER_TIMING_MODES = ("full_prompt", "destination_missing")
SCHEDULE_POLICIES = ("fifo", "fcfs", "lpm")
"""``fcfs`` is an earlier name of ``fifo``."""
_NOT_NEGATIVE = "a finite number, at least 0"


@dataclass(frozen=True, slots=True)
class SglangConfig:
    """How SGLang's scheduler is set. Its meanings are those of SGLang's server arguments.

    Attributes:
        schedule_policy: ``fifo`` in the order of arrival; ``lpm`` who has most of its prompt cached comes first.
        max_prefill_tokens: Prompt tokens that one pass computes at most; a longer prompt goes alone.
        chunked_prefill_size: Longer prompts are computed in parts of so many tokens.
        clip_max_new_tokens: Output that an admission reckons with at most, in tokens.
        schedule_conservativeness: How much of the output that running requests may still give is kept free.
    """

    schedule_policy: str = "fifo"
    max_prefill_tokens: int = 16_384
    chunked_prefill_size: int = 8_192
    clip_max_new_tokens: int = 4_096
    schedule_conservativeness: float = 1.0

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_setting(self, "schedule_policy", self.schedule_policy in SCHEDULE_POLICIES, "fifo or lpm")
        for name in ("max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens"):
            check_setting(self, name, getattr(self, name) >= 1, "at least 1")
        value = self.schedule_conservativeness
        check_setting(
            self, "schedule_conservativeness", math.isfinite(value) and value >= 0, "a finite number, at least 0"
        )


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    """A share ``ratio`` of every answer, at least two tokens, are thoughts between these two token ids."""

    start_token_id: int
    end_token_id: int
    ratio: float

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        check_setting(self, "ratio", 0 <= self.ratio <= 1, "between 0 and 1")


@dataclass(frozen=True, slots=True)
class MockEngineConfig(SchedulerConfig):
    """What the simulated engine is, beside its sizes.

    Attributes:
        speedup_ratio: How many times faster than the modelled GPU; 0: no delay at all.
        decode_speedup_ratio: Further factor for the decode part of a pass; 0: that part takes no time.
        dp_size: Data-parallel ranks.
        startup_time: Seconds that the start takes; None: none.
        worker_type: ``aggregated``, ``prefill`` (its passes have no decode time, and its answers hand the prompt over)
            or ``decode`` (it takes over prompts, and computes those that come without).
        engine_type: Whose scheduler and events are mimicked: ``vllm``, ``sglang`` or ``trtllm``, which gives a request
            room for its whole output before it begins, so that nobody has to give way.
        sglang: Settings of SGLang's scheduler, which takes these in place of ``max_num_batched_tokens``.
        reasoning: Thoughts in every answer; None: none.
        kv_bytes_per_token: Size of the KV cache of one token; with ``kv_transfer_bandwidth`` it says how long a decode
            worker waits for a prompt that another worker computed.
        kv_transfer_bandwidth: GB/s (10^9 bytes); None or 0: a transfer takes no time.
        kv_transfer_timing_mode: What is transferred: ``full_prompt``, or ``destination_missing``, what is not cached.
        handoff_session_timeout_ms: How long the two sides of a hand-over wait for each other.
    """

    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    dp_size: int = 1
    startup_time: float | None = None
    worker_type: str = "aggregated"
    engine_type: str = "vllm"
    sglang: SglangConfig = field(default_factory=SglangConfig)
    reasoning: ReasoningOutput | None = None
    kv_bytes_per_token: int | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: str = "full_prompt"
    handoff_session_timeout_ms: int = 300_000

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        SchedulerConfig.__post_init__(self)
        check_setting(self, "engine_type", self.engine_type in ENGINE_TYPES, f"one of {', '.join(ENGINE_TYPES)}")
        for name in ("dp_size", "handoff_session_timeout_ms"):
            check_setting(self, name, getattr(self, name) >= 1, "at least 1")
        # Only SGLang has pages of a single token.
        least = 1 if self.engine_type == "sglang" else 2
        check_setting(self, "block_size", self.block_size >= least, f"at least {least}")
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, name)
            check_setting(self, name, math.isfinite(value) and value >= 0, _NOT_NEGATIVE)
        for name in ("startup_time", "kv_bytes_per_token", "kv_transfer_bandwidth"):
            value = getattr(self, name)
            check_setting(
                self, name, value is None or (math.isfinite(value) and value >= 0), "a finite number, at least 0"
            )
        check_setting(self, "worker_type", self.worker_type in WORKER_TYPES, f"one of {', '.join(WORKER_TYPES)}")
        mode = self.kv_transfer_timing_mode
        check_setting(
            self, "kv_transfer_timing_mode", mode in TRANSFER_TIMING_MODES, " or ".join(TRANSFER_TIMING_MODES)
        )

    @property
    def prefill_budget(self) -> int | None:
        """Prompt tokens of one pass; None: no limit."""
        return self.sglang.max_prefill_tokens if self.engine_type == "sglang" else self.max_num_batched_tokens

    def transfer_seconds(self, tokens: int) -> float:
        """How long the KV blocks of so many tokens are under way from one worker to another."""
        if not self.kv_transfer_bandwidth or not self.kv_bytes_per_token or not self.speedup_ratio:
            return 0.0
        return tokens * self.kv_bytes_per_token / (self.kv_transfer_bandwidth * 1e9) / self.speedup_ratio
