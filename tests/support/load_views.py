"""What a router counts of other routers' bookings, whichever way it learnt of them."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynamo_es.clock import ManualClock
from dynamo_es.router.active_sequences import ActiveSequences, BookedLoad, OtherRouters, WorkerRank
from streams.requests import RequestsFold, RequestsState
from streams.testing import FoldDriver

NOBODY = 0xFFFF


class WatchingRouter:
    """A router that books nothing itself and follows the log of requests."""

    def __init__(self, clock: ManualClock | None = None, own_router_id: int = NOBODY) -> None:
        """``clock``: prompts fall with time."""
        self._clock, self._own = clock, own_router_id
        self.driver: FoldDriver[RequestsState] = FoldDriver(RequestsFold())
        self._live = self._mirror(self.driver)

    def read(self, events: Iterable[msgspec.Struct], at_ms: int | None = None) -> None:
        """Fold events, all of the time ``at_ms``."""
        if at_ms is not None:
            self.driver.now_ms = at_ms
        for event in events:
            self.driver.feed(event)

    def load(self, rank: WorkerRank) -> BookedLoad:
        """The load of a rank: live, after a full replay, and restarted from committed rows and the tail. Fails unless
        all three agree.
        """
        views = [self._live, *(self._mirror(other) for other in (self.driver.replayed(), self.driver.restarted()))]
        loads = [view.load(rank) for view in views]
        assert loads[0] == loads[1] == loads[2], loads
        return loads[0]

    def _mirror(self, driver: FoldDriver[RequestsState]) -> ActiveSequences:
        sequences = ActiveSequences(None if self._clock is None else self._clock.monotonic)
        mirror = OtherRouters(sequences, self._own, clock=self._clock)
        mirror.replaced(driver.state.bookings.values())
        driver.state.observers.append(mirror)
        return sequences
