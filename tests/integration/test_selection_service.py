"""``SelectionService`` beyond what was recorded: engines that restart, peers, waiting, age, keys."""

from __future__ import annotations

import asyncio
import http.server
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from dynamo_es.clock import ManualClock
from dynamo_es.errors import ConfigError
from dynamo_es.router.errors import SelectionServiceError
from dynamo_es.router.selection_service import SelectionService
from tests.kafka.broker import free_port, free_ports
from tests.support.runtimes import wait_for
from tests.support.selection_player import Engine

GOLDEN = Path(__file__).parents[1] / "data/golden/router"
TOKENS = list(range(16))
NO_EVENTS = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
QUEUE = {**NO_EVENTS, "DYN_ROUTER_QUEUE_THRESHOLD": "0.0"}


class Services:
    """Makes services, and shuts them down at the end."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.made: list[SelectionService] = []

    def make(self, env: dict[str, str] | None = None, **options: Any) -> SelectionService:
        service = SelectionService(
            env=NO_EVENTS if env is None else env, clock=self.clock, rng=random.Random(len(self.made)), **options
        )
        self.made.append(service)
        return service


@pytest.fixture
async def services():
    services = Services()
    yield services
    for service in services.made:
        await service.shutdown_async()


@pytest.fixture
async def engine():
    context = zmq.asyncio.Context()
    yield Engine(context)
    context.destroy(linger=0)


def worker(number=1, **members: Any) -> dict[str, Any]:
    return {"worker_id": number, "endpoint": f"http://w{number}", "block_size": 4, **members}


def loads(service) -> dict[int, tuple[int, int, int]]:
    """By worker: prefill tokens, blocks, requests."""
    return {
        row["worker_id"]: (
            row["potential_prefill_tokens"], row["potential_decode_blocks"], row["active_requests"],
        )
        for partition in service.loads() for row in partition["loads"]
    }  # fmt: skip


def stored(hashes, tokens, parent=None, medium=None):
    return {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens,
        "block_size": 4, "medium": medium,
    }  # fmt: skip


async def device_blocks(service) -> int:
    return (await service.overlap_scores({"token_ids": TOKENS}))["workers"][0]["device_blocks"]


async def wait_for_blocks(service, count):
    async with asyncio.timeout(60):
        while await device_blocks(service) != count:
            await asyncio.sleep(0.002)


async def fails(call: Any, kind: str, text: str) -> SelectionServiceError:
    with pytest.raises(SelectionServiceError) as caught:
        await call
    assert (caught.value.kind, str(caught.value)) == (kind, text)
    return caught.value


async def test_an_empty_prompt_is_refused_and_wedges_nothing(services):
    service = services.make()
    await service.upsert_worker(worker())
    for _ in range(2):
        with pytest.raises(ValueError, match="isl_tokens must be greater than 0"):
            await service.select({"token_ids": []})
    assert (await service.select({"token_ids": TOKENS}))["worker_id"] == 1
    assert (await service.overlap_scores({"token_ids": []}))["num_blocks"] == 0
    assert (await service.potential_loads({"token_ids": []}))[0]["potential_prefill_tokens"] == 0


async def test_what_cannot_be_read_is_said_before_anything_is_awaited(services):
    service = services.make()
    with pytest.raises(ValueError, match="missing field `worker_id`"):
        service.upsert_worker({})
    with pytest.raises(TypeError, match="'int' object cannot be converted to 'PyString'"):
        service.free_reservation(5)
    with pytest.raises(TypeError, match="argument 'decay_fraction': must be real number, not str"):
        service.add_output_block("a", decay_fraction="x")


async def test_an_engine_that_restarts_starts_from_an_empty_cache(services, engine):
    service = services.make({})
    await service.upsert_worker(worker(kv_events_endpoint=engine.url))
    await engine.subscribed()
    for _ in range(3):
        await engine.publish([0.0, [stored([1, 2], TOKENS[:8])], None])
    await wait_for_blocks(service, 2)
    engine.sent = 0
    await engine.publish([0.0, [stored([1], TOKENS[:4])], None])
    await wait_for_blocks(service, 1)


async def test_one_bad_event_costs_itself_and_a_bad_batch_nothing_else(services, engine):
    service = services.make({})
    await service.upsert_worker(worker(kv_events_endpoint=engine.url))
    await engine.subscribed()
    await engine.publish("nonsense")
    await engine.publish([0.0, [{"type": "Unheard"}, stored([b"name"], TOKENS[:4]), 5], None])
    await wait_for_blocks(service, 1)
    await engine.publish([0.0, [stored([b"other"], TOKENS[4:8], b"name")], None])
    await wait_for_blocks(service, 2)


async def test_a_worker_that_changes_loses_blocks_and_bookings_and_one_that_does_not_keeps_them(services, engine):
    service = services.make({})
    spec = worker(kv_events_endpoint=engine.url)
    await service.upsert_worker(spec)
    await engine.subscribed()
    await engine.publish([0.0, [stored([1], TOKENS[:4])], None])
    await wait_for_blocks(service, 1)
    await service.select_and_reserve({"selection_id": "a", "token_ids": TOKENS})
    await service.upsert_worker(spec)
    assert loads(service) == {1: (12, 4, 1)}
    record = await service.patch_worker(1, {"endpoint": "http://new"})
    assert (record["endpoint"], record["kv_events_endpoint"]) == ("http://new", engine.url)
    assert loads(service) == {1: (0, 0, 0)}
    assert await device_blocks(service) == 0
    await fails(service.patch_worker(9, {}), "not_found", "worker 9 not found")
    await fails(service.free_reservation("a"), "not_found", "reservation a not found")


async def test_a_snapshot_is_what_a_new_service_takes_over(services, engine):
    service = services.make({})
    await service.upsert_worker(worker(kv_events_endpoint=engine.url))
    await engine.subscribed()
    await engine.publish([0.0, [stored([1, 2], TOKENS[:8]), stored([3], TOKENS[8:12], 2, "CPU")], None])
    await wait_for_blocks(service, 2)
    snapshot = await service.indexer_snapshot()
    assert snapshot["default:default"]["block_size"] == 4
    with serve_dump(snapshot) as url:
        later = services.make({}, indexer_peers=["http://127.0.0.1:1", url])
        await later.upsert_worker(worker(kv_events_endpoint=engine.url))
        row = (await later.overlap_scores({"token_ids": TOKENS}))["workers"][0]
        assert (row["device_blocks"], row["host_pinned_blocks"]) == (2, 3)
        assert await later.recover_indexer_from_peers([url])
    assert not await service.recover_indexer_from_peers(["http://127.0.0.1:1", "nonsense"])


class serve_dump:
    """A peer that answers ``/dump``."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        body = json.dumps(snapshot).encode()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if self.path == "/dump" else 404)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: Any) -> None:
                return None

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __exit__(self, *args: Any) -> None:
        self._server.shutdown()
        self._server.server_close()


async def test_LOAD_11_services_that_are_peers_see_each_others_bookings(services):
    ports = free_ports(2)
    made = [
        services.make(replica_sync_port=own, replica_sync_peers=[f"tcp://127.0.0.1:{other}"])
        for own, other in (ports, reversed(ports))
    ]
    for service in made:
        for number in (1, 2):
            await service.upsert_worker(worker(number))
    here, there = made
    # PUB drops what nobody listens to yet.
    async with asyncio.timeout(60):
        while not loads(there)[1][2]:
            await here.create_reservation({"selection_id": "probe", "worker_id": 1, "token_ids": TOKENS})
            await asyncio.sleep(0.02)
            await here.free_reservation("probe")
    await wait_for(lambda: loads(there)[1] == (0, 0, 0))
    pin = {"worker_id": 1, "dp_rank": 0}
    await here.select_and_reserve({"selection_id": "a", "token_ids": TOKENS, "pinned_worker": pin})
    await wait_for(lambda: loads(there)[1] == (16, 4, 1))
    assert (await there.select({"token_ids": TOKENS}))["worker_id"] == 2
    await here.prefill_complete("a")
    here.add_output_block("a")
    await wait_for(lambda: loads(there)[1] == (0, 4, 1))
    assert loads(here)[1] == (0, 5, 1)
    taken = "Request a already exists (assigned to worker WorkerWithDpRank { worker_id: 1, dp_rank: 0 })"
    await fails(there.create_reservation({"selection_id": "a", "worker_id": 2, "token_ids": TOKENS}), "sequence", taken)
    # The other way round as well.
    async with asyncio.timeout(60):
        while loads(here)[1][2]:
            if loads(there)[1][2]:
                await there.free_reservation("a")
            else:
                await there.create_reservation({"selection_id": "a", "worker_id": 1, "token_ids": TOKENS})
            await asyncio.sleep(0.02)
    assert here.list_replica_peers() == [f"tcp://127.0.0.1:{ports[1]}"]
    assert await here.register_replica_peer("tcp://127.0.0.1:9")
    assert not await here.register_replica_peer("tcp://127.0.0.1:9")
    assert await here.deregister_replica_peer("tcp://127.0.0.1:9")
    assert not await here.deregister_replica_peer("tcp://127.0.0.1:9")
    for change in (here.register_replica_peer, here.deregister_replica_peer):
        with pytest.raises(ValueError, match="invalid ZMQ endpoint `bad`: missing scheme"):
            await change("bad")
    with pytest.raises(ValueError, match="failed to register replica peer `tcp://a b:1`"):
        await here.register_replica_peer("tcp://a b:1")
    await here.shutdown_async()
    await fails(here.register_replica_peer("tcp://127.0.0.1:9"), "not_ready", "replica peer manager is unavailable")


async def test_replica_sync_is_refused_where_it_cannot_be(services):
    with pytest.raises(ValueError, match="replica_sync_peers requires replica_sync_port"):
        services.make(replica_sync_peers=["tcp://127.0.0.1:9"])
    with pytest.raises(ValueError, match="replica sync port must be greater than zero"):
        services.make(replica_sync_port=0)
    with pytest.raises(ValueError, match="invalid replica peer endpoint `bad`"):
        services.make(replica_sync_port=free_port(), replica_sync_peers=["bad"])
    with pytest.raises(ValueError, match="replica sync is disabled"):
        await services.make().register_replica_peer("tcp://127.0.0.1:9")
    assert services.make().list_replica_peers() == []
    port = free_port()
    services.make(replica_sync_port=port)
    with pytest.raises(ConfigError, match=f"replica sync port {port} cannot be used"):
        services.make(replica_sync_port=port)


async def waiting(service, count=1) -> list[asyncio.Task[Any]]:
    """Tasks that wait behind a booking ``hold``, in this order."""
    await service.upsert_worker(worker(max_num_batched_tokens=16))
    await service.select_and_reserve({"selection_id": "hold", "token_ids": TOKENS})
    tasks = []
    for number in range(count):
        request = {"selection_id": f"r{number}", "token_ids": TOKENS}
        tasks.append(asyncio.ensure_future(service.select_and_reserve(request)))
        await asyncio.sleep(0)
    assert service.loads()[0]["pending_count"] == count
    return tasks


async def test_who_waits_fails_at_shutdown_and_who_comes_later_is_told(services):
    service = services.make(QUEUE)
    (task,) = await waiting(service)
    service.shutdown()
    await fails(task, "scheduler", "endpoint subscriber shutdown")
    await fails(service.select({"token_ids": TOKENS}), "not_ready", "selection service is shutting down")
    await service.prefill_complete("hold")
    await service.free_reservation("hold")


async def test_who_gives_up_leaves_the_queue_and_who_is_placed_meanwhile_is_freed(services):
    service = services.make(QUEUE)
    first, second, third = await waiting(service, 3)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert service.loads()[0]["pending_count"] == 2
    # Placed, and cancelled before it could take note: both happen before the loop goes on.
    with pytest.raises(StopIteration):
        service.prefill_complete("hold").send(None)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert (await third)["selection_id"] == "r2"
    assert loads(service) == {1: (16, 4, 2)}


async def test_a_full_queue_says_what_is_full(services, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(
        "default_policy_family: std\n"
        "uncached_isl_buckets: [{min_tokens: 0, bucket: all}]\n"
        "policy_classes:\n"
        "  - {name: std-all, policy_family: std, cache_bucket: all, quantum: 1, prefill_busy_threshold: 0,\n"
        "     request_queue_limit_per_worker: 0}\n"
        "  - {name: express, quantum: 1}\n"
    )
    service = services.make({**NO_EVENTS, "DYN_ROUTER_POLICY_CONFIG": str(policy)})
    await waiting(service, 0)
    text = 'router policy class "std-all" queue requests limit reached (current=0, limit=0)'
    error = await fails(service.select({"token_ids": TOKENS}), "scheduler", text)
    assert error.details == {"policy_class": "std-all", "limit_kind": "requests", "current": 0, "limit": 0}
    # As in Dynamo, a request has no say in its class.
    await fails(service.select({"token_ids": TOKENS, "policy_class": "express"}), "scheduler", text)


async def test_a_waiting_request_goes_to_a_worker_that_comes_and_fails_when_the_last_one_goes(services):
    service = services.make(QUEUE)
    first, second = await waiting(service, 2)
    await service.upsert_worker(worker(2, max_num_batched_tokens=16))
    assert (await first)["worker_id"] == 2
    await service.delete_worker(2)
    await service.delete_worker(1)
    await fails(second, "scheduler", "no endpoints available to route work")


async def test_bookings_that_nobody_frees_expire_by_age(services):
    service = services.make({**NO_EVENTS, "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "100"})
    await service.upsert_worker(worker())
    await service.select_and_reserve({"selection_id": "old", "token_ids": TOKENS})
    services.clock.advance(60)
    await service.select_and_reserve({"selection_id": "young", "token_ids": TOKENS})
    assert loads(service)[1][2] == 2
    services.clock.advance(60)
    await service.select({"token_ids": TOKENS})
    assert loads(service)[1][2] == 1
    await fails(service.free_reservation("old"), "not_found", "reservation old not found")
    await service.free_reservation("young")


@pytest.mark.parametrize("text", ["x", "0", "-1", "nan"])
def test_an_expiry_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"):
        SelectionService(env={"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": text})


async def test_keyed_identities_are_those_of_the_reference(services, tmp_path):
    golden = json.loads((GOLDEN / "tracking_hash_keyed.json").read_text())
    (tmp_path / "key").write_bytes(bytes.fromhex(golden["key_hex"]))
    service = services.make(
        {
            **NO_EVENTS,
            "DYN_ROUTER_TRACKING_HASH": "keyed-xxh3-v1",
            "DYN_ROUTER_TRACKING_KEY_FILE": str(tmp_path / "key"),
            "DYN_ROUTER_TRACKING_KEY_ID": golden["key_id"],
        }
    )
    for number, scope in enumerate(golden["scopes"]):
        place = {name: scope[name] for name in ("model_name", "routing_group")}
        await service.upsert_worker(worker(number, **place, block_size=golden["block_size"]))
        for case in scope["cases"]:
            answer = await service.select_and_reserve(case["request"])
            assert answer["sequence_hashes"] == case["sequence_hashes_i64"]


@pytest.mark.parametrize(("content", "text"), [(None, "cannot be read"), (b"short", "must hold 32 raw bytes")])
def test_a_tracking_key_that_cannot_be_used_is_said(tmp_path, content, text):
    if content is not None:
        (tmp_path / "key").write_bytes(content)
    env = {
        "DYN_ROUTER_TRACKING_HASH": "keyed-xxh3-v1",
        "DYN_ROUTER_TRACKING_KEY_FILE": str(tmp_path / "key"),
        "DYN_ROUTER_TRACKING_KEY_ID": "k",
    }
    with pytest.raises(ConfigError, match=text):
        SelectionService(env=env)


async def test_without_reuse_no_two_prompts_share_a_block(services):
    service = services.make({**NO_EVENTS, "DYN_ROUTER_ASSUME_KV_REUSE": "false"})
    await service.upsert_worker(worker())
    answers = [await service.select_and_reserve({"token_ids": TOKENS}) for _ in range(2)]
    assert loads(service) == {1: (32, 8, 2)}
    assert not set(answers[0]["sequence_hashes"]) & set(answers[1]["sequence_hashes"])
    # Whoever brings hashes of his own means them.
    own = {"block_hashes": [1, 2], "sequence_hashes": [3, 4], "isl_tokens": 9}
    for _ in range(2):
        assert (await service.select_and_reserve(own))["sequence_hashes"] == [3, 4]
    assert loads(service)[1][1] == 10
    assert (await service.potential_loads({"token_ids": TOKENS}))[0]["potential_decode_blocks"] == 14


async def test_a_cached_selection_whose_worker_is_gone_stays_until_it_is_back(services):
    service = services.make()
    for number in (1, 2):
        await service.upsert_worker(worker(number))
    pin = {"worker_id": 1, "dp_rank": 0}
    await service.select({"selection_id": "x", "token_ids": TOKENS, "pinned_worker": pin})
    await service.delete_worker(1)
    text = "schedulable worker 1 (dp_rank 0) not found for model=default routing_group=default"
    for _ in range(2):
        await fails(service.create_reservation({"selection_id": "x"}), "not_found", text)
    await service.upsert_worker(worker(1))
    assert (await service.create_reservation({"selection_id": "x"}))["worker_id"] == 1


async def test_explicit_reservations_are_checked_in_order(services):
    service = services.make()
    await service.upsert_worker(worker(2))
    reserve = service.create_reservation
    text = "no schedulable workers for model=zz routing_group=default"
    await fails(reserve({"selection_id": "x", "worker_id": 77, "model_name": "zz"}), "not_ready", text)
    with pytest.raises(ValueError, match="sequence_hashes is required without token_ids"):
        await reserve({"selection_id": "x", "worker_id": 77})
    with pytest.raises(ValueError, match=r"effective_prefill_tokens \(20\) must not exceed isl_tokens \(16\)"):
        await reserve(
            {"selection_id": "x", "worker_id": 2, "dp_rank": 7, "token_ids": TOKENS, "effective_prefill_tokens": 20}
        )
    await reserve({"selection_id": "none", "worker_id": 2, "sequence_hashes": [], "isl_tokens": 0})
    await reserve({"selection_id": "empty", "worker_id": 2, "token_ids": []})
    assert loads(service) == {2: (0, 0, 2)}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("x", "missing scheme"),
        ("http://a:1", "unsupported scheme `http`"),
        ("tcp://a", "missing TCP port"),
        ("tcp://a:x", "invalid TCP port: invalid digit found in string"),
    ],
)
async def test_endpoints_that_cannot_be_listened_to_are_said(services, url, problem):
    service = services.make({})
    record = await service.upsert_worker(worker(kv_events_endpoint=url))
    reason = f"invalid kv_events endpoint for worker 1 dp_rank 0: invalid ZMQ endpoint `{url}`: {problem}"
    assert record["not_schedulable_reasons"] == [f"reconciliation failed: {reason}"]


async def test_the_number_of_workers_and_ranks_is_bounded(services, monkeypatch):
    monkeypatch.setattr("dynamo_es.router.selection_catalog.MAX_WORKERS", 2)
    service = services.make()
    record = await service.upsert_worker(worker(1, data_parallel_size=2**32 - 1))
    assert record["not_schedulable_reasons"] == ["data_parallel_size must be at most 1024"]
    await service.upsert_worker(worker(2))
    with pytest.raises(SelectionServiceError, match="workers are registered already"):
        await service.upsert_worker(worker(3))
    await service.delete_worker(1)
    await service.upsert_worker(worker(3))
    assert [row["worker_id"] for row in service.list_workers()] == [2, 3]
