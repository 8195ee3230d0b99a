"""Several routers over one log: whatever happens to them, in whatever order they read, they end with equal loads.

A router is real from its decisions to the records that it appends; the log has partitions, which each router reads in
an order of its own. Appends are buffered, in bounded room; a run of them may get into the log twice; a router may be
given up though it lives; it may die with what it had not appended; one may start from nothing or from a dead one's
committed rows.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from zlib import crc32

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynamo_es.clock import ManualClock
from dynamo_es.router.active_sequences import NO_LOAD, ActiveSequences, BookedLoad, OtherRouters, WorkerRank
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.errors import BookingConflict, UnknownRequest
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from schemas.requests import Finished, RouterLost
from streams.kv_index import KvIndexFold
from streams.requests import BookingKey, RequestsFold, RequestsState
from streams.testing import FoldDriver

PARTITIONS = 3
RANKS = (WorkerRank(1, 0), WorkerRank(2, 0))
NAMES = ("a", "b", "c", "d")
BLOCK = 4


class Log:
    """Partitions of events."""

    def __init__(self) -> None:
        self.partitions: list[list[msgspec.Struct]] = [[] for _ in range(PARTITIONS)]

    def append(self, key: bytes, event: msgspec.Struct) -> None:
        self.partitions[crc32(key) % PARTITIONS].append(event)

    def lose(self, router_id: int, lease_id: int) -> None:
        self.append(f"router/{router_id}".encode(), RouterLost(1, router_id, lease_id))


class Replica:
    """One process that routes. ``room``: events that its buffer takes."""

    def __init__(self, log: Log, number: int, driver: FoldDriver[RequestsState], cursors: dict[int, int]) -> None:
        self.log, self.driver, self.cursors = log, driver, cursors
        self.router_id, self.lease_id = 1000 + number, 5000 + number
        self.committed = dict(cursors)
        self.buffer: list[tuple[bytes, msgspec.Struct]] = []
        self.room = 1000
        self.timers: list[Callable[[], None]] = []
        self.active = ActiveSequences()
        index, clock = KvIndexFold().new_state(), ManualClock()
        chooser = KvChooser(
            lambda: index, self.active, model=lambda: "m", block_size=BLOCK, settings=KvRouterSettings(),
            rng=random.Random(1), clock=clock, approximate=None, decode_only=lambda: False,
        )  # fmt: skip
        self.router = RequestRouter(
            chooser, self.active, None, lambda: RANKS, self, router_id=self.router_id, model=lambda: "m",  # type: ignore[arg-type]
            block_size=BLOCK, positions=dict, clock=clock, lease_id=lambda: self.lease_id, later=self.timers.append,
        )  # fmt: skip
        mirror = OtherRouters(self.active, self.router_id)
        mirror.replaced(driver.state.bookings.values())
        driver.state.observers.append(mirror)

    def offer(self, topic: Any, key: bytes, event: msgspec.Struct | None) -> bool:
        """As an ``EventSink``."""
        if len(self.buffer) >= self.room:
            return False
        assert event is not None
        self.buffer.append((key, event))
        return True

    def flush(self, *, twice: bool = False) -> None:
        """The buffer goes to the log; a failed attempt may have got there as well."""
        for key, event in self.buffer * (1 + twice):
            self.log.append(key, event)
        self.buffer.clear()

    def read(self, partition: int, count: int) -> None:
        """Fold the next records of a partition."""
        start = self.cursors.get(partition, 0)
        records = self.log.partitions[partition][start : start + count]
        for event in records:
            self.driver.feed(event)
        self.cursors[partition] = start + len(records)

    def commit(self) -> None:
        self.driver.commit()
        self.committed = dict(self.cursors)

    def run_timers(self) -> None:
        due, self.timers[:] = list(self.timers), []
        for work in due:
            work()

    def renew_lease(self, lease_id: int) -> None:
        """As after the end of its lease."""
        self.lease_id = lease_id
        self.router.announce_open()

    def loads(self) -> list[BookedLoad]:
        return [self.active.load(rank) for rank in RANKS]


class Fleet(RuleBasedStateMachine):
    """Up to four routers, and what may happen to them."""

    @initialize(count=st.integers(2, 3))
    def start(self, count: int) -> None:
        self.log = Log()
        self.numbers = 0
        self.replicas: list[Replica] = []
        self.unsaid: list[tuple[int, int]] = []
        self.dead: list[Replica] = []
        for _ in range(count):
            self.join(None)

    def pick(self, choice: int) -> Replica:
        return self.replicas[choice % len(self.replicas)]

    @rule(
        which=st.integers(0, 3), name=st.sampled_from(NAMES), rank=st.sampled_from(RANKS), length=st.integers(1, 3),
        shared=st.booleans(),
    )  # fmt: skip
    def route(self, which: int, name: str, rank: WorkerRank, length: int, shared: bool) -> None:
        tokens = [7 if shared else ord(name)] * BLOCK * length
        request = RoutingRequest(name, tokens, worker_id=rank.worker_id)
        try:
            self.pick(which).router.route(request, attempt=1 + length)
        except BookingConflict:
            assert self.pick(which).router.open_requests

    @rule(which=st.integers(0, 3), place=st.integers(0, 9), end=st.booleans())
    def go_on(self, which: int, place: int, end: bool) -> None:
        router = self.pick(which).router
        # One that is open, if there is any.
        name = [*router._open, *NAMES][place % (len(router._open) or len(NAMES))]
        with suppress(UnknownRequest):
            router.release(name) if end else router.complete_prefill(name)

    @rule(which=st.integers(0, 3), twice=st.booleans())
    def flush(self, which: int, twice: bool) -> None:
        self.pick(which).flush(twice=twice)

    @rule(which=st.integers(0, 3), partition=st.integers(0, PARTITIONS - 1), count=st.integers(1, 5))
    def read(self, which: int, partition: int, count: int) -> None:
        self.pick(which).read(partition, count)

    @rule(which=st.integers(0, 3))
    def commit(self, which: int) -> None:
        self.pick(which).commit()

    @rule(which=st.integers(0, 3), room=st.sampled_from((0, 1, 2, 1000)))
    def squeeze(self, which: int, room: int) -> None:
        replica = self.pick(which)
        replica.room = room
        replica.run_timers()

    @rule(which=st.integers(0, 3), at_once=st.booleans())
    def give_up_wrongly(self, which: int, at_once: bool) -> None:
        replica = self.pick(which)
        self.say_lost(replica, at_once=at_once)
        self.numbers += 1
        replica.renew_lease(9000 + self.numbers)

    @rule()
    @precondition(lambda self: len(self.replicas) > 1)
    def start_over(self) -> None:
        """The log was taken for another one: everything is announced again under the same lease."""
        self.replicas[0].router.announce_open()

    @rule(which=st.integers(0, 3), at_once=st.booleans())
    @precondition(lambda self: len(self.replicas) > 1)
    def die(self, which: int, at_once: bool) -> None:
        replica = self.pick(which)
        self.replicas.remove(replica)
        self.dead.append(replica)
        self.say_lost(replica, at_once=at_once)

    @rule(heir=st.booleans())
    @precondition(lambda self: len(self.replicas) < 4)
    def come(self, heir: bool) -> None:
        self.join(self.dead.pop() if heir and self.dead else None)

    @rule()
    @precondition(lambda self: self.unsaid)
    def say(self) -> None:
        self.log.lose(*self.unsaid.pop(0))

    @invariant()
    def no_load_is_negative(self) -> None:
        for replica in getattr(self, "replicas", ()):
            for load in replica.loads():
                assert min(load.prefill_tokens, load.blocks, load.requests) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "replicas"):
            return
        self.settle()
        expected: defaultdict[WorkerRank, list[int]] = defaultdict(lambda: [0, 0])
        for replica in self.replicas:
            for booked in replica.router._open.values():
                row = expected[booked.choice.rank]
                row[0] += booked.choice.prefill_tokens if booked.first_token_at is None else 0
                row[1] += 1
        loads = [replica.loads() for replica in self.replicas]
        assert all(one == loads[0] for one in loads), loads
        assert [(load.prefill_tokens, load.requests) for load in loads[0]] == [tuple(expected[rank]) for rank in RANKS]
        for replica in self.replicas:
            for name in list(replica.router._open):
                replica.router.release(name)
        self.settle()
        assert all(replica.loads() == [NO_LOAD] * len(RANKS) for replica in self.replicas)
        late = FoldDriver(RequestsFold())
        for partition in reversed(self.log.partitions):
            for event in partition:
                late.feed(event)
        assert late.state.bookings == {}

    def settle(self) -> None:
        """The log takes everything, what is to be said is said, and everybody reads all of it."""
        for replica in self.replicas:
            replica.room = 10_000
            replica.flush()
            replica.run_timers()
            replica.flush()
            assert not replica.timers
        while self.unsaid:
            self.log.lose(*self.unsaid.pop(0))
        for replica in self.replicas:
            for partition in range(PARTITIONS):
                replica.read(partition, 10_000)

    def join(self, ancestor: Replica | None) -> None:
        self.numbers += 1
        driver, cursors = FoldDriver(RequestsFold()), dict[int, int]()
        if ancestor is not None:
            # From its committed rows: what it had read since then is read again, in whichever order.
            driver, cursors = FoldDriver(RequestsFold(), ancestor.driver.store), dict(ancestor.committed)
        self.replicas.append(Replica(self.log, self.numbers, driver, cursors))

    def say_lost(self, replica: Replica, *, at_once: bool) -> None:
        if at_once:
            self.log.lose(replica.router_id, replica.lease_id)
        else:
            self.unsaid.append((replica.router_id, replica.lease_id))


Fleet.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None, derandomize=True)
TestRoutersConverge = Fleet.TestCase


LIFE = st.lists(
    st.tuples(st.sampled_from(("route", "prefill", "output", "release", "announce")), st.sampled_from(NAMES)),
    max_size=80,
)


@settings(deadline=None, derandomize=True)
@given(LIFE)
def test_every_booking_is_released_once_whatever_the_order_of_its_events(life: list[tuple[str, str]]) -> None:
    replica = Replica(Log(), 1, FoldDriver(RequestsFold()), {})
    router, booked = replica.router, 0
    for step, name in life:
        try:
            if step == "route":
                # The same request again is the same name with a higher attempt.
                router.route(RoutingRequest(name, [1] * 8), attempt=booked + 1)
                booked += 1
            elif step == "prefill":
                router.complete_prefill(name)
            elif step == "output":
                router.note_output(name, 3)
            elif step == "release":
                router.release(name)
            else:
                router.announce_open()
        except (BookingConflict, UnknownRequest):
            pass
        assert len(replica.active) == router.open_requests
    for name in list(router._open):
        router.release(name)
    ends = [BookingKey(event.request_id, event.attempt) for _, event in replica.buffer if isinstance(event, Finished)]
    assert len(ends) == len(set(ends)) == booked
    assert replica.loads() == [NO_LOAD] * len(RANKS)
