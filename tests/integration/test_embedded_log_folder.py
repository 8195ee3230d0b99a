"""The embedded log's folder: who may open it, what happens to it under a running log, and what a crash leaves."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import asyncinotify
import pytest

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.log.base import Bounds, Entry, TopicConfig, TopicPartition
from dynamo_es.log.doorbell import PollingWatcher, make_watcher
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.errors import LogClosed, LogFormatError, LogReplaced, LogUnavailable, OffsetOutOfRange
from dynamo_es.log.open import open_log
from tests.contract.log_suite import read, read_to_end
from tests.support.open_things import open_files_under

P0 = TopicPartition("t", 0)
DEADLINE_S = 60.0


class DeafWatcher:
    """A doorbell nobody hears, as on a file system that does not report writes."""

    def __init__(self, loop): ...

    def watch(self, path, callback): ...

    def unwatch(self, path, callback): ...

    def close(self): ...


@pytest.fixture
async def opened():
    logs = []

    async def start(folder: Path, clock=None, watcher=make_watcher, **options) -> EmbeddedLog:
        log = EmbeddedLog(folder, clock or SystemClock(), options=EmbeddedOptions(**options), watcher=watcher)
        await log.start()
        logs.append(log)
        return log

    yield start
    for log in logs:
        await log.close()


async def with_topic(opened, folder, count=0, **settings):
    log = await opened(folder, **settings)
    await log.create_topics([TopicConfig("t", 1)])
    for number in range(count):
        await log.append("t", Entry(b"%d" % number))
    return log


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "topics" / "t" / "0").glob("*.sqlite"))


# ---- opening ----


async def test_OPS_04_two_handles_share_a_folder(opened, tmp_path):
    logs = await asyncio.gather(*(opened(tmp_path / "deep" / "log") for _ in range(5)))
    assert len({log.log_id for log in logs}) == 1


def test_processes_that_start_together_make_one_log(tmp_path):
    code = (
        "import asyncio, sys\n"
        "from dynamo_es.clock import SystemClock\n"
        "from dynamo_es.log.base import TopicConfig\n"
        "from dynamo_es.log.open import open_log\n"
        "async def main():\n"
        "    log = open_log(sys.argv[1], SystemClock())\n"
        "    await log.start()\n"
        "    await log.create_topics([TopicConfig('t', 3)])\n"
        "    print(log.log_id, (await log.describe('t')).topic_id)\n"
        "    await log.close()\n"
        "asyncio.run(main())\n"
    )
    children = [
        subprocess.Popen(
            [sys.executable, "-c", code, f"embedded://{tmp_path}/log"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(4)
    ]
    said = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0] * 4, said
    assert len({out for out, _ in said}) == 1


async def test_a_newer_format_is_refused_with_what_to_do(opened, tmp_path):
    log = await opened(tmp_path / "log")
    await log.close()
    (tmp_path / "log" / "log.json").write_text('{"format": 99, "shape": ["unheard of"]}')
    with pytest.raises(LogFormatError, match=r"log format 99, this version knows 1; upgrade dynamo-es"):
        await opened(tmp_path / "log")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "x"}', '{"log_id": "x"}', '{"format": 1}'])
async def test_a_damaged_log_file_is_named(opened, tmp_path, content):
    log = await opened(tmp_path / "log")
    await log.close()
    (tmp_path / "log" / "log.json").write_text(content)
    with pytest.raises(LogFormatError, match=r"log\.json cannot be read"):
        await opened(tmp_path / "log")


async def test_a_foreign_folder_is_left_alone(opened, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(LogFormatError, match=r"not an event log and not empty \(it holds 'notes.txt'\)"):
        await opened(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


async def test_a_fresh_volume_is_taken(opened, tmp_path):
    (tmp_path / "lost+found").mkdir()
    log = await with_topic(opened, tmp_path, 1)
    assert (await log.bounds("t"))[0] == Bounds(0, 1)


async def test_a_folder_that_cannot_be_made_is_named(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogUnavailable, match=f"{tmp_path}/file/log cannot be used: {tmp_path}/file is not a folder"):
        await opened(tmp_path / "file" / "log")


async def test_missing_permission_says_what_to_do(opened, tmp_path, monkeypatch):
    def refuse(*arguments, **settings):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(LogUnavailable, match=r"no folder can be made .*Permission denied\); .*--log embedded:///dir"):
        await opened(tmp_path / "log")


async def test_use_before_start_says_so(tmp_path):
    log = open_log(f"embedded://{tmp_path}/log", SystemClock())
    with pytest.raises(LogClosed, match="was not started"):
        await log.append("t", Entry(b"v"))
    await log.close()
    assert not (tmp_path / "log").exists()


# ---- under a running log ----


async def test_a_deleted_folder_is_an_error_and_not_a_loss(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    reader = log.reader({P0: 0})
    await read(reader, 3)
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogUnavailable, match="moved or deleted"):
        await log.append("t", Entry(b"lost"))
    with pytest.raises(LogUnavailable, match="moved or deleted"):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)
    for call in (log.bounds("t"), log.list_topics(), log.describe("t"), log.create_topics([TopicConfig("u", 1)])):
        with pytest.raises(LogUnavailable):
            await call
    assert not (tmp_path / "log").exists()


async def test_a_folder_that_comes_back_goes_on(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    reader = log.reader({P0: 0})
    await read(reader, 3)
    (tmp_path / "log").rename(tmp_path / "away")
    with pytest.raises(LogUnavailable):
        await log.append("t", Entry(b"refused"))
    with pytest.raises(LogUnavailable):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)
    (tmp_path / "away").rename(tmp_path / "log")
    position = await log.append("t", Entry(b"back"))
    records = await read(reader, position.offset + 1 - 3)
    assert [record.offset for record in records] == list(range(3, position.offset + 1))
    assert records[-1].value == b"back"


async def test_another_log_in_the_same_place_is_noticed(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    reader = log.reader({P0: 0})
    await read(reader, 3)
    shutil.rmtree(tmp_path / "log")
    await with_topic(opened, tmp_path / "log", 10)
    with pytest.raises(LogReplaced, match="deleted and made anew"):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)


async def test_another_log_in_the_same_place_gets_nothing_of_ours(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    old_id = log.log_id
    reader = log.reader({P0: 0})
    await read(reader, 3)
    shutil.rmtree(tmp_path / "log")
    other = await with_topic(opened, tmp_path / "log", 1)
    for _ in range(3):
        with pytest.raises(LogReplaced) as caught:
            await log.append("t", Entry(b"lost"))
        assert (caught.value.found, caught.value.expected) == (other.log_id, old_id)
        assert caught.value.retriable
    for call in (
        log.bounds("t"), log.describe("t"), log.list_topics(), log.create_topics([TopicConfig("u", 1)]),
        log.offset_at(P0, 0), log.trim(P0, 1), log.enforce_retention(0), log.append("u", Entry(b"lost")),
        log.reader({P0: 0}).poll(timeout_s=0),
    ):  # fmt: skip
        with pytest.raises(LogReplaced):
            await call
    assert await other.list_topics() == ["t"]
    assert await other.bounds("t") == {0: Bounds(0, 1)}


async def test_a_log_that_is_taken_over_goes_on_from_its_own_start(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    reader = log.reader({P0: 0})
    await read(reader, 3)
    shutil.rmtree(tmp_path / "log")
    other = await with_topic(opened, tmp_path / "log", 1)
    with pytest.raises(LogReplaced):
        await log.append("t", Entry(b"lost"))
    await log.reopen()
    assert log.log_id == other.log_id
    assert (await log.append("t", Entry(b"ours"))).offset == 1
    with pytest.raises(LogReplaced):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)
    await reader.close()
    again = log.reader({P0: 0})
    assert [record.value for record in await read(again, 2)] == [b"0", b"ours"]
    # The doorbell is that of the new log: a waiting reader hears of an append long before it looks by itself.
    assert [record.value for record in await read(other.reader({P0: 1}), 1)] == [b"ours"]


async def test_reopening_makes_no_log(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 1)
    before = log.log_id
    await log.reopen()
    assert log.log_id == before
    shutil.rmtree(tmp_path / "log")
    with pytest.raises(LogUnavailable, match="moved or deleted"):
        await log.reopen()
    assert not (tmp_path / "log").exists()


async def test_a_segment_is_not_rolled_into_another_log(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", segment_bytes=16_384)
    for _ in range(30):
        await log.append("t", Entry(b"x" * 500))
    shutil.rmtree(tmp_path / "log")
    other = await with_topic(opened, tmp_path / "log", 1)
    for _ in range(60):
        with pytest.raises(LogUnavailable):
            await log.append("t", Entry(b"x" * 500))
    assert [int(path.stem) for path in segments(tmp_path / "log")] == [0]
    assert await other.bounds("t") == {0: Bounds(0, 1)}


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_topic_made_anew_in_the_same_log_is_told_once_to_appends(opened, tmp_path, partitions):
    log = await with_topic(opened, tmp_path / "log", 3, recheck_s=0.05)
    reader = log.reader({P0: 0})
    await read(reader, 3)
    shutil.rmtree(tmp_path / "log" / "topics" / "t")
    other = await opened(tmp_path / "log")
    await other.create_topics([TopicConfig("t", partitions)])
    with pytest.raises(LogReplaced, match=r"topic 't' .*deleted and made anew"):
        await log.append("t", Entry(b"lost", partition=0))
    with pytest.raises(LogReplaced, match=r"topic 't' .*deleted and made anew"):
        await asyncio.wait_for(reader.poll(), DEADLINE_S)
    assert (await log.append("t", Entry(b"new", partition=partitions - 1))).offset == 0
    position = TopicPartition("t", partitions - 1)
    assert [record.value for record in await read(log.reader({position: 0}), 1)] == [b"new"]


@pytest.mark.parametrize("content", [b"not a database at all" * 1000, b""], ids=["garbage", "empty"])
async def test_a_damaged_segment_is_named(opened, tmp_path, content):
    log = await with_topic(opened, tmp_path / "log", 3)
    await log.close()
    (path,) = segments(tmp_path / "log")
    path.write_bytes(content)
    log = await opened(tmp_path / "log")
    for call in (log.append("t", Entry(b"v")), log.bounds("t"), log.reader({P0: 0}).poll(timeout_s=0)):
        with pytest.raises(LogFormatError, match=str(path)):
            await call


async def test_a_segment_of_a_newer_format_is_refused(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 3)
    await log.close()
    (path,) = segments(tmp_path / "log")
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 7")
    connection.close()
    log = await opened(tmp_path / "log")
    with pytest.raises(LogFormatError, match=r"segment format 7, this version knows 1; upgrade"):
        await log.append("t", Entry(b"v"))


async def test_a_stopped_process_that_holds_a_partition_costs_a_timeout_and_no_more(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 1, append_timeout_s=0.3)
    await log.create_topics([TopicConfig("u", 1)])
    descriptor = os.open(tmp_path / "log" / "topics" / "t" / "0" / "lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        with pytest.raises(LogUnavailable, match="a stopped process holds the partition"):
            await asyncio.wait_for(log.append("t", Entry(b"late")), DEADLINE_S)
        assert (await log.bounds("t"))[0] == Bounds(0, 1)
    finally:
        os.close(descriptor)
    assert (await log.append("t", Entry(b"after"))).offset == 2
    records = await read(log.reader({P0: 0}), 3)
    assert [record.value for record in records] == [b"0", b"late", b"after"]


async def test_a_database_that_another_program_locks_is_unavailable(opened, tmp_path, monkeypatch):
    monkeypatch.setattr("dynamo_es.log.embedded_segment.BUSY_TIMEOUT_S", 0.1)
    log = await with_topic(opened, tmp_path / "log", 1)
    blocker = sqlite3.connect(segments(tmp_path / "log")[0], isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(LogUnavailable, match="locked by another process"):
        await asyncio.wait_for(log.append("t", Entry(b"v")), DEADLINE_S)
    assert len(await read(log.reader({P0: 0}), 1)) == 1
    blocker.execute("ROLLBACK")
    blocker.close()
    assert (await log.append("t", Entry(b"v"))).offset == 1


# ---- rolling ----


async def test_a_segment_ends_by_size(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", segment_bytes=65_536)
    for number in range(200):
        await log.append("t", Entry(b"%03d" % number + b"x" * 2000))
    paths = segments(tmp_path / "log")
    assert 5 <= len(paths) <= 12
    assert all(path.stat().st_size <= 80_000 for path in paths)
    records = await read(log.reader({P0: 0}), 200)
    assert [int(record.value[:3]) for record in records] == list(range(200))


async def test_a_segment_ends_by_age(opened, tmp_path):
    clock = ManualClock()
    log = await with_topic(opened, tmp_path / "log", 2, clock=clock, segment_ms=60_000)
    clock.advance(59)
    await log.append("t", Entry(b"2"))
    assert len(segments(tmp_path / "log")) == 1
    clock.advance(2)
    await log.append("t", Entry(b"3"))
    await log.append("t", Entry(b"4"))
    assert [int(path.stem) for path in segments(tmp_path / "log")] == [0, 3]
    assert [r.offset for r in await read(log.reader({P0: 0}), 5)] == [0, 1, 2, 3, 4]


def test_a_short_retention_makes_short_segments():
    options = EmbeddedOptions(segment_ms=3_600_000)
    assert options.segment_age_ms(TopicConfig("t", 1)) == 3_600_000
    assert options.segment_age_ms(TopicConfig("t", 1, retention_ms=7 * 86_400_000)) == 3_600_000
    assert options.segment_age_ms(TopicConfig("t", 1, retention_ms=3_600_000)) == 450_000
    assert options.segment_age_ms(TopicConfig("t", 1, compacted=True, retention_ms=1)) == 3_600_000


async def test_a_crash_between_sealing_and_creating_is_repaired(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 5)
    reader = log.reader({P0: 0})
    await read(reader, 5)
    (path,) = segments(tmp_path / "log")
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE segment SET sealed_end = 5, newest_ms = 1")
    connection.close()
    (path.parent / ".00000000000000000005.sqlite.tmp").write_bytes(b"half a file")
    assert await reader.poll(timeout_s=0) == {}
    assert (await log.bounds("t"))[0] == Bounds(0, 5)
    assert await log.offset_at(P0, 2**60) == 5
    assert (await log.append("t", Entry(b"5"))).offset == 5
    assert [record.offset for record in await read(reader, 1)] == [5]
    assert [int(path.stem) for path in segments(tmp_path / "log")] == [0, 5]


async def test_what_a_crash_left_of_a_trim_is_cleared_away(opened, tmp_path):
    log = await opened(tmp_path / "log")
    await log.create_topics([TopicConfig("t", 1, retention_ms=3_600_000)])
    await log.append("t", Entry(b"v"))
    folder = tmp_path / "log" / "topics" / "t" / "0"
    orphan = folder / "00000000000000000777.sqlite-wal"
    orphan.write_bytes(b"x")
    await log.enforce_retention(SystemClock().now_ms())
    assert not orphan.exists()
    assert (await log.bounds("t"))[0] == Bounds(0, 1)


async def test_a_reader_of_a_trimmed_segment_goes_on_or_is_told(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", segment_bytes=16_384, recheck_s=0.05)
    for number in range(100):
        await log.append("t", Entry(b"%02d" % number + b"x" * 1000))
    reader = log.reader({P0: 0})
    await reader.poll(max_records=1)
    start = await log.trim(P0, 90)
    assert start > 50
    # It may finish the segment that it has open; what follows is gone.
    with pytest.raises(OffsetOutOfRange) as caught:
        for _ in range(start):
            for record in (await reader.poll(max_records=1))[P0]:
                assert int(record.value[:2]) == record.offset
    assert 1 <= caught.value.offset < start
    assert (caught.value.start, caught.value.end) == (start, 100)
    reader.seek(P0, start)
    assert [r.offset for r in await read(reader, 100 - start)] == list(range(start, 100))


async def test_a_compacted_topic_gives_its_files_back(opened, tmp_path):
    clock = ManualClock()
    log = await opened(tmp_path / "log", clock=clock, segment_bytes=32_768)
    await log.create_topics([TopicConfig("t", 1, compacted=True)])
    for number in range(200):
        await log.append("t", Entry(b"x" * 1000, b"only" if number != 50 else b"other"))
    before = segments(tmp_path / "log")
    behind = log.reader({P0: 40})
    assert len(before) > 4
    clock.advance(7200)
    await log.enforce_retention(clock.now_ms())
    after = segments(tmp_path / "log")
    assert len(after) == 3
    records = await read_to_end(log, log.reader({P0: 0}), "t")
    assert [record.offset for record in records] == [50, 199]
    assert [record.offset for record in await read_to_end(log, behind, "t")] == [50, 199]
    assert await log.trim(P0, 100) == 0
    assert (await log.bounds("t"))[0] == Bounds(0, 200)
    assert await log.offset_at(P0, 0) == 50


async def test_retention_is_left_to_the_process_that_is_at_it(opened, tmp_path):
    log = await opened(tmp_path / "log")
    await log.create_topics([TopicConfig("t", 1, retention_ms=1_000)])
    await log.append("t", Entry(b"v", timestamp_ms=0))
    descriptor = os.open(tmp_path / "log" / "maintenance.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    later = SystemClock().now_ms() + 10_000
    assert await log.enforce_retention(later) == {}
    os.close(descriptor)
    assert await log.enforce_retention(later) == {P0: 1}


# ---- doorbell ----


async def test_a_lost_ring_costs_a_moment_only(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", watcher=DeafWatcher, recheck_s=0.05)
    reader = log.reader({P0: 0})
    waiting = asyncio.create_task(reader.poll())
    await asyncio.sleep(0.02)
    await log.append("t", Entry(b"v"))
    assert len((await asyncio.wait_for(waiting, DEADLINE_S))[P0]) == 1


@pytest.mark.parametrize("watcher", [make_watcher, PollingWatcher])
async def test_the_doorbell_alone_wakes_a_reader(opened, tmp_path, watcher):
    log = await with_topic(opened, tmp_path / "log", watcher=watcher, recheck_s=3600.0)
    other = await opened(tmp_path / "log")
    reader = log.reader({P0: 0})
    assert await reader.poll(timeout_s=0.01) == {}
    for number in range(20):
        waiting = asyncio.create_task(reader.poll())
        await asyncio.sleep(0)
        await other.append("t", Entry(b"%d" % number))
        batch = await asyncio.wait_for(waiting, DEADLINE_S)
        assert [record.value for record in batch[P0]] == [b"%d" % number]


async def test_without_an_inotify_instance_it_polls_and_says_so(opened, tmp_path, monkeypatch, caplog):
    def refuse(**settings):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(asyncinotify, "Inotify", refuse)
    with caplog.at_level(logging.WARNING):
        log = await with_topic(opened, tmp_path / "log", recheck_s=3600.0)
    assert "max_user_instances" in caplog.text
    reader = log.reader({P0: 0})
    waiting = asyncio.create_task(reader.poll())
    await asyncio.sleep(0.02)
    await log.append("t", Entry(b"v"))
    assert len((await asyncio.wait_for(waiting, DEADLINE_S))[P0]) == 1


async def test_closing_releases_every_file(opened, tmp_path):
    folder = str(tmp_path / "log")
    log = await with_topic(opened, tmp_path / "log", 5)
    reader = log.reader({P0: 0})
    await read(reader, 5)
    assert open_files_under(folder)
    await log.close()
    assert not open_files_under(folder)
    left = sorted(path.name for path in (tmp_path / "log" / "topics" / "t" / "0").iterdir())
    assert left == ["00000000000000000000.sqlite", "lock"]


async def test_topic_files_are_readable_by_people(opened, tmp_path):
    log = await with_topic(opened, tmp_path / "log", 1)
    content = json.loads((tmp_path / "log" / "topics" / "t" / "topic.json").read_text())
    assert content["partitions"] == 1
    assert content["topic_id"] == (await log.describe("t")).topic_id
