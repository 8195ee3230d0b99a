"""What a router tells the log of its bookings: the decision, its prompt computed, its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynamo_es.publishers.sink import EventSink
from dynamo_es.router.booked import Booked
from dynamo_es.router.choosers import Chooser
from dynamo_es.router.event_outlet import EventOutlet
from dynamo_es.router.request_events import finished_event, routed_event
from schemas.requests import REQUESTS, Outcome, PrefillCompleted


@dataclass(frozen=True, slots=True)
class RouterIdentity:
    """What is in all events of a router.

    Attributes:
        router_id: Its instance.
        model: Name of its model now.
        block_size: Tokens a block.
        lease_id: The lease of its process now.
    """

    router_id: int
    model: Callable[[], str]
    block_size: int
    lease_id: Callable[[], int]


class BookingEvents:
    """Offers events to a sink. Belongs to one event loop; never blocks, never raises."""

    def __init__(
        self,
        sink: EventSink,
        later: Callable[[Callable[[], None]], object],
        router: RouterIdentity,
        chooser: Chooser,
        open_bookings: Mapping[str, Booked],
    ) -> None:
        """``later``: as for ``EventOutlet``. ``open_bookings``: live; a decision that found no room is told again while
        it is among them.
        """
        self._outlet = EventOutlet(sink, later, self._tell_missing)
        self._router = router
        self._chooser = chooser
        self._open = open_bookings

    @property
    def refused(self) -> int:
        """Events that found no room when they were offered; some of them were told later."""
        return self._outlet.refused

    def routed(self, booked: Booked, prefill_tokens: int) -> None:
        """A decision; ``prefill_tokens``: those that its worker is to compute still."""
        router = self._router
        event = routed_event(
            booked.key,
            booked.choice._replace(prefill_tokens=prefill_tokens),
            router_id=router.router_id,
            model=router.model(),
            mode=self._chooser.mode,
            block_size=router.block_size,
            isl_tokens=booked.isl_tokens,
            positions=booked.positions,
            decided_us=booked.decided_us,
            session=booked.session,
            expected_prefill_s=booked.prefill_s,
            stage=booked.stage,
            lease_id=router.lease_id(),
        )
        booked.is_current = self._outlet.tell(event, booked.trace)
        booked.is_known |= booked.is_current

    def prefill_completed(self, booked: Booked) -> None:
        """Its prompt is computed."""
        # Nobody waits for news of what they never heard of.
        if booked.is_known:
            key = booked.key
            event = PrefillCompleted(REQUESTS.version, key.request_id, key.attempt, self._router.router_id)
            self._outlet.owe(event, booked.trace)

    def finished(self, booked: Booked, outcome: Outcome, detail: str, now: float) -> None:
        """Its end, at ``now`` by the clock that it was routed by."""
        if not booked.is_known:
            return
        first = booked.first_token_at
        event = finished_event(
            booked.key,
            router_id=self._router.router_id,
            outcome=outcome,
            output_tokens=booked.output_tokens,
            first_token_s=None if first is None else first - booked.routed_at,
            duration_s=now - booked.routed_at,
            detail=detail,
        )
        self._outlet.owe(event, booked.trace)

    def tell_open(self) -> None:
        """All open bookings again."""
        for booked in self._open.values():
            self._tell_again(booked)

    def _tell_again(self, booked: Booked) -> None:
        self.routed(booked, 0 if booked.first_token_at is not None else booked.choice.prefill_tokens)

    def _tell_missing(self) -> bool:
        for booked in self._open.values():
            if not booked.is_current:
                self._tell_again(booked)
        return all(booked.is_current for booked in self._open.values())
