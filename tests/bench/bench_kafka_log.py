"""What the Kafka log costs: append, tail, read. No asserts; run against a broker that does nothing else.

python -m tests.bench.bench_kafka_log kafka://127.0.0.1:9092
"""

from __future__ import annotations

import argparse
import asyncio
import time
import uuid

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, EventLog, TopicConfig, TopicPartition
from dynamo_es.log.open import open_log

PARTITIONS = 4
VALUE = b"x" * 300


def percentiles(samples: list[float]) -> str:
    ordered = sorted(samples)
    return " ".join(f"p{p}={ordered[min(len(ordered) - 1, len(ordered) * p // 100)] * 1000:.2f} ms" for p in (50, 99))


async def make_topic(log: EventLog) -> str:
    name = f"bench.{uuid.uuid4().hex}"
    await log.create_topics([TopicConfig(name, PARTITIONS, replication=1)])
    return name


async def awaited_appends(log: EventLog, count: int) -> None:
    topic = await make_topic(log)
    await log.append(topic, Entry(VALUE))
    samples = []
    for number in range(count):
        begun = time.perf_counter()
        await log.append(topic, Entry(VALUE, b"k%d" % (number % 50)))
        samples.append(time.perf_counter() - begun)
    print(f"append, awaited one by one: {percentiles(samples)}")


async def pipelined_appends(log: EventLog, count: int) -> str:
    topic = await make_topic(log)
    await log.append(topic, Entry(VALUE))
    entries = [Entry(VALUE, b"k%d" % (number % 50)) for number in range(count)]
    begun = time.perf_counter()
    await log.append_all(topic, entries)
    print(
        f"append_all of {count} records of {len(VALUE)} bytes: {count / (time.perf_counter() - begun):,.0f} records/s"
    )
    return topic


async def reading(log: EventLog, topic: str, count: int) -> None:
    reader = log.reader({TopicPartition(topic, number): 0 for number in range(PARTITIONS)})
    begun, seen = time.perf_counter(), 0
    while seen < count:
        seen += sum(map(len, (await reader.poll()).values()))
    print(f"read from the start, connecting included: {seen / (time.perf_counter() - begun):,.0f} records/s")
    await reader.close()


async def append_to_seen(log: EventLog, rate: int, seconds: float) -> None:
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
    print(f"append to seen at {rate}/s: {percentiles(samples)}")
    await reader.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description="What the Kafka log costs.")
    parser.add_argument("url", help="kafka://host:port")
    parser.add_argument("--records", type=int, default=200_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    arguments = parser.parse_args()
    log = open_log(arguments.url, SystemClock())
    await log.start()
    try:
        await awaited_appends(log, 2_000)
        topic = await pipelined_appends(log, arguments.records)
        await reading(log, topic, arguments.records)
        for rate in (100, 300):
            await append_to_seen(log, rate, arguments.seconds)
    finally:
        await log.close()


if __name__ == "__main__":
    asyncio.run(main())
