"""The LOAD cases on the whole road: a router decides and tells the log, others count the same as it does.

Every load is the same live, after a full replay, and from committed rows and the tail (``WatchingRouter.load``).
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import CannotConnect, Disconnected
from dynamo_es.router.active_sequences import NO_LOAD, BookedLoad, WorkerRank
from dynamo_es.router.errors import BookingConflict
from dynamo_es.runtime.context import Context
from schemas.columns import pack_u64
from schemas.requests import Finished, PrefillCompleted, Routed, RouterLost, Stage
from tests.support.load_views import WatchingRouter
from tests.unit.router.test_request_router import W1, W2, W3, Setup, ask

ROUTER = 77


def routed(
    name: str, worker: int = 1, attempt: int = 1, router: int = ROUTER, stage: Stage = "", prefill: int = 16
) -> Routed:
    column = pack_u64([1, 2, 3, 4])
    return Routed(
        1, name, attempt, router, "m", "kv", worker, 0, 4, 16, column, column, 0, 0, prefill, [], "", [], 1, stage=stage
    )


def prefilled(name: str, attempt: int = 1, router: int = ROUTER) -> PrefillCompleted:
    return PrefillCompleted(1, name, attempt, router)


def finished(name: str, attempt: int = 1, router: int = ROUTER) -> Finished:
    return Finished(1, name, attempt, router, "ok", 1, 1, 1)


class Pair:
    """A router, and another one that follows it. ``load`` fails unless both count the same."""

    def __init__(self, **options: Any) -> None:
        self.setup = Setup(**options)
        self.other = WatchingRouter()
        self._read = 0

    def load(self, rank: WorkerRank) -> BookedLoad:
        events = self.setup.sink.events
        self.other.read(events[self._read :])
        self._read = len(events)
        load = self.setup.active.load(rank)
        assert self.other.load(rank) == load
        return load

    def finished(self) -> list[tuple[int, str]]:
        return [(event.attempt, event.outcome) for event in self.setup.sink.events if isinstance(event, Finished)]


@pytest.fixture(params=[False, True], ids=["log alone", "rows and log"])
def log(request: pytest.FixtureRequest) -> WatchingRouter:
    """``request.param``: rows are committed after each event."""
    watching = WatchingRouter()
    feed = watching.driver.feed

    def feed_and_commit(*args: Any, **named: Any) -> None:
        feed(*args, **named)
        watching.driver.commit()

    if request.param:
        watching.driver.feed = feed_and_commit  # type: ignore[method-assign]
    return watching


@pytest.mark.parametrize(
    ("failure", "ends"),
    [(CannotConnect("deregistered"), [(1, "migrated"), (2, "ok")]), (Disconnected("died"), [(1, "error")])],
)
async def test_LOAD_01_a_worker_that_leaves_before_the_first_token_is_freed_once(
    failure: Exception, ends: list[tuple[int, str]]
) -> None:
    pair = Pair(script={1: [failure], 2: [[{"token_ids": [5]}]]})
    pair.setup.cache(1, list(range(16)))
    stream = pair.setup.router.stream(ask(), {}, Context("r"))
    if len(ends) == 1:
        # The request may have begun there: whoever asked decides whether it is asked again.
        with pytest.raises(Disconnected):
            await anext(stream)
    else:
        assert [batch async for batch in stream] == [[{"token_ids": [5]}]]
    assert pair.finished() == ends
    assert pair.load(W1) == pair.load(W2) == NO_LOAD


def test_LOAD_02_late_events_change_nothing_and_are_counted(log: WatchingRouter) -> None:
    log.read([routed("r1"), prefilled("r1")])
    assert log.load(W1) == BookedLoad(0, 4, 1)
    log.read([finished("r1"), finished("r1"), prefilled("r1"), finished("r2")])
    assert log.load(W1) == NO_LOAD
    assert log.driver.state.counters.late == 3


def test_LOAD_03_a_burst_spreads_and_others_see_it_so() -> None:
    pair = Pair()
    for number in range(8):
        pair.setup.router.route(ask(f"r{number}", [number * 100 + offset for offset in range(16)]))
    assert pair.load(W1) == pair.load(W2) == BookedLoad(64, 16, 4)


def test_LOAD_04_on_a_miss_the_size_of_a_cache_does_not_count() -> None:
    pair = Pair()
    pair.setup.cache(1, list(range(1000, 1040)))
    pair.setup.cache(2, list(range(10_000)))
    for number in range(50):
        pair.setup.router.route(ask(f"busy{number}", [5_000_000 + number] * 16, worker_id=1))
    assert pair.setup.router.route(ask(tokens=[9] * 16)).choice.rank == W2
    assert (pair.load(W1).requests, pair.load(W2).requests) == (50, 1)


def test_LOAD_05_attempts_are_bookings_of_their_own(log: WatchingRouter) -> None:
    log.read([routed("r1", 1, attempt=1), routed("r1", 2, attempt=2), finished("r1", attempt=1)])
    assert (log.load(W1), log.load(W2)) == (NO_LOAD, BookedLoad(16, 4, 1))
    log.read([finished("r1", attempt=1), routed("r1", 2, attempt=2)])
    assert log.load(W2) == BookedLoad(16, 4, 1)
    log.read([finished("r1", attempt=2)])
    assert log.load(W1) == log.load(W2) == NO_LOAD
    router = Pair().setup.router
    router.route(ask("r1", worker_id=1))
    with pytest.raises(BookingConflict):
        router.route(ask("r1", worker_id=1))


def test_LOAD_06_load_goes_by_event_time_whatever_order_events_arrive_in() -> None:
    """Prompts of 1,000 tokens at 100 tokens a second: routed 4 s ago, 5 s ago, and by a clock that is ahead."""
    clock = ManualClock()
    clock.advance(100)
    ages_s = {"a": 4, "b": 5, "ahead": -60}
    events = [
        Routed(1, name, 1, ROUTER, "m", "kv", 1, 0, 4, 1000, b"", b"", 0, 0, 1000, [], "", [], 1,
               expected_prefill_ms=10_000.0)
        for name in ages_s
    ]  # fmt: skip
    for order in permutations(events):
        log = WatchingRouter(clock)
        for event in order:
            log.read([event], at_ms=clock.now_ms() - 1000 * ages_s[event.request_id])
        # They are computed one after the other.
        assert log.load(W1) == BookedLoad(3000 - 500, 0, 3)
        log.read([finished("a"), finished("b"), finished("ahead")])
        assert log.load(W1) == NO_LOAD


def test_LOAD_08_each_hop_is_charged_with_its_own_work(log: WatchingRouter) -> None:
    prefill, decode = W1, W2
    log.read([routed("r", 1, attempt=1, stage="prefill")])
    assert (log.load(prefill), log.load(decode)) == (BookedLoad(16, 0, 1), NO_LOAD)
    log.read([prefilled("r", attempt=1)])
    assert (log.load(prefill), log.load(decode)) == (BookedLoad(0, 0, 1), NO_LOAD)
    log.read([finished("r", attempt=1), routed("r", 2, attempt=2, stage="decode", prefill=0)])
    assert (log.load(prefill), log.load(decode)) == (NO_LOAD, BookedLoad(0, 4, 1))
    log.read([finished("r", attempt=2)])
    assert log.load(prefill) == log.load(decode) == NO_LOAD


@pytest.mark.parametrize(
    ("cached", "worker", "tokens"), [(12, 1, 4), (12, 2, 16), (16, 1, 0), (400, 1, 0)],
    ids=["warm", "cold", "all of it", "more than the prompt"],
)  # fmt: skip
def test_LOAD_09_only_what_is_not_cached_is_booked(cached: int, worker: int, tokens: int) -> None:
    pair = Pair()
    pair.setup.cache(1, list(range(cached)))
    pair.setup.router.route(ask(tokens=range(16), worker_id=worker))
    assert pair.load(WorkerRank(worker, 0)) == BookedLoad(tokens, 4, 1)
    pair.setup.router.release("r")
    assert pair.load(WorkerRank(worker, 0)) == NO_LOAD


def test_LOAD_11_what_four_replicas_booked_is_one_load(log: WatchingRouter) -> None:
    routers = [1, 2, 3, 4]
    # The same names on each.
    log.read([routed(f"r{number}", router=router) for number in range(16) for router in routers])
    assert log.load(W1) == BookedLoad(1024, 4, 64)
    log.read([finished(f"r{number}", router=2) for number in range(16)])
    assert log.load(W1) == BookedLoad(768, 4, 48)
    log.read([finished(f"r{number}", router=router) for number in range(16) for router in routers])
    assert log.load(W1) == NO_LOAD


def test_LOAD_13_a_prefix_that_all_want_is_shared_by_several_and_others_count_so() -> None:
    pair = Pair(ranks=(W1, W2, W3, WorkerRank(4, 0)))
    prefix = list(range(64))
    pair.setup.cache(1, prefix)
    for number in range(100):
        pair.setup.router.route(ask(f"r{number}", prefix + [1000 + number] * 16))
    requests = [pair.load(rank).requests for rank in pair.setup.ranks]
    assert sum(requests) == 100
    assert max(requests) <= 2.5 * 25


def test_LOAD_14_age_frees_nothing_and_the_loss_of_its_router_does(log: WatchingRouter) -> None:
    start_ms = log.driver.now_ms
    log.read([routed("r1", router=1), routed("r2", router=2)])
    log.read([routed("other", worker=2, router=3)], at_ms=start_ms + 24 * 3_600_000)
    assert log.load(W1) == BookedLoad(32, 4, 2)
    log.read([RouterLost(1, 2)])
    assert log.load(W1) == BookedLoad(16, 4, 1)
    log.read([finished("r2", router=2), finished("r1", router=1), finished("r1", router=1)])
    assert log.load(W1) == NO_LOAD
