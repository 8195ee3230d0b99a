from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.router.active_sequences import NO_LOAD, ActiveSequences, BookedLoad, OtherRouters, WorkerRank
from schemas.columns import pack_u64
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed, RouterLost
from streams.requests import BookingKey, RequestsFold
from streams.testing import FoldDriver

W1, W2 = WorkerRank(1, 0), WorkerRank(2, 0)


def key(name: str, attempt: int = 1) -> BookingKey:
    return BookingKey(name, attempt)


def test_shared_prompt_blocks_count_once_a_worker():
    active = ActiveSequences()
    active.book(key("a"), W1, [1, 2, 3, 4], 16)
    active.book(key("b"), W1, [1, 2, 8, 9], 8)
    assert active.load(W1) == BookedLoad(24, 6, 2)
    active.release(key("b"))
    assert active.load(W1) == BookedLoad(16, 4, 1)
    active.release(key("a"))
    assert active.load(W1) == NO_LOAD


def test_new_blocks_are_all_but_the_longest_active_prefix():
    active = ActiveSequences()
    active.book(key("a"), W1, [1, 2, 3, 4], 16)
    assert active.new_blocks(W1, [1, 2, 3, 4]) == 0
    assert active.new_blocks(W1, [1, 2, 9, 10]) == 2
    assert active.new_blocks(W1, [9, 10, 11]) == 3
    assert active.new_blocks(W2, [1, 2]) == 2
    assert active.new_blocks(W1, []) == 0


def test_LOAD_02_late_events_are_no_ops_with_a_counter():
    active = ActiveSequences()
    active.book(key("r1"), W1, [1], 4)
    assert active.complete_prefill(key("r1"))
    assert not active.complete_prefill(key("r1"))
    assert active.release(key("r1"))
    assert not active.release(key("r1"))
    assert not active.complete_prefill(key("r1"))
    assert not active.release(key("r2"))
    assert active.late == 3
    assert active.load(W1) == NO_LOAD


def test_LOAD_05_attempts_are_bookings_of_their_own():
    active = ActiveSequences()
    assert active.book(key("r1", 1), W1, [1], 4)
    assert not active.book(key("r1", 1), W1, [1], 4)
    assert active.book(key("r1", 2), W2, [1], 4)
    active.release(key("r1", 1))
    assert active.load(W1) == NO_LOAD
    assert active.load(W2) == BookedLoad(4, 1, 1)
    assert not active.release(key("r1", 1))
    assert active.load(W2) == BookedLoad(4, 1, 1)


def blocks_after(active, name, fraction) -> int:
    assert active.add_output_block(key(name), fraction)
    return active.load(W1).blocks


def test_output_blocks_decay_with_the_prompt_of_their_request():
    active = ActiveSequences()
    active.book(key("a"), W1, [1, 2, 3, 4], 16)
    fractions = [0.5, 0.25, 0.1, 0.0, 1.0, None]
    assert [blocks_after(active, "a", fraction) for fraction in fractions] == [3, 2, 1, 0, 9, 10]
    active.release(key("a"))
    assert active.load(W1) == NO_LOAD


def test_decay_stops_at_shared_blocks_and_weights_stick():
    active = ActiveSequences()
    active.book(key("a"), W1, [1, 2, 3, 4], 0)
    active.book(key("b"), W1, [1, 2, 8, 9], 0)
    assert active.load(W1).blocks == 6
    assert blocks_after(active, "a", 0.5) == 6
    assert blocks_after(active, "b", 0.25) == 4
    active.book(key("c"), W1, [1, 2, 3, 4], 0)
    assert active.load(W1).blocks == 4
    active.release(key("b"))
    assert active.load(W1).blocks == 4
    assert blocks_after(active, "a", 0.75) == 5
    active.release(key("a"))
    assert active.load(W1).blocks == 3
    active.release(key("c"))
    assert active.load(W1) == NO_LOAD


def test_a_request_that_is_a_prefix_of_another_shares_all_of_its_blocks():
    active = ActiveSequences()
    active.book(key("long"), W1, [1, 2, 3, 4], 0)
    active.book(key("short"), W1, [1, 2], 0)
    assert blocks_after(active, "short", 0.0) == 4
    assert blocks_after(active, "long", 0.0) == 2
    active.release(key("short"))
    assert blocks_after(active, "long", 0.0) == 0


def test_a_fraction_is_added_up_without_drift():
    active = ActiveSequences()
    active.book(key("a"), W1, [], 0)
    for _ in range(10_000):
        active.add_output_block(key("a"), 0.1)
    assert active.load(W1).blocks == 1000
    active.add_output_block(key("a"), 1.0)
    assert active.load(W1).blocks == 10_001
    assert not active.add_output_block(key("gone"))


def test_old_bookings_and_those_of_a_worker_can_be_taken_away():
    active = ActiveSequences()
    active.book(key("old"), W1, [1], 4, at=1.0)
    active.book(key("young"), W1, [2], 4, at=5.0)
    active.book(key("there"), W2, [3], 4, at=5.0)
    assert active.release_older(5.0) == [key("old")]
    assert active.load(W1) == BookedLoad(4, 1, 1)
    assert active.release_worker(2) == [key("there")]
    assert active.load(W2) == NO_LOAD
    assert len(active) == 1


def test_LOAD_06_the_order_in_which_bookings_arrive_does_not_matter():
    bookings = [(key(f"r{number}"), [number % 3, 10 + number], 4 * number) for number in range(12)]
    loads = []
    for order in (bookings, bookings[::-1]):
        active = ActiveSequences()
        for name, hashes, tokens in order:
            active.book(name, W1, hashes, tokens)
        for name, _, tokens in order:
            if tokens % 8:
                active.complete_prefill(name)
        loads.append(active.load(W1))
    assert loads[0] == loads[1]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=6), st.lists(st.integers(0, 2)))
def test_new_blocks_agrees_with_a_walk(prompts, query):
    def chain(tokens):
        return [hash(tuple(tokens[: end + 1])) for end in range(len(tokens))]

    active = ActiveSequences()
    for number, prompt in enumerate(prompts):
        active.book(key(f"r{number}"), W1, chain(prompt), 0)
    known = {block for prompt in prompts for block in chain(prompt)}
    hashes = chain(query)
    depth = next((at for at, block in enumerate(hashes) if block not in known), len(hashes))
    assert active.new_blocks(W1, hashes) == len(hashes) - depth


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["book", "prefill", "output", "decay", "release"]),
        st.sampled_from("abcde"),
        st.sampled_from([W1, W2]),
        st.lists(st.integers(0, 5), max_size=4),
        st.integers(0, 9),
    ),
    max_size=60,
)


@given(EVENTS)
def test_no_load_is_ever_negative_and_everything_released_leaves_nothing(events):
    active = ActiveSequences()
    for kind, name, rank, hashes, tokens in events:
        if kind == "book":
            active.book(key(name), rank, hashes, tokens)
        elif kind == "prefill":
            active.complete_prefill(key(name))
        elif kind in ("output", "decay"):
            active.add_output_block(key(name), tokens / 9 if kind == "decay" else None)
        else:
            active.release(key(name))
        for place in (W1, W2):
            load = active.load(place)
            assert min(load.prefill_tokens, load.blocks, load.requests) >= 0
    for name in "abcde":
        active.release(key(name))
    assert active.load(W1) == active.load(W2) == NO_LOAD


def routed(name: str, router: int, worker: int = 1, attempt: int = 1) -> Routed:
    column = pack_u64([1, 2, 3])
    return Routed(1, name, attempt, router, "m", "kv", worker, 0, 4, 12, column, column, 0, 0, 12, [], "", [], 1)


class Replica:
    """A router's load, fed from the log alone."""

    def __init__(self, router_id: int, driver: FoldDriver | None = None):
        self.driver = driver if driver is not None else FoldDriver(RequestsFold())
        self.active = ActiveSequences()
        mirror = OtherRouters(self.active, router_id)
        mirror.replaced(self.driver.state.bookings.values())
        self.driver.state.observers.append(mirror)


def test_LOAD_11_other_routers_bookings_count_and_own_events_do_not_count_twice():
    replica = Replica(1)
    replica.active.book(key("mine"), W1, [1, 2, 3], 12)
    for event in (routed("mine", 1), routed("theirs", 2), routed("other", 3)):
        replica.driver.feed(event, topic=REQUESTS)
    assert replica.active.load(W1) == BookedLoad(36, 3, 3)
    replica.driver.feed(PrefillCompleted(1, "theirs", 1, 2))
    replica.driver.feed(Finished(1, "other", 1, 3, "ok", 1, 1, 1))
    assert replica.active.load(W1) == BookedLoad(12, 3, 2)
    replica.driver.feed(Finished(1, "mine", 1, 1, "ok", 1, 1, 1))
    assert replica.active.load(W1) == BookedLoad(12, 3, 2)


def test_LOAD_14_a_lost_router_frees_its_bookings_and_age_frees_nothing():
    replica = Replica(1)
    replica.driver.feed(routed("long", 2))
    replica.driver.feed(routed("orphan", 3))
    replica.driver.now_ms += 3_600_000
    replica.driver.feed(RouterLost(1, 3))
    assert replica.active.load(W1) == BookedLoad(12, 3, 1)
    replica.driver.feed(Finished(1, "orphan", 1, 3, "ok", 1, 1, 1))
    replica.driver.feed(routed("late", 3))
    assert replica.active.load(W1) == BookedLoad(12, 3, 1)


def test_a_replica_that_starts_later_converges():
    first = Replica(1)
    for number in range(20):
        first.driver.feed(routed(f"r{number}", 2, worker=1 + number % 2))
        if number % 3 == 0:
            first.driver.feed(Finished(1, f"r{number}", 1, 2, "ok", 1, 1, 1))
        if number == 10:
            first.driver.commit()
    second = Replica(9, first.driver.restarted())
    third = Replica(8, first.driver.replayed())
    for place in (W1, W2):
        assert first.active.load(place) == second.active.load(place) == third.active.load(place)
