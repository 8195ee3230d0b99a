"""KV events from publisher to folded view over Kafka with acks=all: how many a second, and how old when visible.

Publisher, broker and folding process are three processes; each one's processor time is told, because two cores are
not enough for the three. The publisher's part begins with a batch of events in sequence hashes (``KvStream``);
``bench_kv_publisher`` has what comes before. Its buffer lingers as a worker's does by default.

Uses the broker that KAFKA_BOOTSTRAP_SERVERS names, else starts one (Java 17 and Maven), else measures nothing.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig
from dynamo_es.log.base import EventLog, Record
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.open import open_log
from dynamo_es.publishers.kv_stream import KvStream
from dynamo_es.runtime.appender import TopicAppender, topic_configs
from dynamo_es.store.rocks import RocksStore
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents
from streams.kv_index import KvIndexFold
from streams.runner import FoldRunner
from tests.bench import kv_history
from tests.bench.brokers import Broker, kafka_here
from tests.bench.spread import Row, latencies, rounds

WORKERS = 16
EVENTS = 8
BLOCKS = 16
RECORDS = 25_000
ROUNDS = 5
TARGET = 50_000
# The publisher holds back when so much waits in its buffer, as engines never do; nothing is lost then.
MOST_WAITING = 4_000
LATENCY_S = 8.0
RATES = (200, 2_000)


def streams(appender: TopicAppender) -> list[KvStream]:
    """One numbered stream a worker, with an empty cache to start from."""
    rng = random.Random()
    return [
        KvStream(
            sink=appender, model_name=lambda: kv_history.MODEL, worker_id=worker, dp_rank=0,
            block_size=kv_history.BLOCK_SIZE, new_incarnation=lambda: rng.getrandbits(64), state=lambda: (),
            clock=SystemClock(),
        )
        for worker in range(WORKERS)
    ]  # fmt: skip


async def with_appender(
    url: str, namespace: str, job: Callable[[TopicAppender, BufferedAppender], Awaitable[None]]
) -> None:
    """What a worker's process has between its publishers and the log."""
    clock = SystemClock()
    log = open_log(url, clock)
    await log.start()
    buffer = BufferedAppender(log, clock, random.Random(), linger_s=LogConfig().linger_ms / 1000)
    buffer.start()
    await job(TopicAppender(log, buffer, namespace, clock), buffer)
    assert await buffer.close(30) == 0
    await log.close()


async def publish_all(url: str, namespace: str) -> None:
    """The publisher's process: everything as fast as the log takes it. Prints when it began and what it cost."""
    batches = list(kv_history.batches(RECORDS - WORKERS, workers=WORKERS, events=EVENTS, blocks=BLOCKS))

    async def job(appender: TopicAppender, buffer: BufferedAppender) -> None:
        sources = streams(appender)
        assert all(source.catch_up(now=True) for source in sources)
        assert await buffer.flush(30)
        began, spent = time.monotonic(), time.process_time()
        for batch in batches:
            while buffer.stats().records >= MOST_WAITING:
                await asyncio.sleep(0.001)
            assert sources[batch.worker].publish(batch.events)
        assert await buffer.flush(60)
        tell(began=began, acked=time.monotonic(), cpu_s=time.process_time() - spent)

    await with_appender(url, namespace, job)


async def publish_steadily(url: str, namespace: str, rate: str) -> None:
    """The publisher's process: ``rate`` records a second, the first block of each named by the time of its making."""
    batches = list(kv_history.batches(64, workers=WORKERS, events=EVENTS, blocks=BLOCKS))

    async def job(appender: TopicAppender, buffer: BufferedAppender) -> None:
        sources = streams(appender)
        assert all(source.catch_up(now=True) for source in sources)
        assert await buffer.flush(30)
        began, sent = time.monotonic(), 0
        while sent < LATENCY_S * int(rate):
            due = int((time.monotonic() - began) * int(rate)) + 1
            for number in range(sent, due):
                batch = batches[number % len(batches)]
                column = time.monotonic_ns().to_bytes(8, "little")
                stamp = BlocksStored("device", None, column, column)
                assert sources[batch.worker].publish([stamp, *batch.events[1:]])
            sent = due
            await asyncio.sleep(max(0.0, began + sent / int(rate) - time.monotonic()))

    await with_appender(url, namespace, job)


class StampedFold(KvIndexFold):
    """Keeps the first block of each batch since it was last asked."""

    def __init__(self) -> None:
        super().__init__()
        self.stamps: list[bytes] = []

    def apply(self, state: Any, record: Record, value: Any) -> None:
        super().apply(state, record, value)
        if isinstance(value, KvEvents) and value.events and isinstance(value.events[0], BlocksStored):
            self.stamps.append(value.events[0].sequence_hashes[:8])


async def fold_all(url: str, namespace: str, expected: str) -> None:
    """The folding process: says when it is ready, and at the end when it had everything and how old records were."""
    log = open_log(url, SystemClock())
    await log.start()
    fold = StampedFold()
    ages: list[float] = []
    done = asyncio.Event()
    with tempfile.TemporaryDirectory() as folder:
        store = RocksStore(Path(folder) / "s", fold.families)
        runner = FoldRunner(
            fold, log, store, namespace, clock=SystemClock(), dead_letters=kv_history.NoLetters(), flush_interval_s=2.0
        )

        def on_batch() -> None:
            now = time.monotonic_ns()
            ages.extend((now - int.from_bytes(stamp, "little")) / 1e6 for stamp in fold.stamps)
            fold.stamps.clear()
            if runner.state.counters.batches >= int(expected):
                done.set()

        runner.add_listener(on_batch)
        await runner.start()
        await runner.wait_caught_up(30)
        spent = time.process_time()
        print("ready", flush=True)
        await done.wait()
        # What waits in the fold's own buffer is no part of a view that can be read.
        runner.state.settle()
        ended = time.monotonic()
        assert runner.state.counters.gaps == 0
        tell(ended=ended, cpu_s=time.process_time() - spent, ages=ages)
        await runner.stop()
        store.close()
    await log.close()


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


async def child(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.bench_kv_path", *arguments, stdout=asyncio.subprocess.PIPE, limit=2**26
    )


async def run(broker: Broker, expected: int, *publisher: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Publish in one process and fold in another; what both told."""
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    log = open_log(broker.url, SystemClock())
    await log.start()
    await create(log, namespace)
    folding = await child("--fold", broker.url, namespace, str(expected))
    assert folding.stdout is not None
    assert (await folding.stdout.readline()).strip() == b"ready"
    publishing = await child(publisher[0], broker.url, namespace, *publisher[1:])
    published, folded = (await publishing.communicate())[0], (await folding.communicate())[0]
    await log.close()
    return json.loads(published or b"{}"), json.loads(folded)


async def create(log: EventLog, namespace: str) -> None:
    await log.create_topics(topic_configs(namespace, None, [KV_EVENTS]))


async def measure_rate(broker: Broker) -> list[Row]:
    found: dict[str, list[float]] = {}
    events = RECORDS * EVENTS
    for _ in range(ROUNDS):
        before = broker.cpu_s()
        published, folded = await run(broker, RECORDS, "--publish")
        found.setdefault("events/s", []).append(events / (folded["ended"] - published["began"]))
        costs = {"publisher": published["cpu_s"], "folding process": folded["cpu_s"]}
        if before is not None:
            costs["broker"] = broker.cpu_s() - before
        for process, cpu_s in costs.items():
            found.setdefault(process, []).append(1e6 * cpu_s / events)
    what = f"events of {BLOCKS} blocks, {EVENTS} a record"
    rows = rounds(f"publisher to folded view, {what} (target {TARGET:,})", found.pop("events/s"), "events/s")
    for process, costs_us in found.items():
        rows += rounds(f"processor time of the {process}", costs_us, "µs/event")
    return rows


async def measure_latency(broker: Broker, rate: int) -> list[Row]:
    expected = int(LATENCY_S * rate) + WORKERS
    _, folded = await run(broker, expected, "--steadily", str(rate))
    # The first records of a process open connections and import what they need.
    ages = folded["ages"][rate // 2 :]
    return latencies(f"publish to visible, {rate} records/s of {EVENTS} events", ages, "ms")


async def main() -> list[Row]:
    async with kafka_here() as broker:
        if broker is None:
            return []
        rows = await measure_rate(broker)
        for rate in RATES:
            rows += await measure_latency(broker, rate)
        return rows


CHILDREN = {"--publish": publish_all, "--steadily": publish_steadily, "--fold": fold_all}

if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(CHILDREN[sys.argv[1]](*sys.argv[2:]))
    else:
        for row in asyncio.run(main()):
            print(*row)
