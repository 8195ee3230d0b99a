from __future__ import annotations

import random

import pytest

from dynamo_es.runtime.index_owners import (
    INDEX_PATH,
    IndexOwner,
    is_taken_over,
    owner_of,
    owners_in,
    plan_questions,
    share_of,
    shares,
)
from schemas.kv_events import KV_EVENTS
from schemas.registry import Instance, key_instance
from streams.registry import RegistryState

ALL = frozenset(range(KV_EVENTS.partitions))


def instance(number: int, data: dict[str, str], state: str = "serving") -> Instance:
    return Instance(1, *INDEX_PATH, number, number, "zmq", "tcp://h:1", state, runtime_data=data)  # type: ignore[arg-type]


def registry(*owners: IndexOwner) -> RegistryState:
    state = RegistryState()
    for owner in owners:
        state.instances[key_instance(*INDEX_PATH, owner.instance_id)] = instance(
            owner.instance_id, owner.runtime_data()
        )
    return state


def shared(number: int, *partitions: int, leaving: bool = False) -> IndexOwner:
    return IndexOwner(number, frozenset(partitions), "shared", leaving)


@pytest.mark.parametrize(
    "owner",
    [shared(7), shared(7, 0, 3, 5), IndexOwner(8, ALL, "view"), IndexOwner(9, frozenset({1}), "given", True)],
)
def test_what_is_registered_can_be_read_again(owner):
    assert owner_of(instance(owner.instance_id, owner.runtime_data())) == owner


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"partitions": "", "kind": "given", "leaving": "no"},
        {"partitions": "x,-1,8,99999999999999999999999,٣", "kind": "boss"},
        {"partitions": "," * 100_000},
    ],
)
def test_what_makes_no_sense_counts_as_not_said(data):
    assert owner_of(instance(5, data)) == IndexOwner(5, frozenset(), "given")


def test_a_long_list_of_partitions_is_read_as_far_as_there_are_partitions():
    assert owner_of(instance(5, {"partitions": ",".join(map(str, range(100_000)))})).partitions <= ALL


def test_one_that_drains_takes_no_questions():
    state = registry(shared(1, 0))
    state.instances[b"x"] = instance(2, shared(2, 1).runtime_data(), "draining")
    assert [owner.instance_id for owner in owners_in(state)] == [1]


@pytest.mark.parametrize("count", range(1, 12))
def test_every_partition_has_one_owner_and_nobody_has_more_than_his_part(count):
    rng = random.Random(count)
    for _ in range(20):
        found = shares(64, [rng.getrandbits(64) for _ in range(count)])
        assert sorted(partition for share in found.values() for partition in share) == list(range(64))
        assert max(map(len, found.values())) <= -(-64 // count)


def test_few_partitions_move_when_one_comes_or_goes():
    rng = random.Random(1)
    moved = []
    for _ in range(50):
        numbers = [rng.getrandbits(64) for _ in range(5)]
        before, after = shares(64, numbers), shares(64, numbers[:4])
        lost = before[numbers[4]]
        moved.append(sum(len(before[number] - after[number]) for number in numbers[:4]) + len(lost))
    # 13 were the leaver's; a few more change hands so that nobody has too many.
    assert sum(moved) / len(moved) < 20


def test_those_that_share_agree_and_others_have_no_part():
    state = registry(
        shared(1, 0), shared(2, leaving=True), shared(3), IndexOwner(4, ALL, "view"), IndexOwner(5, ALL, "given")
    )
    assert share_of(state, 1) | share_of(state, 3) == ALL
    assert len(share_of(state, 1)) == len(share_of(state, 3)) == len(ALL) // 2
    assert all(share_of(state, number) == set() for number in (2, 4, 5, 6))


def test_a_partition_is_taken_over_by_somebody_else_who_stays():
    state = registry(shared(1, 0, 1), shared(2, 1), shared(3, 2, leaving=True), IndexOwner(4, frozenset({3}), "view"))
    assert [is_taken_over(state, 1, partition) for partition in range(4)] == [False, True, False, True]


def test_each_partition_is_asked_for_once():
    plan = plan_questions([shared(1, 0, 1, 2), shared(2, 2, 3), shared(3, 3)], asker=9)
    assert plan == {1: [0, 1, 2], 2: [3]} or plan == {1: [0, 1, 2], 3: [3]}
    assert plan_questions([], asker=9) == {}
    assert plan_questions([shared(1)], asker=9) == {}


def test_indexers_come_before_routers_and_routers_fill_what_is_left():
    view = IndexOwner(9, ALL, "view")
    assert plan_questions([view, shared(1, 0, 1), shared(2, 2)], asker=3) == {
        1: [0, 1], 2: [2], 9: sorted(ALL - {0, 1, 2}),
    }  # fmt: skip


def test_routers_spread_over_those_that_are_as_good():
    views = [IndexOwner(number, ALL, "view") for number in (1, 2, 3)]
    asked = {tuple(plan_questions(views, asker=asker)) for asker in range(50)}
    assert asked == {(1,), (2,), (3,)}
