"""A background task that dies of what nobody thought of makes its process not ready, by name."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.config.tree import HttpPathsConfig
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.starting import StartingApp
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.publishers.forward_pass_relay import FpmEventRelay
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.publishers.zmq_relay import ZmqRelay
from dynamo_es.router.booking_reaper import BookingReaper
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.lease_monitor import LeaseMonitor
from dynamo_es.runtime.log_janitor import LogJanitor
from dynamo_es.runtime.progress import ProgressWatch
from dynamo_es.runtime.registration import Registration
from dynamo_es.runtime.request_client import Connection
from dynamo_es.runtime.request_server import RequestServer
from dynamo_es.runtime.views import RoutingViews
from streams.registry import RegistryFold
from streams.requests import RequestsState
from streams.snapshot_writer import SnapshotWriter
from tests.integration.test_metrics_frontend import page_of
from tests.integration.test_metrics_system_server import a_runtime, echo, get
from tests.support.pages import Page
from tests.support.runtimes import serving, wait_for
from tests.support.served_fleet import served_fleet
from tests.unit.frontend.asgi_client import call

LOOPS = {
    "lease": (Registration, "_keep"),
    "lease-monitor": (LeaseMonitor, "_run"),
    "log-janitor": (LogJanitor, "_run"),
    "fold-progress": (ProgressWatch, "_run"),
    "request-server-reaper": (RequestServer, "_reap"),
    "buffered-appender": (BufferedAppender, "_run"),
    "connection": (Connection, "_keep_alive"),
    "source-reaper": (SourceReaper, "_run"),
    "booking-reaper": (BookingReaper, "_run"),
    "snapshot-writer": (SnapshotWriter, "_run"),
}


async def dies(self):
    raise ZeroDivisionError("a prompt that was in the way")


@pytest.mark.parametrize("name", LOOPS)
async def test_DISC_10_a_task_that_dies_makes_a_worker_not_ready_and_is_named(log, name, monkeypatch, caplog):
    async with a_runtime(log) as runtime:
        monkeypatch.setattr(*LOOPS[name], dies)
        async with serving(runtime, "ns.comp.generate", echo):
            client = await runtime.endpoint("ns.comp.generate").client()
            assert [item async for item in await client.generate("a", annotated=False)] == ["a"]
            views = RoutingViews(runtime.core)
            await views.start()
            SourceReaper(runtime.core, views.index_states).start()
            BookingReaper(runtime.core, RequestsState).start()
            await wait_for(lambda: runtime.core.tasks.dead)
            reply = await get(runtime, "/health")
            body = reply.json()
            assert (reply.status_code, body["status"], body["stage"]) == (503, "notready", "task-died")
            assert [task["error"] for task in body["dead_tasks"]] == ["ZeroDivisionError"]
            assert body["dead_tasks"][0]["task"].startswith(name)
            assert name in body["message"]
            assert "prompt" not in reply.text
            page = Page((await get(runtime, "/metrics")).text)
            assert page["dynamo_es_background_tasks_died_total", f"task={name}"] == 1
            # Only a restart mends it: an orchestrator is to start it again.
            live = await get(runtime, "/live")
            assert (live.status_code, live.json()["status"]) == (503, "task-died")
            assert live.json()["message"].startswith(f"Service must be started again: background task {name}")
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("name", ["kv-event-relay", "forward-pass-relay"])
async def test_DISC_10_a_relay_of_an_engine_that_dies_makes_its_worker_not_ready(log, name, monkeypatch, caplog):
    monkeypatch.setattr(ZmqRelay, "run", dies)
    monkeypatch.setattr(FpmEventRelay, "_run", dies)
    async with a_runtime(log) as runtime, serving(runtime, "ns.comp.generate", echo):
        endpoint = runtime.endpoint("ns.comp.generate")
        if name == "kv-event-relay":
            KvEventPublisher(endpoint, kv_block_size=16, zmq_endpoint="tcp://127.0.0.1:9")
        else:
            FpmEventRelay(endpoint, "tcp://127.0.0.1:9")
        await wait_for(lambda: runtime.core.tasks.dead)
        reply = await get(runtime, "/health")
        assert reply.status_code == 503
        assert reply.json()["dead_tasks"] == [{"task": name, "error": "ZeroDivisionError"}]
        page = Page((await get(runtime, "/metrics")).text)
        assert page["dynamo_es_background_tasks_died_total", f"task={name}"] == 1
    assert "Traceback" in caplog.text


async def test_DISC_10_a_fold_that_dies_makes_a_frontend_not_ready_although_nothing_is_left_to_fold(monkeypatch):
    async with served_fleet() as fleet:
        assert (await fleet.get("/health")).status == 200
        monkeypatch.setattr(RegistryFold, "housekeep", lambda self, state: 1 // 0)
        await wait_for(lambda: fleet.core.tasks.dead)
        reply = await fleet.get("/health")
        assert (reply.status, reply.json()["status"], reply.json()["stage"]) == (503, "not_ready", "task-died")
        assert reply.json()["dead_tasks"] == [{"task": "fold-registry", "error": "ZeroDivisionError"}]
        live = await fleet.get("/live")
        assert (live.status, live.json()["status"]) == (503, "task-died")
        assert "fold-registry" in live.json()["message"]
        # A process that still recovers its views would not be ready for ever, either.
        starting = StartingApp(fleet.core, FrontendMetrics(CollectorRegistry()), HttpPathsConfig())
        assert (await call(starting, "/live", method="GET")).status == 503
        page = await page_of(fleet)
        assert page["dynamo_es_background_tasks_died_total", "task=fold-registry"] == 1
