"""Releasing what routers booked that are gone.

Who ends a router's lease also appends that it is lost. That process may die in between, or find no room in its buffer;
the bookings would then weigh on their workers for ever. So everybody who routes looks for bookings under ended leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from dynamo_es.runtime.core import RuntimeCore
from schemas.requests import REQUESTS, RouterLost
from streams.registry import RegistryState
from streams.requests import Booking, RequestsState

logger = logging.getLogger(__name__)


class OrphanedBookings:
    """Whose bookings are open under a lease that ended more than ``grace_s`` ago. Pure: time is handed in."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: dict[tuple[int, int], float] = {}

    def find(self, bookings: Iterable[Booking], registry: RegistryState, now: float) -> list[tuple[int, int]]:
        """(router id, lease id) of each (monotonic ``now``, seconds); once in ``grace_s`` while it lasts."""
        ended = {(booking.router_id, booking.lease_id) for booking in bookings if booking.lease_id in registry.ended}
        self._since = {lease: self._since.get(lease, now) for lease in ended}
        found = [lease for lease, since in self._since.items() if now - since > self._grace_s]
        for lease in found:
            self._since[lease] = now
        return found


class BookingReaper:
    """Looks every few seconds and appends ``RouterLost``; several processes may do so."""

    def __init__(self, core: RuntimeCore, requests: Callable[[], RequestsState]) -> None:
        runtime = core.settings.runtime
        self._core = core
        self._requests = requests
        self._interval_s = runtime.heartbeat_s
        self._orphaned = OrphanedBookings(runtime.lease_ttl_s)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; stopped with the runtime."""
        self._task = self._core.tasks.spawn(self._run(), "booking-reaper")
        self._core.add_cleanup(self.close)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            bookings, now = self._requests().bookings.values(), self._core.clock.monotonic()
            for router_id, lease_id in self._orphaned.find(bookings, self._core.registry.state, now):
                logger.warning("router %x is gone: what it booked is released", router_id)
                lost = RouterLost(REQUESTS.version, router_id, lease_id)
                self._core.appender.offer(REQUESTS, f"router/{router_id}".encode(), lost)
