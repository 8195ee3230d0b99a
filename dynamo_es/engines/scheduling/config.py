"""Sizes and rules of a rank's scheduler. Names and defaults are vLLM's, where Dynamo's ``MockEngineArgs`` has none."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.errors import ConfigError

PREEMPTION_MODES = ("lifo", "fifo")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What a rank has room for, and who goes first.

    Attributes:
        num_gpu_blocks: KV blocks of each rank.
        block_size: Tokens a block.
        max_num_seqs: Requests that run at a time in a rank; None: no limit.
        max_num_batched_tokens: Tokens computed in a pass of a rank; None: no limit.
        enable_prefix_caching: Reuse blocks of earlier requests, and tell the router of them.
        enable_chunked_prefill: A prompt may be spread over passes.
        preemption_mode: Who gives way when blocks run out: ``lifo`` the newest running request, ``fifo`` the oldest.
        max_model_len: Longest prompt with its output, in tokens; None: what fits the blocks.
    """

    num_gpu_blocks: int = 16_384
    block_size: int = 16
    max_num_seqs: int | None = 256
    max_num_batched_tokens: int | None = 8_192
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption_mode: str = "lifo"
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        for name in ("num_gpu_blocks", "block_size"):
            check_setting(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            check_setting(self, name, value is None or value >= 1, "at least 1, or None")
        check_setting(self, "preemption_mode", self.preemption_mode in PREEMPTION_MODES, "lifo or fifo")


def check_setting(config: object, name: str, good: bool, accepted: str) -> None:
    """Raises ``ConfigError``, which says what is accepted, unless ``good``."""
    if not good:
        raise ConfigError(f"engine: {name} is {getattr(config, name)!r}, it must be {accepted}")
