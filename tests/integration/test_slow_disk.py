"""A disk that takes seconds for a commit, under the log and under the stores: serving, leases, acknowledgements."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import RuntimeConfig, StateConfig
from dynamo_es.log import state as log_state
from dynamo_es.log.base import Entry
from dynamo_es.log.open import open_log
from dynamo_es.log.state import LogCondition
from dynamo_es.store.rocks import RocksStore
from schemas.requests import REQUESTS, PrefillCompleted
from schemas.worker_load import WORKER_LOAD, WorkerLoad
from streams import state_writer
from streams.refold import refold
from streams.requests import RequestsFold
from tests.support.runtimes import count_handler, make_runtime, serving, wait_for
from tests.support.served_fleet import CHAT, served_fleet
from tests.support.slow_disk import SlowDisk

LEASES = RuntimeConfig(lease_ttl_s=2.0, heartbeat_s=0.4, drain_timeout_s=0.5, connect_timeout_s=20.0, inhibited_s=0.5)
NOT_REGISTRY = ("requests", "worker-load")


@pytest.fixture
def disk(monkeypatch):
    disk = SlowDisk(monkeypatch)
    yield disk
    disk.go_on()


def renewals(runtime):
    return runtime.core.registration._renewal


async def test_leases_are_renewed_although_events_wait_for_the_disk(tmp_path, disk):
    """They used to wait in the same line: an idle process then took busy ones for dead."""
    url = f"embedded://{tmp_path}/log?durability=fsync"
    idle, busy = (make_runtime(url=url, runtime=LEASES) for _ in range(2))
    try:
        await asyncio.gather(idle.core.start(), busy.core.start())
        disk.hang(lambda path: any(f".{topic}" in str(path) for topic in NOT_REGISTRY))
        for number in range(50):
            busy.core.appender.offer(REQUESTS, b"r", PrefillCompleted(1, f"r{number}", 1, 1))
            busy.core.appender.offer(WORKER_LOAD, b"w", WorkerLoad(1, "m", 1, 0, 1, number, None, 100, 1, 0, 5))
        await wait_for(lambda: disk.waiting == 2)
        before = renewals(busy)
        await wait_for(lambda: renewals(busy) > before + 8)
        assert disk.waiting == 2
        assert busy.core.buffer.stats().records == 100
        assert not idle.core.registry.state.ended
        disk.go_on()
        assert await busy.core.buffer.flush(60)
        assert busy.core.registration.times_lost == 0
    finally:
        disk.go_on()
        await asyncio.gather(idle.close(), busy.close())


async def test_DISC_03_a_disk_that_hangs_for_longer_than_a_lease_costs_no_lease_and_no_event(
    tmp_path, disk, monkeypatch
):
    """Requests are answered meanwhile, what waits is bounded, health tells, and what was offered is there once."""
    monkeypatch.setattr(log_state, "SLOW_APPEND_S", 0.5)
    url = f"embedded://{tmp_path}/log?durability=fsync"
    caller, server = (make_runtime(url=url, runtime=LEASES) for _ in range(2))
    try:
        async with serving(server, "ns.comp.ep", count_handler):
            client = await caller.endpoint("ns.comp.ep").client()
            await client.wait_for_instances()
            disk.hang()
            began = time.monotonic()
            for number in range(20):
                caller.core.appender.offer(REQUESTS, b"r", PrefillCompleted(1, f"r{number}", 1, 1))
            append = asyncio.create_task(
                caller.core.log.append(WORKER_LOAD.qualified("dynamo"), Entry(b"late", b"key", (), None, 0))
            )
            await wait_for(lambda: caller.core.log_state.state is LogCondition.DEGRADED)
            assert "is not done after" in caller.core.log_state.reason
            while time.monotonic() - began < 2 * LEASES.lease_ttl_s:
                assert len([item async for item in await client.generate("x", annotated=False)]) == 3
                await asyncio.sleep(0.1)
            assert not append.done()
            assert caller.core.buffer.stats().records == 20
            disk.go_on()
            assert (await append).offset == 0
            assert await caller.core.buffer.flush(60)
            before = renewals(server), renewals(caller)
            await wait_for(lambda: renewals(server) > before[0] + 2 and renewals(caller) > before[1] + 2)
            await wait_for(lambda: caller.core.log_state.ok)
            assert not caller.core.registry.state.ended
            assert (server.core.registration.times_lost, caller.core.registration.times_lost) == (0, 0)
            bounds = await caller.core.log.bounds(REQUESTS.qualified("dynamo"))
            assert sum(limits.end for limits in bounds.values()) == 20
    finally:
        disk.go_on()
        await asyncio.gather(caller.close(), server.close())


async def test_SCALE_08_routing_goes_on_while_log_and_store_hang_and_both_are_right_afterwards(
    tmp_path, disk, monkeypatch
):
    monkeypatch.setattr(state_writer, "SLOW_WRITE_S", 0.3)
    log = open_log(f"embedded://{tmp_path}/log?durability=fsync", SystemClock(), rng=random.Random(1))
    await log.start()
    state, fold = StateConfig(state_dir=str(tmp_path / "state"), flush_interval_s=0.1), RequestsFold()
    async with served_fleet(lambda memory: log, state, runtime=LEASES) as fleet:
        await fleet.mock_worker()
        assert (await fleet.ask(CHAT)).status == 200
        disk.hang(lambda path: path == tmp_path / "state")
        await wait_for(lambda: disk.waiting)
        # The log goes on, and with it the view, although its store hangs.
        before = fleet.views.requests.counters.records
        assert (await fleet.ask(CHAT)).status == 200
        await wait_for(lambda: fleet.views.requests.counters.records >= before + 3)
        await wait_for(lambda: "hangs" in conditions(fleet))
        assert "hangs" in (await fleet.get("/health")).text
        disk.hang()
        for _ in range(10):
            assert (await fleet.ask(CHAT)).status == 200
        await wait_for(lambda: fleet.core.buffer.stats().records)
        disk.go_on()
        assert await fleet.core.buffer.flush(60)
        await wait_for(lambda: conditions(fleet) == {"written"})
        assert (await fleet.get("/health")).status == 200
    store = RocksStore(tmp_path / "state", fold.families)
    folded, _ = await refold(fold, log, "dynamo", until=store.positions(fold.name))
    assert sum(store.positions(fold.name).values()) >= 12 * 3
    assert fold.digest(fold.load(store)) == fold.digest(folded)
    store.close()
    await log.close()


def conditions(fleet):
    return {runner.store_condition.value for runner in fleet.core.runners()}
