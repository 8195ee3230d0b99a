"""The standalone services over HTTP: what was recorded from Dynamo's, and what was not."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq.asyncio

from dynamo_es.clock import ManualClock
from dynamo_es.errors import DynamoException
from dynamo_es.llm import run_kv_indexer, run_select_service, run_slot_tracker
from dynamo_es.publishers.zmq_relay import ZmqRelay
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.peer_recovery import PartitionDump
from dynamo_es.router.replica_events import ReplicaEvent, ReplicatedBooking
from dynamo_es.router.replica_link import ReplicaLink
from dynamo_es.router.selection_requests import PartitionKey
from dynamo_es.router.selection_service import SelectionService
from dynamo_es.services.command_lines import indexer_arguments, selection_arguments, tracker_arguments
from dynamo_es.services.kv_indexer import KvIndexer
from dynamo_es.services.kv_indexer_http import build_indexer_app
from dynamo_es.services.run import serve_kv_indexer, serve_selection, serve_slot_tracker
from dynamo_es.services.selection_http import build_selection_app
from dynamo_es.services.slot_tracker import EXPIRY_S, REPLICA_EXPIRY_S, SlotTracker
from dynamo_es.services.slot_tracker_http import build_slot_tracker_app
from tests.kafka.broker import free_port, free_ports
from tests.support.selection_player import Engine
from tests.support.service_transcripts import FOLDER, play, steps

LIMIT_S = 60.0
EVENTS = "its answer is about KV events of an engine, which the transcript does not hold"
REPLICA = "it went to another replica"
# Which of equal workers is chosen is chance.
CHANCE = ("worker_id", "dp_rank", "endpoint", "overlap", "effective_prefill_tokens", "selection_id")
HELP = json.loads((FOLDER / "cli_help.json").read_text())


def as_it_is(case: str, body: Any) -> Any:
    return body


# -- a listener that dies of what nobody thought of --------------------------------------------------------------------


async def dies(self: Any, *arguments: Any) -> None:
    raise ZeroDivisionError("a prompt that was in the way")


async def unhealthy(client: httpx.AsyncClient, path: str = "/health") -> Any:
    deadline = time.monotonic() + LIMIT_S
    while (reply := await client.get(path)).status_code == 200:
        assert time.monotonic() < deadline, "it stays healthy"
        await asyncio.sleep(0.01)
    assert reply.status_code == 503
    assert "prompt" not in reply.text
    return reply.json()


async def test_DISC_10_a_listener_that_dies_makes_a_kv_indexer_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    indexer = KvIndexer()
    monkeypatch.setattr(ZmqRelay, "run", dies)
    try:
        async with client_of(build_indexer_app(indexer)) as client:
            assert (await client.get("/health")).content == b""
            body = {"instance_id": 7, "model_name": "m", "block_size": 4, "endpoint": "tcp://127.0.0.1:9"}
            assert (await client.post("/register", json=body)).status_code == 201
            told = await unhealthy(client)
            assert (told["status"], told["stage"]) == ("notready", "task-died")
            assert told["dead_tasks"] == [{"task": "kv-events-7:0", "error": "ZeroDivisionError"}]
            (listed,) = (await client.get("/workers")).json()
            assert listed["listeners"]["0"]["status"] == "failed"
            assert "ZeroDivisionError" in listed["listeners"]["0"]["last_error"]
            page = (await client.get("/metrics")).text
            assert 'dynamo_es_background_tasks_died_total{task="kv-events"} 1.0' in page
    finally:
        await indexer.close()


async def test_an_instance_that_is_unregistered_is_no_death() -> None:
    indexer = KvIndexer()
    try:
        async with client_of(build_indexer_app(indexer)) as client:
            body = {"instance_id": 7, "model_name": "m", "block_size": 4, "endpoint": "tcp://127.0.0.1:9"}
            assert (await client.post("/register", json=body)).status_code == 201
            assert (await client.post("/unregister", json={"instance_id": 7, "model_name": "m"})).status_code == 200
            await indexer.close()
            assert (await client.get("/health")).status_code == 200
    finally:
        await indexer.close()


async def test_DISC_10_replica_sync_that_dies_makes_a_slot_tracker_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = SlotTracker(ManualClock().monotonic, lambda event: None, 1)
    link = ReplicaLink(free_port(), (), 1, tracker.on_replica_event)
    monkeypatch.setattr(ReplicaLink, "_receive", dies)
    try:
        async with client_of(build_slot_tracker_app(tracker, link)) as client:
            assert (await client.get("/health")).status_code == 200
            link.start()
            assert (await unhealthy(client))["dead_tasks"][0]["task"] == "replica-sync"
    finally:
        await link.close()


@pytest.mark.parametrize(("kind", "method", "name"), [
    (ZmqRelay, "run", "kv-events-7:0"), (ReplicaLink, "_receive", "replica-sync"),
])  # fmt: skip
async def test_DISC_10_a_task_that_dies_makes_a_selection_service_unhealthy(
    kind: type, method: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = SelectionService(env={}, clock=ManualClock(), rng=random.Random(1), replica_sync_port=free_port())
    monkeypatch.setattr(kind, method, dies)
    worker = {
        "worker_id": 7, "model_name": "m", "block_size": 4, "endpoint": "http://x",
        "kv_events_endpoint": "tcp://127.0.0.1:9", "data_parallel_size": 1,
    }  # fmt: skip
    try:
        async with client_of(build_selection_app(service)) as client:
            assert (await client.get("/health")).json() == {"status": "ok"}
            assert (await client.post("/workers", json=worker)).status_code < 300
            for path in ("/health", "/ready"):
                assert (await unhealthy(client, path))["dead_tasks"][0]["task"] == name
            assert service.ready()["ready"] is False
    finally:
        await service.shutdown_async()


# -- transcripts -------------------------------------------------------------------------------------------------------


async def test_the_slot_tracker_answers_as_recorded() -> None:
    clock = ManualClock()
    tracker = SlotTracker(clock.monotonic, lambda event: None, 1)
    link = ReplicaLink(free_port(), (), 1, tracker.on_replica_event)
    link.start()
    try:
        differences = await play(build_slot_tracker_app(tracker, link), "http_slot_tracker", {"062": REPLICA}, as_it_is)
    finally:
        await link.close()
    assert not differences, "\n".join(differences)


async def test_the_kv_indexer_answers_as_recorded() -> None:
    indexer = KvIndexer()
    elsewhere = dict.fromkeys(("038", "044", "046", "048", "049", "050", "054"), EVENTS)

    def masked(case: str, body: Any) -> Any:
        # A listener is active as soon as its task ran, which the first request after it need not wait for.
        return json.loads(json.dumps(body).replace("pending", "active"))

    try:
        differences = await play(build_indexer_app(indexer, test_endpoints=True), "http_kv_indexer", elsewhere, masked)
    finally:
        await indexer.close()
    assert not differences, "\n".join(differences)


def without_chance(case: str, body: Any) -> Any:
    """A choice without what is chance; loads as sums, since a booking is where the choice was."""
    if isinstance(body, dict) and "overlap" in body:
        return {name: value for name, value in body.items() if name not in CHANCE}
    if isinstance(body, dict) and set(body) == {
        "selection_id", "model_name", "routing_group", "worker_id", "dp_rank", "endpoint",
    }:  # fmt: skip
        return {name: body[name] for name in ("selection_id", "model_name", "routing_group")}
    if isinstance(body, list) and body and "loads" in body[0]:
        return [
            {
                **part,
                "loads": {
                    name: sum(row[name] for row in part["loads"])
                    for name in part["loads"][0]
                    if name not in ("worker_id", "dp_rank")
                },
            }
            for part in body
        ]
    if isinstance(body, dict) and "error" in body:
        return body["error"].partition(" (assigned to")[0]
    return body


async def test_the_selection_service_answers_as_recorded() -> None:
    service = SelectionService(env={}, clock=ManualClock(), rng=random.Random(1))
    elsewhere = {
        **dict.fromkeys(("100", "101", "104"), REPLICA),
        **dict.fromkeys(("096", "097"), "Dynamo's defect: an empty prompt ends the partition"),
        **dict.fromkeys(("099", "114"), EVENTS),
        "064": "its id was made up by the service that was recorded",
        "049": "whether blocks are shared hangs on where a choice among equals fell",
    }
    try:
        differences = await play(build_selection_app(service), "http_select_service", elsewhere, without_chance)
    finally:
        await service.shutdown_async()
    assert not differences, "\n".join(differences)


async def test_the_selection_service_scores_what_is_held_as_recorded() -> None:
    """The transcript's own dump says what the engines had told before its first question."""
    service = SelectionService(env={}, clock=ManualClock(), rng=random.Random(1))
    (dumped,) = (step["response"]["body"] for step in steps("http_select_service_overlap") if step["case"] == "021")
    held = msgspec.convert(dumped["m:default"], PartitionDump)

    def tell() -> None:
        partition = service._fleet.get(PartitionKey("m"))
        assert partition is not None
        for worker_id in (1, 2):
            held.apply(partition.index, worker_id)

    def masked(case: str, body: Any) -> Any:
        if case in ("023", "024", "025"):
            return without_chance(case, body)
        # How a dump's events are numbered means nothing.
        return json.loads(re.sub(r'"event_id": \d+', '"event_id": 0', json.dumps(body)))

    elsewhere = {
        **dict.fromkeys(("004", "007", "011", "020", "026"), "recorded without engines"),
        **dict.fromkeys(("014", "016"), "the output block of step 013 is missing in what was recorded"),
        "022": "two workers are equal, and it is chance which is chosen",
    }
    app = build_selection_app(service)
    try:
        differences = await play(app, "http_select_service_overlap", elsewhere, masked, {"004": tell})
    finally:
        await service.shutdown_async()
    assert not differences, "\n".join(differences)


# -- beyond the transcripts --------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def client_of(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
        yield client


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    context = zmq.asyncio.Context()
    yield Engine(context)
    context.destroy(linger=0)


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, medium: str | None = None) -> Any:
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "medium": medium,
    }  # fmt: skip


async def test_what_engines_hold_is_counted_in_tokens_and_by_tier(engine: Engine) -> None:
    """As step 044 of the transcript: ranks 0 and 1 of one instance, and a block in host memory behind rank 0's."""
    indexer = KvIndexer()
    other_context = zmq.asyncio.Context()
    other = Engine(other_context)
    prompt = {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 14], "model_name": "m"}
    instance = {"instance_id": 7, "model_name": "m", "block_size": 4}
    try:
        async with client_of(build_indexer_app(indexer)) as client:
            for rank, source in ((0, engine), (1, other)):
                body = {**instance, "endpoint": source.url, "dp_rank": rank}
                assert (await client.post("/register", json=body)).status_code == 201
                await source.subscribed()
            await engine.publish([0.0, [stored([1, 2], list(range(1, 9)))], None])
            await engine.publish([0.0, [stored([3], [11, 12, 13, 14], 2, "CPU")], None])
            await other.publish([0.0, [stored([1], [1, 2, 3, 4])], 1])

            async def held() -> Any:
                return (await client.post("/query", json=prompt)).json()

            wanted = {
                "scores": {"7": {"0": 8, "1": 4}},
                "frequencies": [],
                "instances": {"7": {"longest_matched": 12, "gpu": 8, "dp": {"0": 8, "1": 4}, "cpu": 12, "disk": 12}},
            }
            async with asyncio.timeout(LIMIT_S):
                while (found := await held()) != wanted:
                    await asyncio.sleep(0.01)
            assert found == wanted
            hashed = {"block_hashes": [-3803038269031200164], "model_name": "m"}
            scores = (await client.post("/query_by_hash", json=hashed)).json()["scores"]
            assert scores == {"7": {"0": 4, "1": 4}}
            salted = await client.post("/query", json={**prompt, "cache_salt": "x"})
            assert salted.json()["scores"] == {}
            dump = (await client.get("/dump")).json()["m:default"]
            assert dump["block_size"] == 4
            assert {event["storage_tier"] for event in dump["events"]} == {"device", "host_pinned"}
            (listed,) = (await client.get("/workers")).json()
            assert listed["status"] == "active"
            page = (await client.get("/metrics")).text
            assert "dynamo_kvindexer_listeners 2.0" in page
            assert 'dynamo_kvindexer_request_duration_seconds_count{endpoint="/query",method="POST"}' in page

            await client.post("/unregister", json={"instance_id": 7, "model_name": "m", "dp_rank": 1})
            assert (await held())["scores"] == {"7": {"0": 8}}
    finally:
        await indexer.close()
        other_context.destroy(linger=0)


async def serve(start: Callable[..., Any], arguments: Any, *more: Any) -> tuple[asyncio.Event, asyncio.Task[None], int]:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.ensure_future(start(arguments, stop, *more, on_ready=ready.set_result))
    async with asyncio.timeout(LIMIT_S):
        await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    return stop, task, ready.result()


async def test_an_indexer_takes_over_a_peer_s_index_and_writes_an_access_log(engine: Engine, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    first = indexer_arguments([
        "--port", "0", "--block-size", "4", "--workers", f"7={engine.url}", "--model-name", "m",
        "--access-log", str(log), "--trace-id-header", "X-Trace",
    ])  # fmt: skip
    stop, task, port = await serve(serve_kv_indexer, first, {})
    await engine.subscribed()
    await engine.publish([0.0, [stored([1], [1, 2, 3, 4])], None])
    query = {"token_ids": [1, 2, 3, 4], "model_name": "m"}
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        url = f"http://127.0.0.1:{port}"
        async with asyncio.timeout(LIMIT_S):
            while not (await client.post(f"{url}/query", json=query, headers={"x-trace": "t1"})).json()["scores"]:
                await asyncio.sleep(0.01)
        second = indexer_arguments(["--port", "0", "--peers", f"http://127.0.0.1:9,{url}"])
        stop_second, task_second, port_second = await serve(serve_kv_indexer, second, {})
        other = f"http://127.0.0.1:{port_second}"
        assert sorted((await client.get(f"{other}/peers")).json()) == sorted(["http://127.0.0.1:9", url])
        body = {"instance_id": 7, "endpoint": engine.url, "model_name": "m", "block_size": 4}
        assert (await client.post(f"{other}/register", json=body)).status_code == 201
        assert (await client.post(f"{other}/query", json=query)).json()["scores"] == {"7": {"0": 4}}
        assert (await client.post(f"{other}/test/pause_listener", json={"instance_id": 7})).status_code == 404
    for event, running in ((stop, task), (stop_second, task_second)):
        event.set()
        await running
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["trace_id"] for line in lines if line["path"] == "/query"} == {"t1"}
    assert list(lines[0]) == ["ts", "trace_id", "method", "path", "model", "status", "duration_ms"]


async def test_slot_trackers_tell_each_other() -> None:
    ports = free_ports(2)
    running = []
    for own, peer in (ports, ports[::-1]):
        arguments = tracker_arguments([
            "--port", "0", "--replica-sync-port", str(own), "--replica-sync-peers", f"tcp://127.0.0.1:{peer}",
        ])  # fmt: skip
        running.append(await serve(serve_slot_tracker, arguments))
    urls = [f"http://127.0.0.1:{port}" for _, _, port in running]
    worker = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 1}
    async with httpx.AsyncClient(timeout=LIMIT_S) as client:
        for url in urls:
            assert (await client.post(f"{url}/register", json=worker)).status_code == 201

        async def booked() -> int:
            (row,) = (await client.get(f"{urls[1]}/loads")).json()
            return int(row["active_prefill_tokens"])

        # What is told before the sockets are connected is lost: one booking after the other, until one arrives.
        booking = {"model_name": "m", "worker_id": 7, "dp_rank": 0, "sequence_hashes": [1, -2], "new_isl_tokens": 32}
        number = 0
        async with asyncio.timeout(LIMIT_S):
            while not await booked():
                number += 1
                added = await client.post(f"{urls[0]}/add", json={**booking, "request_id": f"r{number}"})
                assert added.status_code == 201
                await asyncio.sleep(0.02)
            while await booked():
                for end in range(1, number + 1):
                    body = {"model_name": "m", "request_id": f"r{end}"}
                    assert (await client.post(f"{urls[0]}/free", json=body)).status_code == 200
    for stop, task, _ in running:
        stop.set()
        await task


def test_bookings_that_nobody_ends_expire() -> None:
    now = [0.0]
    told: list[ReplicaEvent] = []
    tracker = SlotTracker(lambda: now[0], told.append, 1)
    key, rank = PartitionKey("m"), WorkerRank(7, 0)
    tracker.register(key, 7, 16, 0, 1)
    tracker.add(key, "own", rank, [1], 10)
    tracker.on_replica_event(ReplicaEvent(key, 16, "other", rank, ReplicatedBooking([2], 20), 2, None))
    tracker.on_replica_event(ReplicaEvent(key, 32, "no", rank, ReplicatedBooking([3], 20), 2, None))
    assert tracker.loads()[0]["active_prefill_tokens"] == 30
    now[0] = REPLICA_EXPIRY_S + 1
    assert tracker.loads()[0]["active_prefill_tokens"] == 10
    now[0] = EXPIRY_S + 1
    assert tracker.loads()[0]["active_prefill_tokens"] == 0
    assert [event.request_id for event in told] == ["own"]


async def test_a_selection_service_by_its_command_line() -> None:
    arguments = selection_arguments([
        "--port", "0", "--selection-cache-ttl-secs", "0.5", "--selection-cache-max-entries", "0",
        "--no-router-assume-kv-reuse",
    ])  # fmt: skip
    stop, task, port = await serve(serve_selection, arguments, {"DYN_ROUTER_USE_KV_EVENTS": "false"})
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as client:
        body = {"worker_id": 1, "endpoint": "http://w1", "block_size": 4}
        assert (await client.post("/workers", json=body)).json()["lifecycle"] == "schedulable"
        chosen = (await client.post("/select", json={"token_ids": [1, 2, 3, 4], "selection_id": "s"})).json()
        assert chosen["endpoint"] == "http://w1"
        assert (await client.post("/reservations", json={"selection_id": "s"})).status_code == 404  # none is kept
        empty = await client.post("/select", json={"token_ids": []})
        assert (empty.status_code, empty.json()) == (400, {"error": "isl_tokens must be greater than 0"})
        assert (await client.post("/select", json={"token_ids": [1]})).status_code == 200
        nested = await client.post("/select", json={"token_ids": [1], "pinned_worker": {"worker_id": 1}})
        assert nested.status_code == 422
        assert "missing field `dp_rank`" in nested.json()["error"]
    stop.set()
    await task


@pytest.mark.parametrize(
    ("run", "arguments", "text"),
    [
        (run_kv_indexer, ["--workers", "1=tcp://h:1"], HELP["errors"]["--block-size missing with --workers"]),
        (run_kv_indexer, ["--block-size", "4", "--workers", "1=notaurl"], HELP["errors"]["bad worker endpoint"]),
        (run_slot_tracker, ["--replica-sync-port", "1", "--replica-sync-peers", "http://a:1"],
         HELP["errors"]["bad replica peer"]),
        (run_select_service, ["--router-tracking-hash", "keyed-xxh3-v1"], HELP["errors"]["keyed hash without key"]),
        (run_slot_tracker, ["--bogus"], "unrecognized arguments: --bogus"),
        (run_slot_tracker, ["--port", "70000"], "'70000' is no whole number from 0 to 65535"),
        (run_kv_indexer, ["--block-size", "4", "--workers", "x=tcp://h:1"], "worker_id[:dp_rank]=zmq_address"),
    ],
)  # fmt: skip
def test_command_lines_that_are_wrong(run: Callable[[list[str]], None], arguments: list[str], text: str) -> None:
    with pytest.raises(DynamoException) as raised:
        run(arguments)
    assert text.removeprefix("Exception: ") in str(raised.value)


@pytest.mark.parametrize(
    ("name", "run"),
    [("kv_indexer", run_kv_indexer), ("select_service", run_select_service), ("slot_tracker", run_slot_tracker)],
)
def test_the_flags_are_dynamos(name: str, run: Callable[[list[str]], None]) -> None:
    with pytest.raises(DynamoException) as raised:
        run(["--help"])
    recorded = {word.strip(",") for word in HELP["help"][name].split() if word.startswith("--")}
    assert recorded <= {word.strip(",") for word in str(raised.value).split() if word.startswith("--")}


def test_a_service_runs_until_it_is_interrupted() -> None:
    port = free_port()
    script = "import sys; from dynamo_es.llm import run_slot_tracker; run_slot_tracker(sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", script, "--port", str(port)])
    try:
        for _ in range(6000):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None
            time.sleep(0.01)
        with pytest.raises(DynamoException, match="cannot listen on"):
            run_slot_tracker(["--port", str(port)])
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
