"""What the Kafka log costs: append, tail, read. No asserts; run against a broker that does nothing else.

python -m tests.bench.bench_kafka_log kafka://127.0.0.1:9092

Under ``python -m tests.bench`` it takes the broker that KAFKA_BOOTSTRAP_SERVERS names, or starts one.
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog, TopicConfig, TopicPartition
from dynamo_es.log.open import open_log
from tests.bench.brokers import kafka_here

PARTITIONS = 4
VALUE = b"x" * 300

Rows = list[tuple[str, float, str]]


def percentiles(what: str, samples: list[float]) -> Rows:
    ordered = sorted(samples)
    return [(f"{what} p{p}", ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1000, "ms") for p in (50, 99)]


async def make_topic(log: EventLog) -> str:
    name = f"bench.{uuid.uuid4().hex}"
    await log.create_topics([TopicConfig(name, PARTITIONS, replication=1)])
    return name


async def awaited_appends(log: EventLog, count: int) -> Rows:
    topic = await make_topic(log)
    await log.append(topic, Entry(VALUE))
    samples = []
    for number in range(count):
        begun = time.perf_counter()
        await log.append(topic, Entry(VALUE, b"k%d" % (number % 50)))
        samples.append(time.perf_counter() - begun)
    return percentiles("append, awaited one by one,", samples)


async def pipelined_appends(log: EventLog, count: int) -> tuple[str, Rows]:
    topic = await make_topic(log)
    await log.append(topic, Entry(VALUE))
    entries = [Entry(VALUE, b"k%d" % (number % 50)) for number in range(count)]
    begun = time.perf_counter()
    await log.append_all(topic, entries)
    rate = count / (time.perf_counter() - begun)
    return topic, [(f"append_all, {len(VALUE)} bytes each", rate, "records/s")]


async def reading(log: EventLog, topic: str, count: int) -> Rows:
    reader = log.reader({TopicPartition(topic, number): 0 for number in range(PARTITIONS)})
    begun, seen = time.perf_counter(), 0
    while seen < count:
        seen += sum(map(len, (await reader.poll()).values()))
    rate = seen / (time.perf_counter() - begun)
    await reader.close()
    return [("read from the start, connecting included", rate, "records/s")]


async def append_to_seen(log: EventLog, rate: int, seconds: float) -> Rows:
    """From the call of ``append`` to the record in another task's hands."""
    topic = await make_topic(log)
    reader = log.reader({TopicPartition(topic, number): 0 for number in range(PARTITIONS)})
    total = int(rate * seconds)
    await log.append(topic, Entry(b""))
    await reader.poll()
    samples: list[float] = []

    async def follow() -> None:
        while len(samples) < total:
            for records in (await reader.poll()).values():
                now = time.perf_counter()
                samples.extend(now - float(record.value or b"0") for record in records)

    following = asyncio.create_task(follow())
    appends = set()
    begun = time.perf_counter()
    for number in range(total):
        await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
        entry = Entry(b"%.9f" % time.perf_counter(), b"k%d" % (number % 50))
        appends.add(asyncio.create_task(log.append(topic, entry)))
    await asyncio.gather(*appends)
    await following
    await reader.close()
    return percentiles(f"append to seen at {rate}/s", samples)


async def measure(url: str, records: int = 200_000, seconds: float = 10.0) -> Rows:
    log = open_log(url, SystemClock())
    await log.start()
    try:
        rows = await awaited_appends(log, 2_000)
        topic, appended = await pipelined_appends(log, records)
        rows += appended + await reading(log, topic, records)
        for rate in (100, 300):
            rows += await append_to_seen(log, rate, seconds)
    finally:
        await log.close()
    for what, value, unit in rows:
        print(f"{what}: {value:,.2f} {unit}")
    return rows


async def main() -> Rows:
    async with kafka_here() as broker:
        return [] if broker is None else await measure(broker.url)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the Kafka log costs.")
    parser.add_argument("url", help="kafka://host:port")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args()
    asyncio.run(measure(options.url, options.records, options.seconds))
