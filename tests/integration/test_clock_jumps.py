"""Wall clocks that step, on one machine or another: leases, routing and buffers go by time that only ever passes."""

from __future__ import annotations

import asyncio
import random

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, StateConfig
from dynamo_es.log.base import Entry
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.runtime import DistributedRuntime
from schemas.registry import REGISTRY
from tests.support.runtimes import FAST, SharedLog, wait_for

DAY_S = 86_400


class SteppedClock(SystemClock):
    """A machine's clocks; a test sets the wall clock."""

    def __init__(self):
        self.step_s = 0

    def now_ms(self):
        return super().now_ms() + self.step_s * 1000


async def test_wall_clocks_that_step_cost_no_worker_and_no_request():
    """The worker's, and that of a process that ends the leases of others, apart by more than a year, and back."""
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    clocks = [SteppedClock(), SteppedClock()]
    worker, caller = (
        DistributedRuntime(
            asyncio.get_running_loop(), "mem", "tcp",
            settings=RuntimeSettings(LogConfig(url="memory://"), StateConfig(flush_interval_s=0.05), FAST),
            clock=clock, rng=random.Random(number), log=SharedLog(log),
        )
        for number, clock in enumerate(clocks)
    )  # fmt: skip

    async def answer(request):
        yield request

    serving = asyncio.create_task(worker.endpoint("ns.comp.ep").serve_endpoint(answer))
    client = await caller.endpoint("ns.comp.ep").client()
    await client.wait_for_instances()
    lease = worker.core.registration.lease_id
    for steps in ((-400 * DAY_S, 3600), (400 * DAY_S, -400 * DAY_S), (0, 0)):
        for clock, step_s in zip(clocks, steps, strict=True):
            clock.step_s = step_s
        await _renewed(worker, times=7)  # more than a time to live
        assert client.instance_ids() == [worker.core.instance_id]
        assert [frame async for frame in await client.generate("x", annotated=False)] == ["x"]
    for runtime in (worker, caller):
        assert runtime.core.registration.times_lost == 0
        assert runtime.core.log_state.ok
    assert worker.core.registration.lease_id == lease
    worker.shutdown()
    await serving
    for runtime in (worker, caller):
        await runtime.close()
    await log.close()


async def _renewed(runtime: DistributedRuntime, times: int) -> None:
    wanted = runtime.core.registration._renewal + times
    await wait_for(lambda: runtime.core.registration._renewal >= wanted)


async def test_a_buffer_tells_ages_by_time_that_passes():
    """What waits does not look hours old, or from the future, because somebody set the clock."""
    clock = SteppedClock()
    log = MemoryLog("test", clock, random.Random(1))
    await log.start()
    buffer = BufferedAppender(log, clock, random.Random(1))
    for step_s in (0, DAY_S, -DAY_S):
        clock.step_s = step_s
        assert buffer.offer(REGISTRY.qualified("dynamo"), Entry(b"v"))
        assert 0 <= buffer.stats().oldest_age_s < 60
    await buffer.close(0)
    await log.close()
