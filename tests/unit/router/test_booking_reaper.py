from __future__ import annotations

from dynamo_es.router.booking_reaper import OrphanedBookings
from schemas.registry import Lease, LeaseEnded, key_lease, key_lease_end
from streams.registry import RegistryFold
from streams.requests import Booking
from streams.testing import FoldDriver


def booking(name: str, router: int, lease: int) -> Booking:
    return Booking(name, 1, router, "m", 1, 0, 12, b"", 12, 0, lease_id=lease)


def test_LOAD_14_bookings_under_an_ended_lease_are_found_once_in_a_while_and_others_never() -> None:
    driver = FoldDriver(RegistryFold())
    for number in (1, 2):
        driver.feed(Lease(1, number, "router", 7, 1000, 0), key_lease(number))
    # 3 is not known yet, and 0 is what routers without a lease book under.
    bookings = [booking("a", 7, 1), booking("b", 7, 1), booking("c", 7, 2), booking("d", 9, 3), booking("e", 5, 0)]
    orphaned = OrphanedBookings(grace_s=10.0)
    assert [orphaned.find(bookings, driver.state, now) for now in (0.0, 100.0)] == [[], []]
    driver.feed(LeaseEnded(1, 1, 0, "expired", "frontend"), key_lease_end(1))
    # Who ended it is given time to say so.
    assert [orphaned.find(bookings, driver.state, now) for now in (100.0, 110.0)] == [[], []]
    assert orphaned.find(bookings, driver.state, 110.1) == [(7, 1)]
    assert [orphaned.find(bookings, driver.state, now) for now in (111.0, 120.0)] == [[], []]
    assert orphaned.find(bookings, driver.state, 121.0) == [(7, 1)]
    assert orphaned.find(bookings[2:], driver.state, 140.0) == []
