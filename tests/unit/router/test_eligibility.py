from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.eligibility import eligible_ranks, taint_multiplier
from dynamo_es.router.errors import AllWorkersOverloaded, NoEligibleWorker, PinNotAllowed
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts

RANKS = [WorkerRank(1, 0), WorkerRank(2, 0), WorkerRank(2, 1), WorkerRank(3, 0)]
TAINTS = {1: {"a", "b"}, 2: {"b"}, 3: set()}


def facts(worker_id):
    return WorkerFacts(taints=frozenset(TAINTS[worker_id]))


def eligible(*, required=None, overloaded=(), **options):
    if required is not None:
        options["constraints"] = SimpleNamespace(required_taints=required, preferred_taints={})
    return list(eligible_ranks(RoutingRequest("r", [1], **options), RANKS, facts, overloaded))


def test_without_wishes_everybody_may():
    assert eligible() == RANKS


def test_allowed_workers_then_required_taints():
    assert eligible(allowed_worker_ids=[2, 9]) == RANKS[1:3]
    assert eligible(required=["b"]) == RANKS[:3]
    assert eligible(required={"a", "b"}) == RANKS[:1]
    assert eligible(required=["b"], allowed_worker_ids=[2]) == RANKS[1:3]


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_worker_ids": []},
        {"allowed_worker_ids": [9]},
        {"required": ["c"]},
        {"required": ["a"], "allowed_worker_ids": [2]},
        {"worker_id": 9, "dp_rank": 0},
        {"worker_id": 1, "dp_rank": 1},
        {"worker_id": 2, "dp_rank": 0, "required": ["a"]},
    ],
)
def test_nobody_is_left(options):
    with pytest.raises(NoEligibleWorker, match=r"^no endpoints available to route work$"):
        eligible(**options)


def test_a_pin_names_a_rank_a_worker_or_a_rank_of_any_worker():
    assert eligible(worker_id=2, dp_rank=1) == [WorkerRank(2, 1)]
    assert eligible(worker_id=2) == RANKS[1:3]
    assert eligible(dp_rank=1) == [WorkerRank(2, 1)]
    with pytest.raises(PinNotAllowed, match=r"^pinned worker 1 is not in allowed worker set$"):
        eligible(worker_id=1, dp_rank=0, allowed_worker_ids=[2])


def test_overloaded_workers_are_left_out_and_it_is_said_if_nobody_else_is_there():
    assert eligible(overloaded={2}) == [RANKS[0], RANKS[3]]
    with pytest.raises(AllWorkersOverloaded, match=r"^all eligible workers are overloaded$"):
        eligible(overloaded={1, 2, 3})
    with pytest.raises(AllWorkersOverloaded, match=r"^pinned worker 1 is overloaded$"):
        eligible(worker_id=1, dp_rank=0, overloaded={1})
    with pytest.raises(NoEligibleWorker):
        eligible(required=["c"], overloaded={1, 2, 3})


def test_preferred_taints_are_bounded_and_cancel_out():
    assert 8 * taint_multiplier({"gpu:b": 0.5}, {"gpu:b"}) == 5.039588260595509
    assert taint_multiplier({"a": 0.5, "b": -0.5}, {"a", "b"}) == 1.0
    assert taint_multiplier({"a": 9.0}, {"b"}) == 1.0
    assert taint_multiplier({}, {"b"}) == 1.0
    assert taint_multiplier({"a": 1e300}, {"a"}) == pytest.approx(math.exp(-1))
    assert taint_multiplier({"a": -math.inf}, {"a"}) == pytest.approx(math.e)
    assert taint_multiplier({"a": math.inf, "b": -math.inf}, {"a", "b"}) == 1.0
    assert taint_multiplier({"a": math.nan}, {"a"}) == 1.0
