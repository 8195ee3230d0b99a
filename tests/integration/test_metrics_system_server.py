"""The system status server of workers: off by default, what its routes say, and who it speaks for."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, MockConfig, StateConfig, SystemConfig, WorkerConfig
from dynamo_es.engines.mock_worker import MockWorkerSettings
from dynamo_es.http_listen import AddressUnavailable
from dynamo_es.llm import KvRouter
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.runtime import DistributedRuntime, settings_from_env
from tests.support.fleet import Fleet
from tests.support.mock_process import mock_process
from tests.support.pages import Page
from tests.support.runtimes import FAST, SharedLog, serving, wait_for

ANY_PORT = SystemConfig(port=0, host="127.0.0.1")


def settings(system=ANY_PORT, role="worker"):
    return RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), FAST, role, system)


@contextlib.asynccontextmanager
async def a_runtime(log, system=ANY_PORT, role="worker"):
    runtime = DistributedRuntime(
        asyncio.get_running_loop(), "mem", "tcp", settings=settings(system, role), log=SharedLog(log)
    )
    try:
        yield runtime
    finally:
        await runtime.close()


async def get(runtime, path):
    async with httpx.AsyncClient(base_url=runtime.system_status_server_url()) as http:
        return await http.get(path)


async def echo(request, context):
    if request == "fail":
        raise ValueError("no")
    yield request


def test_it_is_off_unless_DYN_SYSTEM_PORT_says_otherwise():
    assert settings_from_env({}).system.port == -1
    assert settings_from_env({"DYN_SYSTEM_PORT": "8081"}).system == SystemConfig(8081, "0.0.0.0")


async def test_off_means_off(log):
    async with a_runtime(log, SystemConfig()) as runtime:
        await runtime.core.start()
        assert runtime.core.system is None
        assert runtime.system_status_server_url() is None


async def test_a_worker_is_ready_once_it_serves_an_endpoint(log):
    async with a_runtime(log) as runtime:
        await runtime.core.start()
        before = await get(runtime, "/health")
        assert (before.status_code, before.json()["status"], before.json()["stage"]) == (503, "notready", "not-serving")
        async with serving(runtime, "ns.comp.generate", echo):
            reply = await get(runtime, "/health")
            body = reply.json()
            assert (reply.status_code, body["status"]) == (200, "ready")
            assert body["endpoints"] == {"generate": "ready"}
            assert set(body["uptime"]) == {"secs", "nanos"}
            assert body["log"]["state"] == "ok"
            assert body["views"]["registry"]["lag_records"] == 0
            runtime.set_health_status(False)
            assert (await get(runtime, "/health")).status_code == 503
            assert (await get(runtime, "/live")).status_code == 200
            runtime.set_health_status(True)
            assert (await get(runtime, "/health")).status_code == 200


async def test_metrics_of_a_worker_have_dynamos_names_for_its_endpoint(log):
    async with a_runtime(log) as runtime, serving(runtime, "ns.comp.generate", echo):
        client = await runtime.endpoint("ns.comp.generate").client()
        for request in ("a", "b"):
            assert [item async for item in await client.generate(request, annotated=False)] == [request]
        with pytest.raises(ValueError, match="no"):
            [item async for item in await client.generate("fail", annotated=False)]
        reply = await get(runtime, "/metrics")
        assert reply.headers["content-type"].startswith("text/plain")
        page = Page(reply.text)
        where = ("dynamo_namespace=ns", "dynamo_component=comp", "dynamo_endpoint=generate")
        assert page["dynamo_component_requests_total", *where] == 3
        assert page["dynamo_component_errors_total", *where, "error_type=generate"] == 1
        assert page["dynamo_component_inflight_requests", *where] == 0
        assert page["dynamo_component_uptime_seconds"] > 0
        assert page["dynamo_es_fold_lag_records", "fold=registry", "topic=registry", "partition=0"] == 0
        assert page["dynamo_es_log_state", "state=ok"] == 1
        (info,) = page.labels_of("dynamo_es_process_info")
        assert "role=worker" in info
        assert page["process_resident_memory_bytes"] > 0


async def test_engine_routes_answer_and_report(log):
    async def taints(body):
        if not isinstance(body.get("taints"), list):
            raise ValueError("'taints' must be a JSON array of strings")
        return {"status": "ok", "taints": sorted(body["taints"])}

    async with a_runtime(log) as runtime:
        runtime.register_engine_route("update/model_taints", taints)
        await runtime.core.start()
        async with httpx.AsyncClient(base_url=runtime.system_status_server_url()) as http:
            good = await http.post("/engine/update/model_taints", json={"taints": ["b", "a"]})
            assert (good.status_code, good.json()) == (200, {"status": "ok", "taints": ["a", "b"]})
            bad = await http.post("/engine/update/model_taints")
            assert bad.status_code == 500
            assert "must be a JSON array" in bad.json()["message"]
            assert (await http.post("/engine/update/model_taints", content=b"{")).status_code == 400
            assert (await http.post("/engine/update/model_taints", content=b" " * 1_100_000)).status_code == 413
            assert (await http.post("/engine/none", json={})).status_code == 404
            assert (await http.get("/engine/none")).status_code == 405
            assert (await http.get("/nowhere")).json()["error"] == "Not Found"


class SlowToStart(SharedLog):
    """A log that is not there until ``open`` is set."""

    def __init__(self, log):
        super().__init__(log)
        self.open = asyncio.Event()

    async def start(self):
        await self.open.wait()


async def test_a_start_that_waits_for_its_log_can_be_watched(log):
    slow = SlowToStart(log)
    core = RuntimeCore(
        settings(role="router"), loop=asyncio.get_running_loop(), clock=SystemClock(), rng=random.Random(2), log=slow
    )
    starting = asyncio.create_task(core.start())
    await wait_for(lambda: core.system is not None and core.system.url != "http://127.0.0.1:0")
    async with httpx.AsyncClient(base_url=core.system.url) as http:

        async def health():
            with contextlib.suppress(httpx.ConnectError):
                return await http.get("/health")

        while (reply := await health()) is None:
            await asyncio.sleep(0.005)
        assert (reply.status_code, reply.json()["stage"], reply.json()["log"]["state"]) == (503, "starting", "away")
        assert (await http.get("/live")).status_code == 200
        assert Page((await http.get("/metrics")).text)["dynamo_es_log_state", "state=away"] == 1
        slow.open.set()
        await starting
        # A router serves no endpoint, and is ready all the same.
        assert (await http.get("/health")).status_code == 200
        core.shutdown_event.set()
        assert (await http.get("/health")).json()["stage"] == "draining"
        assert (await http.get("/live")).status_code == 503
    await core.close()


async def test_a_router_of_a_python_program_shows_its_index_and_bookings(log):
    async with a_runtime(log, role="router") as runtime:
        for _ in range(2):  # Two routers have views of their own; a page has each name once.
            await KvRouter(runtime.endpoint("dynamo.backend.generate"), 16).start()
        page = Page((await get(runtime, "/metrics")).text)
        assert page["dynamo_es_index_sources", "trust=exact"] == 0
        assert page["dynamo_es_open_bookings"] == 0
        assert page["dynamo_es_snapshots_total", "result=failed"] == 0
        assert page["dynamo_es_fold_state", "fold=kv-index", "state=live"] + page[
            "dynamo_es_fold_state", "fold=kv-index", "state=catching-up"
        ] == 2  # fmt: skip
        assert (await get(runtime, "/health")).status_code == 200


async def test_a_port_in_use_is_told_and_leaves_nothing_open(log):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with a_runtime(log, SystemConfig(port=port, host="127.0.0.1")) as runtime:
            with pytest.raises(AddressUnavailable, match=rf"127\.0\.0\.1:{port}.*--system-port"):
                await runtime.core.start()


async def test_a_start_that_fails_gives_its_port_back():
    class Away(SharedLog):
        async def start(self):
            raise LogUnavailable("no broker answers")

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    core = RuntimeCore(
        settings(SystemConfig(port=port, host="127.0.0.1")), loop=asyncio.get_running_loop(), clock=SystemClock(),
        rng=random.Random(2), log=Away(None),
    )  # fmt: skip
    with pytest.raises(LogUnavailable):
        await core.start()
    with socket.create_server(("127.0.0.1", port)):
        pass


async def test_one_server_speaks_for_all_workers_of_a_process(log):
    mock = MockWorkerSettings(
        settings(), WorkerConfig(model_name="m"), MockConfig(num_workers=3, speedup_ratio=0.0, num_gpu_blocks=64)
    )
    async with mock_process(mock, log) as first, httpx.AsyncClient(base_url=first.system.url) as http:

        async def page():
            return Page((await http.get("/metrics")).text)

        async with asyncio.timeout(60):
            while (await page()).samples.get(("dynamo_es_publisher_batches_total", frozenset())) != 3:
                await asyncio.sleep(0.01)
        shown = await page()
        assert shown["dynamo_es_publisher_incarnations_total"] == 3
        assert shown["dynamo_es_publisher_losses_total"] == 0
        assert shown["dynamo_es_publisher_blocks", "state=known"] == 0
        assert shown["dynamo_es_log_buffer_limit_records"] == 100_000  # One buffer for all.
        assert shown["dynamo_es_registry_entries", "kind=lease"] == 3
        answer = await http.post("/engine/update/model_taints", json={"taints": ["gpu=h100"]})
        assert answer.json() == {"status": "ok", "taints": ["gpu=h100"]}
        cards = first.registry.state.models
        await wait_for(lambda: [card.runtime_config.get("taints") for card in cards.values()] == [["gpu=h100"]] * 3)


async def test_the_command_line_serves_it(tmp_path):
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        await fleet.worker(1, "--system-port", str(port), "--system-host", "127.0.0.1")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            async with asyncio.timeout(60):
                while (await http.get("/health")).status_code != 200:
                    await asyncio.sleep(0.02)
            assert (await http.get("/health")).json()["endpoints"] == {"generate": "ready"}
            page = Page((await http.get("/metrics")).text)
            assert page["dynamo_es_registry_instances", "state=serving"] == 1
    finally:
        await fleet.close()
