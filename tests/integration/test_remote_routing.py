"""Routers and frontends that ask indexers (``use_remote_indexer``), as users start them; indexers that are killed."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import httpx
import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import (
    FrontendConfig,
    LogConfig,
    MockConfig,
    RouterConfig,
    RuntimeConfig,
    StateConfig,
    WorkerConfig,
)
from dynamo_es.engines.mock_worker import MockWorkerSettings, run_mock_workers
from dynamo_es.errors import ConfigError
from dynamo_es.frontend.main import FrontendSettings, run_frontend
from dynamo_es.frontend.routing_plan import plan_routing
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.partitioning import partition_for
from dynamo_es.router.config import KvRouterConfig
from dynamo_es.router.errors import IndexElsewhere
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.router.remote_index import DEFAULT_DEADLINE_S
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.runtime import DistributedRuntime
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import Instance, key_instance, key_model
from schemas.requests import REQUESTS, Routed
from tests.support.fleet import Fleet
from tests.support.index_fleet import ALL, BLOCK, PATIENT, TOPIC, IndexFleet, index_fleet
from tests.support.pages import Page
from tests.support.runtimes import SharedLog, make_runtime, wait_for

ENDPOINT = "dynamo.backend.generate"
WHERE = ("dynamo", "backend", "generate")
# One source of KV events in each partition.
WORKERS = [
    next(number for number in range(1, 1_000) if partition_for(key_kv_events("m", number, 0), len(ALL)) == partition)
    for partition in sorted(ALL)
]


def prompt_of(worker: int) -> list[int]:
    """16 tokens that this worker has cached."""
    return [worker * 100 + offset for offset in range(16)]


async def register_workers(runtime: DistributedRuntime) -> None:
    """Workers that take no requests, but are there; all live as long as the runtime."""
    core = runtime.core
    for number in WORKERS:
        key = key_instance(*WHERE, number)
        await core.registration.register(key, Instance(1, *WHERE, number, 0, "zmq", "tcp://127.0.0.1:1"))
        card = make_card(
            read_model_facts(BUILTIN_MODEL), WHERE, number, name="m", block_size=BLOCK, runtime_config={}
        )  # fmt: skip
        await core.registration.register(key_model(*WHERE, number), card)


async def publish_prompts(runtime: DistributedRuntime) -> None:
    """Each worker stores its own prompt, in two tiers."""
    for number in WORKERS:
        column = pack_u64(hash_prompt(prompt_of(number), BLOCK)[1])
        events = [BlocksStored("device", None, column[:24], column[:24]), BlocksStored("disk", None, column, column)]
        batch = KvEvents(1, "m", number, 0, 1, 0, BLOCK, True, events)
        await runtime.core.appender.append(KV_EVENTS, key_kv_events("m", number, 0), batch)


async def overlaps(router: KvRouter, worker: int) -> dict[int, tuple[int, int]]:
    """Device and disk blocks of a worker's prompt, by worker that has some."""
    scores = await router.get_overlap_scores(prompt_of(worker))
    rows = {row["worker_id"]: (row["device_blocks"], row["disk_extension_blocks"]) for row in scores["workers"]}
    return {number: depths for number, depths in rows.items() if any(depths)}


async def knows_all(router: KvRouter) -> bool:
    return all([await overlaps(router, worker) == {worker: (3, 1)} for worker in WORKERS])


async def until_known(router: KvRouter, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not await knows_all(router):
            await asyncio.sleep(0.02)


async def routed(fleet: IndexFleet, count: int) -> list[Routed]:
    """The first ``count`` decisions that the log has."""
    topic = REQUESTS.qualified("dynamo")
    codec, found = TopicCodec(REQUESTS), []
    reader = fleet.log.reader({TopicPartition(topic, number): 0 for number in range(REQUESTS.partitions)})
    async with asyncio.timeout(60):
        while len(found) < count:
            for records in (await reader.poll(timeout_s=1)).values():
                events = [codec.decode(record.value, record.headers) for record in records]
                found += [event for event in events if isinstance(event, Routed)]
    await reader.close()
    return found


async def test_a_router_without_an_index_decides_as_one_that_has_it_and_records_how_far_indexers_were():
    async with index_fleet() as fleet:
        workers = await fleet.process("worker")
        await register_workers(workers)
        await publish_prompts(workers)
        for _ in range(2):
            await fleet.indexer()
        await fleet.wait_covered()
        runtime = await fleet.process("router")
        router = KvRouter(
            runtime.endpoint(ENDPOINT), BLOCK, KvRouterConfig(use_remote_indexer=True), remote_indexer_timeout_s=2.0
        )
        local = KvRouter((await fleet.process("router")).endpoint(ENDPOINT), BLOCK)
        await until_known(local)
        await until_known(router)
        assert "kv-index" not in {runner.fold.name for runner in runtime.core.runners()}
        for number, worker in enumerate(WORKERS):
            tokens = prompt_of(worker)
            assert await router.get_overlap_scores(tokens) == await local.get_overlap_scores(tokens)
            assert await router.best_worker(tokens, request_id=f"r{number}") == (worker, 0, 3)
        events = await routed(fleet, len(WORKERS))
        ends = {number: bounds.end for number, bounds in (await fleet.log.bounds(TOPIC)).items()}
        for event in events:
            seen = {row.partition: row.next_offset for row in event.positions if row.topic == TOPIC}
            assert seen == ends
        with pytest.raises(IndexElsewhere, match="use_remote_indexer"):
            await router.dump_events()


async def test_a_router_that_serves_its_index_is_asked_by_one_that_has_none():
    async with index_fleet() as fleet:
        workers = await fleet.process("worker")
        await register_workers(workers)
        await publish_prompts(workers)
        serving = await fleet.process("router")
        for _ in range(2):
            # The second one of a process finds that it is served.
            await KvRouter(serving.endpoint(ENDPOINT), BLOCK, KvRouterConfig(serve_indexer=True)).start()
        asking = await fleet.process("router")
        router = KvRouter(
            asking.endpoint(ENDPOINT), BLOCK, KvRouterConfig(use_remote_indexer=True), remote_indexer_timeout_s=2.0
        )
        await until_known(router)
        assert list(fleet.owners()) == [serving.core.instance_id]
        # Without it decisions go on; the wait of a question to one that is gone is short.
        await serving.close()
        began = time.monotonic()
        number, _, overlap = await router.best_worker(prompt_of(WORKERS[0]))
        assert number in WORKERS
        assert overlap == 0
        assert time.monotonic() - began < 1.0


async def test_a_frontend_without_an_index_shows_who_has_it(monkeypatch):
    async with index_fleet() as fleet:
        indexers = [await fleet.indexer("0-3"), await fleet.indexer("4-7")]
        runtime = RuntimeSettings(LogConfig(url="memory://"), StateConfig(), PATIENT, "frontend")
        worker = MockWorkerSettings(
            RuntimeSettings(LogConfig(url="memory://"), StateConfig(), PATIENT, "worker"),
            WorkerConfig(model_name="m"), MockConfig(speedup_ratio=0.0, block_size=4),
        )  # fmt: skip
        settings = FrontendSettings(
            runtime,
            FrontendConfig(http_host="127.0.0.1", http_port=0, router_mode="kv"),
            RouterConfig(use_remote_indexer=True, remote_indexer_timeout_ms=2_000.0),
        )
        stop, ready = asyncio.Event(), asyncio.Event()
        urls: list[str] = []

        def on_ready(server: Any) -> None:
            urls.append(f"http://{server.host}:{server.port}")
            ready.set()

        arguments: Any = {"clock": SystemClock(), "log": SharedLog(fleet.log)}
        tasks = [
            asyncio.create_task(run_frontend(settings, stop, rng=random.Random(5), on_ready=on_ready, **arguments)),
            asyncio.create_task(run_mock_workers(worker, stop, rng=random.Random(6), **arguments)),
        ]
        async with asyncio.timeout(60):
            await ready.wait()
        async with httpx.AsyncClient(base_url=urls[0], timeout=60) as http:

            async def ask() -> httpx.Response:
                return await http.post("/v1/completions", json={"model": "m", "prompt": "x" * 64, "max_tokens": 2})

            async def health() -> dict[str, Any]:
                return (await http.get("/health")).json()

            async with asyncio.timeout(60):
                while (await ask()).status_code != 200:
                    await asyncio.sleep(0.05)
            report = await health()
            assert report["status"] == "healthy"
            assert report["snapshots"] is None
            shown = report["remote_index"]
            assert shown["missing_partitions"] == []
            assert sorted(owner["partitions"] for owner in shown["owners"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]

            async def hits() -> float:
                await ask()
                return Page((await http.get("/metrics")).text)[
                    "dynamo_es_routing_decisions_total", "model=m", "reason=overlap"
                ]

            async with asyncio.timeout(60):
                while True:
                    try:
                        if await hits():
                            break
                    except KeyError:
                        await asyncio.sleep(0.02)
            page = Page((await http.get("/metrics")).text)
            assert page["dynamo_es_remote_index_lookups_total", "coverage=full"] >= 2
            assert page["dynamo_es_remote_index_questions_total", "result=answered"] >= 4
            assert page["dynamo_es_remote_index_missing_partitions"] == 0
            assert page["dynamo_es_remote_index_owners", "state=asked"] == 2
            assert page["dynamo_es_registry_instances", "state=serving"] == 1
            await indexers[1].end()
            await wait_for(lambda: len(fleet.owners()) == 1)

            async def degraded() -> bool:
                report = await health()
                return (report["status"], report["remote_index"]["missing_partitions"]) == ("degraded", [4, 5, 6, 7])

            async with asyncio.timeout(60):
                while not await degraded():
                    await asyncio.sleep(0.02)
            assert (await ask()).status_code == 200
            page = Page((await http.get("/metrics")).text)
            assert page["dynamo_es_remote_index_missing_partitions"] == 4
            assert page["dynamo_es_remote_index_lookups_total", "coverage=partial"] >= 1
        stop.set()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(
    ("router", "mode", "text"),
    [
        (RouterConfig(serve_indexer=True), "random", "--serve-indexer requires --router-mode=kv"),
        (
            RouterConfig(serve_indexer=True, use_remote_indexer=True),
            "kv",
            "--serve-indexer and --use-remote-indexer are mutually exclusive",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(router, mode, text):
    with pytest.raises(ConfigError, match=f"^{text}$"):
        plan_routing(FrontendConfig(router_mode=mode), router)


def test_a_frontend_and_a_router_wait_as_long_by_default():
    assert RouterConfig().remote_indexer_timeout_ms / 1000 == DEFAULT_DEADLINE_S


def test_a_timeout_that_is_none_is_refused():
    for timeout_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="remote_indexer_timeout_s must be greater than 0"):
            KvRouter(None, 4, remote_indexer_timeout_s=timeout_s)  # type: ignore[arg-type]


async def start_indexers(fleet: Fleet, *numbers: int) -> list[Any]:
    started = [
        await fleet.start(
            f"indexer-{number}", "indexer", "--state-dir", str(fleet.folder / f"state-{number}"),
            "--state-flush-interval", "0.1", "--snapshot-interval", "0.5", "--system-port", "0",
            "--system-host", "127.0.0.1",
        )
        for number in numbers
    ]  # fmt: skip
    await asyncio.gather(*(process.wait_ready() for process in started))
    return started


@pytest.mark.crash
async def test_when_an_indexer_is_killed_decisions_go_on_in_time_and_another_takes_its_part(tmp_path):
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    lease = RuntimeConfig(lease_ttl_s=2.0, heartbeat_s=0.4, drain_timeout_s=5.0, connect_timeout_s=2.0)
    runtimes = [
        make_runtime(url=fleet.url, role=role, runtime=lease, state=StateConfig()) for role in ("worker", "router")
    ]
    try:
        killed, other = await start_indexers(fleet, 1, 2)
        workers, routing = runtimes
        for runtime in runtimes:
            await runtime.core.start()
        await register_workers(workers)
        await publish_prompts(workers)
        deadline_s = 0.25
        router = KvRouter(
            routing.endpoint(ENDPOINT), BLOCK, KvRouterConfig(use_remote_indexer=True),
            remote_indexer_timeout_s=deadline_s,
        )  # fmt: skip
        await until_known(router)
        killed.process.kill()
        known = 0
        for worker in WORKERS * 3:
            began = time.monotonic()
            number, _, overlap = await router.best_worker(prompt_of(worker))
            assert time.monotonic() - began < deadline_s + 0.5
            assert number in WORKERS
            assert (number == worker) or not overlap
            known += bool(overlap)
        # Half of the partitions are answered for, until the lease of the killed one is over.
        assert known == len(WORKERS) * 3 // 2
        await until_known(router)
        assert await other.end() == 0
        assert "partition" in other.log()
    finally:
        for runtime in reversed(runtimes):
            await runtime.close()
        await fleet.close()


async def test_an_indexer_that_ends_leaves_its_part_to_another_process(tmp_path):
    fleet = Fleet(f"embedded://{tmp_path}/log", tmp_path)
    try:
        first, second = await start_indexers(fleet, 1, 2)
        began = time.monotonic()
        assert await first.end() == 0
        assert time.monotonic() - began < 15
        url = next(line.split()[-1] for line in second.log().splitlines() if "system status on" in line)
        async with httpx.AsyncClient(base_url=url) as http:
            body = (await http.get("/health")).json()
            assert body["status"] == "ready"
            assert body["index"]["wanted"] == sorted(ALL)
            assert all(entry["whole"] and entry["registered"] for entry in body["index"]["partitions"].values())
            page = Page((await http.get("/metrics")).text)
            for state in ("wanted", "followed", "whole", "registered"):
                assert page["dynamo_es_indexer_partitions", f"state={state}"] == len(ALL)
            assert page["dynamo_es_fold_lag_records", "fold=kv-index", "topic=kv-events", "partition=7"] == 0
        assert await second.end() == 0
    finally:
        await fleet.close()


@pytest.mark.parametrize("text", ["8", "x", "3-1"])
def test_a_wrong_list_of_partitions_is_one_line(text, capsys, tmp_path):
    from dynamo_es.cli.main import main

    assert main(["indexer", "--partitions", text, "--log", f"embedded://{tmp_path}/log"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dynamo-es: --partitions={text}: ")
    assert not (tmp_path / "log").exists()
