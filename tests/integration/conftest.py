"""What most integration tests begin with."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.runtime import DistributedRuntime
from tests.support.runtimes import make_runtime


@pytest.fixture
async def log() -> AsyncIterator[MemoryLog]:
    """A log that is started and closed here; runtimes take it as ``SharedLog``."""
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    yield log
    await log.close()


@pytest.fixture
async def runtime(log: MemoryLog) -> AsyncIterator[DistributedRuntime]:
    """A runtime on that log."""
    runtime = make_runtime(log)
    yield runtime
    await runtime.close()
