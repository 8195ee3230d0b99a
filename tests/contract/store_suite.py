"""What every state store must do. A backend's test class inherits this and says how to open one."""

from __future__ import annotations

import abc
from pathlib import Path

import pytest

from dynamo_es.log.base import TopicPartition
from dynamo_es.store.base import Delete, DeleteRange, Put, StateStore
from dynamo_es.store.errors import StoreClosed

P0 = TopicPartition("ns.kv-events", 0)
P1 = TopicPartition("ns.kv-events", 1)


class StateStoreSuite(abc.ABC):
    @abc.abstractmethod
    def open(self, path: Path) -> StateStore: ...

    @pytest.fixture
    def store(self, tmp_path):
        store = self.open(tmp_path / "state")
        yield store
        store.close()

    def test_a_new_store_is_empty(self, store):
        assert store.positions("fold") == {}
        assert store.identity("fold") == {}
        assert list(store.scan("rows")) == []
        assert store.get("rows", b"a") is None

    def test_changes_and_positions_arrive_together(self, store):
        store.commit("fold", [Put("rows", b"a", b"1"), Put("more", b"b", b"2")], {P0: 7, P1: 0}, {"log_id": "x"})
        assert store.get("rows", b"a") == b"1"
        assert store.get("more", b"b") == b"2"
        assert store.positions("fold") == {P0: 7, P1: 0}
        assert store.identity("fold") == {"log_id": "x"}

    def test_later_changes_win(self, store):
        store.commit(
            "fold",
            [
                Put("rows", b"a", b"1"),
                Put("rows", b"a", b"2"),
                Put("rows", b"b", b"1"),
                Delete("rows", b"b"),
                Put("rows", b"c1", b"x"),
                DeleteRange("rows", b"c", b"d"),
                Put("rows", b"c2", b"y"),
            ],
            {P0: 1},
        )
        assert list(store.scan("rows")) == [(b"a", b"2"), (b"c2", b"y")]

    def test_deleting_what_is_not_there_is_no_error(self, store):
        store.commit("fold", [Delete("rows", b"zz"), DeleteRange("rows", b"x", b"y")], {P0: 1})
        assert list(store.scan("rows")) == []

    def test_range_end_is_exclusive(self, store):
        store.commit("fold", [Put("rows", bytes((n,)), b"") for n in range(5)], {})
        store.commit("fold", [DeleteRange("rows", b"\x01", b"\x03")], {})
        assert [key for key, _ in store.scan("rows")] == [b"\x00", b"\x03", b"\x04"]

    def test_scan_is_by_prefix_in_byte_order(self, store):
        keys = [b"\xff\xff", b"\xff", b"b\xff", b"b", b"ba", b"a", b"c"]
        store.commit("fold", [Put("rows", key, key) for key in keys], {})
        assert [key for key, _ in store.scan("rows")] == sorted(keys)
        assert [key for key, _ in store.scan("rows", b"b")] == [b"b", b"ba", b"b\xff"]
        assert [key for key, _ in store.scan("rows", b"\xff")] == [b"\xff", b"\xff\xff"]

    def test_scan_can_be_abandoned(self, store):
        store.commit("fold", [Put("rows", b"%05d" % n, b"v") for n in range(1000)], {})
        for _ in range(100):
            assert next(iter(store.scan("rows")))[0] == b"00000"

    def test_owners_do_not_share_positions(self, store):
        store.commit("one", [Put("rows", b"1", b"")], {P0: 1}, {"log_id": "a"})
        store.commit("two", [Put("more", b"2", b"")], {P0: 2}, {"log_id": "b"})
        store.wipe("one", ["rows"])
        assert store.positions("one") == {}
        assert store.identity("one") == {}
        assert list(store.scan("rows")) == []
        assert store.positions("two") == {P0: 2}
        assert store.identity("two") == {"log_id": "b"}
        assert list(store.scan("more")) == [(b"2", b"")]

    def test_a_position_moves_only_where_it_is_given(self, store):
        store.commit("fold", [], {P0: 5, P1: 6})
        store.commit("fold", [], {P1: 9})
        assert store.positions("fold") == {P0: 5, P1: 9}

    def test_EVT_19_every_family_gets_its_own_rows(self, store):
        store.commit("fold", [Put(family, b"k", family.encode()) for family in ("rows", "more", "default")], {P0: 3})
        for family in ("rows", "more", "default"):
            assert list(store.scan(family)) == [(b"k", family.encode())]

    def test_use_after_close_says_so(self, store):
        store.close()
        store.close()
        with pytest.raises(StoreClosed):
            store.get("rows", b"a")
        with pytest.raises(StoreClosed):
            store.commit("fold", [], {P0: 1})
