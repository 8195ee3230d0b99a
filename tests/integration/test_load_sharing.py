"""Routers on one log see each other's bookings, whatever happens to one of them."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.active_sequences import NO_LOAD, BookedLoad, WorkerRank
from dynamo_es.router.booking_reaper import BookingReaper
from dynamo_es.router.errors import AllWorkersOverloaded
from dynamo_es.router.kv_router import KvRouter
from dynamo_es.router.measured_overload import MeasuredOverload
from dynamo_es.router.overload import BusyThresholds
from schemas.registry import REGISTRY, LeaseEnded, key_lease_end
from tests.integration.test_kv_router import TOKENS, Fleet
from tests.support.runtimes import FAST, wait_for

# From the last booking to the moment when all replicas count all of them; a few milliseconds on an idle machine.
CONVERGENCE_S = 2.0


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    fleet = Fleet(log, FAST)
    yield fleet
    await fleet.close()
    await log.close()


def load(router: KvRouter, worker_id: int) -> BookedLoad:
    return router._router._sequences.load(WorkerRank(worker_id, 0))


def overloads(router: KvRouter) -> MeasuredOverload:
    found = router._router._overloaded
    assert isinstance(found, MeasuredOverload)
    return found


def prompt(number: int) -> list[int]:
    return [number * 100 + offset for offset in range(16)]


async def test_LOAD_11_four_replicas_count_together(fleet: Fleet) -> None:
    """Each sends 16 requests of 16 tokens to the only worker, which is busy above 20 of them."""
    busy = (await fleet.worker()).core.instance_id
    routers = [await fleet.router() for _ in range(4)]
    for router in routers:
        await router.start()
    for number in range(16):
        for place, router in enumerate(routers):
            await router.best_worker(prompt(64 * place + number), request_id=f"r{place}-{number}")
    begin = time.perf_counter()
    await wait_for(lambda: all(load(router, busy).requests == 64 for router in routers), CONVERGENCE_S)
    print(f"64 bookings of 4 replicas were seen by all within {(time.perf_counter() - begin) * 1000:.1f} ms")
    assert [load(router, busy) for router in routers] == [BookedLoad(1024, 256, 64)] * 4
    for router in routers:
        # Alone none of them would be above it.
        overloads(router).monitor.thresholds = BusyThresholds(active_prefill_tokens=20 * 16)
        with pytest.raises(AllWorkersOverloaded):
            await router.best_worker(TOKENS)
    free = (await fleet.worker()).core.instance_id
    for router in routers:
        await wait_for(lambda router=router: router._router.has_worker(free))
        assert {(await router.best_worker(TOKENS))[0] for _ in range(10)} == {free}
    for place, router in enumerate(routers):
        for number in range(16):
            await router.free(f"r{place}-{number}")
    await wait_for(lambda: all(load(router, busy) == NO_LOAD for router in routers), CONVERGENCE_S)
    # Nobody counts for more than one router.
    assert {(await router.best_worker(TOKENS))[0] for router in routers for _ in range(5)} == {busy, free}


async def test_LOAD_14_bookings_of_a_router_that_was_taken_for_dead_count_again(fleet: Fleet) -> None:
    worker = (await fleet.worker()).core.instance_id
    stalled, other = await fleet.router(), await fleet.router()
    for router in (stalled, other):
        await router.start()
    await stalled.best_worker(prompt(1), request_id="a")
    await stalled.best_worker(prompt(2), request_id="b")
    await stalled.mark_prefill_complete("b")
    both = BookedLoad(16, 8, 2)
    await wait_for(lambda: load(other, worker) == both)
    registration, monitor = stalled._endpoint.core.registration, other._endpoint.core.monitor
    before, requests = registration.lease_id, other._views.requests.state
    registry = other._endpoint.core.registry.state
    await monitor._end(registry, registry.leases[before])
    await wait_for(lambda: registration.lease_id != before and requests.lost_leases)
    await wait_for(lambda: {booking.lease_id for booking in requests.bookings.values()} == {registration.lease_id})
    assert load(stalled, worker) == load(other, worker) == both
    await stalled.free("a")
    await stalled.best_worker(prompt(3), request_id="c")
    await wait_for(lambda: load(other, worker) == load(stalled, worker) == BookedLoad(16, 8, 2))
    await stalled.free("b")
    await stalled.free("c")
    await wait_for(lambda: load(other, worker) == load(stalled, worker) == NO_LOAD)


async def test_LOAD_14_bookings_are_released_though_nobody_said_that_their_router_is_lost(fleet: Fleet) -> None:
    """Who ended its lease died before the next step."""
    worker = (await fleet.worker()).core.instance_id
    gone, other = await fleet.router(), await fleet.router()
    for router in (gone, other):
        await router.start()
    await gone.best_worker(prompt(1), request_id="a")
    await other.best_worker(prompt(2), request_id="b")
    await wait_for(lambda: load(other, worker).requests == 2)
    core = other._endpoint.core
    lease = gone._endpoint.core.registration.lease_id
    gone._endpoint.core.registration._task.cancel()
    await core.appender.append(REGISTRY, key_lease_end(lease), LeaseEnded(1, lease, 10**6, "expired", "test"))
    await wait_for(lambda: lease in core.registry.state.ended)
    assert load(other, worker).requests == 2
    BookingReaper(core, lambda: other._views.requests.state).start()
    await wait_for(lambda: load(other, worker) == BookedLoad(16, 4, 1))
