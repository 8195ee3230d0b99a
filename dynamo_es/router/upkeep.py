"""What everybody who routes does for the others: set right what processes leave behind that are gone."""

from __future__ import annotations

from dynamo_es.router.booking_reaper import BookingReaper
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.views import RoutingViews


def start_upkeep(core: RuntimeCore, views: RoutingViews) -> None:
    """Look after KV index and bookings until the runtime is closed. Once for each set of views."""
    SourceReaper(core, views.index_states).start()
    BookingReaper(core, lambda: views.requests.state).start()
