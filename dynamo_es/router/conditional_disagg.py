"""When a decode worker computes a prompt itself, though there are prefill workers (Dynamo's conditional disaggregation;
spec: router-core F.1). Pure.

- ``isl_bounding``: little is left to compute where the prompt is cached best: fewer uncached tokens than
  ``eff_isl_threshold``, and a smaller fraction of the prompt than ``eff_isl_ratio_threshold``.
- ``prefill_load``: the prefill rank that would get it has more prompt tokens to compute than
  ``prefill_busy_threshold`` (by default the queue's threshold) times what it computes in one pass.
- ``isl_or_load``: either.

With ``decode_busy_threshold`` all of this holds only if the decode rank is known to use no more than that fraction of
its KV blocks. What is not known keeps the prompt away from the decode worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.router.config_settings import KvRouterSettings


@dataclass(frozen=True, slots=True)
class RankState:
    """A rank that would be chosen. ``None``: it did not say.

    Attributes:
        prefill_tokens: Prompt tokens booked on it and not computed yet.
        max_num_batched_tokens: Tokens that it computes in one pass.
        decode_blocks: KV blocks of the requests that are booked on it.
        total_kv_blocks: Its KV blocks.
    """

    prefill_tokens: int
    max_num_batched_tokens: int | None
    decode_blocks: int
    total_kv_blocks: int | None


@dataclass(frozen=True, slots=True)
class ConditionalDisagg:
    """A policy. ``None``: that limit is not asked.

    Attributes:
        eff_isl_threshold, eff_isl_ratio_threshold: Both or neither; exclusive bounds.
        prefill_busy_threshold, decode_busy_threshold: A rank at the threshold is not busy.
    """

    eff_isl_threshold: int | None
    eff_isl_ratio_threshold: float | None
    prefill_busy_threshold: float | None
    decode_busy_threshold: float | None

    @property
    def asks_prefill_load(self) -> bool:
        """Whether ``keeps_local`` looks at the prefill rank."""
        return self.prefill_busy_threshold is not None

    def keeps_local(
        self, isl_tokens: int, device_cached_tokens: int, decode: RankState, prefill: RankState | None
    ) -> bool:
        """Whether the decode rank is to compute the prompt.

        Args:
            isl_tokens: Length of the prompt.
            device_cached_tokens: Of it, in the decode rank's device memory.
            decode, prefill: The ranks that would be chosen; prefill None: nobody would.
        """
        if not (self._is_short(isl_tokens, device_cached_tokens) or self._is_prefill_busy(prefill)):
            return False
        return not self._may_be_busy(decode)

    def _is_short(self, isl_tokens: int, cached_tokens: int) -> bool:
        if self.eff_isl_threshold is None or self.eff_isl_ratio_threshold is None:
            return False
        uncached = max(isl_tokens - cached_tokens, 0)
        return uncached < self.eff_isl_threshold and uncached / max(isl_tokens, 1) < self.eff_isl_ratio_threshold

    def _is_prefill_busy(self, rank: RankState | None) -> bool:
        if self.prefill_busy_threshold is None or rank is None or rank.max_num_batched_tokens is None:
            return False
        return rank.prefill_tokens > self.prefill_busy_threshold * rank.max_num_batched_tokens

    def _may_be_busy(self, rank: RankState) -> bool:
        if self.decode_busy_threshold is None:
            return False
        if rank.total_kv_blocks is None:
            return True
        return rank.decode_blocks > self.decode_busy_threshold * rank.total_kv_blocks


def conditional_disagg(settings: KvRouterSettings) -> ConditionalDisagg | None:
    """The policy that settings ask for; None: prompts always go to prefill workers."""
    if not settings.conditional_disagg_enabled:
        return None
    policy = settings.conditional_disagg_policy
    busy = settings.conditional_disagg_prefill_busy_threshold
    if busy is None:
        busy = settings.router_queue_threshold
    by_length = policy in ("isl_bounding", "isl_or_load")
    by_load = policy in ("prefill_load", "isl_or_load")
    return ConditionalDisagg(
        settings.conditional_disagg_eff_isl_threshold if by_length else None,
        settings.conditional_disagg_eff_isl_ratio_threshold if by_length else None,
        busy if by_load else None,
        settings.conditional_disagg_decode_busy_threshold,
    )
