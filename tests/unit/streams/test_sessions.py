"""Sessions in the fold of ``requests``: one table, however its events were ordered."""

from __future__ import annotations

import itertools

import pytest

from schemas.requests import Finished, Routed, RouterLost
from streams.requests import RequestsFold
from streams.sessions import Session, SessionTable
from streams.testing import FoldDriver

A, B, C = (bytes([number]) * 16 for number in (1, 2, 3))


def routed(name, session=A, worker=1, rank=0, router=9, attempt=1):
    return Routed(
        1, name, attempt, router, "m", "kv", worker, rank, 4, 12, b"", b"", 0, 0, 12, [], "", [], 1, session=session
    )


def finished(name, router=9, attempt=1):
    return Finished(1, name, attempt, router, "ok", 3, 5, 20)


def feed(driver, *timed):
    for at_ms, event in timed:
        driver.now_ms = at_ms
        driver.feed(event)
    return driver


def driver_of(*timed):
    return feed(FoldDriver(RequestsFold()), *timed)


def found(driver):
    return driver.state.sessions.sessions


def test_the_latest_dispatch_says_where_a_session_is():
    driver = driver_of((10, routed("a", worker=1)), (20, finished("a")), (30, routed("b", worker=2, rank=3)))
    assert found(driver) == {A: Session(2, 3, 30, 30)}
    assert driver.state.sessions.has_open(A)
    feed(driver, (70, finished("b")))
    assert found(driver) == {A: Session(2, 3, 30, 70)}
    assert not driver.state.sessions.has_open(A)


def test_the_order_in_which_partitions_are_read_does_not_matter():
    """Two routers bind one session at nearly the same time; a third is lost before its decision is read."""
    events = [
        (10, routed("a", worker=1, router=5)),
        (12, routed("b", worker=2, router=6)),
        (11, routed("c", session=B, worker=3, router=7)),
        (13, RouterLost(1, 7)),
    ]
    tables = [found(driver_of(*order)) for order in itertools.permutations(events)]
    assert all(table == {A: Session(2, 0, 12, 12), B: Session(3, 0, 11, 11)} for table in tables)


def test_a_draw_goes_to_the_higher_worker_in_every_replica():
    events = [(10, routed("a", worker=1)), (10, routed("b", worker=2))]
    assert found(driver_of(*events)) == found(driver_of(*events[::-1])) == {A: Session(2, 0, 10, 10)}


def test_a_lost_router_leaves_no_open_request_and_is_no_sign_of_life():
    driver = driver_of((10, routed("a")), (50, RouterLost(1, 9)))
    assert not driver.state.sessions.has_open(A)
    assert found(driver)[A].seen_at_ms == 10


def test_the_table_is_the_same_live_after_a_replay_and_after_a_restart():
    driver = driver_of((10, routed("a")), (11, routed("b", session=B, worker=4)), (20, finished("a")))
    driver.commit()
    feed(driver, (30, routed("c", session=C, worker=5)), (40, finished("b")))
    expected = {A: Session(1, 0, 10, 20), B: Session(4, 0, 11, 40), C: Session(5, 0, 30, 30)}
    for other in (driver, driver.replayed(), driver.restarted()):
        other_found = {key: (item.worker_id, item.dp_rank) for key, item in found(other).items()}
        assert other_found == {key: (item.worker_id, item.dp_rank) for key, item in expected.items()}
        assert [other.state.sessions.has_open(session) for session in (A, B, C)] == [False, False, True]
    assert found(driver) == expected


def test_a_session_that_had_to_go_goes_from_the_store_too():
    driver = FoldDriver(RequestsFold())
    driver.state.sessions = SessionTable(2, tracks_changes=True)
    feed(driver, (1, routed("a")), (2, routed("b", session=B)))
    driver.commit()
    feed(driver, (3, routed("c", session=C)))
    driver.commit()
    assert set(found(driver)) == set(found(driver.restarted())) == {B, C}
    assert driver.state.sessions.dropped == 1


def test_a_full_table_keeps_the_latest_signs_of_life_in_whatever_order_they_came():
    signs = [(at, bytes([at]) * 16) for at in range(1, 9)]
    for order in (signs, signs[::-1], signs[4:] + signs[:4]):
        table = SessionTable(3)
        for at, digest in order:
            table.dispatched(digest, at, 0, at)
        assert set(table.sessions) == {bytes([at]) * 16 for at in (6, 7, 8)}


def test_an_end_counts_as_a_sign_of_life():
    table = SessionTable(2)
    table.dispatched(A, 1, 0, 1)
    table.opened(A)
    table.dispatched(B, 1, 0, 2)
    table.closed(A, 5)
    table.dispatched(C, 1, 0, 4)
    assert set(table.sessions) == {A, C}


def test_the_memory_of_a_busy_session_stays_small():
    table = SessionTable(2)
    for at in range(1000):
        table.dispatched(A, 1, 0, at)
    assert len(table._ages) <= 9


@pytest.mark.parametrize("session", [b"x", b"x" * 17])
def test_a_session_of_another_length_is_refused(session):
    with pytest.raises(ValueError, match="session has"):
        routed("a", session=session)
