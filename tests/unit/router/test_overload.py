from __future__ import annotations

import pytest

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.measured_overload import count_stale_workers
from dynamo_es.router.overload import BusyThresholds, OverloadMonitor
from dynamo_es.router.routing_request import WorkerFacts
from schemas.worker_load import WORKER_LOAD, WorkerLoad
from streams.testing import FoldDriver
from streams.worker_load import WorkerLoadFold

W1, W2 = WorkerRank(1, 0), WorkerRank(2, 0)
FACTS = WorkerFacts(max_num_batched_tokens=100, total_kv_blocks=50)


def monitor(ttl_s=30.0, **thresholds) -> OverloadMonitor:
    return OverloadMonitor(BusyThresholds(**thresholds), ttl_s)


def observe(found, rank=W1, used=None, decode=None, total=None, at=0.0, now=None):
    found.observe(
        rank,
        kv_used_blocks=used,
        active_decode_blocks=decode,
        total_kv_blocks=total,
        at=at,
        now=at if now is None else now,
    )


def overloaded(found, ranks=(W1, W2), prefill=lambda rank: 0, now=0.0, facts=lambda worker_id: FACTS):
    return set(found.overloaded(ranks, facts, prefill, now))


def test_without_thresholds_nobody_is_overloaded():
    found = monitor()
    observe(found, used=10_000)
    assert overloaded(found, prefill=lambda rank: 10**9) == set()


@pytest.mark.parametrize(("tokens", "busy"), [(7, set()), (8, {1})])
def test_prefill_is_busy_above_the_number(tokens, busy):
    assert overloaded(monitor(active_prefill_tokens=7), prefill={W1: tokens, W2: 0}.get) == busy


@pytest.mark.parametrize(("tokens", "busy"), [(150, set()), (151, {1})])
def test_prefill_is_busy_above_a_multiple_of_a_step(tokens, busy):
    assert overloaded(monitor(active_prefill_tokens_frac=1.5), prefill={W1: tokens, W2: 0}.get) == busy


def test_a_worker_that_does_not_say_how_large_its_steps_are_has_very_large_ones():
    found = monitor(active_prefill_tokens_frac=1.0)
    unknown = WorkerFacts()
    assert overloaded(found, prefill=lambda rank: 10_000_000, facts=lambda worker_id: unknown) == set()
    assert overloaded(found, prefill=lambda rank: 10_000_001, facts=lambda worker_id: unknown) == {1, 2}


def test_either_decode_signal_makes_busy_and_only_news_of_it_lets_go():
    found = monitor(active_decode_blocks=0.8)
    observe(found, used=40, decode=40)
    assert overloaded(found) == set()
    observe(found, used=41, at=1.0)
    assert overloaded(found, now=1.0) == {1}
    observe(found, decode=1, at=2.0)
    assert overloaded(found, now=2.0) == {1}
    observe(found, used=40, at=3.0)
    assert overloaded(found, now=3.0) == set()
    observe(found, decode=41, at=4.0)
    assert overloaded(found, now=4.0) == {1}


def test_what_the_worker_says_of_its_capacity_goes_before_what_it_registered():
    found = monitor(active_decode_blocks=0.5)
    observe(found, used=100, total=1000)
    assert overloaded(found) == set()
    observe(found, W2, used=26)
    assert overloaded(found) == {2}
    assert overloaded(found, facts=lambda worker_id: WorkerFacts()) == set()


def test_an_older_measurement_that_comes_late_changes_nothing():
    found = monitor(active_decode_blocks=0.5)
    observe(found, used=49, at=5.0)
    observe(found, used=1, at=4.0, now=6.0)
    assert overloaded(found, now=6.0) == {1}


def test_LOAD_07_what_was_measured_becomes_unknown_on_its_own():
    found = monitor(ttl_s=10.0, active_decode_blocks=0.5)
    observe(found, used=49, at=100.0)
    observe(found, W2, used=49, at=103.0)
    assert overloaded(found, now=110.0) == {1, 2}
    assert overloaded(found, now=110.5) == {2}


def test_LOAD_07_a_measurement_from_the_future_does_not_count_longer():
    found = monitor(ttl_s=10.0, active_decode_blocks=0.5)
    observe(found, used=49, at=10_000.0, now=100.0)
    assert overloaded(found, now=110.0) == {1}
    assert overloaded(found, now=110.5) == set()


def test_LOAD_07_workers_that_went_silent_are_counted_while_they_are_registered():
    log = FoldDriver(WorkerLoadFold())
    for number, at_ms, used in ((1, 1000, 49), (2, 25_000, 49), (3, 1000, 1), (4, 1000, 1)):
        for rank in range(2):
            log.now_ms = at_ms + 20_000 * rank * (number == 3)
            log.feed(WorkerLoad(1, "m", number, rank, 1, used, None, None, None, None, 0), topic=WORKER_LOAD)
    log.commit()
    views = [log, log.replayed(), log.restarted()]

    def stale(now_ms, *registered):
        (found,) = {tuple(count_stale_workers(view.state, registered, now_ms).items()) for view in views}
        return dict(found)

    assert stale(31_000, 1, 2, 3) == {"m": 0}
    assert stale(31_001, 1, 2, 3) == {"m": 1}
    # A worker with one rank that speaks is not silent, and one that is gone is nobody.
    assert stale(60_000, 1, 2, 3) == {"m": 3}
    assert stale(60_000, 2) == {"m": 1}
    assert stale(60_000) == {}


def test_LOAD_12_capacity_is_that_of_a_rank_and_one_free_rank_keeps_the_worker():
    found = monitor(active_decode_blocks=0.9)
    ranks = [WorkerRank(1, rank) for rank in range(4)]
    observe(found, ranks[0], used=50)
    facts = lambda worker_id: FACTS  # noqa: E731
    assert [found.is_busy(rank, facts, 0, 0.0) for rank in ranks] == [True, False, False, False]
    assert overloaded(found, ranks) == set()
    for rank in ranks:
        observe(found, rank, used=50)
    assert overloaded(found, ranks) == {1}


def test_ranks_that_are_gone_are_forgotten():
    found = monitor(active_decode_blocks=0.5)
    for number in range(100):
        observe(found, WorkerRank(number, 0), used=50)
    overloaded(found, [W1])
    assert found._measured.keys() == {W1}
