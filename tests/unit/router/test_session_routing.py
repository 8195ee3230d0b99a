"""Sessions and predicted prefill times in the life of a routed request."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import CannotConnect, InvalidArgument
from dynamo_es.router.active_sequences import ActiveSequences, OtherRouters, WorkerRank
from dynamo_es.router.choosers import RoundRobinChooser
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.errors import SessionElsewhere
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from dynamo_es.router.session_affinity import AffinitySettings, SessionAffinity
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from streams.kv_index import KvIndexFold
from streams.requests import BookingKey, RequestsFold
from streams.testing import FoldDriver

W1, W2, W3 = RANKS = tuple(WorkerRank(number, 0) for number in (1, 2, 3))
TOKENS = list(range(16))


class Sink:
    def __init__(self, driver):
        self.driver, self.events = driver, []

    def offer(self, topic, key, value):
        self.events.append(value)
        self.driver.feed(value)
        return True


class Client:
    def __init__(self, **scripts):
        self.scripts, self.asked = {int(name[1:]): error for name, error in scripts.items()}, []

    async def stream(self, request, instance_id, context, lane=None):
        self.asked.append(instance_id)
        if error := self.scripts.get(instance_id):
            raise error
        yield [{"token_ids": [1]}]


class TokensTimes:
    """A second for each hundred tokens; nothing is known of more than a thousand."""

    def predict_s(self, tokens, prefix=0, batch=1):
        return tokens / 100 if tokens + prefix <= 1000 else None


class Setup:
    def __init__(self, ranks=RANKS, client=None, hard=True, mode="round-robin", times=None, settings=None):
        self.clock, self.driver = ManualClock(), FoldDriver(RequestsFold())
        self.driver.now_ms = self.clock.now_ms()
        self.client, self.sink, self.ranks = client or Client(), Sink(self.driver), list(ranks)
        self.active = ActiveSequences(self.clock.monotonic if times else None)
        chooser = RoundRobinChooser()
        if mode == "kv":
            index = FoldDriver(KvIndexFold())
            chooser = KvChooser(
                lambda: index.state, self.active, model=lambda: "m", block_size=4,
                settings=settings or KvRouterSettings(), rng=random.Random(1),
            )  # fmt: skip
        self.router = RequestRouter(
            chooser, self.active, self.client, lambda: self.ranks, self.sink, router_id=7, model=lambda: "m",
            block_size=4, positions=dict, clock=self.clock, prefill_times=times,
            facts=lambda worker: WorkerFacts(max_num_batched_tokens=16),
            affinity=SessionAffinity(
                AffinitySettings(10, hard), lambda: self.driver.state.sessions, lambda: "here"
            ),
        )  # fmt: skip

    def route(self, name, session="s", tokens=TOKENS, **options):
        return self.router.route(RoutingRequest(name, tokens, session_id=session, **options)).choice.rank

    async def ask(self, name, session="s", **options):
        request = RoutingRequest(name, TOKENS, session_id=session, **options)
        return [item async for item in self.router.stream(request, {}, Context(name))]


def test_requests_of_a_session_stay_together_and_others_go_round():
    setup = Setup()
    assert [setup.route(f"s{number}") for number in range(4)] == [W1] * 4
    assert [setup.route(f"o{number}", session=None) for number in range(3)] == [W2, W3, W1]
    sessions = {event.session for event in setup.sink.events if event.request_id.startswith("s")}
    assert len(sessions) == 1
    assert all(len(session) == 16 for session in sessions)
    assert {event.session for event in setup.sink.events if event.request_id.startswith("o")} == {b""}


def test_the_idle_time_starts_when_the_last_request_is_released():
    setup = Setup()
    setup.route("a")
    setup.clock.advance(3600)
    assert setup.route("b") == W1
    setup.router.release("a")
    setup.router.release("b")
    setup.clock.advance(10.001)
    assert setup.route("c") == W2


async def test_a_worker_that_cannot_be_reached_lets_the_session_go():
    setup = Setup(client=Client(w1=CannotConnect("gone")))
    await setup.ask("a")
    assert setup.client.asked == [1, 2]
    await setup.ask("b")
    assert setup.client.asked == [1, 2, 2]
    assert (setup.router.affinity.counters.bound, setup.router.affinity.counters.moved) == (1, 1)


async def test_one_that_has_no_room_keeps_it_and_fails_the_request_in_hard_mode_only():
    for hard, asked in ((True, [1]), (False, [1, 2])):
        setup = Setup(client=Client(w1=Overloaded("full")), hard=hard)
        if hard:
            with pytest.raises(Overloaded, match="full"):
                await setup.ask("a")
        else:
            await setup.ask("a")
        assert setup.client.asked == asked


async def test_a_waiting_request_is_refused_when_its_session_is_bound_elsewhere_meanwhile():
    setup = Setup(ranks=(W1, W2), mode="kv")
    setup.router.queue_by(queue_profile(None, 0.0, "fcfs"), asyncio.get_running_loop())
    for name, worker in (("a", 1), ("b", 2)):
        setup.route(name, session=None, tokens=[worker] * 16, worker_id=worker)
    waiting = asyncio.create_task(setup.router.admit(RoutingRequest("c", TOKENS, session_id="s", worker_id=2)))
    await asyncio.sleep(0)
    assert setup.route("d", tokens=[9] * 16, worker_id=1) == W1
    setup.router.release("b")
    async with asyncio.timeout(60):
        with pytest.raises(SessionElsewhere):
            await waiting
    await setup.router.close()


def test_a_name_that_is_too_long_is_refused_and_nothing_is_booked():
    setup = Setup()
    with pytest.raises(InvalidArgument, match="256 bytes"):
        setup.route("a", session="x" * 257)
    assert setup.router.open_requests == 0


def test_a_predicted_prompt_falls_with_time_and_the_event_says_how_long_it_takes():
    setup = Setup(ranks=(W1,), times=TokensTimes())
    setup.route("a", tokens=[1] * 200)
    assert setup.sink.events[0].expected_prefill_ms == 2000
    setup.clock.advance(0.5)
    assert (setup.active.load(W1).prefill_tokens, setup.active.prefill_tokens(W1)) == (150, 150)
    setup.router.complete_prefill("a")
    assert setup.active.prefill_tokens(W1) == 0


def test_the_next_prompt_falls_from_when_the_first_is_released():
    setup = Setup(ranks=(W1,), times=TokensTimes())
    setup.route("a", tokens=[1] * 100)
    setup.route("b", tokens=[2] * 100)
    setup.clock.advance(5)
    setup.router.release("a")
    assert setup.active.prefill_tokens(W1) == 100
    setup.clock.advance(0.25)
    assert setup.active.prefill_tokens(W1) == 75


def test_a_prompt_that_cannot_be_predicted_counts_in_full():
    setup = Setup(ranks=(W1,), times=TokensTimes())
    setup.route("a", tokens=[1] * 2000)
    setup.clock.advance(60)
    assert setup.active.prefill_tokens(W1) == 2000
    assert setup.sink.events[0].expected_prefill_ms == -1


def test_without_a_model_no_time_is_asked_for():
    setup = Setup(ranks=(W1,))
    setup.route("a", tokens=[1] * 200)
    setup.clock.advance(60)
    assert setup.active.prefill_tokens(W1) == 200


def test_LOAD_06_other_routers_prompts_fall_from_when_they_were_routed():
    """Routed 30 s and 29 s ago, heard of in the other order; one whose clock is ahead counts from now."""
    setup = Setup(ranks=(W1,), times=TokensTimes())
    setup.route("a", tokens=[1] * 1000, session=None)
    event = setup.sink.events[0]
    log, clock = FoldDriver(RequestsFold()), ManualClock()
    loads = ActiveSequences(clock.monotonic)
    log.state.observers.append(OtherRouters(loads, own_router_id=1, clock=clock))
    clock.advance(100)
    log.now_ms = clock.now_ms() - 4_000
    log.feed(event)
    assert loads.prefill_tokens(W1) == 600
    log.now_ms = clock.now_ms() - 5_000
    log.feed(msgspec.structs.replace(event, request_id="b"))
    assert loads.prefill_tokens(W1) == 1500
    loads.release(BookingKey("a", 1, event.router_id))
    loads.release(BookingKey("b", 1, event.router_id))
    log.now_ms = clock.now_ms() + 60_000
    log.feed(msgspec.structs.replace(event, request_id="c"))
    assert loads.prefill_tokens(W1) == 1000
