from __future__ import annotations

from dynamo_es.runtime.index_owners import INDEX_PATH, IndexOwner
from dynamo_es.runtime.snapshot_duty import partitions_of
from schemas.registry import Instance, Lease, key_instance
from streams.registry import RegistryState


def registry(*owners: tuple[str, int]) -> RegistryState:
    state = RegistryState()
    for number, (role, owner_id) in enumerate(owners):
        state.leases[number] = Lease(1, number, role, owner_id, 9_000, 0)  # type: ignore[arg-type]
    return state


def test_each_partition_goes_to_one_of_the_processes_that_route():
    owners = [("frontend", 11), ("router", 12), ("frontend", 13), ("worker", 14)]
    state = registry(*owners)
    shares = {owner_id: partitions_of(state, owner_id, 64) for _, owner_id in owners}
    assert shares[14] == set()
    assert sorted(partition for share in shares.values() for partition in share) == list(range(64))
    assert all(shares[owner_id] for owner_id in (11, 12, 13))


def test_when_one_leaves_only_its_partitions_move():
    before = {
        owner: partitions_of(registry(("router", 1), ("router", 2), ("router", 3)), owner, 64) for owner in (1, 2)
    }
    after = {owner: partitions_of(registry(("router", 1), ("router", 2)), owner, 64) for owner in (1, 2)}
    assert all(before[owner] <= after[owner] for owner in (1, 2))


def test_strangers_write_nothing():
    assert partitions_of(registry(("frontend", 1)), 99, 8) == set()


def test_those_that_answer_questions_for_a_partition_write_it_and_routers_the_rest():
    state = registry(("frontend", 1), ("router", 2), ("indexer", 3), ("indexer", 4))
    for owner in (IndexOwner(3, frozenset({0, 1, 2}), "shared"), IndexOwner(4, frozenset({2, 3}), "shared")):
        key = key_instance(*INDEX_PATH, owner.instance_id)
        state.instances[key] = Instance(
            1, *INDEX_PATH, owner.instance_id, 0, "zmq", "tcp://h:1", runtime_data=owner.runtime_data()
        )
    share = {number: partitions_of(state, number, 8) for number in (1, 2, 3, 4)}
    assert {0, 1} <= share[3] <= {0, 1, 2}
    assert {3} <= share[4] <= {2, 3}
    assert share[1] | share[2] == {4, 5, 6, 7}
    assert sorted(partition for partitions in share.values() for partition in partitions) == list(range(8))
