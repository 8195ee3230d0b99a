from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.router.errors import RouterQueueLimitExceeded
from dynamo_es.router.policy_config import CacheBucket, PolicyClass, PolicyProfile
from dynamo_es.router.policy_queue import MAX_WAITING, PolicyQueue, Waiting, is_rank_busy, queue_profile


def simple(queue_policy="fcfs", **limits) -> PolicyQueue[str]:
    profile = queue_profile(None, 1.0, queue_policy)
    only = profile.classes[0]
    changed = PolicyClass("default", "default", "default", 1, queue_policy, prefill_busy_threshold_frac=1.0, **limits)
    assert (only.name, only.queue_policy) == (changed.name, changed.queue_policy)
    return PolicyQueue(PolicyProfile("default", profile.buckets, (changed,)))


def put(queue, name, isl=4, cached=0, wanted=None, now=0.0, jump=0.0, strict=0, workers=1, lane=None) -> Waiting[str]:
    waiting = Waiting(name, queue.classify(wanted, isl - cached), isl, cached, lane)
    queue.enqueue(waiting, now=now, priority_jump=jump, strict_priority=strict, workers=workers)
    return waiting


def order(queue, can_place=lambda waiting: True) -> list[str]:
    names = []
    while (waiting := queue.pop_next(can_place)) is not None:
        names.append(waiting.item)
    return names


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", "abc"), ("lcfs", "cba"), ("wspt", "bca")])
def test_each_policy_has_its_order(policy, expected):
    queue = simple(policy)
    for now, (name, isl) in enumerate([("a", 16), ("b", 4), ("c", 8)]):
        put(queue, name, isl, now=now)
    assert "".join(order(queue)) == expected


def test_a_jump_counts_in_seconds_and_a_negative_one_not_at_all():
    queue = simple()
    put(queue, "first", now=0.0)
    put(queue, "jumps", now=10.0, jump=11.0)
    put(queue, "falls", now=10.0, jump=-30.0)
    put(queue, "last", now=10.5)
    assert order(queue) == ["jumps", "first", "falls", "last"]


def test_a_jump_weighs_the_shortest_first_order():
    queue = simple("wspt")
    put(queue, "long", 16, jump=99.0)
    put(queue, "short", 4)
    put(queue, "mid", 8, jump=-50.0)
    put(queue, "cached", 16, cached=16)
    assert order(queue) == ["long", "cached", "short", "mid"]


def test_strict_priority_goes_before_everything():
    queue = simple()
    put(queue, "a", jump=100.0)
    put(queue, "b", strict=1)
    put(queue, "c", strict=2)
    assert order(queue) == ["c", "b", "a"]


@pytest.mark.parametrize("policy", ["fcfs", "lcfs", "wspt"])
def test_equals_go_by_arrival(policy):
    queue = simple(policy)
    for name in "abcdef":
        put(queue, name)
    assert "".join(order(queue)) == "abcdef"


def test_no_threshold_no_queue():
    assert queue_profile(None, None, "fcfs") is None
    free = PolicyClass("a", "std", "all", 1)
    assert queue_profile(PolicyProfile("std", (CacheBucket(0, "all"),), (free,)), 0.5, "fcfs") is None


@pytest.mark.parametrize(
    ("thresholds", "tokens", "batched", "busy"),
    [
        ({"prefill_busy_threshold": 0}, 0, 16, False),
        ({"prefill_busy_threshold": 0}, 1, 16, True),
        ({"prefill_busy_threshold_frac": 1.0}, 16, 16, False),
        ({"prefill_busy_threshold_frac": 1.0}, 17, 16, True),
        ({"prefill_busy_threshold_frac": 1.0}, 10_000_000, None, False),
        ({"prefill_busy_threshold": 100, "prefill_busy_threshold_frac": 1.0}, 17, 16, True),
        ({"prefill_busy_threshold": 10, "prefill_busy_threshold_frac": 1.0}, 11, 16, True),
        ({}, 10**9, 16, False),
    ],
)
def test_a_rank_is_busy_above_either_threshold(thresholds, tokens, batched, busy):
    assert is_rank_busy(PolicyClass("a", "std", "all", 1, **thresholds), tokens, batched) is busy


def matrix(small=None, big=None, explicit=None) -> PolicyQueue[str]:
    busy = {"prefill_busy_threshold": 0}
    return PolicyQueue(
        PolicyProfile(
            "std",
            (CacheBucket(0, "small"), CacheBucket(8, "big")),
            (
                PolicyClass("std-small", "std", "small", **{"quantum": 8, **busy, **(small or {})}),
                PolicyClass("std-big", "std", "big", **{"quantum": 4, **busy, **(big or {})}),
                PolicyClass("bulk-small", "bulk", "small", quantum=1, **busy),
                PolicyClass("bulk-big", "bulk", "big", quantum=1, **busy),
                PolicyClass("express", None, None, **{"quantum": 1, **busy, **(explicit or {})}),
            ),
        )
    )


@pytest.mark.parametrize(
    ("wanted", "uncached", "expected"),
    [
        (None, 7, "std-small"),
        (None, 8, "std-big"),
        ("bulk", 100, "bulk-big"),
        ("express", 100, "express"),
        ("bulk-small", 0, "std-small"),
        ("nobody", 0, "std-small"),
    ],
)
def test_a_request_names_an_explicit_class_or_a_family(wanted, uncached, expected):
    assert matrix().classify(wanted, uncached).name == expected


def test_limits_are_per_worker_and_the_request_that_crosses_one_is_taken():
    queue = matrix(small={"request_queue_limit_per_worker": 1}, big={"raw_isl_token_queue_limit_per_worker": 12})
    put(queue, "s1", 4)
    with pytest.raises(RouterQueueLimitExceeded) as caught:
        put(queue, "s2", 4)
    error = caught.value
    assert str(error) == 'router policy class "std-small" queue requests limit reached (current=1, limit=1)'
    assert (error.policy_class, error.limit_kind, error.current, error.limit) == ("std-small", "requests", 1, 1)
    put(queue, "s3", 4, workers=2)
    put(queue, "b1", 16)
    with pytest.raises(RouterQueueLimitExceeded, match=r"raw_isl_tokens limit reached \(current=16, limit=12\)"):
        put(queue, "b2", 16)
    assert queue.rejected == {("std-small", "requests"): 1, ("std-big", "raw_isl_tokens"): 1}
    assert (len(queue), queue.isl_tokens) == (3, 24)
    assert queue.usage()["std-big"] == (1, 16, 0)


def test_cached_tokens_have_a_limit_too_and_a_limit_of_nothing_refuses_at_once():
    queue = matrix(small={"cached_token_queue_limit_per_worker": 4, "request_queue_limit_per_worker": 9})
    put(queue, "a", 16, cached=12)
    with pytest.raises(RouterQueueLimitExceeded, match=r"cached_tokens limit reached \(current=12, limit=4\)"):
        put(queue, "b", 16, cached=12)
    with pytest.raises(RouterQueueLimitExceeded, match=r"requests limit reached \(current=0, limit=0\)"):
        put(matrix(small={"request_queue_limit_per_worker": 0}), "a", 4)


def test_even_a_class_without_limits_has_one(monkeypatch):
    monkeypatch.setattr("dynamo_es.router.policy_queue.MAX_WAITING", 3)
    queue = simple()
    for name in "abc":
        put(queue, name)
    with pytest.raises(RouterQueueLimitExceeded, match="limit=3"):
        put(queue, "d")
    assert MAX_WAITING == 100_000


def test_a_head_that_cannot_be_placed_holds_up_its_class_and_no_other():
    queue = matrix()
    put(queue, "small-pinned", 4)
    put(queue, "small", 4)
    put(queue, "big", 16)
    free = lambda waiting: waiting.item != "small-pinned"  # noqa: E731
    assert order(queue, free) == ["big"]
    assert order(queue) == ["small-pinned", "small"]


def test_a_pinned_request_holds_up_only_those_with_the_same_pin():
    queue = simple()
    put(queue, "w1 first", lane=1, strict=1)
    put(queue, "w1 then", lane=1)
    put(queue, "w2", lane=2)
    put(queue, "anywhere")
    free = lambda waiting: waiting.lane != 1  # noqa: E731
    assert order(queue, free) == ["w2", "anywhere"]
    assert order(queue) == ["w1 first", "w1 then"]


def test_an_open_request_holds_up_no_pinned_one():
    queue = simple()
    put(queue, "anywhere")
    put(queue, "also anywhere")
    put(queue, "w2", lane=2)
    assert order(queue, lambda waiting: waiting.lane == 2) == ["w2"]


def test_a_class_goes_on_until_nobody_can_be_placed_then_it_is_the_others_turn():
    queue = matrix(small={"quantum": 100}, explicit={"quantum": 10})
    for number in range(4):
        put(queue, f"s{number}", 5)
        put(queue, f"e{number}", 5, wanted="express")
    take = lambda: queue.pop_next(lambda waiting: True).item  # noqa: E731
    assert [take(), take()] == ["s0", "s1"]
    assert queue.pop_next(lambda waiting: False) is None
    assert [take(), take()] == ["e0", "e1"]


def test_classes_share_by_quantum():
    queue = matrix(small={"quantum": 30}, explicit={"quantum": 10})
    for number in range(40):
        put(queue, f"s{number}", 5)
        put(queue, f"e{number}", 5, wanted="express")
    served = [queue.pop_next(lambda waiting: True).item[0] for _ in range(40)]
    assert served.count("s") == 30
    assert served.count("e") == 10


def test_a_request_that_costs_many_rounds_is_served_when_it_alone_is_ready():
    queue = matrix(explicit={"quantum": 1})
    put(queue, "huge", 1_000_000, wanted="express")
    put(queue, "small", 4)
    assert order(queue) == ["small", "huge"]


def test_whoever_gave_up_is_not_served_and_does_not_count():
    queue = simple(request_queue_limit_per_worker=2)
    first, second = put(queue, "a"), put(queue, "b")
    queue.give_up(first)
    queue.give_up(first)
    assert len(queue) == 1
    put(queue, "c")
    assert queue.pop_next(lambda waiting: True) is second
    queue.give_up(second)
    assert order(queue) == ["c"]
    assert len(queue) == 0


def test_given_up_requests_do_not_pile_up():
    queue = simple()
    kept = put(queue, "kept", strict=1)
    for number in range(1000):
        queue.give_up(put(queue, f"r{number}"))
    assert sum(map(len, next(iter(queue._queues.values()))._lanes.values())) < 200
    assert queue.drain() == [kept]


REQUESTS = st.lists(
    st.tuples(st.sampled_from([None, "bulk", "express"]), st.integers(1, 40), st.integers(0, 40), st.booleans()),
    max_size=40,
)


@given(REQUESTS)
def test_everything_comes_out_once_and_nothing_is_left(requests):
    queue = matrix()
    kept = []
    for number, (wanted, isl, cached, gives_up) in enumerate(requests):
        waiting = put(queue, str(number), isl, min(cached, isl), wanted, now=number)
        if gives_up:
            queue.give_up(waiting)
        else:
            kept.append(str(number))
    assert sorted(order(queue)) == sorted(kept)
    assert set(queue.usage().values()) == {(0, 0, 0)}
