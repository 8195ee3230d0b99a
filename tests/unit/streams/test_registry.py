from __future__ import annotations

import itertools
import random

import pytest

from schemas.registry import Instance, Lease, LeaseEnded, ModelCard, key_instance, key_lease, key_lease_end, key_model
from streams.registry import RegistryFold
from streams.testing import FoldDriver


@pytest.fixture
def driver():
    return FoldDriver(RegistryFold())


def lease(driver, number, renewal=0):
    driver.feed(Lease(1, number, "worker", number, 1000, renewal), key_lease(number))


def instance(driver, number, lease_id, endpoint="e", state="serving"):
    value = Instance(1, "n", "c", endpoint, number, lease_id, "zmq", "tcp://h:1", state)
    driver.feed(value, key_instance("n", "c", endpoint, number))


def card(driver, number, lease_id, name="m"):
    value = ModelCard(1, "n", "c", "e", number, lease_id, "", name, "p", "Tokens", "Chat", "aggregated", [], 0, 16)
    driver.feed(value, key_model("n", "c", "e", number))


def end(driver, number, renewal, reason="expired"):
    driver.feed(LeaseEnded(1, number, renewal, reason, "test"), key_lease_end(number))


def check_same(driver):
    assert len({driver.digest(), driver.replayed().digest(), driver.restarted().digest()}) == 1


def test_what_names_an_ended_lease_goes_with_it(driver):
    for number in (1, 2):
        lease(driver, number)
        instance(driver, number, number)
        card(driver, number, number)
    driver.commit()
    end(driver, 1, 0)
    assert [item.instance_id for item in driver.state.instances.values()] == [2]
    assert [item.instance_id for item in driver.state.models.values()] == [2]
    check_same(driver)


def test_DISC_09_the_model_of_another_worker_stays(driver):
    for number in (1, 2):
        lease(driver, number)
        card(driver, number, number, name="shared")
    driver.feed(None, key_model("n", "c", "e", 1))
    assert [item.display_name for item in driver.state.models.values()] == ["shared"]


def test_a_renewal_that_came_in_between_makes_an_expiry_void(driver):
    lease(driver, 1)
    instance(driver, 1, 1)
    lease(driver, 1, renewal=5)
    end(driver, 1, 4)
    assert 1 in driver.state.leases
    assert driver.state.counters.void_endings == 1
    end(driver, 1, 5)
    assert driver.state.instances == {}
    check_same(driver)


def test_a_revoked_lease_ends_whatever_its_renewal(driver):
    lease(driver, 1, renewal=9)
    end(driver, 1, 0, "revoked")
    assert driver.state.leases == {}


def test_an_ended_lease_never_comes_back(driver):
    lease(driver, 1)
    end(driver, 1, 0)
    end(driver, 1, 0)
    lease(driver, 1, renewal=7)
    instance(driver, 1, 1)
    card(driver, 1, 1)
    assert driver.state.leases == driver.state.instances == driver.state.models == {}
    check_same(driver)


def test_a_deleted_ending_is_forgotten(driver):
    lease(driver, 1)
    end(driver, 1, 0)
    driver.feed(None, key_lease_end(1))
    assert driver.state.ended == {}
    check_same(driver)


def test_an_instance_before_its_lease_is_kept_as_compaction_may_reorder(driver):
    instance(driver, 1, 1)
    lease(driver, 1, renewal=3)
    assert len(driver.state.instances) == 1
    end(driver, 1, 3)
    assert driver.state.instances == {}


def test_DISC_10_several_endings_in_a_row(driver):
    for number in range(5):
        lease(driver, number)
        instance(driver, number, number)
    for number in range(3):
        end(driver, number, 0)
    instance(driver, 9, 4)
    assert sorted(item.instance_id for item in driver.state.instances.values()) == [3, 4, 9]


def test_renewals_do_not_count_as_changes_for_watchers(driver):
    lease(driver, 1)
    instance(driver, 1, 1)
    before = driver.state.revision
    lease(driver, 1, renewal=1)
    assert driver.state.revision == before
    instance(driver, 1, 1, state="draining")
    assert driver.state.revision > before


def test_DISC_01_a_compacted_log_folds_to_the_same_state():
    rng = random.Random(4)
    for _ in range(50):
        driver = FoldDriver(RegistryFold())
        renewals = [0] * 4
        for _ in range(60):
            number = rng.randrange(4)
            kind = rng.random()
            if kind < 0.4:
                renewals[number] += 1
                lease(driver, number, renewals[number])
            elif kind < 0.6:
                instance(driver, number + 10 * rng.randrange(2), number)
            elif kind < 0.7:
                driver.feed(None, key_instance("n", "c", "e", number))
            elif kind < 0.72:
                end(driver, number, renewals[number])
        newest = {}
        for record in driver._records:
            newest[record.key] = record.offset
        compacted = FoldDriver(RegistryFold())
        for record in driver._records:
            if newest[record.key] == record.offset:
                compacted.feed_record(record)
        # Rows of an ended lease are gone in one and never were in the other.
        assert compacted.state.instances == driver.state.instances
        assert set(compacted.state.leases) == set(driver.state.leases)
        check_same(driver)


def test_endings_in_any_order_give_one_state():
    states = set()
    for order in itertools.permutations([("expired", 0), ("expired", 1), ("revoked", 0)]):
        driver = FoldDriver(RegistryFold())
        lease(driver, 1)
        instance(driver, 1, 1)
        for reason, renewal in order:
            end(driver, 1, renewal, reason)
        states.add((len(driver.state.leases), len(driver.state.instances)))
    assert states == {(0, 0)}
