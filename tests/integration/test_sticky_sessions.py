"""Sessions over whole frontends: several of them on one log, one that starts again, workers that go."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.session_affinity import AffinitySettings
from schemas.requests import REQUESTS
from tests.support.runtimes import wait_for
from tests.support.served_fleet import COMPLETIONS, ServedFleet, served_fleet
from tests.unit.frontend.asgi_client import call

WORKERS = 4


async def ask(fleet, session, prompt="Hi", **body):
    """The worker that answered."""
    headers = {"content-type": "application/json", "x-dynamo-session-id": session}
    payload = json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, **body}).encode()
    reply = await call(fleet.app, COMPLETIONS, payload, headers=headers)
    assert reply.status == 200, reply.text
    return await last_worker(fleet, session)


async def last_worker(fleet, session):
    ((_, engine),) = fleet.models.routers()
    affinity = engine.router.affinity
    return affinity.rank_of(affinity.digest(session), SystemClock().now_ms())


@asynccontextmanager
async def frontends(count, affinity):
    """So many frontends on one log, with workers."""
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    with ThreadPoolExecutor(1) as executor:
        fleets = [ServedFleet(log, affinity=affinity) for _ in range(count)]
        try:
            for fleet in fleets:
                await fleet.start(executor)
            for _ in range(WORKERS):
                await fleets[0].mock_worker(WorkerConfig(model_name="m"))
            for fleet in fleets:
                await wait_for(lambda fleet=fleet: fleet.models.models() and len(ranks(fleet)) == WORKERS)
            yield fleets, executor
        finally:
            for fleet in reversed(fleets):
                await fleet.close()
    await log.close()


async def records_of_requests(fleet):
    """All that the log has of them now."""
    topic = REQUESTS.qualified("dynamo")
    bounds = await fleet.log.bounds(topic)
    reader = fleet.log.reader({TopicPartition(topic, number): 0 for number in bounds})
    found = []
    while len(found) < sum(limits.end for limits in bounds.values()):
        for records in (await reader.poll(timeout_s=1)).values():
            found.extend(records)
    await reader.close()
    return found


def ranks(fleet):
    found = fleet.models.routers()
    return found[0][1].router._candidates() if found else ()


async def settled(fleet, session, worker):
    """Wait until a frontend's log says that the session is there."""
    async with asyncio.timeout(60):
        while await last_worker(fleet, session) != worker:
            await asyncio.sleep(0.01)


async def test_a_session_stays_on_its_worker_and_the_log_has_no_name_of_it():
    async with served_fleet(affinity=AffinitySettings(60)) as fleet:
        for _ in range(WORKERS):
            await fleet.mock_worker()
        await wait_for(lambda: len(ranks(fleet)) == WORKERS)
        workers = {await ask(fleet, "alice@example.org", prompt=f"{number} is another prompt") for number in range(8)}
        assert len(workers) == 1
        others = {await ask(fleet, f"session {number}") for number in range(12)}
        assert len(others) > 1
        await fleet.finished(20)
        for record in await records_of_requests(fleet):
            assert b"alice" not in record.value
        page = (await fleet.get("/metrics")).text
        assert 'dynamo_es_session_dispatches_total{model="m",result="kept"} 7.0' in page
        assert 'dynamo_es_session_dispatches_total{model="m",result="bound"} 13.0' in page


async def test_replicas_send_a_session_where_another_one_bound_it():
    async with frontends(3, AffinitySettings(60)) as ((first, second, third), _):
        worker = await ask(first, "s")
        for fleet in (second, third):
            await settled(fleet, "s", worker)
            assert await ask(fleet, "s", prompt="another prompt") == worker


async def test_a_frontend_that_starts_again_goes_on_with_the_sessions_of_the_log():
    async with frontends(2, AffinitySettings(60)) as (fleets, executor):
        sessions = [f"session {number}" for number in range(8)]
        bound = {session: await ask(fleets[0], session) for session in sessions}
        await fleets[0].core.buffer.flush(5)
        again = ServedFleet(fleets[0].log, affinity=AffinitySettings(60))
        await again.start(executor)
        fleets.append(again)
        await wait_for(lambda: len(ranks(again)) == WORKERS)
        for session in sessions:
            await settled(again, session, bound[session])
            assert await ask(again, session) == bound[session]


async def test_a_session_whose_worker_left_is_bound_anew():
    async with served_fleet(affinity=AffinitySettings(60)) as fleet:
        stops = {}
        for _ in range(2):
            before = {rank.worker_id for rank in ranks(fleet)} if fleet.models.routers() else set()
            stop = await fleet.mock_worker()
            await wait_for(lambda before=before: len(ranks(fleet)) == len(before) + 1)
            (new,) = {rank.worker_id for rank in ranks(fleet)} - before
            stops[new] = stop
        worker = await ask(fleet, "s")
        stops[worker.worker_id].set()
        await wait_for(lambda: worker not in ranks(fleet))
        moved = await ask(fleet, "s")
        assert moved != worker
        assert await ask(fleet, "s") == moved


@pytest.mark.parametrize(("hard", "status"), [(True, 400), (False, 200)])
async def test_a_pin_to_another_worker_is_refused_in_hard_mode_and_moves_the_session_in_soft_mode(hard, status):
    async with served_fleet(affinity=AffinitySettings(60, hard)) as fleet:
        for _ in range(2):
            await fleet.mock_worker()
        await wait_for(lambda: len(ranks(fleet)) == 2)
        worker = await ask(fleet, "s")
        other = next(rank for rank in ranks(fleet) if rank != worker)
        headers = {"content-type": "application/json", "x-session-id": "s"}
        body = {"model": "m", "prompt": "Hi", "max_tokens": 1, "nvext": {"backend_instance_id": other.worker_id}}
        reply = await call(fleet.app, COMPLETIONS, json.dumps(body).encode(), headers=headers)
        assert reply.status == status
        assert await last_worker(fleet, "s") == (worker if hard else other)


async def test_without_the_option_sessions_are_not_looked_at():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        headers = {"content-type": "application/json", "x-dynamo-session-id": "s" * 1000}
        body = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 1}).encode()
        assert (await call(fleet.app, COMPLETIONS, body, headers=headers)).status == 200
        await fleet.finished(1)
        assert len(fleet.views.requests.state.sessions) == 0


async def test_a_name_that_is_too_long_is_the_clients_mistake():
    async with served_fleet(affinity=AffinitySettings(60)) as fleet:
        await fleet.mock_worker()
        headers = {"content-type": "application/json", "x-dynamo-session-id": "s" * 257}
        body = json.dumps({"model": "m", "prompt": "Hi", "max_tokens": 1}).encode()
        reply = await call(fleet.app, COMPLETIONS, body, headers=headers)
        assert reply.status == 400
        assert "256 bytes" in reply.text


async def test_a_pin_to_a_worker_that_is_not_there_is_the_clients_mistake():
    async with served_fleet() as fleet:
        await fleet.mock_worker()
        reply = await fleet.ask(COMPLETIONS, max_tokens=1, nvext={"backend_instance_id": 12345})
        assert (reply.status, reply.json()["message"]) == (400, "Invalid request")
