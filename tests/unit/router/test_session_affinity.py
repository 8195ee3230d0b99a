from __future__ import annotations

import pytest

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.eligibility import eligible_ranks
from dynamo_es.router.errors import AllWorkersOverloaded, NoEligibleWorker, SessionElsewhere
from dynamo_es.router.routing_request import UNKNOWN_WORKER, RoutingRequest
from dynamo_es.router.session_affinity import AffinitySettings, SessionAffinity
from schemas.requests import Finished, Routed
from streams.requests import RequestsFold
from streams.sessions import SessionTable
from streams.testing import FoldDriver

W1, W2, W3 = (WorkerRank(number, 0) for number in (1, 2, 3))
RANKS = (W1, W2, W3)


class Setup:
    """One router's sessions over a log's fold. ``at``: the time in ms."""

    def __init__(self, ttl_s=10, hard=True, driver=None, key=None):
        self.driver = driver or FoldDriver(RequestsFold())
        self.affinity = SessionAffinity(
            AffinitySettings(ttl_s, hard), lambda: self.driver.state.sessions, lambda: "m/ns.backend.generate", key
        )

    def narrow(self, session, at=0, ranks=RANKS, overloaded=(), **pins):
        request = RoutingRequest("r", [1], **pins)
        return list(
            self.affinity.narrow(
                request,
                self.affinity.digest(session),
                ranks,
                lambda some: eligible_ranks(request, some, lambda worker: UNKNOWN_WORKER, frozenset(overloaded)),
                at,
            )
        )

    def send(self, session, rank, at=0, until=None):
        digest = self.affinity.digest(session)
        self.affinity.dispatched(digest, rank, at)
        if until is not None:
            self.affinity.ended(digest, until)


def test_the_first_dispatch_binds_the_session():
    setup = Setup()
    assert setup.narrow("s") == list(RANKS)
    setup.send("s", W2, at=5)
    assert setup.narrow("s", at=5) == [W2]
    assert setup.narrow("other", at=5) == list(RANKS)


def test_the_idle_time_runs_from_the_end_of_the_last_request():
    setup = Setup(ttl_s=10)
    setup.send("s", W1, at=0)
    setup.send("s", W1, at=1_000, until=2_000)
    assert setup.narrow("s", at=3_600_000) == [W1]  # one request is still open
    setup.affinity.ended(setup.affinity.digest("s"), 4_000_000)
    assert setup.narrow("s", at=4_010_000) == [W1]
    assert setup.narrow("s", at=4_010_001) == list(RANKS)


def test_an_idle_session_that_is_used_in_time_goes_on():
    setup = Setup(ttl_s=10)
    for at in range(0, 50_000, 9_000):
        assert setup.narrow("s", at=at) == ([W1] if at else list(RANKS))
        setup.send("s", W1, at=at, until=at + 100)


def test_hard_refuses_a_pin_to_another_worker_or_rank():
    setup = Setup()
    setup.send("s", W1)
    with pytest.raises(SessionElsewhere, match="bound to worker 1, rank 0") as caught:
        setup.narrow("s", worker_id=2)
    assert (caught.value.worker_id, caught.value.dp_rank) == (1, 0)
    with pytest.raises(SessionElsewhere):
        setup.narrow("s", dp_rank=1)
    assert setup.narrow("s", worker_id=1) == [W1]


def test_hard_fails_while_the_bound_worker_cannot_take_it():
    setup = Setup()
    setup.send("s", W1)
    with pytest.raises(AllWorkersOverloaded):
        setup.narrow("s", overloaded=[1])
    with pytest.raises(NoEligibleWorker):
        setup.narrow("s", allowed_worker_ids=[2])


def test_soft_moves_the_session_when_the_bound_worker_cannot_take_it():
    setup = Setup(hard=False)
    setup.send("s", W1, at=0, until=1)
    assert setup.narrow("s", at=2) == [W1]
    assert setup.narrow("s", at=2, worker_id=2) == [W2]
    assert setup.narrow("s", at=2, overloaded=[1]) == [W2, W3]
    setup.send("s", W3, at=2, until=3)
    assert setup.narrow("s", at=4) == [W3]
    assert (setup.affinity.counters.bound, setup.affinity.counters.kept, setup.affinity.counters.moved) == (1, 0, 1)


@pytest.mark.parametrize("hard", [True, False])
def test_a_worker_that_is_gone_binds_nothing(hard):
    setup = Setup(hard=hard)
    setup.send("s", W1)
    assert setup.narrow("s", ranks=(W2, W3)) == [W2, W3]
    assert setup.narrow("s", ranks=(W2, W3), worker_id=3) == [W3]


def events(setup, session, name, worker, router=9):
    return (
        Routed(
            1, name, 1, router, "m", "kv", worker, 0, 4, 12, b"", b"", 0, 0, 12, [], "", [], 1,
            session=setup.affinity.digest(session),
        ),
        Finished(1, name, 1, router, "ok", 1, 1, 1),
    )  # fmt: skip


def test_replicas_and_a_restarted_router_learn_bindings_from_the_log():
    first = Setup(ttl_s=10)
    routed, finished = events(first, "s", "r", worker=2)
    first.driver.now_ms = 1_000
    first.driver.feed(routed)
    replica, restarted = Setup(driver=first.driver.replayed()), Setup(driver=first.driver.restarted())
    for setup in (first, replica, restarted):
        assert setup.narrow("s", at=500_000) == [W2]  # the request is open somewhere
    first.driver.now_ms = 600_000
    first.driver.feed(finished)
    assert first.narrow("s", at=610_000) == [W2]
    assert first.narrow("s", at=610_001) == list(RANKS)


def test_routers_that_bind_one_session_at_the_same_time_agree_when_the_log_is_read():
    one, two = Setup(), Setup()
    one.send("s", W1, at=10)
    two.send("s", W2, at=11)
    assert (one.narrow("s", at=12), two.narrow("s", at=12)) == ([W1], [W2])
    for setup in (one, two):
        for at, name, worker in ((10, "a", 1), (11, "b", 2)):
            setup.driver.now_ms = at
            setup.driver.feed(events(setup, "s", name, worker)[0])
    assert one.narrow("s", at=12) == two.narrow("s", at=12) == [W2]


def test_scopes_and_keys_keep_sessions_apart_and_names_out_of_the_log():
    plain, keyed = Setup(), Setup(key=b"k" * 32)
    other = SessionAffinity(AffinitySettings(1), SessionTable, lambda: "m/ns.prefill.generate")
    digests = {setup.digest("alice@example.org") for setup in (plain.affinity, keyed.affinity, other)}
    assert len(digests) == 3
    assert all(len(digest) == 16 and b"alice" not in digest for digest in digests)


def test_names_are_bounded_in_bytes():
    affinity = Setup().affinity
    affinity.digest("x" * 256)
    with pytest.raises(InvalidArgument, match="session affinity ID must not exceed 256 bytes"):
        affinity.digest("é" * 129)


@pytest.mark.parametrize("ttl_s", [0, 31_536_001])
def test_the_time_to_live_is_bounded(ttl_s):
    with pytest.raises(ValueError, match="session_affinity_ttl_secs must be between 1 and 31536000"):
        AffinitySettings(ttl_s)


def test_a_full_table_forgets_the_session_that_was_silent_for_longest():
    setup = Setup()
    setup.affinity.own = SessionTable(2)
    for at, session in enumerate(("a", "b", "c")):
        setup.send(session, W1, at=at, until=at)
    assert [setup.narrow(session, at=3) == [W1] for session in ("a", "b", "c")] == [False, True, True]
    assert setup.affinity.own.dropped == 1
