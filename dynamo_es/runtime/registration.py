"""A process's own lease and what it registered under it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

import msgspec

from dynamo_es.background import BackgroundTasks
from dynamo_es.errors import ConfigError
from dynamo_es.log.errors import LogError
from dynamo_es.runtime.appender import TopicAppender
from schemas.registry import REGISTRY, Instance, Lease, LeaseEnded, ModelCard, ProcessRole, key_lease, key_lease_end
from streams.registry import RegistryState

logger = logging.getLogger(__name__)
_RETRY_S = 0.5
_TOLD_FAILURES = 60


def check_heartbeat(heartbeat_s: float, lease_ttl_s: float) -> None:
    """A lease must survive two lost renewals. Raises ``ConfigError``."""
    if heartbeat_s >= lease_ttl_s / 3:
        raise ConfigError(
            f"--heartbeat {heartbeat_s:g} s must be under a third of --lease-ttl {lease_ttl_s:g} s, "
            "or a slow moment takes a healthy process for dead"
        )


class Registration:
    """Holds the lease, renews it, and keeps registered what the process serves. Belongs to one event loop.

    If the lease was ended by others (the process or the log was away too long) a new one is taken and everything is
    registered again; ``on_renewed_identity`` callbacks then let publishers start over. What of that fails is done at
    the next renewal. So is what an append left open: one that failed may have come into the log all the same, so the
    record is written again as it should be.
    """

    def __init__(
        self,
        appender: TopicAppender,
        registry: Callable[[], RegistryState],
        *,
        owner: ProcessRole,
        owner_id: int,
        ttl_s: float,
        heartbeat_s: float,
        rng: random.Random,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        check_heartbeat(heartbeat_s, ttl_s)
        self._appender = appender
        self._registry = registry
        self._owner: ProcessRole = owner
        self._owner_id = owner_id
        self._ttl_ms = int(ttl_s * 1000)
        self._heartbeat_s = heartbeat_s
        self._rng = rng
        self._tasks = tasks or BackgroundTasks()
        self._renewal = 0
        self._rows: dict[bytes, Instance | ModelCard] = {}
        # Keys under which the log may have something else than ``_rows``; there is none for what was taken back.
        self._owed: set[bytes] = set()
        self._announcing = False
        self._task: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self.lease_id = 0
        self.times_lost = 0
        self.failed_renewals = 0
        self.on_renewed_identity: list[Callable[[], None]] = []

    async def start(self) -> None:
        """Take a lease and keep it. Raises ``LogError``."""
        await self._take_lease()
        self._task = self._tasks.spawn(self._keep(), "lease")

    async def register(self, key: bytes, value: Instance | ModelCard) -> None:
        """Register, or update; durable on return. ``value.lease_id`` is set here.

        Raises:
            LogError: It stays as it was; the log has it so after the next renewal at the latest.
        """
        async with self._lock:
            value = msgspec.structs.replace(value, lease_id=self.lease_id)
            await self._write(key, value)
            self._rows[key] = value

    async def unregister(self, key: bytes) -> bool:
        """Take back; False if it was not registered here.

        Raises:
            LogError: It is not registered any more, and gone from the log after the next renewal at the latest.
                Called again, it is tried again.
        """
        async with self._lock:
            if self._rows.pop(key, None) is None and key not in self._owed:
                return False
            await self._write(key, None)
            return True

    def row(self, key: bytes) -> Instance | ModelCard | None:
        """What this process registered under ``key``."""
        return self._rows.get(key)

    def rows(self) -> list[Instance | ModelCard]:
        """Everything that this process registered."""
        return list(self._rows.values())

    async def announce(self) -> None:
        """Write lease and registrations again, in a log that may not have them, and let publishers start over.

        Raises ``LogError``: what is missing is written at the next renewal.
        """
        async with self._lock:
            self._begin_announcement()
        await self._announce()

    async def close(self) -> None:
        """Take back everything and give up the lease; a log that is away is not waited for. Safe to call twice."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._task = None
        try:
            for key in list(self._rows):
                await self.unregister(key)
            ending = LeaseEnded(REGISTRY.version, self.lease_id, self._renewal, "revoked", "owner")
            await self._appender.append(REGISTRY, key_lease_end(self.lease_id), ending)
        except LogError as error:
            logger.warning("lease not given back, it will expire by itself: %s", error)

    async def _write(self, key: bytes, value: Instance | ModelCard | None) -> None:
        """A record; its key is owed unless it is certainly in the log."""
        try:
            await self._appender.append(REGISTRY, key, value)
        except (LogError, asyncio.CancelledError):
            self._owed.add(key)
            raise
        self._owed.discard(key)

    async def _write_owed(self) -> None:
        for key in sorted(self._owed):
            await self._write(key, self._rows.get(key))

    async def _take_lease(self) -> None:
        self.lease_id = self._rng.getrandbits(64)
        self._renewal = 0
        await self._append_lease()

    async def _append_lease(self) -> None:
        lease = Lease(REGISTRY.version, self.lease_id, self._owner, self._owner_id, self._ttl_ms, self._renewal)
        await self._appender.append(REGISTRY, key_lease(self.lease_id), lease)

    async def _keep(self) -> None:
        wait_s = self._heartbeat_s
        failures = 0
        while True:
            await asyncio.sleep(wait_s * self._rng.uniform(0.9, 1.0))
            try:
                if self.lease_id in self._registry().ended:
                    await self._start_over()
                elif self._announcing:
                    await self._announce()
                else:
                    self._renewal += 1
                    await self._append_lease()
                    if self._owed:
                        async with self._lock:
                            await self._write_owed()
                wait_s = self._heartbeat_s
                failures = 0
            except LogError as error:
                # Every try would drown the log of a process whose log is away; the first and each 60th tell enough.
                if failures % _TOLD_FAILURES == 0:
                    logger.warning("lease not renewed, trying again: %s", error)
                failures += 1
                self.failed_renewals += 1
                wait_s = min(_RETRY_S, self._heartbeat_s)

    async def _start_over(self) -> None:
        async with self._lock:
            logger.warning("lease %x was ended by others; registering again under a new one", self.lease_id)
            self.times_lost += 1
            self.lease_id = self._rng.getrandbits(64)
            self._renewal = 0
            for key, value in self._rows.items():
                self._rows[key] = msgspec.structs.replace(value, lease_id=self.lease_id)
            self._begin_announcement()
        await self._announce()

    def _begin_announcement(self) -> None:
        self._announcing = True
        self._owed.update(self._rows)

    async def _announce(self) -> None:
        async with self._lock:
            self._renewal += 1
            await self._append_lease()
            await self._write_owed()
            self._announcing = False
        for callback in self.on_renewed_identity:
            callback()
