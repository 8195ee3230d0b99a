"""What all data centres told of themselves, followed from one log or several.

For routers above data centres. A log may be that of each data centre, or one that their ``dc-relay`` topics are copied
to (by Kafka's MirrorMaker, for one); a copy that has another name is another topic namespace.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.background import BackgroundTasks, DeadTask
from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import EventLog
from dynamo_es.log.buffered import BackoffPolicy
from dynamo_es.log.errors import LogError
from dynamo_es.services.dc_relay.ranking import PoolCandidate, PromptQuery, find_candidates
from dynamo_es.store.memory import MemoryStore
from schemas.dc_relay import DC_RELAY
from schemas.dead_letters import DeadLetter
from streams.dc_relay import DcRelayFold
from streams.dc_relay_state import DcRelayState
from streams.runner import FoldRunner, RunnerStatus

logger = logging.getLogger(__name__)
STALE_AFTER_S = 15.0
_BACKOFF = BackoffPolicy(initial_s=0.2, maximum_s=10.0)
_COMMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class RelaySource:
    """A topic ``dc-relay``: the log that has it (not started; the view starts and closes it), and its namespace."""

    log: EventLog
    namespace: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{DC_RELAY.qualified(self.namespace)} at {self.log.url}"


class GlobalKvView:
    """Order of calls: ``start``, then anything, then ``close``. Belongs to one event loop; never writes to a log."""

    def __init__(
        self, sources: Sequence[RelaySource], *, clock: Clock, rng: random.Random, stale_after_s: float = STALE_AFTER_S
    ) -> None:
        """``stale_after_s``: a data centre that was not heard of for longer is ranked behind all others.

        That goes by the times of its records, but no later than they were read: a relay whose clock is behind by
        more looks stale, one whose clock is ahead looks fresh while its records come, and for so much longer.
        """
        self._clock = clock
        self._stale_after_s = stale_after_s
        self._topics = [_FollowedTopic(source, clock, rng) for source in sources]

    async def start(self, timeout_s: float) -> None:
        """Follow all topics; return once each is read to its end, or after ``timeout_s``. One that is away is waited
        for in the background.
        """
        for topic in self._topics:
            topic.start()
        await self.wait_caught_up(timeout_s)

    async def wait_caught_up(self, timeout_s: float) -> bool:
        """Wait until everything that is in the topics now is known; whether it is after ``timeout_s``."""
        waits = [topic.wait_caught_up(timeout_s) for topic in self._topics]
        return all(await asyncio.gather(*waits))

    async def close(self) -> None:
        """Stop, and close the logs. Safe to call twice."""
        await asyncio.gather(*(topic.close() for topic in self._topics))

    @property
    def states(self) -> list[DcRelayState]:
        """What is known, one for each topic that could be read."""
        return [topic.runner.state for topic in self._topics if topic.runner is not None]

    def find(self, query: PromptQuery) -> list[PoolCandidate]:
        """Pools that have the model, the best first; see ``find_candidates``. Raises TypeError, OverflowError."""
        return find_candidates(self.states, query, self._clock.now_ms(), self._stale_after_s)

    @property
    def tasks(self) -> list[BackgroundTasks]:
        """Its background tasks, by topic."""
        return [topic.tasks for topic in self._topics]

    @property
    def dead(self) -> Sequence[DeadTask]:
        """Tasks of the view that died: what their topics say is not followed any more."""
        return [task for tasks in self.tasks for task in tasks.dead]

    def topics(self) -> list[dict[str, Any]]:
        """How each topic is followed; JSON without secrets."""
        return [topic.entry() for topic in self._topics]

    def data_centres(self) -> list[dict[str, Any]]:
        """What each data centre told last; JSON. One that is in several topics is told once for each."""
        now_ms = self._clock.now_ms()
        found = []
        for state in self.states:
            for centre in state.centres.values():
                age_s = max(0, now_ms - centre.seen_ms) / 1000
                entry: dict[str, Any] = {
                    "dc_id": centre.dc_id, "age_seconds": round(age_s, 3), "stale": age_s > self._stale_after_s,
                }  # fmt: skip
                if centre.status is not None:
                    status = centre.status
                    entry |= {
                        "endpoints": status.endpoints,
                        "active_endpoints": status.active_endpoints,
                        "fenced_endpoints": status.fenced_endpoints,
                        "pools": len(status.pools),
                        "known_pools": sum(pool.held is not None for pool in centre.pools.values()),
                        "models": {f"{each.namespace}/{each.model}": each.ready for each in status.models},
                    }
                found.append(entry)
        return sorted(found, key=lambda entry: str(entry["dc_id"]))


class _FollowedTopic:
    """One topic, from ``start`` to ``close``; a log that is away is waited for. A supervisor."""

    def __init__(self, source: RelaySource, clock: Clock, rng: random.Random) -> None:
        self.runner: FoldRunner[DcRelayState] | None = None
        self.tasks = BackgroundTasks()
        self._source = source
        self._clock = clock
        self._rng = rng
        self._letters = _CountedLetters(source.name)
        self._error = ""
        self._opened = asyncio.Event()
        self._opening: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._opening = self.tasks.spawn(self._open(), "follow-dc-relay")

    async def wait_caught_up(self, timeout_s: float) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._opened.wait()
                assert self.runner is not None
                await self.runner.wait_caught_up(timeout_s)
        except (TimeoutError, LogError) as error:
            reason = self._error or str(error) or f"not read to its end within {timeout_s:g} s"
            logger.warning("%s: %s", self._source.name, reason)
            return False
        return True

    async def close(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        if self.runner is not None:
            await self.runner.stop()
        await self._source.log.close()

    def entry(self) -> dict[str, Any]:
        runner = self.runner
        state, reason = "unreadable", self._error
        if runner is not None:
            state = runner.status.value
            reason = str(runner.last_error) if runner.status is RunnerStatus.LOG_AWAY else ""
        if self.tasks.dead:
            state, reason = "dead", str(self.tasks.dead[0])
        return {
            "topic": self._source.name,
            "state": state,
            "reason": reason,
            "lag_records": None if runner is None else runner.lag(),
            "refused_records": self._letters.count,
        }

    async def _open(self) -> None:
        for failures in itertools.count():
            try:
                await self._source.log.start()
                self.runner = await self._follow()
                self._opened.set()
                return
            except DynamoException as error:
                if str(error) != self._error:
                    logger.warning("%s cannot be read, will try again: %s", self._source.name, error)
                self._error = str(error)
            await asyncio.sleep(_BACKOFF.wait_s(failures, self._rng))

    async def _follow(self) -> FoldRunner[DcRelayState]:
        # The fold has no rows, so there is nothing to commit but positions that nobody starts from.
        runner = FoldRunner(
            DcRelayFold(self._rng.getrandbits(64)), self._source.log, MemoryStore("memory://dc-relay"),
            self._source.namespace, clock=self._clock, dead_letters=self._letters, flush_interval_s=_COMMIT_S,
            tasks=self.tasks,
        )  # fmt: skip
        runner.add_listener(lambda: runner.state.bound_ages(self._clock.now_ms()))
        await runner.start()
        return runner


class _CountedLetters:
    """A ``DeadLetterSink`` for logs of others: what they hold is told and counted, and nothing is written to them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.count = 0

    def offer_dead_letter(self, letter: DeadLetter) -> None:
        self.count += 1
        logger.warning("%s: [%d]@%d refused: %s", self._name, letter.partition, letter.offset, letter.detail)
