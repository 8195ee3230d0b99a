from __future__ import annotations

import random
from dataclasses import replace

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
    [
        shared(7),
        shared(7, 0, 3, 5),
        IndexOwner(8, ALL, "view"),
        IndexOwner(9, frozenset({1}), "given", True),
        IndexOwner(9, ALL, "shared", yielding=frozenset({0, 7}), revision=12),
    ],
)
def test_what_is_registered_can_be_read_again(owner):
    assert owner_of(instance(owner.instance_id, owner.runtime_data())) == owner


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"partitions": "", "kind": "given", "leaving": "no"},
        {"partitions": "x,-1,8,99999999999999999999999,٣", "kind": "boss"},
        {"yielding": "8,x", "revision": "-1"},
        {"revision": "9" * 5000},
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


def yielding(number: int, *partitions: int, revision: int = 1) -> IndexOwner:
    return IndexOwner(number, frozenset(partitions), "shared", yielding=frozenset(partitions), revision=revision)


def test_a_partition_is_taken_over_by_somebody_else_who_keeps_it():
    own = yielding(1, 0, 1, 2, 3, 4)
    others = shared(2, 1), shared(3, 2, leaving=True), IndexOwner(4, frozenset({3}), "view"), yielding(5, 4)
    state = registry(own, *others)
    assert [is_taken_over(state, own, partition) for partition in range(5)] == [False, True, False, True, False]


def test_nobody_takes_his_word_back_before_the_registry_has_that_he_yields():
    other = shared(2, 1)
    assert not is_taken_over(registry(shared(1, 1), other), shared(1, 1), 1)
    assert not is_taken_over(registry(shared(1, 1), other), yielding(1, 1), 1)
    assert not is_taken_over(registry(yielding(1, 1), other), yielding(1, 1, revision=2), 1)
    assert is_taken_over(registry(yielding(1, 1, revision=2), other), yielding(1, 1, revision=2), 1)


class Negotiation:
    """Three processes and one partition; each sees the registry as it was some records ago."""

    def __init__(self) -> None:
        self.said = [shared(number) for number in range(3)]
        self.registered: dict[int, IndexOwner] = {}
        self.views: list[dict[int, IndexOwner]] = [{}, {}, {}]
        self.coming: list[list[IndexOwner]] = [[], [], []]
        self.wanted = [True, False, False]

    def act(self, number: int) -> None:
        """As a keeper looks: answer for what is wanted, yield what is not, go when another one keeps it."""
        said, wanted = self.said[number], self.wanted[number]
        answers = wanted or 0 in said.partitions
        if answers and not wanted and is_taken_over(registry(*self.views[number].values()), said, 0):
            answers = False
        partitions = frozenset({0} if answers else ())
        owner = IndexOwner(number, partitions, "shared", yielding=frozenset() if wanted else partitions)
        if replace(owner, revision=said.revision) != said:
            owner = replace(owner, revision=said.revision + 1)
            self.said[number] = self.registered[number] = owner
            for coming in self.coming:
                coming.append(owner)

    def see(self, number: int, records: int) -> None:
        for owner in self.coming[number][:records]:
            self.views[number][owner.instance_id] = owner
        del self.coming[number][:records]


@pytest.mark.parametrize("seed", range(4))
def test_whoever_is_to_have_it_and_however_late_they_see_it_somebody_answers(seed):
    rng = random.Random(seed)
    talk = Negotiation()
    talk.act(0)
    for _ in range(4_000):
        number = rng.randrange(3)
        step = rng.random()
        if step < 0.4:
            talk.act(number)
        elif step < 0.7:
            talk.see(number, rng.choice([1, 1, 2, 99]))
        else:
            talk.wanted[number] = not talk.wanted[number]
        assert any(0 in owner.partitions for owner in talk.registered.values())


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
