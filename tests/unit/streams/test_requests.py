"""Bookings as the log tells them: whose they are, when they end, and that order between partitions does not matter."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import msgspec

from schemas.columns import pack_u64
from schemas.requests import Finished, PrefillCompleted, Routed, RouterLost
from streams.requests import BookingKey, RequestsFold, RequestsState
from streams.testing import FoldDriver

COLUMN = pack_u64([1, 2, 3])


def routed(name: str, router: int, worker: int = 1, attempt: int = 1, lease: int = 0) -> Routed:
    return Routed(
        1, name, attempt, router, "m", "kv", worker, 0, 4, 12, COLUMN, COLUMN, 0, 0, 12, [], "", [], 1, lease_id=lease
    )


def finished(name: str, router: int, attempt: int = 1) -> Finished:
    return Finished(1, name, attempt, router, "ok", 1, 1, 1)


def lost(router: int, lease: int = 0) -> RouterLost:
    return RouterLost(1, router, lease)


def fold(*events: msgspec.Struct) -> FoldDriver[RequestsState]:
    driver = FoldDriver(RequestsFold())
    for event in events:
        driver.feed(event)
    return driver


def open_bookings(driver: FoldDriver[RequestsState]) -> dict[BookingKey, tuple[int, int]]:
    """Worker and prompt tokens of each, the same live, replayed, and from committed rows and the tail."""
    views = [driver, driver.replayed(), driver.restarted()]
    found = [
        {key: (booking.worker_id, booking.prefill_tokens) for key, booking in view.state.bookings.items()}
        for view in views
    ]
    assert found[0] == found[1] == found[2]
    assert len({view.digest() for view in views}) == 1
    return found[0]


def test_two_routers_may_use_the_same_request_id() -> None:
    driver = fold(routed("r", 1, worker=1), routed("r", 2, worker=2))
    both = {BookingKey("r", 1, 1): (1, 12), BookingKey("r", 1, 2): (2, 12)}
    assert open_bookings(driver) == both
    driver.commit()
    driver.feed(PrefillCompleted(1, "r", 1, 2))
    assert open_bookings(driver) == both | {BookingKey("r", 1, 2): (2, 0)}
    driver.feed(finished("r", 2))
    assert open_bookings(driver) == {BookingKey("r", 1, 1): (1, 12)}
    driver.feed(finished("r", 1))
    assert open_bookings(driver) == {}


def test_a_router_that_was_given_up_wrongly_counts_again_under_its_new_lease() -> None:
    driver = fold(routed("before", 7, lease=1), lost(7, 1))
    assert open_bookings(driver) == {}
    # It had not noticed yet.
    driver.feed(routed("between", 7, lease=1))
    assert open_bookings(driver) == {}
    driver.commit()
    for name in ("before", "between", "after"):
        driver.feed(routed(name, 7, lease=2))
    assert len(open_bookings(driver)) == 3
    driver.feed(finished("before", 7))
    driver.feed(lost(7, 2))
    assert open_bookings(driver) == {}


def orders(*events: Routed | RouterLost) -> Iterator[FoldDriver[RequestsState]]:
    """All orders in which these may be read: events of one request are in one partition, losses in another."""
    for order in permutations(events):
        leases = [event.lease_id for event in order if isinstance(event, Routed)]
        if leases == sorted(leases):
            yield fold(*order)


def test_what_is_announced_again_under_a_new_lease_is_no_second_booking_and_outlives_the_old_one() -> None:
    for driver in orders(routed("r", 7, lease=1), routed("r", 7, lease=2), lost(7, 1)):
        assert open_bookings(driver) == {BookingKey("r", 1, 7): (1, 12)}
        driver.feed(finished("r", 7))
        assert open_bookings(driver) == {}


def test_what_was_announced_last_under_a_lease_that_is_lost_is_lost() -> None:
    for driver in orders(routed("r", 7, lease=1), routed("r", 7, lease=2), lost(7, 2)):
        assert open_bookings(driver) == {}
    for driver in orders(routed("r", 7, lease=1), routed("r", 7, lease=2), lost(7, 1), lost(7, 2)):
        assert open_bookings(driver) == {}
        driver.feed(routed("r", 7, lease=3))
        assert open_bookings(driver) == {BookingKey("r", 1, 7): (1, 12)}


def test_a_router_that_is_gone_takes_its_bookings_along_whichever_partition_is_read_first() -> None:
    for events in permutations((routed("a", 7, lease=1), routed("b", 7, lease=1), lost(7, 1), routed("c", 8, lease=5))):
        driver = fold(*events)
        assert open_bookings(driver) == {BookingKey("c", 1, 8): (1, 12)}
        driver.feed(lost(7, 1))
        assert driver.state.bookings.keys() == {BookingKey("c", 1, 8)}
