"""A process of mock workers within the test's own: what ``dynamo-es worker mock`` runs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.engines.mock_worker import MockWorkerSettings, run_mock_workers
from dynamo_es.log.base import EventLog
from dynamo_es.runtime.core import RuntimeCore
from tests.support.runtimes import SharedLog, wait_for


@asynccontextmanager
async def mock_process(settings: MockWorkerSettings, log: EventLog) -> AsyncIterator[RuntimeCore]:
    """Its first runtime, the one with the system status server, when all workers serve. Drained at the end.

    Raises:
        DynamoException: They do not start.
    """
    stop, ready = asyncio.Event(), list[int]()
    cores: list[RuntimeCore] = []
    original = RuntimeCore.start

    async def start(core: RuntimeCore) -> None:
        cores.append(core)
        await original(core)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RuntimeCore, "start", start)
        running = asyncio.create_task(
            run_mock_workers(
                settings, stop, clock=SystemClock(), rng=random.SystemRandom(), log=SharedLog(log),  # type: ignore[arg-type]
                on_ready=ready.append,
            )
        )  # fmt: skip
        await wait_for(lambda: running.done() or len(ready) == settings.mock.num_workers)
    try:
        if running.done():
            running.result()
        with_server = {id(core): core for core in cores if core.system is not None}
        assert len(with_server) == 1
        yield next(iter(with_server.values()))
    finally:
        stop.set()
        await running
