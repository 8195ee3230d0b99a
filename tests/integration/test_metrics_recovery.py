"""A frontend that is still recovering its state: what its probes, its metrics and its clients see."""

from __future__ import annotations

import asyncio
import contextlib
import random

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import FrontendConfig, LogConfig, StateConfig
from dynamo_es.frontend import main
from dynamo_es.frontend.main import FrontendSettings, run_frontend
from dynamo_es.log.base import Entry
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.core import RuntimeSettings
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, KvEvents, key_kv_events
from schemas.kv_snapshots import KV_SNAPSHOTS
from tests.support.pages import Page
from tests.support.runtimes import FAST, SharedLog

HI = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Gated(SharedLog):
    """A log that does not tell where partition 4 of ``kv-snapshots`` ends until ``open`` is set."""

    def __init__(self, log):
        super().__init__(log)
        self.open = asyncio.Event()
        self._asked = 0

    async def bounds(self, topic):
        if topic == KV_SNAPSHOTS.qualified("dynamo"):
            self._asked += 1
            if self._asked > 4:
                await self.open.wait()
        return await self._log.bounds(topic)


class HeldEvents(SharedLog):
    """A log whose readers of ``kv-events`` get nothing until ``open`` is set."""

    def __init__(self, log):
        super().__init__(log)
        self.open = asyncio.Event()

    def reader(self, positions):
        outer, inner = self, self._log.reader(positions)
        if not any(place.topic == KV_EVENTS.qualified("dynamo") for place in positions):
            return inner

        class Reader:
            async def poll(self, **options):
                if not outer.open.is_set():
                    await asyncio.sleep(0.02)
                    return {}
                return await inner.poll(**options)

            def __getattr__(self, name):
                return getattr(inner, name)

        return Reader()


class Running:
    """A frontend in a task, and its address as soon as it listens."""

    def __init__(self, log, monkeypatch, **state):
        self.stop, self.ready = asyncio.Event(), asyncio.Event()
        listening = []
        bind = main.bind

        def bound(config, **options):
            listening.append(bind(config, **options))
            return listening[0]

        monkeypatch.setattr(main, "bind", bound)
        settings = FrontendSettings(
            RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2, **state), FAST, "frontend"),
            FrontendConfig(http_host="127.0.0.1", http_port=0, router_mode="kv"),
        )
        self.task = asyncio.create_task(
            run_frontend(
                settings, self.stop, clock=SystemClock(), rng=random.Random(2), log=log,
                on_ready=lambda server: self.ready.set(),
            )
        )  # fmt: skip
        self._listening = listening

    async def client(self):
        while not self._listening:
            await asyncio.sleep(0)
        return httpx.AsyncClient(base_url=f"http://127.0.0.1:{self._listening[0].getsockname()[1]}")


async def until(condition):
    async with asyncio.timeout(60):
        while not await condition():
            await asyncio.sleep(0.01)


async def test_EVT_07_probes_tell_the_progress_and_requests_are_told_to_come_again(log, monkeypatch):
    gated = Gated(log)
    running = Running(gated, monkeypatch)
    async with await running.client() as http:

        async def half_done():
            # Registry all, the index half, two views not begun.
            return (await http.get("/health")).json().get("progress_percent") == 37.5

        await until(half_done)
        reply = await http.get("/health")
        body = reply.json()
        assert (reply.status_code, body["status"], body["stage"]) == (503, "not_ready", "recovering")
        assert body["views"]["kv-index"]["restoring_snapshots"] == {"partitions_done": 4, "partitions": 8}
        assert body["log"]["state"] == "ok"
        assert (await http.get("/live")).status_code == 200
        asked = await http.post("/v1/chat/completions", json=HI)
        assert (asked.status_code, asked.headers["retry-after"]) == (503, "1")
        assert asked.json()["error"]["code"] == "index_recovering"
        assert "37.5 %" in asked.json()["message"]
        assert (await http.get("/v1/models")).status_code == 503
        page = Page((await http.get("/metrics")).text)
        assert page["dynamo_es_fold_progress_ratio", "fold=kv-index"] == 0.5
        assert page["dynamo_es_fold_state", "fold=kv-index", "state=loading"] == 1
        assert not running.ready.is_set()
        gated.open.set()
        await running.ready.wait()
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).json()["data"] == []
        assert (await http.post("/v1/chat/completions", json=HI)).status_code == 404
    running.stop.set()
    await running.task


async def test_SCALE_10_a_tail_that_does_not_end_in_time_is_served_without(log, monkeypatch):
    """The index goes on catching up meanwhile, and says how far it is."""
    await log.create_topics(topic_configs("dynamo", None))
    codec = TopicCodec(KV_EVENTS)
    for seq in range(50):
        value = KvEvents(1, "m", 1, 0, 1, seq, 16, seq == 0, [])
        await log.append(KV_EVENTS.qualified("dynamo"), Entry(codec.encode(value), key_kv_events("m", 1, 0)))
    held = HeldEvents(log)
    running = Running(held, monkeypatch, catch_up_timeout_s=0.3)
    async with await running.client() as http:
        async with asyncio.timeout(60):
            await running.ready.wait()
        index = (await http.get("/health")).json()["views"]["kv-index"]
        assert (index["state"], index["lag_records"], index["progress_percent"]) == ("catching-up", 50, 0.0)
        assert (await http.get("/v1/models")).status_code == 200
        held.open.set()

        async def live():
            index = (await http.get("/health")).json()["views"]["kv-index"]
            return (index["state"], index["lag_records"]) == ("live", 0)

        await until(live)
    running.stop.set()
    await running.task


async def test_a_frontend_that_is_told_to_stop_does_not_finish_its_recovery(log, monkeypatch):
    running = Running(Gated(log), monkeypatch)
    async with await running.client() as http:

        async def begun():
            return "kv-index" in (await http.get("/health")).json()["views"]

        await until(begun)
        running.stop.set()
        async with asyncio.timeout(60):
            await running.task
        with pytest.raises(httpx.ConnectError):
            await http.get("/live")
    assert not running.ready.is_set()


async def test_a_recovery_that_fails_is_told_and_leaves_nothing_open(log, monkeypatch):
    class Away(SharedLog):
        async def start(self):
            await asyncio.sleep(0)
            raise LogUnavailable("no broker answers")

    running = Running(Away(log), monkeypatch)
    async with await running.client() as http:
        with pytest.raises(LogUnavailable, match="no broker answers"):
            await running.task
        with contextlib.suppress(httpx.HTTPError):
            await http.get("/live")
            raise AssertionError("the port is still open")


async def test_the_event_loop_is_measured_from_the_start(log, monkeypatch):
    running = Running(SharedLog(log), monkeypatch)
    async with await running.client() as http:
        await running.ready.wait()

        async def measured():
            page = Page((await http.get("/metrics")).text)
            return page["dynamo_frontend_event_loop_delay_seconds_count"] > 5

        await until(measured)
    running.stop.set()
    await running.task
