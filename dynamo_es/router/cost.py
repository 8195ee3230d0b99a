"""What a worker costs for a request, and the choice (spec: router-core D.4–D.6; Dynamo's KV router).

All quantities are in blocks; the lowest cost wins. For a candidate w:

    raw_prefill   = (tokens booked on w and not computed + the whole prompt) / block size
    credit        = overlap_score_credit * decay * device + host_weight * host + disk_weight * disk
    decode        = distinct blocks booked on w, with this prompt's new blocks
    cost          = prefill_load_scale * max(raw_prefill - credit, 0) + decode + request_weight * requests booked on w
    cost         *= multiplier of the preferred taints that w carries

A router of decode workers has no prefill to weigh: its cost is max(decode - credit, 0) plus the requests' term.
``decay`` = 1 / (1 + credit_decay * excess / ceil(prompt / block size)), where excess is how many blocks of prefill
are booked on w beyond the candidate with the fewest: a crowded worker's cache is worth less. Load is part of the
one cost, never a gate: a popular prefix spreads once its worker is busy enough.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from dynamo_es.router.active_sequences import BookedLoad, WorkerRank


@dataclass(frozen=True, slots=True)
class CostWeights:
    """The terms' weights; names and defaults are those of Dynamo's ``KvRouterConfig``."""

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    decode_active_request_weight: float = 0.0
    router_temperature: float = 0.0
    track_prefill_tokens: bool = True
    decode_only: bool = False


class CandidateInput(msgspec.Struct, frozen=True, gc=False):
    """A candidate as it is before this request. Blocks of overlap by tier, each tier extending the one before.

    ``multiplier``: of its cost, from the taints that the request prefers.
    """

    rank: WorkerRank
    device: int
    host: int
    disk: int
    load: BookedLoad
    new_blocks: int
    multiplier: float = 1.0


class CandidateCost(msgspec.Struct, frozen=True, gc=False):
    """What a candidate would cost. ``cached_tokens`` and ``prefill_tokens``: of this request there."""

    candidate: CandidateInput
    effective_overlap: float
    cached_tokens: int
    prefill_tokens: int
    decode_blocks: float
    cost: float


def round_half_away(value: float) -> int:
    """Nearest integer, halves away from zero, as Rust's ``round``."""
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)


def cost_candidates(
    candidates: Sequence[CandidateInput], isl_tokens: int, block_size: int, weights: CostWeights
) -> list[CandidateCost]:
    """Cost of every candidate, in their order."""
    if not candidates:
        return []
    # This runs for every worker of every request: names are bound once, and nothing is called that need not be.
    prefill_scale = weights.prefill_load_scale
    host_weight, disk_weight = weights.host_cache_hit_weight, weights.disk_cache_hit_weight
    request_weight = weights.decode_active_request_weight
    tracks_prefill = weights.track_prefill_tokens
    decode_only = weights.decode_only and not tracks_prefill and weights.overlap_score_credit > 0
    device_credit = weights.overlap_score_credit
    decay = _decay_per_token(isl_tokens, block_size, weights)
    least = min([candidate.load.prefill_tokens for candidate in candidates]) if decay else 0
    result = []
    for candidate in candidates:
        load = candidate.load
        device, host, disk = candidate.device, candidate.host, candidate.disk
        lower_tiers = host * host_weight + disk * disk_weight if host or disk else 0.0
        effective = device + lower_tiers
        cached = round_half_away(effective * block_size) if lower_tiers else device * block_size
        prefill = isl_tokens - cached if cached < isl_tokens else 0
        credit = device_credit * device
        if decay and load.prefill_tokens > least:
            credit /= 1 + decay * (load.prefill_tokens - least)
        prompt = (load.prefill_tokens + prefill + cached) / block_size if tracks_prefill else 0.0
        prompt -= credit + lower_tiers
        decode = load.blocks + candidate.new_blocks
        cost = decode + request_weight * load.requests
        if prompt > 0:
            cost += prefill_scale * prompt
        elif decode_only:
            cost = max(decode - credit - lower_tiers, 0.0) + request_weight * load.requests
        if candidate.multiplier != 1.0:
            cost *= candidate.multiplier
        result.append(CandidateCost(candidate, effective, cached, prefill, decode, cost))
    return result


def _decay_per_token(isl_tokens: int, block_size: int, weights: CostWeights) -> float:
    """How much of the credit is lost for each token of excess prefill; 0 if there is no decay."""
    prompt_blocks = math.ceil(isl_tokens / block_size)
    if not weights.overlap_score_credit_decay or not weights.track_prefill_tokens or not prompt_blocks:
        return 0.0
    return weights.overlap_score_credit_decay / block_size / prompt_blocks


def choose_candidate(costs: Sequence[CandidateCost], temperature: float, rng: random.Random) -> CandidateCost:
    """The cheapest; exact ties at random. With a temperature, by softmax over min-max normalised costs.

    ``costs`` is not empty.
    """
    low = min([item.cost for item in costs])
    span = max([item.cost for item in costs]) - low if temperature > 0 else 0.0
    if temperature <= 0 or not math.isfinite(span):
        best = [item for item in costs if item.cost == low]
        return best[0] if len(best) == 1 else best[rng.randrange(len(best))]
    if span == 0 or math.isinf(temperature):
        return costs[rng.randrange(len(costs))]
    weights = [math.exp(-(item.cost - low) / (span * temperature)) for item in costs]
    return rng.choices(costs, weights)[0]
