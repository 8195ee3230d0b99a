from __future__ import annotations

import pytest

from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.store.memory import MemoryStore
from schemas.aggregates import PassLoad
from streams.windows import WindowSettings, WindowTable

SETTINGS = WindowSettings(window_ms=1000, kept_ms=5000, max_rows=6)


class Table:
    """A window table whose rows count records, with a store that it can be loaded from again."""

    def __init__(self, settings=SETTINGS):
        self.settings = settings
        self.store = MemoryStore()
        self.table = WindowTable("forward-pass", settings)
        self.offset = 0

    def add(self, at_ms, worker=1, offset=None, partition=0):
        offset = self.offset if offset is None else offset
        self.offset = max(self.offset, offset + 1)
        record = Record("ns.forward-pass", partition, offset, at_ms, b"", b"")
        row = self.table.row(record, ("m", worker, 0), lambda *window: make(window, worker))
        if row is not None:
            row.passes += 1
        return row is not None

    def commit(self):
        self.store.commit("w", self.table.changes(), {TopicPartition("t", 0): self.offset})

    def reloaded(self):
        other = Table(self.settings)
        other.store, other.offset = self.store, self.offset
        other.table.load(self.store)
        return other

    def counts(self):
        return {(row.window_start_ms, row.worker_id): row.passes for row in self.table.rows()}

    def publish(self):
        found = {key.decode(): value for key, value in self.table.unpublished(0).items()}
        self.table.confirm_published(0, self.offset)
        return found


def make(window, worker):
    version, partition, start, window_ms = window
    return PassLoad(version, partition, 0, start, window_ms, "m", worker, 0)


@pytest.fixture
def table():
    return Table()


def key(start, worker=1):
    return f"forward-pass/0/{start}+1000/rank/m/{worker}:0"


def test_records_are_counted_in_the_window_of_their_own_time(table):
    for at_ms in (0, 999, 1000, 500, 2999):
        assert table.add(at_ms)
    assert table.counts() == {(0, 1): 3, (1000, 1): 1, (2000, 1): 1}


def test_times_before_1970_have_windows_as_well(table):
    assert table.add(-1)
    assert table.counts() == {(-1000, 1): 1}


def test_a_record_that_is_read_again_counts_nothing(table):
    table.add(100, offset=0)
    table.add(200, offset=1)
    assert not table.add(100, offset=0)
    assert not table.add(200, offset=1)
    assert table.counts() == {(0, 1): 2}


def test_one_record_may_add_to_a_row_several_times(table):
    record = Record("ns.forward-pass", 0, 7, 100, b"", b"")
    for _ in range(3):
        table.table.row(record, ("m", 1, 0), lambda *window: make(window, 1)).passes += 1
    assert table.counts() == {(0, 1): 3}


def test_old_windows_go_and_late_records_do_not_count(table):
    table.add(500)
    table.add(1500)
    table.add(6100)
    assert table.counts() == {(1000, 1): 1, (6000, 1): 1}
    assert not table.add(900)
    assert table.table.counters.late == 1
    assert table.add(1900), "this window is kept still"


def test_partitions_have_times_of_their_own(table):
    table.add(500)
    table.add(900_000, partition=1)
    assert table.add(600)


def test_too_many_rows_cost_the_oldest_window(table):
    for worker in range(6):
        table.add(500, worker)
    table.add(1500)
    assert table.counts() == {(1000, 1): 1}
    assert table.table.counters.evicted == 6


def test_too_many_rows_of_one_window_cost_the_row_that_was_begun_first(table):
    for worker in range(8):
        table.add(500, worker)
    assert set(table.counts()) == {(0, worker) for worker in range(2, 8)}


def test_what_changed_is_published_once(table):
    table.add(500)
    table.add(1500)
    assert set(table.publish()) == {key(0), key(1000)}
    assert table.publish() == {}
    table.add(1600)
    assert {name: row.passes for name, row in table.publish().items()} == {key(1000): 2}


def test_a_deletion_is_published_even_after_a_restart(table):
    table.add(500)
    table.publish()
    table.add(9000)
    table.commit()
    table = table.reloaded()
    published = table.publish()
    assert published[key(0)] is None
    assert published[key(9000)].passes == 1
    table.commit()
    assert table.reloaded().publish() == {}
    assert [row for row, _ in table.store.scan("windows", b"r")] == [b"r" + key(9000).encode()]


def test_what_was_not_published_before_a_crash_is_published_after_it(table):
    table.add(500)
    table.commit()
    table.publish()
    table.commit()
    table.add(700)
    table.add(1500)
    table.commit()
    assert set(table.reloaded().publish()) == {key(0), key(1000)}


def test_a_row_that_comes_back_is_not_deleted(table):
    for worker in range(7):
        table.add(500, worker)
    table.commit()
    assert table.publish()[key(0, 0)] is None
    table.add(600, 0)
    table.commit()
    assert {name: row and row.passes for name, row in table.publish().items()} == {key(0, 0): 1, key(0, 1): None}
    table.commit()
    assert table.reloaded().counts() == table.counts()


def test_a_restart_changes_no_meaning(table):
    for number in range(40):
        table.add(number * 397 % 9000, worker=number % 3)
        table.commit()
        assert table.reloaded().table.digest() == table.table.digest()


def test_another_window_length_begins_new_rows_and_keeps_the_old():
    table = Table()
    table.add(500)
    table.commit()
    longer = table.reloaded()
    longer.table = WindowTable("forward-pass", WindowSettings(window_ms=2000, kept_ms=5000))
    longer.table.load(table.store)
    longer.add(600)
    assert sorted((row.window_ms, row.passes) for row in longer.table.rows()) == [(1000, 1), (2000, 1)]


def test_refused_records_are_counted_by_reason(table):
    for offset, reason in enumerate(["undecodable", "rejected", "undecodable"]):
        table.table.reject(Record("ns.forward-pass", 0, offset, 10, None, b""), reason)
    assert {row.reason: row.records for row in table.table.rows()} == {"undecodable": 2, "rejected": 1}
    assert set(table.publish()) == {
        "forward-pass/0/0+1000/rejected/undecodable", "forward-pass/0/0+1000/rejected/rejected"
    }  # fmt: skip


def test_a_restored_table_covers_what_was_published(table):
    row = make((1, 0, 0, 1000), 1)
    row.passes, row.next_offset = 4, 12
    table.table.restore(0, [row], floor=10, newest_ms=900, void=[b"forward-pass/0/gone"])
    assert not table.add(300, worker=2, offset=9), "below what is covered"
    assert not table.add(300, offset=11), "this row covers more than the rest"
    assert table.add(300, worker=2, offset=10)
    assert table.add(300, offset=12)
    assert table.counts() == {(0, 1): 5, (0, 2): 1}
    assert table.publish()["forward-pass/0/gone"] is None
