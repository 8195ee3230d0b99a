"""Settings of the mock engine. Names and defaults are those of Dynamo's ``MockEngineArgs`` (spec/services h.4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_es.errors import ConfigError

WORKER_TYPES = ("aggregated", "prefill", "decode")
PREEMPTION_MODES = ("lifo", "fifo")


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

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name in ("num_gpu_blocks", "dp_size"):
            self._check(name, getattr(self, name) >= 1, "at least 1")
        self._check("block_size", self.block_size >= 2, "at least 2")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            self._check(name, value is None or value >= 1, "at least 1, or None")
        for name in ("speedup_ratio", "decode_speedup_ratio"):
            value = getattr(self, name)
            self._check(name, math.isfinite(value) and value >= 0, "a finite number, at least 0")
        start = self.startup_time
        self._check("startup_time", start is None or (math.isfinite(start) and start >= 0), "seconds, at least 0")
        self._check("worker_type", self.worker_type in WORKER_TYPES, f"one of {', '.join(WORKER_TYPES)}")
        self._check("preemption_mode", self.preemption_mode in PREEMPTION_MODES, "lifo or fifo")

    def _check(self, name: str, good: bool, accepted: str) -> None:
        if not good:
            raise ConfigError(f"mock engine: {name} is {getattr(self, name)!r}, it must be {accepted}")
