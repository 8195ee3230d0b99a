"""The embedded log when processes die at random instants, and when the disk is full."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log import embedded_partition
from dynamo_es.log.base import Bounds, Entry, TopicConfig, TopicPartition
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.errors import LogFull, OffsetOutOfRange
from dynamo_es.log.open import open_log
from tests.contract.log_suite import read_to_end
from tests.integration.log_crash_child import parse

REPOSITORY = Path(__file__).parents[2]
CHILD = (sys.executable, "-m", "tests.integration.log_crash_child")
TOPIC = "crash"


async def open_here(url: str):
    log = open_log(url, SystemClock())
    await log.start()
    return log


async def run_and_kill(arguments: list[str], acknowledgements: int, after_s: float) -> list[list[str]]:
    """Start a child, let it acknowledge something, kill it a little later. Its complete lines."""
    child = await asyncio.create_subprocess_exec(
        *CHILD, *arguments, cwd=REPOSITORY, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    assert child.stderr is not None
    lines = []
    async with asyncio.timeout(60):
        while len(lines) < acknowledgements:
            line = await child.stdout.readline()
            if not line:
                raise AssertionError((await child.stderr.read()).decode())
            lines.append(line)
        rest = asyncio.create_task(child.stdout.read())
        await asyncio.sleep(after_s)
        child.send_signal(signal.SIGKILL)
        lines.extend((await rest).splitlines(keepends=True))
        assert (await child.stderr.read()).decode() == ""
        assert await child.wait() == -signal.SIGKILL
    return [line.decode().split() for line in lines if line.endswith(b"\n")]


async def follow(log, seen: dict[int, int], stop: asyncio.Event) -> None:
    """Read along; every offset once, none skipped, nothing torn."""
    reader = log.reader({TopicPartition(TOPIC, 0): 0, TopicPartition(TOPIC, 1): 0})
    while True:
        last = stop.is_set()
        batch = await reader.poll(timeout_s=0.2)
        for (_, partition), records in batch.items():
            for record in records:
                assert record.offset == seen[partition]
                seen[partition] += 1
                parse(record.value)
        if last and not batch:
            return


def check_files(folder: Path) -> int:
    """Number of segments; each of them must be a sound database."""
    segments = sorted(folder.glob("topics/*/*/*.sqlite"))
    for path in segments:
        connection = sqlite3.connect(f"file:{path}?mode=rw", uri=True)
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        connection.close()
    return len(segments)


@pytest.mark.crash
async def test_fifty_killed_writers_lose_no_acknowledged_record(tmp_path):
    url = f"embedded://{tmp_path}/log?segment_bytes=65536"
    log = await open_here(url)
    await log.create_topics([TopicConfig(TOPIC, 2)])
    seen = {0: 0, 1: 0}
    stop = asyncio.Event()
    follower = asyncio.create_task(follow(log, seen, stop))
    rng = random.Random(7)
    acknowledged: dict[tuple[int, int], tuple[int, int]] = {}
    for pair in range(0, 50, 2):
        runs = (pair, pair + 1)
        results = await asyncio.gather(
            *(run_and_kill(["write", url, TOPIC, str(run)], 1, rng.uniform(0, 0.25)) for run in runs)
        )
        for run, lines in zip(runs, results, strict=True):
            for word in (word for line in lines for word in line):
                partition, offset, number = map(int, word.split("/"))
                assert (partition, offset) not in acknowledged
                acknowledged[partition, offset] = (run, number)
        assert not follower.done() or follower.result()
    stop.set()
    await asyncio.wait_for(follower, 60)
    bounds = await log.bounds(TOPIC)
    assert bounds == {partition: Bounds(0, count) for partition, count in seen.items()}
    # They still can be appended to, and a fresh handle sees the same.
    assert (await log.append(TOPIC, Entry(b"v", partition=0))).offset == bounds[0].end
    await log.close()
    again = await open_here(url)
    reader = again.reader({TopicPartition(TOPIC, 0): 0, TopicPartition(TOPIC, 1): 0})
    records = await read_to_end(again, reader, TOPIC)
    await again.close()
    stored = {(r.partition, r.offset): parse(r.value) for r in records if r.value != b"v"}
    assert len(stored) == sum(seen.values())
    lost = {position for position, who in acknowledged.items() if stored.get(position) != who}
    assert not lost
    assert len(acknowledged) > 5_000
    assert check_files(tmp_path / "log") > 20


@pytest.mark.crash
async def test_EVT_05_killed_trims_and_compactions_leave_a_log_that_is_whole(tmp_path):
    url = f"embedded://{tmp_path}/log?segment_bytes=16384"
    log = await open_here(url)
    await log.create_topics([TopicConfig(TOPIC, 1), TopicConfig(f"{TOPIC}.compacted", 1, compacted=True)])
    rng = random.Random(11)
    acknowledged: dict[int, tuple[int, int]] = {}
    newest: dict[int, tuple[int, int]] = {}
    trimmed = 0
    for run in range(12):
        lines = await run_and_kill(["maintain", url, TOPIC, str(run)], 12, rng.uniform(0, 0.3))
        for line in lines:
            if line[0] == "trimmed":
                trimmed = max(trimmed, int(line[1]))
                continue
            offset, number, *keys = map(int, line)
            acknowledged[offset] = (run, number)
            for index, key in enumerate(keys):
                newest[key] = (run, number * 4 + index)
    start, end = (await log.bounds(TOPIC))[0]
    assert trimmed <= start <= end
    assert trimmed > 0
    reader = log.reader({TopicPartition(TOPIC, 0): start})
    records = await read_to_end(log, reader, TOPIC)
    assert [record.offset for record in records] == list(range(start, end))
    stored = {record.offset: parse(record.value) for record in records}
    assert all(stored[offset] == who for offset, who in acknowledged.items() if offset >= start)
    if start:
        with pytest.raises(OffsetOutOfRange):
            await log.reader({TopicPartition(TOPIC, 0): start - 1}).poll(timeout_s=0)

    # Of each key the newest record counts: it is the one last acknowledged, or one after it that was not.
    state: dict[int, tuple[tuple[int, int], bool]] = {}
    topic = f"{TOPIC}.compacted"
    remaining = await read_to_end(log, log.reader({TopicPartition(topic, 0): 0}), topic)
    for record in remaining:
        run, at = record.headers[0][1].split(b"/")
        state[int(record.key[1:])] = ((int(run), int(at)), record.value is None)
    for key, at in newest.items():
        if key in state:
            assert state[key][0] >= at, "an older record came back"
    assert len(remaining) < 4 * len(acknowledged) / 4
    await log.close()
    check_files(tmp_path / "log")


def may_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="no private mount namespace here")
def test_a_full_disk_stops_appends_only_until_there_is_room(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size=6m tmpfs '{disk}' && exec \"$@\""
    child = [*CHILD, "fill", f"embedded://{disk}/log?segment_bytes=1000000"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *child],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["acknowledged"] > 100
    assert all("free space" in error for error in told["errors"])
    assert told["read"][0] >= told["acknowledged"]
    assert told["read"] == [told["full_end"]] * 2
    assert told["again"] == [told["full_end"], told["full_end"] + 1]
    assert told["in_all"] == told["full_end"] + 2


async def test_a_full_database_is_the_same_error(tmp_path, monkeypatch):
    room = {"pages": 40}

    def open_small(path, **settings):
        connection = open_segment(path, **settings)
        connection.execute(f"PRAGMA max_page_count = {room['pages']}")
        connections.append(connection)
        return connection

    connections: list[sqlite3.Connection] = []
    open_segment = embedded_partition.open_segment
    monkeypatch.setattr(embedded_partition, "open_segment", open_small)
    log = EmbeddedLog(tmp_path / "log", SystemClock(), options=EmbeddedOptions())
    await log.start()
    await log.create_topics([TopicConfig("t", 1)])
    count = 0
    with pytest.raises(LogFull, match="free space"):
        while count < 1000:
            await log.append("t", Entry(b"x" * 1000))
            count += 1
    assert LogFull.retriable
    batch = await log.reader({TopicPartition("t", 0): 0}).poll(timeout_s=0)
    assert len(batch[TopicPartition("t", 0)]) == count
    await asyncio.to_thread(connections[-1].execute, "PRAGMA max_page_count = 4000")
    assert (await log.append("t", Entry(b"after"))).offset == count
    await log.close()


@pytest.mark.crash
async def test_no_writer_starves(tmp_path):
    url = f"embedded://{tmp_path}/log?segment_bytes=1000000"
    log = await open_here(url)
    await log.create_topics([TopicConfig(TOPIC, 2)])
    await asyncio.gather(*(run_and_kill(["write", url, TOPIC, str(run)], 20, 1.0) for run in range(3)))
    shares: dict[int, int] = defaultdict(int)
    reader = log.reader({TopicPartition(TOPIC, 0): 0, TopicPartition(TOPIC, 1): 0})
    for record in await read_to_end(log, reader, TOPIC):
        shares[parse(record.value)[0]] += 1
    assert min(shares.values()) > max(shares.values()) / 10
    await log.close()
