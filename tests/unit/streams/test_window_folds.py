"""The folds that count by windows: requests, forward passes, measured load, anomalies of KV events."""

from __future__ import annotations

import pytest

from schemas.aggregates import KvSourceCounts
from schemas.columns import pack_u64
from schemas.forward_pass import ForwardPass, QueuedRequests, ScheduledRequests
from schemas.kv_events import BlocksStored, KvEvents, SourceRetired
from schemas.requests import Finished, PrefillCompleted, Routed, RouterLost
from schemas.worker_load import WorkerLoad
from streams.kv_partition import KvPartitionFold
from streams.rank_load import MeasuredLoadFold, PassLoadFold
from streams.request_load import RequestLoadFold
from streams.testing import FoldDriver
from streams.windows import WindowSettings

SETTINGS = WindowSettings(window_ms=1000, kept_ms=10_000)
START = 1_700_000_000_000


def driver_of(fold):
    return FoldDriver(fold(SETTINGS))


def at(driver, ms):
    driver.now_ms = START + ms
    return driver


def rows(driver):
    found = {}
    for row in driver.fold.windows(driver.state).rows():
        found[(row.window_start_ms - START) // 1000, row.worker_id] = row
    return found


def same_after_restart(driver):
    driver.commit()
    assert driver.restarted().digest() == driver.replayed().digest() == driver.digest()


def routed(name, worker=1, router=5, attempt=0, cached=16):
    return Routed(
        1, name, attempt, router, "m", "kv", worker, 0, 16, 50, b"", b"", 1, cached, 34, [], "d", [], 9
    )  # fmt: skip


def finished(name, outcome="ok", tokens=3, first=7, duration=20, attempt=0):
    return Finished(1, name, attempt, 5, outcome, tokens, first, duration)


class TestRequestLoad:
    @pytest.fixture
    def driver(self):
        return driver_of(RequestLoadFold)

    def test_a_request_counts_where_it_was_routed_and_when_it_ended(self, driver):
        at(driver, 100).feed(routed("a"))
        at(driver, 200).feed(routed("b", cached=0))
        at(driver, 300).feed(PrefillCompleted(1, "a", 0, 5))
        at(driver, 2400).feed(finished("a", first=30, tokens=4))
        at(driver, 2500).feed(finished("b", first=10, tokens=6))
        first, later = rows(driver)[0, 1], rows(driver)[2, 1]
        assert (first.routed, first.prompt_tokens, first.cached_tokens, first.ok) == (2, 100, 16, 0)
        assert (later.routed, later.ok, later.output_tokens, later.duration_ms_sum) == (0, 2, 10, 40)
        assert (later.first_tokens, later.first_token_ms_mean, later.first_token_ms_max) == (2, 20.0, 30)
        same_after_restart(driver)

    def test_endings_count_by_outcome(self, driver):
        for outcome in ("ok", "cancelled", "error", "migrated"):
            driver.feed(routed(outcome))
            driver.feed(finished(outcome, outcome, tokens=0, first=-1))
        (row,) = rows(driver).values()
        assert (row.ok, row.cancelled, row.error, row.migrated) == (1, 1, 1, 1)
        assert row.first_tokens == 0
        assert row.first_token_ms_mean is None
        same_after_restart(driver)

    def test_repeated_and_late_events_count_nothing(self, driver):
        for _ in range(2):
            driver.feed(routed("a"))
            driver.feed(finished("a"))
            driver.feed(routed("a"))
            driver.feed(finished("a"))
        driver.feed(finished("unknown"))
        (row,) = rows(driver).values()
        assert (row.routed, row.ok) == (1, 1)
        same_after_restart(driver)

    def test_attempts_are_requests_of_their_own(self, driver):
        driver.feed(routed("a"))
        driver.feed(finished("a", "migrated"))
        driver.feed(routed("a", worker=2, attempt=1))
        driver.feed(finished("a", attempt=1))
        assert (rows(driver)[0, 1].migrated, rows(driver)[0, 2].ok) == (1, 1)

    def test_a_lost_router_leaves_its_requests_unfinished(self, driver):
        for name, router in (("a", 5), ("b", 6), ("c", 5)):
            driver.feed(routed(name, router=router))
        driver.feed(RouterLost(1, 5))
        driver.feed(RouterLost(1, 5))
        driver.feed(finished("b"))
        (row,) = rows(driver).values()
        assert (row.routed, row.unfinished, row.ok) == (3, 2, 1)
        same_after_restart(driver)

    def test_what_is_open_for_too_long_is_unfinished(self, driver):
        driver.feed(routed("a"))
        at(driver, 9_000).feed(routed("b"))
        at(driver, 10_100).feed(routed("c"))
        assert rows(driver)[10, 1].unfinished == 1
        at(driver, 10_200).feed(finished("a"))
        assert rows(driver)[10, 1].ok == 0
        same_after_restart(driver)

    def test_too_many_open_requests_cost_the_oldest(self, driver, monkeypatch):
        monkeypatch.setattr("streams.request_load.MAX_OPEN", 2)
        for name in "abc":
            driver.feed(routed(name))
        driver.feed(finished("a"))
        driver.feed(finished("b"))
        (row,) = rows(driver).values()
        assert (row.routed, row.unfinished, row.ok) == (3, 1, 1)
        same_after_restart(driver)

    def test_replay_begins_where_the_oldest_open_request_did(self, driver, monkeypatch):
        monkeypatch.setattr("streams.request_load.MAX_ENDED", 0)
        for name in "abc":
            driver.feed(routed(name))
        driver.feed(finished("a"))
        assert driver.fold.replay_from(driver.state, 0, 4) == 1
        driver.feed(finished("c"))
        driver.feed(finished("b"))
        assert driver.fold.replay_from(driver.state, 0, 6) == 6

    def test_a_deletion_is_refused(self, driver):
        driver.feed(None)
        assert driver.rejected == ["requests has no deletions"]


def forward_pass(counter, worker=1, incarnation=1, wall=0.1, waiting=0):
    scheduled = ScheduledRequests(num_prefill_requests=1, sum_prefill_tokens=100, num_decode_requests=4)
    return ForwardPass(
        1, "m", worker, 0, incarnation, counter, wall, scheduled, QueuedRequests(num_prefill_requests=waiting)
    )


class TestPassLoad:
    @pytest.fixture
    def driver(self):
        return driver_of(PassLoadFold)

    def test_passes_and_heartbeats(self, driver):
        driver.feed(forward_pass(0, waiting=3))
        driver.feed(forward_pass(1, waiting=1))
        driver.feed(forward_pass(2, wall=0.0))
        (row,) = rows(driver).values()
        assert (row.passes, row.heartbeats, row.missed, row.duplicates) == (2, 1, 0, 0)
        assert (row.prefill_tokens, row.decode_requests, row.waiting_max) == (200, 8, 3)
        assert row.wall_time_s == pytest.approx(0.2)
        same_after_restart(driver)

    def test_what_is_missing_or_repeated_is_told_by_the_numbers(self, driver):
        for counter in (3, 4, 4, 7, 5, 8):
            driver.feed(forward_pass(counter))
        (row,) = rows(driver).values()
        assert (row.passes, row.missed, row.duplicates, row.counter) == (4, 2, 2, 8)
        same_after_restart(driver)

    def test_numbers_go_on_in_the_next_window(self, driver):
        driver.feed(forward_pass(3))
        at(driver, 1500).feed(forward_pass(3))
        at(driver, 1600).feed(forward_pass(6))
        assert (rows(driver)[1, 1].duplicates, rows(driver)[1, 1].missed) == (1, 2)
        same_after_restart(driver)

    def test_a_restarted_engine_counts_from_anywhere(self, driver):
        driver.feed(forward_pass(9))
        driver.feed(forward_pass(0, incarnation=2))
        (row,) = rows(driver).values()
        assert (row.passes, row.missed, row.duplicates, row.incarnation) == (2, 0, 0, 2)

    def test_a_rank_that_was_silent_for_longer_than_windows_are_kept_is_new(self, driver):
        driver.feed(forward_pass(9))
        at(driver, 60_000).feed(forward_pass(20))
        assert rows(driver)[60, 1].missed == 0
        same_after_restart(driver)

    def test_gone_ranks_are_forgotten(self, driver, monkeypatch):
        monkeypatch.setattr("streams.windowed_fold._TIDY_RANKS", 3)
        driver = driver_of(PassLoadFold)
        for worker in range(10):
            at(driver, 20_000 * worker).feed(forward_pass(0, worker))
        assert len(driver.state.newest) <= 5


class TestMeasuredLoad:
    @pytest.fixture
    def driver(self):
        return driver_of(MeasuredLoadFold)

    def load(self, at_ms, used=10, running=1, total=100):
        return WorkerLoad(1, "m", 1, 0, 1, used, None, total, running, None, at_ms)

    def test_samples_and_maxima(self, driver):
        driver.feed(self.load(1, used=10, running=2))
        driver.feed(self.load(2, used=30, running=None))
        driver.feed(self.load(3, used=None, total=None))
        (row,) = rows(driver).values()
        assert (row.samples, row.used_blocks_samples, row.used_blocks_sum, row.used_blocks_max) == (3, 2, 40, 30)
        assert (row.running_max, row.total_blocks, row.at_ms) == (2, 100, 3)
        same_after_restart(driver)

    def test_a_repeated_measurement_counts_once(self, driver):
        driver.feed(self.load(1))
        driver.feed(self.load(1))
        at(driver, 1500).feed(self.load(1))
        assert [row.samples for row in rows(driver).values()] == [1, 0]

    def test_a_deletion_changes_nothing(self, driver):
        driver.feed(self.load(1))
        driver.feed(None)
        assert driver.rejected == []
        (row,) = rows(driver).values()
        assert row.samples == 1


COLUMN = pack_u64([1, 2])


def batch(seq, incarnation=1, worker=1, reset=None, events=None, block_size=4):
    events = [BlocksStored("device", None, COLUMN, COLUMN)] if events is None else events
    return KvEvents(1, "m", worker, 0, incarnation, seq, block_size, seq == 0 if reset is None else reset, events)


class TestKvSourceCounts:
    @pytest.fixture
    def driver(self):
        return driver_of(KvPartitionFold)

    def counts(self, driver):
        (row,) = rows(driver).values()
        assert isinstance(row, KvSourceCounts)
        return (
            row.batches, row.duplicates, row.stragglers, row.gaps, row.missing_batches, row.skipped_batches,
        )  # fmt: skip

    def test_gaps_duplicates_and_stragglers(self, driver):
        """EVT-01, EVT-04: what the index noticed is counted where it happened."""
        for seq in (0, 1, 1, 2, 5, 6):
            driver.feed(batch(seq))
        driver.feed(batch(0, incarnation=2))
        driver.feed(batch(7))
        assert self.counts(driver) == (8, 1, 1, 1, 2, 2)
        same_after_restart(driver)

    def test_a_sources_end_is_no_batch(self, driver):
        driver.feed(batch(0))
        driver.feed(batch(1, events=[SourceRetired("gone")]))
        assert self.counts(driver)[0] == 1
        same_after_restart(driver)

    def test_sources_are_counted_apart(self, driver):
        driver.feed(batch(0))
        driver.feed(batch(4, worker=2))
        assert [row.gaps for row in rows(driver).values()] == [0, 1]

    def test_a_batch_that_makes_no_sense_is_refused(self, driver):
        driver.feed(batch(0))
        driver.feed(batch(1, block_size=8))
        assert "block_size 8" in driver.rejected[0]

    def test_its_version_follows_the_index(self):
        from streams.kv_index import KvIndexFold

        assert KvPartitionFold.version % 1000 == KvIndexFold.version
