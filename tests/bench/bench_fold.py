"""Folding KV events: rate from the log into the view, and time from append to visible in another process.

On the embedded log, and on Kafka if there is one or one can be started (see ``tests.bench.brokers``).
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
from dynamo_es.log.base import Entry, EventLog, TopicPartition
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.rocks import RocksStore
from schemas.codec import TopicCodec
from schemas.columns import pack_u64, unpack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents
from streams.kv_index import KvIndexFold
from streams.runner import FoldRunner
from tests.bench.brokers import kafka_here
from tests.bench.kv_history import NoLetters, append, entries
from tests.bench.spread import Row, latencies, rounds

WORKERS = 16
RECORDS = 10_000
EVENTS = 8
BLOCKS = 16
ROUNDS = 7
SAMPLES = 1_500
RATE = 200


def runner_for(log: EventLog, namespace: str, folder: Path) -> FoldRunner:
    fold = KvIndexFold()
    store = RocksStore(folder, fold.families)
    return FoldRunner(fold, log, store, namespace, clock=SystemClock(), dead_letters=NoLetters(), flush_interval_s=2.0)


async def fold_once(url: str, namespace: str) -> None:
    """A process that starts without state: prints events folded a second, from the first read to the last event."""
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    with tempfile.TemporaryDirectory() as folder:
        runner = runner_for(log, namespace, Path(folder) / "s")
        started = time.perf_counter()
        await runner.start()
        await runner.wait_caught_up(120)
        print(RECORDS * EVENTS / (time.perf_counter() - started))
        await runner.stop()
    await log.close()


async def fold_barely(url: str, namespace: str) -> None:
    """The yardstick: the same records read and decoded into one flat dict of bit masks, and nothing else."""
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    codec = TopicCodec(KV_EVENTS)
    topic = KV_EVENTS.qualified(namespace)
    bounds = await log.bounds(topic)
    reader = log.reader({TopicPartition(topic, number): limits.start for number, limits in bounds.items()})
    masks: dict[int, int] = {}
    left = RECORDS
    started = time.perf_counter()
    while left:
        for records in (await reader.poll(max_records=4096)).values():
            left -= len(records)
            for record in records:
                batch = codec.decode(record.value, record.headers)
                bit = 1 << batch.worker_id
                for event in batch.events:
                    hashes = unpack_u64(event.sequence_hashes)
                    if isinstance(event, BlocksStored):
                        for block in hashes:
                            masks[block] = masks.get(block, 0) | bit
                    else:
                        for block in hashes:
                            mask = masks.get(block, 0) & ~bit
                            if mask:
                                masks[block] = mask
                            else:
                                masks.pop(block, None)
    print(RECORDS * EVENTS / (time.perf_counter() - started))
    await reader.close()
    await log.close()


async def fold_rate(url: str) -> list[Row]:
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    await log.create_topics(topic_configs(namespace, None, [KV_EVENTS]))
    await append(log, namespace, entries(RECORDS, workers=WORKERS, events=EVENTS, blocks=BLOCKS))
    await log.close()
    rates: dict[str, list[float]] = {"--fold": [], "--bare": []}
    for _ in range(ROUNDS):
        for way, found in rates.items():
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.bench.bench_fold", way, url, namespace, stdout=asyncio.subprocess.PIPE
            )
            found.append(float((await child.communicate())[0]))
    kind = url.split(":")[0]
    ratios = [ours / bare for ours, bare in zip(*rates.values(), strict=True)]
    return [
        *rounds(f"fold from {kind}, events of {BLOCKS} blocks", rates["--fold"], "events/s"),
        *rounds(f"bare dict from {kind}, the same", rates["--bare"], "events/s"),
        *rounds(f"fold against bare dict, {kind}", ratios, "ratio"),
    ]


async def append_stamped(url: str, namespace: str) -> None:
    """The other process: appends events whose worker id is the monotonic time before the append."""
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    codec = TopicCodec(KV_EVENTS)
    column = pack_u64(range(16))
    for _ in range(SAMPLES):
        stamp = time.monotonic_ns()
        value = KvEvents(1, "m", stamp, 0, 1, 0, 16, True, [BlocksStored("device", None, column, column)])
        await log.append(KV_EVENTS.qualified(namespace), Entry(codec.encode(value), b"one-key", codec.headers))
        await asyncio.sleep(max(0.0, 1 / RATE - (time.monotonic_ns() - stamp) / 1e9))
    await log.close()


async def visible_latency(url: str) -> list[Row]:
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    await log.create_topics(topic_configs(namespace, None, [KV_EVENTS]))
    with tempfile.TemporaryDirectory() as folder:
        runner = runner_for(log, namespace, Path(folder) / "s")
        seen: dict[int, float] = {}

        def on_batch() -> None:
            now = time.monotonic_ns()
            for key in reversed(runner.state.sources):
                if key.worker_id in seen:
                    break
                seen[key.worker_id] = (now - key.worker_id) / 1e6

        runner.add_listener(on_batch)
        await runner.start()
        writer = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.bench.bench_fold", "--append", url, namespace
        )
        await writer.wait()
        await runner.wait_caught_up(20)
        await runner.stop()
    await log.close()
    # The first appends of a process open files and connections.
    return latencies(f"append to visible, {url.split(':')[0]}, {RATE}/s", list(seen.values())[50:], "ms")


async def main() -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        rows += await fold_rate(f"embedded://{folder}/log")
        rows += await visible_latency(f"embedded://{folder}/log")
    async with kafka_here() as broker:
        if broker is not None:
            rows += await fold_rate(broker.url)
            rows += await visible_latency(broker.url)
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["--append"]:
        asyncio.run(append_stamped(*sys.argv[2:]))
    elif sys.argv[1:2] == ["--fold"]:
        asyncio.run(fold_once(*sys.argv[2:]))
    elif sys.argv[1:2] == ["--bare"]:
        asyncio.run(fold_barely(*sys.argv[2:]))
    else:
        for row in asyncio.run(main()):
            print(*row)
