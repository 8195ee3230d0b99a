"""What the view over data centres says when something of its own or of a relay's is wrong."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import Entry
from dynamo_es.log.memory import MemoryLog
from dynamo_es.services.dc_relay.global_view import GlobalKvView, RelaySource
from dynamo_es.services.dc_relay.http import build_relay_app
from dynamo_es.services.dc_relay.ranking import PromptQuery
from schemas.codec import TopicCodec
from schemas.dc_relay import DC_RELAY, key_dc_relay
from tests.support.relay_sites import Site, shared, site
from tests.support.relay_stream import pool, status
from tests.support.runtimes import wait_for

PROMPT = list(range(100, 132))
OTHER = list(range(500, 532))
TOPIC = DC_RELAY.qualified("dynamo")


@pytest.fixture
async def east():
    async with site("east") as made:
        yield made


def view_of(log: MemoryLog, stale_after_s: float = 600.0) -> GlobalKvView:
    return GlobalKvView(
        [RelaySource(log, "dynamo")], clock=SystemClock(), rng=random.Random(1), stale_after_s=stale_after_s
    )


async def get(view: GlobalKvView, path: str) -> httpx.Response:
    transport = httpx.ASGITransport(build_relay_app(view))
    async with httpx.AsyncClient(transport=transport, base_url="http://view") as client:
        return await client.get(path)


async def test_a_view_whose_fold_died_says_so_and_is_not_ready(
    east: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await east.relay(load_window_ms=20)
    view = view_of(shared(east.log))
    await view.start(60)
    await wait_for(lambda: view.topics()[0]["state"] == "live")
    assert (await get(view, "/health")).status_code == 200
    assert (await get(view, "/live")).status_code == 200

    def die(state):
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(view._topics[0].runner.fold, "housekeep", die)
    await wait_for(lambda: view.topics()[0]["state"] == "dead")
    assert "fold-dc-relay died of ZeroDivisionError" in view.topics()[0]["reason"]
    answer = await get(view, "/health")
    assert answer.status_code == 503
    assert (answer.json()["status"], answer.json()["stage"]) == ("notready", "task-died")
    assert "secret" not in answer.text
    assert [task["task"] for task in answer.json()["dead_tasks"]] == ["fold-dc-relay"]
    assert answer.json()["topics"][0]["state"] == "dead"
    assert (await get(view, "/live")).status_code == 503
    page = (await get(view, "/metrics")).text
    assert 'dynamo_es_background_tasks_died_total{task="fold-dc-relay"} 1.0' in page
    await view.close()


class BrokenLog(MemoryLog):
    """Cannot be opened for as long as its settings are wrong."""

    wrong: Exception | None = None

    async def start(self) -> None:
        if self.wrong is not None:
            raise self.wrong
        await super().start()


async def test_a_log_whose_settings_are_wrong_is_told_and_tried_again() -> None:
    log = BrokenLog("north", SystemClock(), random.Random(1))
    log.wrong = ConfigError("no such file: /etc/ca.pem")
    view = view_of(log)
    await view.start(0.1)
    assert view.topics()[0]["state"] == "unreadable"
    assert view.topics()[0]["reason"] == "no such file: /etc/ca.pem"
    log.wrong = None
    # It is open now; what is missing is the topic.
    await wait_for(lambda: "does not exist" in view.topics()[0]["reason"])
    await view.close()


async def test_a_log_that_fails_as_nobody_thought_of_is_a_dead_task() -> None:
    log = BrokenLog("north", SystemClock(), random.Random(1))
    log.wrong = ZeroDivisionError()
    view = view_of(log)
    await view.start(0.1)
    await wait_for(lambda: view.topics()[0]["state"] == "dead")
    assert "follow-dc-relay died of ZeroDivisionError" in view.topics()[0]["reason"]
    assert (await get(view, "/health")).status_code == 503
    await view.close()


async def test_a_relay_whose_clock_is_ahead_is_stale_once_it_is_silent(east: Site) -> None:
    await east.relay(load_window_ms=20)
    view = view_of(shared(east.log), stale_after_s=0.3)
    await view.start(60)
    in_a_year_ms = SystemClock().now_ms() + 365 * 86_400_000
    codec = TopicCodec(DC_RELAY)
    value = codec.encode(status("future", 1, 0, pool()))
    await east.log.append(TOPIC, Entry(value, key_dc_relay("future"), codec.headers, in_a_year_ms))

    def stale() -> list[bool]:
        return [entry["stale"] for entry in view.data_centres() if entry["dc_id"] == "future"]

    await wait_for(lambda: stale() == [True])
    await view.close()


async def test_a_model_whose_workers_tell_no_blocks_is_a_candidate_without_a_match(east: Site) -> None:
    await east.worker(model="plain", events=False)
    relay = await east.relay(load_window_ms=20)
    view = view_of(shared(east.log))
    await view.start(60)
    await wait_for(lambda: view.find(PromptQuery("plain", PROMPT)))
    (candidate,) = view.find(PromptQuery("plain", PROMPT))
    assert (candidate.dc_id, candidate.ready, candidate.known, candidate.matched_tokens) == ("east", True, False, 0)
    assert relay.pools() == {}
    transport = httpx.ASGITransport(build_relay_app(view))
    async with httpx.AsyncClient(transport=transport, base_url="http://view") as client:
        answer = await client.post("/query", json={"model": "plain", "token_ids": PROMPT})
    (told,) = answer.json()["candidates"]
    assert (told["namespace"], told["model"], told["component"], told["block_size"]) == ("ns", "plain", None, None)
    assert (told["roles"], told["load"]["waiting"]) == (["aggregated"], None)
    await view.close()


async def test_a_pool_that_something_else_saw_first_is_told_with_its_blocks(east: Site) -> None:
    """A scrape or the timer may look at the registry between two slices of its fold, before the relay is called."""
    relay = await east.relay(load_window_ms=20, publication_delay_ms=3_600_000, publication_threshold=1_000_000)
    await east.worker(events=False)
    await wait_for(lambda: relay.health()["endpoint_count"] == 1)
    view = view_of(shared(east.log))
    await view.start(60)
    # Whatever changes, the relay's listener finds that it was looked at.
    core = relay._core
    core.registry.remove_listener(relay._on_registry)
    core.registry.add_listener(relay.health)
    core.registry.add_listener(relay._on_registry)
    other = await east.worker(endpoint="ns.other.generate", model="late")
    other.store(PROMPT)

    def matches() -> list[int]:
        return [each.matched_blocks for each in view.find(PromptQuery("late", PROMPT)) if each.known]

    async with asyncio.timeout(60):
        while relay._changes.blocks < 8:
            await asyncio.sleep(0.01)
    await wait_for(lambda: matches() == [8])

    # So are blocks that go with a worker, though no event says so.
    again = await east.worker(endpoint="ns.other.generate", model="late")
    again.store(PROMPT[:4] + OTHER)
    await relay.flush()
    (pool,) = relay.pools()
    await wait_for(lambda: relay._changes.blocks >= 8 or relay.pools()[pool] > 8)
    await relay.flush()
    assert relay.pools()[pool] == 16
    await again.leave()
    await wait_for(lambda: relay.pools() == {pool: 8})
    core.registry.remove_listener(relay.health)
    await view.close()
