"""Many instances in one process: each has lease, registrations and port of its own, and all share one log."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import resource
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq.auth

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, RuntimeConfig, StateConfig
from dynamo_es.errors import DynamoException
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.errors import RuntimeClosed
from schemas.registry import REGISTRY, LeaseEnded, ResyncAsked, key_lease_end, key_resync
from tests.support.runtimes import FAST, PATIENT, SharedLog, make_runtime, wait_for

PATH = "ns.many.generate"


class Household:
    """A host, its guests, and what they serve."""

    def __init__(self, log: MemoryLog, guests: int, runtime: RuntimeConfig) -> None:
        loop, clock, rng = asyncio.get_running_loop(), SystemClock(), random.Random(7)
        settings = RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.2), runtime)
        self.host = RuntimeCore(settings, loop=loop, clock=clock, rng=rng, log=SharedLog(log))
        self.guests = [RuntimeCore(settings, loop=loop, clock=clock, rng=rng, host=self.host) for _ in range(guests)]
        self.tasks = [asyncio.create_task(self._serve(core)) for core in self.cores]

    @property
    def cores(self) -> list[RuntimeCore]:
        return [self.host, *self.guests]

    async def _serve(self, core: RuntimeCore) -> None:
        async def who(request, context):
            yield core.instance_id

        await Endpoint(core, PATH).serve_endpoint(who)

    async def close(self) -> None:
        await self.host.close()
        await asyncio.gather(*self.tasks)


@contextlib.asynccontextmanager
async def household(log: MemoryLog, guests: int, runtime: RuntimeConfig = PATIENT) -> AsyncIterator[Household]:
    found = Household(log, guests, runtime)
    try:
        await wait_for(lambda: all(core.started for core in found.cores))
        yield found
    finally:
        await found.close()


async def whom_it_reached(client, instance_id: int) -> int:
    (found,) = [item async for item in await client.direct(None, instance_id, annotated=False)]
    return found


@pytest.fixture
def open_files() -> AsyncIterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (before[1] if before[1] != resource.RLIM_INFINITY else 65_536, before[1])
    )
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_hundreds_of_instances_share_a_process_and_a_caller_reaches_each(log, open_files):
    """More than the 341 that libzmq's own limit of sockets allows a caller."""
    count = 400
    caller = make_runtime(log, runtime=PATIENT)
    client = await caller.endpoint(PATH).client()
    async with household(log, count - 1) as held:
        ids = {core.instance_id for core in held.cores}
        await wait_for(lambda: set(client.instance_ids()) == ids)
        assert len({core.server.port for core in held.cores}) == count
        assert len(caller.core.registry.state.leases) == count + 1
        assert {core.log for core in held.cores} == {held.host.log}
        assert [await whom_it_reached(client, number) for number in sorted(ids)] == sorted(ids)
    await wait_for(lambda: not client.instance_ids())
    await wait_for(lambda: set(caller.core.registry.state.leases) == {caller.core.registration.lease_id})
    assert not held.host._guests
    await caller.close()


async def test_a_guest_that_leaves_takes_only_its_own_with_it(log):
    caller = make_runtime(log, runtime=PATIENT)
    client = await caller.endpoint(PATH).client()
    async with household(log, 2) as held:
        gone, stays = held.guests
        await wait_for(lambda: len(client.instance_ids()) == 3)
        await gone.close()
        await wait_for(lambda: set(client.instance_ids()) == {held.host.instance_id, stays.instance_id})
        assert held.host._guests == [stays]
        assert await whom_it_reached(client, stays.instance_id) == stays.instance_id
    with pytest.raises(RuntimeClosed):
        await stays.start()
    await caller.close()


async def test_a_guest_of_a_host_that_cannot_start_says_why_and_leaves_nothing_open(log):
    class Away(SharedLog):
        async def start(self):
            raise OSError("no disk")

    loop, settings = asyncio.get_running_loop(), RuntimeSettings(LogConfig(url="memory://"), runtime=FAST)
    made = {"loop": loop, "clock": SystemClock(), "rng": random.Random(3)}
    host = RuntimeCore(settings, log=Away(log), **made)
    guest = RuntimeCore(settings, host=host, **made)
    with pytest.raises(OSError, match="no disk"):
        await guest.start()
    assert not host._guests
    assert not guest.started


async def test_what_concerns_one_instance_of_a_process_is_done_by_that_one(log):
    """A lost lease, and a reader that asks for an instance's events again."""
    renewed: list[int] = []
    async with household(log, 2, dataclasses.replace(FAST, lease_ttl_s=20.0)) as held:
        for number, core in enumerate(held.cores):
            core.renewals.append(lambda number=number: renewed.append(number))
        await wait_for(lambda: len(held.host.registry.state.instances) == 3)
        lost = held.guests[1].registration.lease_id
        end = LeaseEnded(REGISTRY.version, lost, 10**9, "expired", "test")
        await held.host.appender.append(REGISTRY, key_lease_end(lost), end)
        await wait_for(lambda: renewed)
        assert set(renewed) == {2}
        await wait_for(lambda: len(held.host.registry.state.instances) == 3)
        renewed.clear()
        asker = held.guests[0]
        question = ResyncAsked(REGISTRY.version, "m", asker.instance_id, 0, 5, 1, 1, "test")
        await held.host.appender.append(REGISTRY, key_resync("m", asker.instance_id, 0), question)
        await wait_for(lambda: renewed)
        assert set(renewed) == {1}


async def test_events_that_the_shared_buffer_lost_are_announced_by_everyone(log):
    renewed: list[int] = []
    async with household(log, 1) as held:
        for number, core in enumerate(held.cores):
            core.renewals.append(lambda number=number: renewed.append(number))
        held.host._on_refused("dynamo.kv-events", b"k")
        await wait_for(lambda: sorted(renewed) == [0, 1])


async def test_one_authenticator_serves_all_servers_of_a_process(log, tmp_path: Path):
    zmq.auth.create_certificates(str(tmp_path), "fleet")
    secure = dataclasses.replace(PATIENT, curve_key_file=str(tmp_path / "fleet.key_secret"))
    caller = make_runtime(log, runtime=secure)
    stranger = make_runtime(log, runtime=dataclasses.replace(PATIENT, connect_timeout_s=0.5))
    client = await caller.endpoint(PATH).client()
    refused = await stranger.endpoint(PATH).client()
    async with household(log, 2, secure) as held:
        await wait_for(lambda: len(client.instance_ids()) == len(refused.instance_ids()) == 3)
        for core in held.cores:
            assert await whom_it_reached(client, core.instance_id) == core.instance_id
            with pytest.raises(DynamoException, match=r"CannotConnect.*handshake_failed"):
                await whom_it_reached(refused, core.instance_id)
    await stranger.close()
    await caller.close()
