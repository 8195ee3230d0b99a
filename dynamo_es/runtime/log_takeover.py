"""Starting over on a log that was made anew under a running process."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence

from dynamo_es.background import BackgroundTasks
from dynamo_es.log.base import EventLog, TopicConfig
from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError, LogReplaced

logger = logging.getLogger(__name__)
_BACKOFF = BackoffPolicy(initial_s=0.1, maximum_s=5.0)


class LogTakeover:
    """Goes on with the log, or the topics, that stand where the process's own ones stood. Belongs to one event loop.

    The views fold the new log from its start by themselves, as soon as the handle is open on it; what is left is what
    only this process knows: topics are made if they are missing, lease and registrations are written again, and
    publishers announce what they have (``Registration.announce``). Repeated until it worked.
    """

    def __init__(
        self,
        log: EventLog,
        topics: Sequence[TopicConfig],
        announce: Callable[[], Awaitable[None]],
        rng: random.Random,
        tasks: BackgroundTasks,
    ) -> None:
        """Does nothing until ``notice``. ``announce``: ``Registration.announce`` of every lease of the process."""
        self._log = log
        self._topics = topics
        self._announce = announce
        self._rng = rng
        self._tasks = tasks
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def notice(self, error: LogReplaced) -> None:
        """Somebody found the log replaced. Whoever finds it while that is dealt with changes nothing."""
        if self._task is None and not self._closed:
            logger.warning("%s; this process starts over on the new one", error)
            self._task = self._tasks.spawn(self._run(), "log-takeover")
            self._task.add_done_callback(self._done)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None

    async def _run(self) -> None:
        attempt = 0
        while True:
            try:
                await self._log.reopen()
                await self._log.create_topics(self._topics)
                await self._announce()
            except LogError as error:
                wait_s = _BACKOFF.wait_s(attempt, self._rng)
                logger.error("cannot start over on the new log, again in %.1f s: %s", wait_s, error)
                attempt += 1
                await asyncio.sleep(wait_s)
            else:
                logger.warning("started over on log %s of id %s", self._log.url, self._log.log_id)
                return
