"""Keeping an embedded log small: retention and compaction, which a Kafka broker does by itself."""

from __future__ import annotations

import asyncio
import logging
import random

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.log.base import EventLog
from dynamo_es.log.errors import LogError

logger = logging.getLogger(__name__)


class LogJanitor:
    """Calls ``enforce_retention`` now and then. Every process of a fleet has one; they take turns by chance."""

    def __init__(
        self, log: EventLog, *, interval_s: float, clock: Clock, rng: random.Random, tasks: BackgroundTasks
    ) -> None:
        self._log = log
        self._interval_s = interval_s
        self._clock = clock
        self._rng = rng
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = self._tasks.spawn(self._run(), "log-janitor")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.5, 1.5))
            try:
                trimmed = await self._log.enforce_retention(self._clock.now_ms())
            except LogError as error:
                logger.warning("retention not enforced, next try in %g s: %s", self._interval_s, error)
                continue
            for position, start in trimmed.items():
                logger.info("%s[%d] starts at offset %d now", position.topic, position.partition, start)
