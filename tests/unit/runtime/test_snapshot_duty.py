from __future__ import annotations

from dynamo_es.runtime.snapshot_duty import partitions_of
from schemas.registry import Lease
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


def test_stream_processors_take_over_and_strangers_write_nothing():
    assert partitions_of(registry(("frontend", 1), ("streams", 2)), 1, 8) == set()
    assert partitions_of(registry(("frontend", 1)), 99, 8) == set()
