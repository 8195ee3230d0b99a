"""Load as a whole frontend accounts for it: what is on its metrics page while requests come and go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from dynamo_es.log.base import Entry
from dynamo_es.router.active_sequences import NO_LOAD, WorkerRank
from dynamo_es.router.overload import MEASURED_TTL_S
from schemas.codec import TopicCodec
from schemas.kv_events import key_kv_events
from schemas.worker_load import WORKER_LOAD, WorkerLoad
from tests.support.pages import Page
from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, ServedFleet, served_fleet
from tests.unit.frontend.asgi_client import call


@pytest.fixture
async def fleet() -> AsyncIterator[ServedFleet]:
    async with served_fleet() as fleet:
        yield fleet


async def page_of(fleet: ServedFleet) -> Page:
    return Page((await fleet.get("/metrics")).text)


async def test_LOAD_07_a_registered_worker_that_went_silent_is_on_the_page(fleet: ServedFleet) -> None:
    await fleet.scripted_worker([[{"token_ids": [5], "finish_reason": "stop"}]])
    (instance,) = fleet.core.registry.state.instances.values()
    codec, clock = TopicCodec(WORKER_LOAD), fleet.core.clock

    async def measure(worker_id: int, age_s: float) -> None:
        load = WorkerLoad(1, "m", worker_id, 0, 1, 99, None, 100, None, None, clock.now_ms())
        entry = Entry(
            codec.encode(load), key_kv_events("m", worker_id, 0), codec.headers, clock.now_ms() - int(age_s * 1000)
        )
        position = await fleet.log.append(WORKER_LOAD.qualified("dynamo"), entry)
        await fleet.views.worker_load.wait_applied(position, 5)

    await measure(instance.instance_id + 1, MEASURED_TTL_S + 100)
    await measure(instance.instance_id, 0.0)
    assert (await page_of(fleet))["dynamo_es_stale_load_workers", "model=m"] == 0
    await measure(instance.instance_id, MEASURED_TTL_S + 1)
    assert (await page_of(fleet))["dynamo_es_stale_load_workers", "model=m"] == 1
    # It still serves.
    assert (await fleet.ask(CHAT)).status == 200


async def test_LOAD_10_nothing_is_left_of_requests_however_they_ended(fleet: ServedFleet) -> None:
    """100 that succeed, 20 that are refused late, 20 that are given up, none of them streamed."""
    await fleet.mock_worker(speedup_ratio=50.0)
    good = [fleet.ask(CHAT, max_tokens=3) for _ in range(100)]
    # Known to be wrong only when the prompt has been tokenized.
    late = [fleet.ask(CHAT, messages=[{"role": "user", "content": "x " * 40_000}]) for _ in range(20)]
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4000}).encode()
    given_up = [asyncio.create_task(call(fleet.app, CHAT, body)) for _ in range(20)]
    (engine,) = [engine for _, engine in fleet.models.routers()]
    await wait_for(lambda: engine.router.open_requests >= 20)
    for task in given_up:
        task.cancel()
    replies = await asyncio.gather(*good, *late)
    await asyncio.gather(*given_up, return_exceptions=True)
    assert [reply.status for reply in replies] == [200] * 100 + [400] * 20
    await wait_for(lambda: engine.router.open_requests == 0)
    (instance,) = fleet.core.registry.state.instances.values()
    assert engine.router._sequences.load(WorkerRank(instance.instance_id, 0)) == NO_LOAD
    await wait_for(lambda: not fleet.views.requests.state.bookings)
    page = await page_of(fleet)
    assert page["dynamo_es_routing_active_requests", "model=m"] == 0
    assert page["dynamo_es_open_bookings"] == 0
    assert {page[name, *labels] for name, labels in page.samples if name.endswith("_inflight_requests")} == {0.0}
    outcomes = [event.outcome for event in await fleet.finished(120)]
    assert (outcomes.count("ok"), outcomes.count("cancelled")) == (100, 20)
