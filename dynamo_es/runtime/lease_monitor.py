"""Ending the leases of processes that are gone. Any process may do it; doing it twice changes nothing."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.log.errors import LogError
from dynamo_es.runtime.appender import TopicAppender
from schemas.registry import REGISTRY, Lease, LeaseEnded, key_lease, key_lease_end
from schemas.requests import REQUESTS, RouterLost
from streams.registry import RegistryState
from streams.runner import FoldRunner, RunnerStatus

logger = logging.getLogger(__name__)
# Endings stay on record this long, so that a straggling write under the lease means nothing; then they are deleted.
FORGET_ENDED_S = 3600.0


@dataclass(slots=True)
class Sighting:
    """When (the watch's own time, seconds) a renewal was first seen."""

    renewal: int
    seen_at: float


class LeaseWatch:
    """Which leases are overdue. Pure: time is handed in.

    What counts is when this process saw the newest renewal, never the record's own time: clocks of machines differ.
    And time passes only while the process's own renewals come through: a log with too few replicas can be read and
    takes nothing, and then the silence of others proves nothing either.
    """

    def __init__(self, pace_s: float) -> None:
        """``pace_s``: how much time an own renewal vouches for at most; own renewals are seen at least so often."""
        self._pace_s = pace_s
        self._time = 0.0
        self._own: tuple[int, int] | None = None
        self._looked_at: float | None = None
        self._sightings: dict[int, Sighting] = {}
        self._endings: dict[int, float] = {}

    def overdue(self, state: RegistryState, own_lease: int, now: float) -> list[Lease]:
        """Leases whose newest renewal was seen more than their time to live ago."""
        self._pass_time(state.leases.get(own_lease), now)
        self._sightings = {
            lease_id: sighting for lease_id, sighting in self._sightings.items() if lease_id in state.leases
        }
        result = []
        for lease_id, lease in state.leases.items():
            sighting = self._sightings.get(lease_id)
            if sighting is None or sighting.renewal != lease.renewal:
                self._sightings[lease_id] = Sighting(lease.renewal, self._time)
            elif lease_id != own_lease and (self._time - sighting.seen_at) * 1000 > lease.ttl_ms:
                result.append(lease)
        return result

    def _pass_time(self, own: Lease | None, now: float) -> None:
        """A process without a lease in the registry has nothing but its clock to go by."""
        renewal = None if own is None else (own.lease_id, own.renewal)
        if renewal is not None and renewal == self._own:
            return
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._time += elapsed if renewal is None else min(elapsed, self._pace_s)
        self._own, self._looked_at = renewal, now

    def forgettable(self, state: RegistryState, now: float) -> list[int]:
        """Endings that were on record for an hour."""
        self._endings = {lease_id: self._endings.get(lease_id, now) for lease_id in state.ended}
        return [lease_id for lease_id, seen_at in self._endings.items() if now - seen_at > FORGET_ENDED_S]

    def restart(self, now: float) -> None:
        """The view was behind: silence until now proves nothing."""
        self._looked_at = now
        for sighting in self._sightings.values():
            sighting.seen_at = self._time


class LeaseMonitor:
    """Runs a ``LeaseWatch`` over the registry view and appends what it finds. Belongs to one event loop."""

    def __init__(
        self,
        runner: FoldRunner[RegistryState],
        appender: TopicAppender,
        *,
        own_lease: Callable[[], int],
        name: str,
        interval_s: float,
        clock: Clock,
        rng: random.Random,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._runner = runner
        self._appender = appender
        self._own_lease = own_lease
        self._name = name
        self._interval_s = interval_s
        self._clock = clock
        self._rng = rng
        self._tasks = tasks or BackgroundTasks()
        # Own renewals come once in an interval, and are seen at the next look.
        self._watch = LeaseWatch(2 * interval_s)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = self._tasks.spawn(self._run(), "lease-monitor")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            # Not all processes at the same moment: the first one's event then saves the others theirs.
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.5, 1.0))
            try:
                await self._look()
            except LogError as error:
                self._watch.restart(self._clock.monotonic())
                logger.debug("leases not checked, the log is away: %s", error)

    async def _look(self) -> None:
        if await self._runner.measure_lag() > 0 or self._runner.status is not RunnerStatus.LIVE:
            self._watch.restart(self._clock.monotonic())
            return
        state = self._runner.state
        now = self._clock.monotonic()
        for lease in self._watch.overdue(state, self._own_lease(), now):
            await self._end(state, lease)
        for lease_id in self._watch.forgettable(state, now):
            await self._appender.append(REGISTRY, key_lease(lease_id), None)
            await self._appender.append(REGISTRY, key_lease_end(lease_id), None)

    async def _end(self, state: RegistryState, lease: Lease) -> None:
        logger.warning(
            "%s %x was not heard of for more than %d ms: its lease is over", lease.owner, lease.owner_id, lease.ttl_ms
        )
        orphans = state.keys_of_lease(lease.lease_id)
        ending = LeaseEnded(REGISTRY.version, lease.lease_id, lease.renewal, "expired", self._name)
        position = await self._appender.append(REGISTRY, key_lease_end(lease.lease_id), ending)
        try:
            await self._runner.wait_applied(position, timeout_s=self._interval_s)
        except TimeoutError:
            return
        if lease.lease_id not in state.ended:
            return  # It was renewed in between: the ending is void.
        for key in orphans:
            await self._appender.append(REGISTRY, key, None)
        if lease.owner in ("frontend", "router"):
            lost = RouterLost(REQUESTS.version, lease.owner_id, lease.lease_id)
            self._appender.offer(REQUESTS, f"router/{lease.owner_id}".encode(), lost)
