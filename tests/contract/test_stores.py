from __future__ import annotations

import contextlib
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rocksdict import Options, Rdict, WriteBatch

from dynamo_es.store.base import Put
from dynamo_es.store.errors import StoreFormatError, StoreLocked
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksMemory, RocksStore
from tests.contract.store_suite import P0, StateStoreSuite

FAMILIES = ["rows", "more", "default"]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


FAILING_DISK = """
import pathlib, resource, sys
from dynamo_es.log.base import TopicPartition
from dynamo_es.store.base import Put
from dynamo_es.store.errors import StoreError, StoreFull
from dynamo_es.store.rocks import RocksStore

place = TopicPartition("ns.kv-events", 0)
store = RocksStore(pathlib.Path(sys.argv[1]), ["rows", "more", "default"])
store.commit("fold", [Put("rows", b"before", b"1")], {place: 1})
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

def refused():
    try:
        store.commit("fold", [Put("rows", b"lost", bytes(65536))], {place: 2})
    except StoreError as error:
        assert not isinstance(error, StoreFull), error
    else:
        raise AssertionError("not refused")

refused()
if sys.argv[2] == "also when it is opened again":
    refused()
    refused()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
if sys.argv[2] == "while others read":
    reading = store.scan("rows")
    assert next(reading) == (b"before", b"1")
    refused()
    reading.close()
store.commit("fold", [Put("rows", b"after", b"3")], {place: 3})
store.close()
"""


def tables_open(folder: Path) -> int:
    """Table files of a store that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = descriptor.readlink()
            found += path.is_relative_to(folder) and ".sst" in path.name
    return found


def bytes_in_files(folder: Path) -> int:
    """Rows in table files. RocksDB merges them meanwhile, and a file that was listed may be gone."""
    total = 0
    for path in folder.glob("*.sst"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


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

    def test_SCALE_07_scans_that_are_abandoned_give_their_memory_back(self, tmp_path):
        """By leaving the loop, by an error, and by an iterator that nobody ever finishes."""
        store = RocksStore(tmp_path / "s", FAMILIES)
        store.commit("fold", [Put("rows", b"%06d" % n, bytes(200)) for n in range(2_000)], {})

        def abandon(times: int) -> None:
            for number in range(times):
                scan = store.scan("rows", b"00")
                next(scan)
                if number % 3 == 0:
                    continue
                with contextlib.suppress(RuntimeError):
                    for _ in scan:
                        if number % 3 == 1:
                            break
                        raise RuntimeError

        # What the allocator keeps is there after the first ones.
        abandon(5_000)
        before = resident_bytes()
        abandon(20_000)
        assert resident_bytes() - before < 8 * 1024 * 1024
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

    def test_rows_go_to_files_before_they_fill_memory(self, tmp_path):
        """Larger buffers, one a family, filled over hours, and a process with many stores grew all that time."""
        store = RocksStore(tmp_path / "s", FAMILIES, memory=RocksMemory(write_buffer_bytes=256 * 1024))
        rng = random.Random(1)
        rows = {number.to_bytes(4, "big"): rng.randbytes(4096) for number in range(400)}
        for key, value in rows.items():
            store.commit("fold", [Put("rows", key, value)], {P0: 5})
        # On RocksDB's own threads. What is in files is all but two buffers.
        deadline = time.monotonic() + 60
        while bytes_in_files(tmp_path / "s") < len(rows) * 4096 - 2 * 256 * 1024:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert dict(store.scan("rows")) == rows
        store.close()

    def test_scans_do_not_fill_the_cache_of_blocks(self, tmp_path):
        """Snapshots scan all the time, and each time over new files."""
        memory = RocksMemory(write_buffer_bytes=256 * 1024)
        store = RocksStore(tmp_path / "s", FAMILIES, memory=memory)
        rng = random.Random(1)
        rows = {number.to_bytes(4, "big"): rng.randbytes(4096) for number in range(400)}
        for key, value in rows.items():
            store.commit("fold", [Put("rows", key, value)], {P0: 5})
        assert dict(store.scan("rows")) == rows
        assert memory.cache.get_usage() < 64 * 1024
        assert all(store.get("rows", key) == value for key, value in rows.items())
        assert memory.cache.get_usage() > 512 * 1024, "what is asked for is kept"
        store.close()

    def test_families_that_are_seldom_written_fill_memory_no_further_than_all_together_may(self, tmp_path):
        """Each used to have a bound of its own, and the last one came near it after hours."""
        bound, rng = 64 * 1024, random.Random(1)
        families = [f"family-{number}" for number in range(8)]
        store = RocksStore(tmp_path / "s", families, memory=RocksMemory(write_buffer_bytes=bound))
        for number in range(600):
            key = number.to_bytes(4, "big")
            store.commit("fold", [Put(family, key, rng.randbytes(120)) for family in families], {P0: number})
        written = len(families) * 600 * 120
        # On RocksDB's own threads, which a burst outruns, and a family goes to a file when something is written. Then
        # all is in files but one buffer that fills and one that is being written.
        deadline = time.monotonic() + 60
        while bytes_in_files(tmp_path / "s") < written - 2 * bound:
            assert time.monotonic() < deadline
            time.sleep(0.01)
            store.commit("fold", [], {P0: 600})
        store.close()

    @pytest.mark.parametrize("failing", ["once", "also when it is opened again", "while others read"])
    def test_a_store_that_a_failing_disk_broke_is_whole_and_works_when_the_disk_does(self, tmp_path, failing):
        """RocksDB itself refuses everything from then on, for ever. In a process that may write no large files."""
        out = subprocess.run(
            [sys.executable, "-c", FAILING_DISK, str(tmp_path / "s"), failing],
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        assert out.returncode == 0, out.stderr
        assert "was opened again after an error" in out.stderr
        store = RocksStore(tmp_path / "s", FAMILIES)
        assert dict(store.scan("rows")) == {b"before": b"1", b"after": b"3"}
        assert store.positions("fold") == {P0: 3}
        store.close()

    def test_open_files_have_a_bound(self, tmp_path):
        """RocksDB keeps all tables open by default. Ten of a partition's store may be, and those that it merges."""
        folder, rng, most = tmp_path / "s", random.Random(1), 0
        families = [f"family-{number}" for number in range(30)]
        store = RocksStore(folder, families, memory=RocksMemory.for_partitions())
        for number in range(300):
            store.commit("fold", [Put(family, rng.randbytes(8), rng.randbytes(1024)) for family in families], {P0: 1})
            if number % 50 == 49:
                for family in families:
                    list(store.scan(family))
                most = max(most, tables_open(folder))
        assert len(list(folder.glob("*.sst"))) >= 30
        assert 5 < most <= 20
        store.close()

    def test_a_block_that_cannot_be_read_is_an_error_and_not_the_end_of_the_rows(self, tmp_path):
        store = RocksStore(tmp_path / "state", FAMILIES)
        rows = random.Random(1)
        store.commit("fold", [Put("rows", b"%06d" % number, rows.randbytes(200)) for number in range(5000)], {P0: 5000})
        store.close()
        # What was written is in a table once the log was read again.
        RocksStore(tmp_path / "state", FAMILIES).close()
        table = max((tmp_path / "state").glob("*.sst"), key=lambda path: path.stat().st_size)
        with table.open("r+b") as file:
            file.seek(table.stat().st_size // 2)
            file.write(bytes(64))
        store = RocksStore(tmp_path / "state", FAMILIES)
        with pytest.raises(StoreFormatError, match="delete the folder, it is folded anew"):
            list(store.scan("rows"))
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
