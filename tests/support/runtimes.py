"""Runtimes for tests: small leases, a log of the test's own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable

from dynamo_es.clock import SystemClock
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import LogConfig, RuntimeConfig, StateConfig
from dynamo_es.log.base import EventLog
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.runtime import DistributedRuntime

FAST = RuntimeConfig(lease_ttl_s=1.0, heartbeat_s=0.2, drain_timeout_s=5.0, connect_timeout_s=2.0, inhibited_s=0.5)

# For a busy machine: nobody is taken for dead because the test's loop stood still for a moment.
PATIENT = RuntimeConfig(lease_ttl_s=20.0, heartbeat_s=0.5, drain_timeout_s=0.2, connect_timeout_s=20.0, inhibited_s=0.5)


class SharedLog:
    """A log that several runtimes of a test use: only the test starts and closes it."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None


def make_runtime(
    log: EventLog | None = None,
    *,
    url: str = "memory://",
    namespace: str = "dynamo",
    role: str = "worker",
    runtime: RuntimeConfig = FAST,
    state: StateConfig | None = None,
    seed: int | None = None,
    telemetry: TelemetryConfig | None = None,
) -> DistributedRuntime:
    settings = RuntimeSettings(
        LogConfig(url=url, namespace=namespace),
        state if state is not None else StateConfig(flush_interval_s=0.2),
        runtime,
        role,
        telemetry=telemetry or TelemetryConfig(),
    )
    rng = random.SystemRandom() if seed is None else random.Random(seed)
    return DistributedRuntime(
        asyncio.get_running_loop(),
        "mem",
        "tcp",
        settings=settings,
        clock=SystemClock(),
        rng=rng,
        log=SharedLog(log) if log is not None else None,
    )


async def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait for a condition, with a deadline."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


async def count_handler(request, context):
    for number in range(3):
        yield {"i": number, "req": request}


async def collect(awaitable, annotated=False):
    result = []
    try:
        async for item in await awaitable:
            if annotated:
                names = sorted(name for name in ("data", "event", "comments", "id", "is_error") if hasattr(item, name))
                result.append(
                    [
                        "ann",
                        names,
                        repr(item.data()),
                        repr(item.event()),
                        repr(item.comments()),
                        repr(item.id()),
                        item.is_error(),
                    ]
                )
            else:
                result.append(repr(item))
    except Exception as error:
        result.append([f"{type(error).__module__}.{type(error).__name__}", str(error)])
    return result


@contextlib.asynccontextmanager
async def serving(runtime: DistributedRuntime, path: str, handler: object) -> AsyncIterator[asyncio.Task]:
    """Serve an endpoint while the block runs; it is there when the block starts."""
    endpoint = runtime.endpoint(path)
    task = asyncio.create_task(endpoint.serve_endpoint(handler))
    try:
        client = await runtime.endpoint(path).client()
        async with asyncio.timeout(60):
            while runtime.core.instance_id not in client.instance_ids():
                await runtime.core.registry_changed()
        yield task
    finally:
        if not runtime.core.shutdown_event.is_set():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def running(runtime: DistributedRuntime, work: Awaitable[None]) -> AsyncIterator[asyncio.Task[None]]:
    """The input runs while the block does, and ends with the runtime."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        runtime.shutdown()
        async with asyncio.timeout(60):
            await task
        await runtime.close()
