"""From overlaps and booked load to a choice (spec: router-core D.2–D.6): what all KV-aware selection shares. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.cost import (
    CandidateCost,
    CandidateInput,
    choose_candidate,
    cost_candidates,
    round_half_away,
)
from dynamo_es.router.eligibility import taint_multiplier
from dynamo_es.router.routing_request import FactsSource, RoutingRequest


class TierOverlap(NamedTuple):
    """Blocks of a prompt that a rank holds: in device memory, then how far host memory, then disk, extend that."""

    device: int
    host: int
    disk: int


NO_OVERLAP = TierOverlap(0, 0, 0)
Overlaps = Mapping[WorkerRank, TierOverlap]


class Lookup(NamedTuple):
    """What indexes say of a prompt, and how far those of other processes were when they said it."""

    overlaps: Overlaps
    positions: Mapping[TopicPartition, int]


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt, hashed, with the settings that hold for it. Hash lists have one entry per complete block.

    ``tracking_hashes``: identities under which its blocks are booked.
    """

    isl_tokens: int
    tokens_hashes: Sequence[int]
    sequence_hashes: Sequence[int]
    tracking_hashes: Sequence[int]
    settings: KvRouterSettings


class CostSelector:
    """Weighs ranks and chooses the cheapest."""

    def __init__(
        self,
        sequences: ActiveSequences,
        *,
        block_size: int,
        settings: KvRouterSettings,
        facts: FactsSource,
        rng: random.Random,
        decode_only: Callable[[], bool] = lambda: False,
    ) -> None:
        """``decode_only`` says whether the workers compute no prompts."""
        self._sequences = sequences
        self._block_size = block_size
        self._settings = settings
        self._weights = settings.weights()
        self._facts = facts
        self._rng = rng
        self._decode_only = decode_only

    def costs(
        self,
        prompt: PreparedPrompt,
        candidates: Sequence[WorkerRank],
        overlaps: Overlaps,
        preferred_taints: Mapping[str, float] | None = None,
    ) -> list[CandidateCost]:
        """Cost of every candidate for a prompt, from the load as it is now."""
        load, new_blocks = self._sequences.load, self._sequences.new_blocks
        tracked = prompt.tracking_hashes
        inputs = []
        for rank in candidates:
            device, host, disk = overlaps.get(rank, NO_OVERLAP)
            multiplier = (
                taint_multiplier(preferred_taints, self._facts(rank.worker_id).taints) if preferred_taints else 1.0
            )
            inputs.append(CandidateInput(rank, device, host, disk, load(rank), new_blocks(rank, tracked), multiplier))
        weights = self._weights if prompt.settings is self._settings else prompt.settings.weights()
        if not weights.track_prefill_tokens and self._decode_only():
            weights = replace(weights, decode_only=True)
        return cost_candidates(inputs, prompt.isl_tokens, self._block_size, weights)

    def choose(
        self,
        request: RoutingRequest,
        prompt: PreparedPrompt,
        candidates: Sequence[WorkerRank],
        overlaps: Overlaps,
    ) -> tuple[CandidateCost, list[CandidateCost]]:
        """The choice, and the costs of all candidates (at least one)."""
        preferred = None
        if request.constraints is not None and request.worker_id is None:
            preferred = request.constraints.preferred_taints
        costs = self.costs(prompt, candidates, overlaps, preferred)
        return choose_candidate(costs, prompt.settings.router_temperature, self._rng), costs

    def best_cached_tokens(self, prompt: PreparedPrompt, overlaps: Overlaps, ranks: Sequence[WorkerRank]) -> int:
        """Cached tokens of the prompt at the one of ``ranks`` that has most of it."""
        host_weight = prompt.settings.host_cache_hit_weight
        disk_weight = prompt.settings.disk_cache_hit_weight
        found = [overlap for rank in ranks if (overlap := overlaps.get(rank)) is not None]
        best = max((device + host * host_weight + disk * disk_weight for device, host, disk in found), default=0.0)
        return round_half_away(best * self._block_size)
