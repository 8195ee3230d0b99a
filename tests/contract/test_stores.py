from __future__ import annotations

import subprocess
import sys

import pytest
from rocksdict import Options, Rdict, WriteBatch

from dynamo_es.store.base import Put
from dynamo_es.store.errors import StoreFormatError, StoreLocked
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksStore
from tests.contract.store_suite import P0, StateStoreSuite

FAMILIES = ["rows", "more", "default"]


class TestMemoryStore(StateStoreSuite):
    def open(self, path):
        return MemoryStore()


class TestRocksStore(StateStoreSuite):
    def open(self, path):
        return RocksStore(path, FAMILIES)

    def test_state_survives_reopening(self, tmp_path):
        store = RocksStore(tmp_path / "s", FAMILIES)
        store.commit("fold", [Put("rows", b"a", b"1")], {P0: 5}, {"log_id": "x"})
        store.close()
        store = RocksStore(tmp_path / "s", [*FAMILIES, "new-family"])
        assert store.get("rows", b"a") == b"1"
        assert store.positions("fold") == {P0: 5}
        assert list(store.scan("new-family")) == []
        store.close()

    def test_OPS_04_second_opener_is_told_who_and_what_to_do(self, tmp_path):
        store = RocksStore(tmp_path / "s", FAMILIES)
        with pytest.raises(StoreLocked, match=r"already open in this process; .*--state-dir"):
            RocksStore(tmp_path / "s", FAMILIES)
        code = (
            "import sys,pathlib;from dynamo_es.store.rocks import RocksStore\n"
            "from dynamo_es.store.errors import StoreLocked\n"
            "try: RocksStore(pathlib.Path(sys.argv[1]),['rows'])\n"
            "except StoreLocked as e: print(e)\n"
        )
        out = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "s")], capture_output=True, text=True, check=True
        )
        assert "held by another process" in out.stdout
        store.close()

    def test_read_only_beside_the_owner(self, tmp_path):
        store = RocksStore(tmp_path / "s", FAMILIES)
        store.commit("fold", [Put("rows", b"a", b"1")], {P0: 5})
        view = RocksStore(tmp_path / "s", FAMILIES, read_only=True)
        store.commit("fold", [Put("rows", b"b", b"2")], {P0: 6})
        assert list(view.scan("rows")) == [(b"a", b"1")]
        assert view.positions("fold") == {P0: 5}
        view.close()
        store.close()

    def test_newer_format_is_refused_with_what_to_do(self, tmp_path):
        store = RocksStore(tmp_path / "s", FAMILIES)
        store.close()
        db = Rdict(
            str(tmp_path / "s"),
            Options(raw_mode=True),
            column_families={
                name: Options(raw_mode=True) for name in [*FAMILIES, "positions", "meta"] if name != "default"
            },
        )
        batch = WriteBatch(raw_mode=True)
        batch.put(b"format", b"99", db.get_column_family_handle("meta"))
        db.write(batch)
        db.close()
        with pytest.raises(StoreFormatError, match=r"format 99, this version knows 1; .*delete the folder"):
            RocksStore(tmp_path / "s", FAMILIES)

    def test_a_foreign_folder_is_left_alone(self, tmp_path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(StoreFormatError, match="not a state store"):
            RocksStore(tmp_path, FAMILIES)
        assert (tmp_path / "notes.txt").read_text() == "mine"
