from __future__ import annotations

import pytest

from dynamo_es.errors import ConfigError
from dynamo_es.router.source_reaper import GoneWorkers
from dynamo_es.runtime.lease_monitor import FORGET_ENDED_S, LeaseWatch
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.registration import check_heartbeat
from schemas.registry import Instance, Lease, LeaseEnded, key_instance, key_lease, key_lease_end, key_model
from streams.kv_index_state import Source, SourceKey
from streams.registry import RegistryFold
from streams.testing import FoldDriver


@pytest.fixture
def driver():
    return FoldDriver(RegistryFold())


def renew(driver, number, renewal=0):
    driver.feed(Lease(1, number, "worker", number, 1000, renewal), key_lease(number))


def overdue(watch, driver, now, own=0):
    return [lease.lease_id for lease in watch.overdue(driver.state, own, now)]


def test_a_lease_is_overdue_by_the_watchers_clock_alone(driver):
    watch = LeaseWatch(pace_s=0.6)
    driver.now_ms = 1  # A worker whose clock is decades off.
    renew(driver, 1)
    assert overdue(watch, driver, 100.0) == []
    assert overdue(watch, driver, 100.9) == []
    assert overdue(watch, driver, 101.1) == [1]


def test_a_renewal_starts_the_time_anew(driver):
    watch = LeaseWatch(pace_s=0.6)
    renew(driver, 1)
    overdue(watch, driver, 100.0)
    renew(driver, 1, 1)
    assert overdue(watch, driver, 100.9) == []
    assert overdue(watch, driver, 101.5) == []
    assert overdue(watch, driver, 102.0) == [1]


def test_the_own_lease_is_never_overdue(driver):
    watch = LeaseWatch(pace_s=0.6)
    renew(driver, 1)
    overdue(watch, driver, 100.0, own=1)
    assert overdue(watch, driver, 200.0, own=1) == []


def test_DISC_03_silence_while_the_log_was_away_proves_nothing(driver):
    watch = LeaseWatch(pace_s=0.6)
    for number in (1, 2):
        renew(driver, number)
    overdue(watch, driver, 100.0)
    watch.restart(130.0)
    assert overdue(watch, driver, 130.5) == []
    renew(driver, 1, 1)
    assert overdue(watch, driver, 130.8) == []
    assert overdue(watch, driver, 131.2) == [2]


def test_DISC_03_silence_proves_nothing_while_own_renewals_do_not_come_through(driver):
    """The log can be read and takes nothing: everybody is silent. Then the own renewal is the first of all."""
    watch = LeaseWatch(pace_s=0.6)
    for number in (1, 2, 3):
        renew(driver, number)
    for now in (100.0, 100.4, 101.2, 105.0):
        assert overdue(watch, driver, now, own=1) == []
    renew(driver, 1, 1)
    assert overdue(watch, driver, 105.1, own=1) == []
    renew(driver, 2, 1)
    for step, now in enumerate((105.4, 105.7, 106.0, 106.3), 2):
        renew(driver, 1, step)
        renew(driver, 2, step)
        assert overdue(watch, driver, now, own=1) == ([3] if now > 105.5 else []), now


def test_DISC_03_a_look_that_took_as_long_as_the_log_was_away_proves_nothing(driver):
    """No look in between saw that own renewals were missing as well."""
    watch = LeaseWatch(pace_s=0.6)
    for step, now in enumerate((100.0, 100.3)):
        for number in (1, 2):
            renew(driver, number, step)
        assert overdue(watch, driver, now, own=1) == []
    renew(driver, 1, 2)
    assert overdue(watch, driver, 109.0, own=1) == []
    for step, now in enumerate((109.3, 109.6), 3):
        renew(driver, 1, step)
        assert overdue(watch, driver, now, own=1) == ([2] if step == 4 else []), now


def test_endings_are_forgotten_after_an_hour(driver):
    watch = LeaseWatch(pace_s=0.6)
    renew(driver, 1)
    driver.feed(LeaseEnded(1, 1, 0, "revoked", "owner"), key_lease_end(1))
    assert watch.forgettable(driver.state, 5.0) == []
    assert watch.forgettable(driver.state, 5.0 + FORGET_ENDED_S + 1) == [1]


def test_DISC_08_a_heartbeat_too_slow_for_its_lease_is_refused():
    check_heartbeat(2.5, 10.0)
    with pytest.raises(ConfigError, match="must be under a third"):
        check_heartbeat(3.4, 10.0)


def test_sources_of_workers_that_are_gone_for_long_are_retired(driver):
    gone = GoneWorkers(grace_s=10.0)
    sources = {SourceKey("m", number, 0): Source(SourceKey("m", number, 0), number, 0, 1, 16) for number in (1, 2)}
    value = Instance(1, "n", "c", "e", 1, 1, "zmq", "tcp://h:1")
    driver.feed(value, key_instance("n", "c", "e", 1))
    assert gone.find(sources, driver.state, 0.0) == []
    assert gone.find(sources, driver.state, 9.0) == []
    assert [source.key.worker_id for source in gone.find(sources, driver.state, 11.0)] == [2]
    sources[SourceKey("m", 2, 0)].retired = True
    assert gone.find(sources, driver.state, 30.0) == []


def test_a_worker_that_has_registered_its_model_and_does_not_serve_yet_is_not_gone(driver):
    """One of very many in a process tells of its cache long before the others let it serve."""
    gone = GoneWorkers(grace_s=10.0)
    sources = {SourceKey("m", 3, 0): Source(SourceKey("m", 3, 0), 3, 0, 1, 16)}
    card = make_card(read_model_facts(BUILTIN_MODEL), ("n", "c", "e"), 3, name="m", block_size=16, runtime_config={})
    driver.feed(card, key_model("n", "c", "e", 3))
    assert gone.find(sources, driver.state, 0.0) == []
    assert gone.find(sources, driver.state, 60.0) == []
    driver.feed(None, key_model("n", "c", "e", 3))
    assert gone.find(sources, driver.state, 61.0) == []
    assert [source.key.worker_id for source in gone.find(sources, driver.state, 72.0)] == [3]
