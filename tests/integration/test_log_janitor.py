from __future__ import annotations

import asyncio
import random

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.log_janitor import LogJanitor
from schemas.catalog import TOPICS
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import KV_EVENTS
from schemas.registry import REGISTRY


class MonthLaterClock(SystemClock):
    def now_ms(self):
        return super().now_ms() + 30 * 24 * 3_600_000


async def test_old_records_go_superseded_ones_too_and_kv_events_stay(tmp_path):
    clock = SystemClock()
    log = open_log(f"embedded://{tmp_path}/log?segment_bytes=16384", clock, rng=random.Random(1))
    await log.start()
    await log.create_topics(topic_configs("n", None, TOPICS))
    for spec in (FORWARD_PASS, KV_EVENTS, REGISTRY):
        entries = [Entry(b"x" * 1000, b"key") for _ in range(100)]
        await log.append_all(spec.qualified("n"), entries)
    janitor = LogJanitor(log, interval_s=0.02, clock=MonthLaterClock(), rng=random.Random(1), tasks=BackgroundTasks())
    janitor.start()
    passes, events, registry = (spec.qualified("n") for spec in (FORWARD_PASS, KV_EVENTS, REGISTRY))
    async with asyncio.timeout(60):
        while not any(limits.start for limits in (await log.bounds(passes)).values()):
            await asyncio.sleep(0.01)
        while await records_of(log, registry) > 40:
            await asyncio.sleep(0.01)
    assert all(limits.start == 0 for limits in (await log.bounds(events)).values())
    assert await records_of(log, events) == 100
    await janitor.close()
    await janitor.close()
    await log.close()


async def records_of(log, topic):
    positions = {TopicPartition(topic, number): limits.start for number, limits in (await log.bounds(topic)).items()}
    reader = log.reader(positions)
    count = 0
    while records := await reader.poll(timeout_s=0):
        count += sum(map(len, records.values()))
    await reader.close()
    return count
