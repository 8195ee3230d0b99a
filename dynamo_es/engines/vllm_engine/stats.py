"""vLLM's statistics of a step as load and forward passes. Pure, but ``logger_class`` makes a class of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_es.engines.vllm_engine.arguments import INSTEAD
from dynamo_es.frontend.extras import import_extra


@dataclass(frozen=True, slots=True)
class EnginePass:
    """What a pass computed.

    Attributes:
        prefill_requests, prefill_tokens: Prompts, or parts of them.
        decode_requests: Requests that got a token.
        decode_kv_tokens: What they have in the cache. vLLM does not tell: all that is in use, without this pass's
            prompts, which is too much while others wait for the rest of theirs.
        wall_time_s: How long it took.
    """

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    decode_kv_tokens: int
    wall_time_s: float


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A rank after a step. ``computed``: its pass, if it was one."""

    rank: int
    kv_used_blocks: int
    total_kv_blocks: int
    running: int
    waiting: int
    computed: EnginePass | None = None


def load_of(stats: Any, rank: int, total_blocks: int, block_size: int) -> EngineLoad:
    """From vLLM's ``SchedulerStats``."""
    used = round(stats.kv_cache_usage * total_blocks)
    waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
    # vLLM promises no stable form of its statistics.
    details, computed = getattr(stats, "iteration_details", None), None
    if details is not None and not details.is_dummy:
        decoding: int = details.num_generation_requests
        computed = EnginePass(
            details.num_ctx_requests,
            details.num_ctx_tokens,
            decoding,
            max(decoding, used * block_size - details.num_ctx_tokens) if decoding else 0,
            details.elapsed_ms / 1000,
        )
    return EngineLoad(rank, used, total_blocks, stats.num_running_reqs, waiting, computed)


def logger_class(on_load: Callable[[EngineLoad], None]) -> Any:
    """A ``StatLoggerBase`` of vLLM that tells ``on_load`` of each step, on the engine's event loop."""
    base: Any = import_extra("vllm.v1.metrics.loggers", "vllm", INSTEAD).StatLoggerBase

    class LoadLogger(base):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._cache = vllm_config.cache_config
            self._rank = engine_index

        def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                total = self._cache.num_gpu_blocks or 0
                on_load(load_of(scheduler_stats, self._rank, total, self._cache.block_size))

        def log_engine_initialized(self) -> None:
            """Nothing to tell."""

    return LoadLogger
