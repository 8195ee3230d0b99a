"""How a router's events get to the log when there is no room for them at once.

The buffer in front of the log is full while the log is away for long. An ending that is not told would leave a booking
on its worker for ever, in the eyes of all other routers; so it is kept here and told, in order, as soon as there is
room. No more is owed than the endings of the requests that were open when the buffer got full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from dynamo_es.publishers.sink import EventSink
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed

# Events that are kept; further ones are lost, and their bookings stay until this router's lease ends.
MAX_OWED = 65_536


class EventOutlet:
    """Offers events to a sink. Belongs to one event loop; never blocks, never raises."""

    def __init__(
        self, sink: EventSink, later: Callable[[Callable[[], None]], object], catch_up: Callable[[], bool]
    ) -> None:
        """``later`` runs what is handed to it after a while. ``catch_up`` is called then, once nothing is owed: it
        offers what else was refused, and says whether all of it was taken.
        """
        self._sink = sink
        self._later = later
        self._catch_up = catch_up
        self._owed: deque[tuple[Finished | PrefillCompleted, str]] = deque()
        self._waits = False
        self.refused = 0

    @property
    def owed(self) -> int:
        """Events that are kept until there is room."""
        return len(self._owed)

    def tell(self, event: Routed, trace: str = "") -> bool:
        """Offer a decision; False if there was no room: ``catch_up`` is to offer it again, if it still matters.

        ``trace``: as ``EventSink.offer``. It waits for what is owed: a request id may be used again, and its old
        ending must not end its new booking.
        """
        return not self._owed and self._offer(event, trace)

    def owe(self, event: Finished | PrefillCompleted, trace: str = "") -> None:
        """Offer what others wait for; kept if there is no room, or if older events are."""
        if (self._owed or not self._offer(event, trace)) and len(self._owed) < MAX_OWED:
            self._owed.append((event, trace))

    def _offer(self, event: Routed | Finished | PrefillCompleted, trace: str) -> bool:
        if self._pass_on(event, trace):
            return True
        self.refused += 1
        self._wait()
        return False

    def _pass_on(self, event: Routed | Finished | PrefillCompleted, trace: str) -> bool:
        key = event.request_id.encode()
        return self._sink.offer(REQUESTS, key, event, trace=trace) if trace else self._sink.offer(REQUESTS, key, event)

    def _wait(self) -> None:
        if not self._waits:
            self._waits = True
            self._later(self._try_again)

    def _try_again(self) -> None:
        self._waits = False
        while self._owed:
            if not self._pass_on(*self._owed[0]):
                break
            self._owed.popleft()
        if self._owed or not self._catch_up():
            self._wait()
