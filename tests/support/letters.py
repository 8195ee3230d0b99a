"""Folds on a log, with what they refuse going to its dead letters."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_es.clock import Clock, SystemClock
from dynamo_es.log.base import EventLog
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.runtime.appender import TopicAppender
from dynamo_es.store.memory import MemoryStore
from streams.fold import Fold
from streams.runner import FoldRunner


@asynccontextmanager
async def folding(
    log: EventLog, namespace: str, *folds: Fold, clock: Clock | None = None
) -> AsyncIterator[list[FoldRunner]]:
    """Runners on a log whose topics exist; what they refuse goes to its dead letters, all of it before the end."""
    clock = clock or SystemClock()
    buffer = BufferedAppender(
        log, clock=clock, rng=random.Random(1), max_records=100_000, max_bytes=64 * 1024 * 1024, linger_s=0.001
    )
    buffer.start()
    letters = TopicAppender(log, buffer, namespace, clock)
    runners = [FoldRunner(fold, log, MemoryStore(), namespace, clock=clock, dead_letters=letters) for fold in folds]
    try:
        for runner in runners:
            await runner.start()
        yield runners
    finally:
        for runner in runners:
            await runner.stop()
        assert await buffer.close(30) == 0
