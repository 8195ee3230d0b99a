from __future__ import annotations

import asyncio

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import EngineShutdown
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.admission import AdmissionQueue
from dynamo_es.router.eligibility import eligible_ranks
from dynamo_es.router.errors import NoEligibleWorker
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from streams.requests import BookingKey

W1, W2 = WorkerRank(1, 0), WorkerRank(2, 0)


class Setup:
    """Two workers that take 16 tokens in a step; a request is placed on the least booked one."""

    def __init__(self, threshold=0.0):
        self.sequences, self.ranks, self.overloaded = ActiveSequences(), [W1, W2], set()
        self.placed, self.undone = [], []
        self.queue = AdmissionQueue(
            queue_profile(None, threshold, "fcfs"),
            eligible=self.eligible,
            prefill_tokens=self.sequences.prefill_tokens,
            facts=lambda worker_id: WorkerFacts(max_num_batched_tokens=16),
            workers=lambda: len(self.ranks),
            clock=ManualClock(),
            loop=asyncio.get_running_loop(),
        )

    def eligible(self, request):
        return eligible_ranks(request, self.ranks, lambda worker_id: WorkerFacts(), self.overloaded)

    def submit(self, name, tokens=16, **options):
        request = RoutingRequest(name, [1] * tokens, **options)

        def place(waited):
            rank = min(self.eligible(request), key=self.sequences.prefill_tokens)
            self.sequences.book(BookingKey(name, 1), rank, [], tokens)
            self.placed.append((name, rank.worker_id, waited))
            return rank

        return asyncio.ensure_future(
            self.queue.submit(request, tokens, lambda ranks: 0, place, lambda rank: self.undone.append(name))
        )

    async def started(self, *names, **options):
        tasks = [self.submit(name, **options) for name in names]
        await asyncio.sleep(0)
        return tasks

    def done(self, name):
        self.sequences.complete_prefill(BookingKey(name, 1))
        self.queue.update()


async def test_requests_are_placed_at_once_while_somebody_is_free_then_in_turn():
    setup = Setup()
    a, b, c, d = await setup.started("a", "b", "c", "d")
    assert await a != await b
    assert (c.done(), d.done(), len(setup.queue.queue)) == (False, False, 2)
    setup.done("a")
    # Placed before anybody else can look, though its caller has not gone on yet.
    assert [item[::2] for item in setup.placed] == [("a", False), ("b", False), ("c", True)]
    assert await c == setup.ranks[0 if setup.placed[0][1] == 1 else 1]
    assert not d.done()
    setup.done("b")
    await d


async def test_nobody_overtakes_who_waits_already():
    setup = Setup()
    await setup.started("a", worker_id=1)
    waiting, later = (await setup.started("b", worker_id=1))[0], (await setup.started("c"))[0]
    assert not later.done()
    setup.queue.update()
    await later
    assert not waiting.done()
    waiting.cancel()


async def test_who_waits_is_looked_after_even_if_nobody_says_that_load_fell(monkeypatch):
    monkeypatch.setattr("dynamo_es.router.admission.RECHECK_S", 0.001)
    setup = Setup()
    *_, waiting = await setup.started("a", "b", "c")
    setup.sequences.complete_prefill(BookingKey("a", 1))
    async with asyncio.timeout(60):
        await waiting


async def test_a_request_that_nobody_can_take_any_more_is_told_and_an_overload_is_waited_for():
    setup = Setup()
    *_, pinned, other = (
        await setup.started("a", "b"),
        *(await setup.started("c", worker_id=1)),
        *(await setup.started("d", worker_id=2)),
    )
    setup.overloaded = {1, 2}
    setup.done("a")
    setup.done("b")
    assert not pinned.done()
    assert not other.done()
    setup.overloaded, setup.ranks = set(), [W2]
    setup.queue.update()
    with pytest.raises(NoEligibleWorker):
        await pinned
    await other


async def test_cancelling_leaves_the_queue_and_undoes_what_was_placed_meanwhile():
    setup = Setup()
    *_, first, second, third = await setup.started("a", "b", "c", "d", "e")
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (len(setup.queue.queue), setup.undone) == (2, [])
    setup.done("a")
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    assert setup.undone == ["d"]
    assert len(setup.queue.queue) == 1
    # Cancelled, but not yet resumed, when its turn comes.
    third.cancel()
    setup.done("b")
    await asyncio.gather(third, return_exceptions=True)
    assert (len(setup.queue.queue), [item[0] for item in setup.placed]) == (0, ["a", "b", "d"])


async def test_a_failure_to_place_is_the_callers_and_the_next_one_has_its_turn():
    setup = Setup()
    *_, bad, good = await setup.started("a", "b", "c", "d")
    bad_ticket = setup.queue.queue._queues["default"].next(lambda waiting: True).item
    bad_ticket.place = lambda waited: 1 / 0
    setup.done("a")
    with pytest.raises(ZeroDivisionError):
        await bad
    await good


async def test_closing_fails_who_waits_and_who_comes():
    setup = Setup()
    *_, waiting = await setup.started("a", "b", "c")
    setup.queue.close(EngineShutdown("over"))
    setup.queue.close(EngineShutdown("over"))
    for task in (waiting, *await setup.started("d")):
        with pytest.raises(EngineShutdown, match="over"):
            await task
