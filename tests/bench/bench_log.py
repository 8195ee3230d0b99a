"""What the embedded log costs: ``python -m tests.bench.bench_log [folder]``. Prints medians and spread only."""

from __future__ import annotations

import asyncio
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog, TopicConfig, TopicPartition
from dynamo_es.log.open import open_log

ROUNDS = 5
VALUE = bytes(range(256)) + b"x" * 44
KEY = b"model/1234567890:0"
HEADERS = (("schema", b"kv-events/1"),)
RATE_PER_S = 300
SEEN = 1500


def percentile(samples: Sequence[float], share: float) -> float:
    return sorted(samples)[min(len(samples) - 1, int(len(samples) * share))]


def spread(values: Sequence[float], unit: str, digits: int = 2) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:,.{digits}f} {unit} ({low:,.{digits}f} to {high:,.{digits}f} in {len(values)} rounds)"


async def opened(folder: Path, options: str = "") -> EventLog:
    log = open_log(f"embedded://{folder}{options}", SystemClock())
    await log.start()
    return log


async def bench_appends(folder: Path, options: str, partitions: int, tasks: int) -> tuple[float, float, float]:
    """Awaited appends: p50 ms, p99 ms, records/s."""
    log = await opened(folder, options)
    await log.create_topics([TopicConfig("t", partitions)])
    latencies: list[float] = []
    count = max(20, 8_000 // tasks)

    async def work(number: int) -> None:
        key = b"%s%d" % (KEY, number)
        for _ in range(count):
            started = time.perf_counter()
            await log.append("t", Entry(VALUE, key, HEADERS))
            latencies.append((time.perf_counter() - started) * 1000)

    started = time.perf_counter()
    await asyncio.gather(*(work(number) for number in range(tasks)))
    rate = len(latencies) / (time.perf_counter() - started)
    await log.close()
    return percentile(latencies, 0.5), percentile(latencies, 0.99), rate


async def write_steadily(folder: Path) -> None:
    """The other process of ``bench_seen``: 300 records a second, each with the time before its append."""
    log = await opened(folder)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for _ in range(SEEN):
        await log.append("t", Entry(time.monotonic_ns().to_bytes(8, "big") + VALUE, KEY))
        due += 1 / RATE_PER_S
        await asyncio.sleep(max(0.0, due - loop.time()))
    await log.close()


async def bench_seen(folder: Path) -> tuple[float, float, float]:
    """From before the append in one process to the record in another: p50 ms, p99 ms, worst ms."""
    log = await opened(folder)
    await log.create_topics([TopicConfig("t", 1)])
    position = TopicPartition("t", 0)
    reader = log.reader({position: 0})
    await reader.poll(timeout_s=0)
    child = await asyncio.create_subprocess_exec(sys.executable, "-m", "tests.bench.bench_log", "write", str(folder))
    latencies: list[float] = []
    while len(latencies) < SEEN:
        batch = await reader.poll()
        now = time.monotonic_ns()
        latencies.extend((now - int.from_bytes(record.value[:8], "big")) / 1e6 for record in batch[position])
    await child.wait()
    await log.close()
    return percentile(latencies, 0.5), percentile(latencies, 0.99), max(latencies)


async def bench_read(folder: Path, count: int = 300_000) -> tuple[float, ...]:
    """Sequential read of 300-byte records with a header, records/s: polls of 1,000 and 10,000, and sqlite3 alone."""
    log = await opened(folder)
    await log.create_topics([TopicConfig("t", 1)])
    for _ in range(count // 10_000):
        await log.append_all("t", [Entry(VALUE, KEY, HEADERS)] * 10_000)
    rates = []
    for size in (1_000, 10_000):
        reader = log.reader({TopicPartition("t", 0): 0})
        done = 0
        started = time.perf_counter()
        while done < count:
            batch = await reader.poll(max_records=size)
            done += sum(map(len, batch.values()))
        rates.append(count / (time.perf_counter() - started))
        await reader.close()
    await log.close()
    return (*rates, await asyncio.to_thread(read_rows, folder))


def read_rows(folder: Path) -> float:
    """Rows/s of the same files through the standard library's sqlite3 and nothing else: the yardstick of a machine."""
    done = 0
    started = time.perf_counter()
    for path in sorted(folder.glob("topics/t/0/*.sqlite")):
        connection = sqlite3.connect(path)
        offset = 0
        statement = "SELECT * FROM records WHERE offset >= ? ORDER BY offset LIMIT 10000"
        while rows := connection.execute(statement, (offset,)).fetchall():
            offset = rows[-1][0] + 1
            done += len(rows)
        connection.close()
    return done / (time.perf_counter() - started)


async def bench_bulk(folder: Path) -> tuple[float]:
    """``append_all`` of 256 records, one task: records/s."""
    log = await opened(folder)
    await log.create_topics([TopicConfig("t", 1)])
    batch = [Entry(VALUE, KEY, HEADERS)] * 256
    started = time.perf_counter()
    for _ in range(200):
        await log.append_all("t", batch)
    rate = 200 * 256 / (time.perf_counter() - started)
    await log.close()
    return (rate,)


def measure(base: Path, bench: Callable[[Path], Coroutine[Any, Any, tuple[float, ...]]]) -> list[tuple[float, ...]]:
    """One tuple of values a round, turned into one tuple of rounds a value."""
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory(dir=base) as folder:
            rounds.append(asyncio.run(bench(Path(folder) / "log")))
    return list(zip(*rounds, strict=True))


def main() -> None:
    if sys.argv[1:2] == ["write"]:
        asyncio.run(write_steadily(Path(sys.argv[2])))
        return
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.gettempdir())
    for options in ("", "?durability=fsync"):
        for partitions in (1, 8):
            for tasks in (1, 16, 256):
                p50, p99, rate = measure(
                    base,
                    lambda folder, o=options, p=partitions, t=tasks: bench_appends(folder, o, p, t),
                )
                print(f"awaited append {options or '?durability=os'}, {partitions} partitions, {tasks} tasks")
                print(f"  p50 {spread(p50, 'ms')}\n  p99 {spread(p99, 'ms')}\n  rate {spread(rate, 'records/s', 0)}")
    (bulk,) = measure(base, bench_bulk)
    print(f"append_all of 256 records, 1 task\n  rate {spread(bulk, 'records/s', 0)}")
    p50, p99, worst = measure(base, bench_seen)
    print(f"append to seen in another process, {RATE_PER_S} records/s")
    print(f"  p50 {spread(p50, 'ms')}\n  p99 {spread(p99, 'ms')}\n  worst {spread(worst, 'ms')}")
    small, large, rows = measure(base, bench_read)
    print("sequential read, 300-byte records with a header, one reader")
    print(f"  polls of 1,000: {spread(small, 'records/s', 0)}\n  polls of 10,000: {spread(large, 'records/s', 0)}")
    print(f"  sqlite3 alone, as tuples: {spread(rows, 'rows/s', 0)}")


if __name__ == "__main__":
    main()
