"""EVT-01, end to end: an event that is missing in the log makes its source count for nothing, until it is repaired."""

from __future__ import annotations

import random

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry
from dynamo_es.log.memory import MemoryLog
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.router import resync
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.views import RoutingViews
from schemas.kv_events import KV_EVENTS
from schemas.registry import key_model
from tests.support.runtimes import make_runtime, wait_for

BLOCK = 4
ENDPOINT = "ns.comp.ep"
TOPIC = KV_EVENTS.qualified("dynamo")


class LosingLog(MemoryLog):
    """Acknowledges a record of ``kv-events`` that it then does not have, when told to."""

    lose_next = False

    async def append(self, topic: str, entry: Entry):
        return (await self.append_all(topic, [entry]))[0]

    async def append_all(self, topic, entries):
        if topic == TOPIC and self.lose_next:
            self.lose_next = False
            ends = await self.bounds(topic)
            assert ends
            return [await super().append("dynamo.embedding-cache", entries[0])] * len(entries)
        return await super().append_all(topic, entries)


@pytest.fixture
async def log():
    log = LosingLog("test", SystemClock(), random.Random(1))
    await log.start()
    yield log
    await log.close()


async def test_a_lost_event_degrades_its_source_and_the_worker_is_asked_for_everything(log, monkeypatch):
    monkeypatch.setattr(resync, "GRACE_S", 0.3)
    worker, router = make_runtime(log), make_runtime(log, role="router")
    await worker.core.start()
    await router.core.start()
    path = ENDPOINT.split(".")
    facts = read_model_facts(BUILTIN_MODEL)
    card = make_card(facts, path, worker.core.instance_id, name="m", block_size=BLOCK, runtime_config={})
    await worker.core.registration.register(key_model(*path, worker.core.instance_id), card)
    views = RoutingViews(router.core)
    await views.start()
    SourceReaper(router.core, views.index_states).start()
    publisher = KvEventPublisher(worker.endpoint(ENDPOINT), kv_block_size=BLOCK)
    tokens = list(range(4 * BLOCK))
    sequence = hash_prompt(tokens, BLOCK)[1]
    name = worker.core.instance_id

    def held() -> int:
        return max((found.device for found in views.kv_index.state.match("m", sequence, BLOCK)), default=0)

    def source():
        return next((item for key, item in views.kv_index.state.sources.items() if key.worker_id == name), None)

    async def publish(first: int) -> None:
        publisher.publish_stored(
            tokens[first * BLOCK : (first + 1) * BLOCK], [BLOCK], [100 + first], 99 + first if first else None
        )
        await worker.core.buffer.flush(5)

    try:
        await publish(0)
        await wait_for(lambda: held() == 1)
        log.lose_next = True
        await publish(1)
        await publish(2)
        await wait_for(lambda: views.kv_index.state.counters.gaps == 1)
        assert held() == 0
        assert not source().exact
        await wait_for(lambda: router.core.registry.state.resyncs)
        await wait_for(lambda: held() == 3)
        assert source().exact
        await wait_for(lambda: not router.core.registry.state.resyncs)
        await publish(3)
        await wait_for(lambda: held() == 4)
    finally:
        publisher.shutdown()
        await worker.close()
        await router.close()
