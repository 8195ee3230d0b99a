from __future__ import annotations

import math
import random
from collections import Counter

import msgspec
import pytest

from dynamo_es.router.active_sequences import BookedLoad, WorkerRank
from dynamo_es.router.cost import CandidateCost, CandidateInput, CostWeights, choose_candidate, cost_candidates
from dynamo_es.router.eligibility import taint_multiplier

# Examples of the specification: block size 4, a prompt of 16 tokens.
ISL, BLOCK = 16, 4


def candidate(device=0, host=0, disk=0, prefill=0, blocks=0, requests=0, new=4, worker=1) -> CandidateInput:
    return CandidateInput(WorkerRank(worker, 0), device, host, disk, BookedLoad(prefill, blocks, requests), new)


def cost(weights: CostWeights, *candidates: CandidateInput) -> list[float]:
    return [item.cost for item in cost_candidates(candidates, ISL, BLOCK, weights)]


def test_a_cold_and_a_warm_worker():
    assert cost(CostWeights(), candidate(), candidate(device=2)) == [8, 6]


def test_a_credit_above_one_is_clamped_at_no_prefill():
    assert cost(CostWeights(overlap_score_credit=3.0), candidate(device=3)) == [4]


def test_credit_decays_with_excess_prefill():
    busy = candidate(device=2, prefill=8)
    assert cost(CostWeights(overlap_score_credit_decay=2.0), busy, candidate()) == [9, 8]


def test_active_requests_may_cost():
    assert cost(CostWeights(decode_active_request_weight=2.5), candidate(device=4, requests=1)) == [6.5]


def test_prefill_scale_weighs_prompt_work():
    assert cost(CostWeights(prefill_load_scale=3.0), candidate(device=1, prefill=12)) == [22]
    assert cost(CostWeights(prefill_load_scale=0.0), candidate(device=1, prefill=12)) == [4]


def test_lower_tiers_count_less():
    row = cost_candidates([candidate(device=1, host=1, disk=1)], ISL, BLOCK, CostWeights())[0]
    assert row.effective_overlap == 2.0
    assert row.cached_tokens == 8
    assert row.prefill_tokens == 8
    assert row.cost == 6


def test_without_prefill_tracking_only_decode_counts():
    assert cost(CostWeights(track_prefill_tokens=False), candidate(device=2, prefill=100)) == [4]


def test_a_router_of_decode_workers_credits_the_cache_against_decode():
    weights = CostWeights(track_prefill_tokens=False, decode_only=True, decode_active_request_weight=0.5)
    assert cost(weights, candidate(device=3, blocks=6, requests=2), candidate(device=9)) == [8, 0]


def test_preferred_taints_multiply_the_whole_cost():
    biased = msgspec.structs.replace(candidate(), multiplier=taint_multiplier({"gpu:b": 0.5}, {"gpu:b"}))
    assert cost(CostWeights(), biased) == [5.039588260595509]


def test_weights_without_bound_give_costs_that_can_be_compared():
    weights = CostWeights(prefill_load_scale=math.inf, overlap_score_credit_decay=math.inf)
    rows = cost_candidates([candidate(device=4), candidate(device=1, worker=2)], ISL, BLOCK, weights)
    assert [item.cost for item in rows] == [4, math.inf]
    for temperature in (0, 0.5, math.inf):
        assert choose_candidate(rows, temperature, random.Random(1)).candidate.rank.worker_id == 1


def test_LOAD_09_overlap_beyond_the_prompt_clamps_at_zero():
    row = cost_candidates([candidate(device=9)], ISL, BLOCK, CostWeights())[0]
    assert row.prefill_tokens == 0
    assert row.cost == 4


def test_LOAD_04_on_a_miss_the_idle_worker_wins():
    costs = cost_candidates(
        [candidate(prefill=200, blocks=50, worker=1), candidate(worker=2)], ISL, BLOCK, CostWeights()
    )
    assert choose_candidate(costs, 0, random.Random(1)).candidate.rank.worker_id == 2


def test_LOAD_13_a_busy_holder_of_the_prefix_loses_to_an_idle_worker():
    holder = candidate(device=4, prefill=0, blocks=40, requests=10, new=0)
    costs = cost_candidates([holder, candidate(worker=2)], ISL, BLOCK, CostWeights())
    assert choose_candidate(costs, 0, random.Random(1)).candidate.rank.worker_id == 2


def row(value: float, worker: int) -> CandidateCost:
    return CandidateCost(candidate(worker=worker), 0, 0, 0, 0, value)


def test_exact_ties_are_broken_at_random():
    rng = random.Random(3)
    rows = [row(1, 1), row(1, 2), row(1, 3), row(5, 4)]
    seen = Counter(choose_candidate(rows, 0, rng).candidate.rank.worker_id for _ in range(3000))
    assert set(seen) == {1, 2, 3}
    assert min(seen.values()) > 850


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, (0.506, 0.307, 0.186)), (0.5, (0.665, 0.245, 0.090))])
def test_temperature_draws_by_softmax_of_normalised_costs(temperature, expected):
    rng = random.Random(7)
    rows = [row(4, 1), row(6, 2), row(8, 3)]
    count = 20_000
    seen = Counter(choose_candidate(rows, temperature, rng).candidate.rank.worker_id for _ in range(count))
    for worker, share in enumerate(expected, 1):
        assert seen[worker] / count == pytest.approx(share, abs=0.015)


def test_equal_costs_with_a_temperature_are_uniform():
    rng = random.Random(7)
    seen = Counter(choose_candidate([row(4, 1), row(4, 2)], 1.0, rng).candidate.rank.worker_id for _ in range(2000))
    assert min(seen.values()) > 850
