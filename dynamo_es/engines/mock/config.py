"""Settings of the mock engine. Names and defaults are those of Dynamo's ``MockEngineArgs`` (spec/services h.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dynamo_es.errors import ConfigError

ENGINE_TYPES = ("vllm", "sglang", "trtllm")
WORKER_TYPES = ("aggregated", "prefill", "decode")
PREEMPTION_MODES = ("lifo", "fifo")
TRANSFER_TIMING_MODES = ("full_prompt", "destination_missing")
SCHEDULE_POLICIES = ("fifo", "fcfs", "lpm")
"""``fcfs`` is an earlier name of ``fifo``."""


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
        _check(self, "schedule_policy", self.schedule_policy in SCHEDULE_POLICIES, "fifo or lpm")
        for name in ("max_prefill_tokens", "chunked_prefill_size", "clip_max_new_tokens"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")
        value = self.schedule_conservativeness
        _check(self, "schedule_conservativeness", math.isfinite(value) and value >= 0, "a finite number, at least 0")


@dataclass(frozen=True, slots=True)
class ReasoningOutput:
    """A share ``ratio`` of every answer, at least two tokens, are thoughts between these two token ids."""

    start_token_id: int
    end_token_id: int
    ratio: float

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check(self, "ratio", 0 <= self.ratio <= 1, "between 0 and 1")


@dataclass(frozen=True, slots=True)
class MockEngineConfig:
    """What the simulated engine is.

    Attributes:
        num_gpu_blocks: KV blocks of each rank.
        block_size: Tokens a block.
        max_num_seqs: Requests that run at a time in a rank; None: no limit.
        max_num_batched_tokens: Tokens computed in a pass of a rank; None: no limit.
        enable_prefix_caching: Reuse blocks of earlier requests, and tell the router of them.
        enable_chunked_prefill: A prompt may be spread over passes.
        speedup_ratio: How many times faster than the modelled GPU; 0: no delay at all.
        decode_speedup_ratio: Further factor for the decode part of a pass; 0: that part takes no time.
        dp_size: Data-parallel ranks.
        startup_time: Seconds that the start takes; None: none.
        worker_type: ``aggregated``, ``prefill`` (its passes have no decode time, and its answers hand the prompt over)
            or ``decode`` (it takes over prompts, and computes those that come without).
        preemption_mode: Who gives way when blocks run out: ``lifo`` the newest running request, ``fifo`` the oldest.
        max_model_len: Longest prompt with its output, in tokens; None: what fits the blocks.
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

    num_gpu_blocks: int = 16_384
    block_size: int = 16
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8_192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    speedup_ratio: float = 1.0
    decode_speedup_ratio: float = 1.0
    dp_size: int = 1
    startup_time: float | None = None
    worker_type: str = "aggregated"
    preemption_mode: str = "lifo"
    max_model_len: int | None = None
    engine_type: str = "vllm"
    sglang: SglangConfig = field(default_factory=SglangConfig)
    reasoning: ReasoningOutput | None = None
    kv_bytes_per_token: int | None = None
    kv_transfer_bandwidth: float | None = None
    kv_transfer_timing_mode: str = "full_prompt"
    handoff_session_timeout_ms: int = 300_000

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        _check(self, "engine_type", self.engine_type in ENGINE_TYPES, f"one of {', '.join(ENGINE_TYPES)}")
        for name in ("num_gpu_blocks", "dp_size", "handoff_session_timeout_ms"):
            _check(self, name, getattr(self, name) >= 1, "at least 1")
        # Only SGLang has pages of a single token.
        least = 1 if self.engine_type == "sglang" else 2
        _check(self, "block_size", self.block_size >= least, f"at least {least}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            _check(self, name, value is None or value >= 1, "at least 1, or None")
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, name)
            _check(self, name, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        for name in ("startup_time", "kv_bytes_per_token", "kv_transfer_bandwidth"):
            value = getattr(self, name)
            _check(self, name, value is None or (math.isfinite(value) and value >= 0), "a finite number, at least 0")
        _check(self, "worker_type", self.worker_type in WORKER_TYPES, f"one of {', '.join(WORKER_TYPES)}")
        _check(self, "preemption_mode", self.preemption_mode in PREEMPTION_MODES, "lifo or fifo")
        mode = self.kv_transfer_timing_mode
        _check(self, "kv_transfer_timing_mode", mode in TRANSFER_TIMING_MODES, " or ".join(TRANSFER_TIMING_MODES))

    @property
    def prefill_budget(self) -> int | None:
        """Prompt tokens of one pass; None: no limit."""
        return self.sglang.max_prefill_tokens if self.engine_type == "sglang" else self.max_num_batched_tokens

    def transfer_seconds(self, tokens: int) -> float:
        """How long the KV blocks of so many tokens are under way from one worker to another."""
        if not self.kv_transfer_bandwidth or not self.kv_bytes_per_token or not self.speedup_ratio:
            return 0.0
        return tokens * self.kv_bytes_per_token / (self.kv_transfer_bandwidth * 1e9) / self.speedup_ratio


def _check(config: object, name: str, good: bool, accepted: str) -> None:
    if not good:
        raise ConfigError(f"mock engine: {name} is {getattr(config, name)!r}, it must be {accepted}")
