"""Time to a whole KV index: from the process's own store, from snapshots and tail, and from the start of the log.

The same on Kafka: the broker that KAFKA_BOOTSTRAP_SERVERS names, else one that is started (Java 17 and Maven).
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
import uuid
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.rocks import RocksStore
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.kv_snapshots import KV_SNAPSHOTS
from streams.kv_index import KvIndexFold
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotWriter
from tests.bench.bench_fold import NoLetters
from tests.bench.brokers import kafka_here
from tests.bench.spread import Row, rounds
from tests.support.snapshots import snapshot_topic

WORKERS = 64
BLOCKS = 5_000_000
RECORD_BLOCKS = 1_024
TAIL_RECORDS = 500
ROUNDS = 5


async def append_blocks(log: EventLog, namespace: str, seqs: list[int], records: int, rng: random.Random) -> None:
    codec = TopicCodec(KV_EVENTS)
    entries = []
    for number in range(records):
        worker = number % WORKERS
        column = rng.randbytes(8 * RECORD_BLOCKS)
        events = [
            BlocksStored("device", None, column[start : start + 128], column[start : start + 128])
            for start in range(0, len(column), 128)
        ]
        value = KvEvents(1, "m", worker, 0, 1, seqs[worker], 16, seqs[worker] == 0, events)
        seqs[worker] += 1
        entries.append(Entry(codec.encode(value), key_kv_events("m", worker, 0), codec.headers))
        if len(entries) == 64 or number == records - 1:
            await log.append_all(KV_EVENTS.qualified(namespace), entries)
            entries = []


def runner_on(log: EventLog, namespace: str, store: RocksStore, *, snapshots: bool) -> FoldRunner:
    fold = KvIndexFold()
    return FoldRunner(
        fold, log, store, namespace, clock=SystemClock(), dead_letters=NoLetters(),
        snapshots=SnapshotStart(log, namespace, fold.version, snapshot_topic(log, namespace)) if snapshots else None,
    )  # fmt: skip


async def start_once(url: str, namespace: str, folder: str, how: str) -> None:
    """A process of its own: prints the seconds until its index has everything that is in the log."""
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    started = time.perf_counter()
    store = RocksStore(Path(folder), KvIndexFold.families)
    runner = runner_on(log, namespace, store, snapshots=how == "snapshots")
    await runner.start()
    await runner.wait_caught_up(300)
    print(time.perf_counter() - started)
    await runner.stop()
    store.close()
    await log.close()


async def measure(url: str) -> list[Row]:
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    rng = random.Random(4)
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    await log.create_topics(topic_configs(namespace, None, [KV_EVENTS, KV_SNAPSHOTS]))
    seqs = [0] * WORKERS
    await append_blocks(log, namespace, seqs, BLOCKS // RECORD_BLOCKS, rng)
    times: dict[str, list[float]] = {"own": [], "snapshots": [], "log": []}
    with tempfile.TemporaryDirectory() as folder:
        store = RocksStore(Path(folder) / "own", KvIndexFold.families)
        runner = runner_on(log, namespace, store, snapshots=False)
        await runner.start()
        await runner.wait_caught_up(300)
        writer = SnapshotWriter(
            log, runner, namespace, snapshot_topic(log, namespace),
            owned=lambda: range(KV_EVENTS.partitions), name="bench", clock=SystemClock(), rng=rng,
        )  # fmt: skip
        began = time.perf_counter()
        await writer.write_owned()
        written = time.perf_counter() - began
        await runner.stop()
        store.close()
        await append_blocks(log, namespace, seqs, TAIL_RECORDS, rng)
        await log.close()
        for number in range(ROUNDS):
            for how, found in times.items():
                place = f"{folder}/own" if how == "own" else f"{folder}/{how}-{number}"
                child = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.bench.bench_start", url, namespace, place, how,
                    stdout=asyncio.subprocess.PIPE,
                )  # fmt: skip
                found.append(float((await child.communicate())[0]))
    kind = url.split(":")[0]
    what = f"{BLOCKS / 1e6:.0f} M blocks of {WORKERS} workers, {kind}"
    return [
        *rounds(f"start from own store and tail, {what}", times["own"], "s"),
        *rounds(f"start from snapshots and tail, {what}", times["snapshots"], "s"),
        *rounds(f"start from the whole log, {what}", times["log"], "s"),
        (f"writing the snapshots, {what}", written, "s"),
    ]


async def main() -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        rows = await measure(f"embedded://{folder}/log")
    async with kafka_here() as broker:
        if broker is not None:
            rows += await measure(broker.url)
    return rows


if __name__ == "__main__":
    if len(sys.argv) == 5:
        asyncio.run(start_once(*sys.argv[1:]))
    else:
        for row in asyncio.run(main()):
            print(*row)
