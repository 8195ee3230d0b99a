"""Decisions of a router whose KV index is with other processes."""

from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import CannotConnect
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.approximate_index import TtlIndex
from dynamo_es.router.conditional_disagg import ConditionalDisagg
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.cost_selector import Lookup, TierOverlap
from dynamo_es.router.disagg_router import DisaggRouter
from dynamo_es.router.errors import BookingConflict
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from dynamo_es.runtime.context import Context
from schemas.requests import Routed
from streams.requests import BookingKey
from tests.unit.router.test_request_router import BLOCK, ListSink, ScriptedClient

W1, W2, W3 = (WorkerRank(number, 0) for number in (1, 2, 3))
PLACE = TopicPartition("d.kv-events", 3)


class Indexers:
    """What they would answer; ``gate`` holds answers back."""

    def __init__(self):
        self.holds: dict[WorkerRank, TierOverlap] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[str, list[int], int]] = []
        self.position = 41

    async def match(self, model, hashes, block_size):
        self.asked.append((model, list(hashes), block_size))
        await self.gate.wait()
        self.position += 1
        return Lookup(dict(self.holds), {PLACE: self.position})


class Setup:
    def __init__(self, ranks=(W1, W2), script=None, settings=None, approximate=None, **options):
        self.indexers, self.active, self.sink = Indexers(), ActiveSequences(), ListSink()
        self.ranks, self.client, self.clock = list(ranks), ScriptedClient(script or {}), ManualClock()
        self.chooser = KvChooser(
            None, self.active, model=lambda: "m", block_size=BLOCK, settings=settings or KvRouterSettings(),
            rng=random.Random(1), clock=self.clock, approximate=approximate, remote=self.indexers,
        )  # fmt: skip
        self.router = RequestRouter(
            self.chooser, self.active, self.client, lambda: self.ranks, self.sink,
            router_id=77, model=lambda: "m", block_size=BLOCK,
            positions=lambda: {TopicPartition("d.requests", 0): 5}, clock=self.clock, **options,
        )  # fmt: skip

    def routed(self) -> list[Routed]:
        return [event for event in self.sink.events if isinstance(event, Routed)]


def ask(name="r", tokens=range(16), **options):
    return RoutingRequest(name, list(tokens), **options)


async def test_the_rank_that_indexers_name_is_chosen_and_the_event_says_how_far_they_were():
    setup = Setup()
    setup.indexers.holds[W2] = TierOverlap(2, 1, 0)
    booked = await setup.router.admit(ask())
    assert booked.choice.rank == W2
    assert setup.indexers.asked == [("m", hash_prompt(list(range(16)), BLOCK)[1], BLOCK)]
    (event,) = setup.routed()
    assert {(row.topic, row.partition): row.next_offset for row in event.positions} == {
        ("d.requests", 0): 5, ("d.kv-events", 3): 42,
    }  # fmt: skip
    held = {row.worker_id: (row.device_blocks, row.host_blocks) for row in event.candidates}
    assert held == {1: (0, 0), 2: (2, 1)}
    assert (await setup.router.select(ask("other"))).rank == W2
    assert (await setup.router.consider(ask("third"))).positions == ((PLACE, 44),)


async def test_what_was_sent_there_counts_beside_what_indexers_say():
    approximate = TtlIndex(60)
    setup = Setup(settings=KvRouterSettings(router_predicted_ttl_secs=60), approximate=approximate)
    setup.indexers.holds[W1] = TierOverlap(1, 0, 0)
    tokens, hashes = hash_prompt(list(range(16)), BLOCK)
    approximate.note(W2, tokens, hashes, setup.clock.monotonic())
    choice = await setup.router.select(ask())
    assert {item.candidate.rank: item.candidate.device for item in choice.costs} == {W1: 1, W2: 4}


async def test_without_kv_events_nobody_is_asked():
    setup = Setup(settings=KvRouterSettings(use_kv_events=False), approximate=TtlIndex(60))
    await setup.router.admit(ask(update_indexer=True))
    assert not setup.indexers.asked
    assert len(setup.chooser.approximate) == 4


async def test_load_is_that_of_the_moment_of_the_choice_not_of_the_question():
    setup = Setup()
    setup.indexers.gate.clear()
    waiting = [asyncio.create_task(setup.router.admit(ask(f"r{number}"))) for number in range(4)]
    while len(setup.indexers.asked) < 4:
        await asyncio.sleep(0)
    setup.indexers.gate.set()
    booked = await asyncio.gather(*waiting)
    assert sorted(one.choice.rank for one in booked) == [W1, W1, W2, W2]


async def test_an_id_that_was_taken_while_indexers_were_asked_is_a_conflict():
    setup = Setup()
    setup.indexers.gate.clear()
    first = asyncio.create_task(setup.router.admit(ask("same", first_attempt=4)))
    second = asyncio.create_task(setup.router.admit(ask("same")))
    while len(setup.indexers.asked) < 2:
        await asyncio.sleep(0)
    setup.indexers.gate.set()
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert results[0].key == BookingKey("same", 4)
    assert isinstance(results[1], BookingConflict)
    setup.router.release("same")
    assert setup.active.load(W1).requests == setup.active.load(W2).requests == 0


async def test_a_caller_that_goes_while_indexers_are_asked_leaves_nothing():
    setup = Setup()
    setup.indexers.gate.clear()
    task = asyncio.create_task(setup.router.admit(ask()))
    while not setup.indexers.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert setup.router.open_requests == 0
    assert not setup.sink.events


async def test_a_request_that_is_sent_again_is_looked_up_again():
    setup = Setup(script={1: [CannotConnect("gone")], 2: [[{"token_ids": [5]}]]})
    setup.indexers.holds[W1] = TierOverlap(4, 0, 0)
    async for _ in setup.router.stream(ask(), {"token_ids": list(range(16))}, Context("r")):
        pass
    assert [number for number, _ in setup.client.asked] == [1, 2]
    assert [(event.attempt, event.positions[-1].next_offset) for event in setup.routed()] == [(1, 42), (2, 43)]


async def test_a_request_that_waited_goes_by_what_indexers_said_when_it_came():
    facts = WorkerFacts(max_num_batched_tokens=16)
    setup = Setup(ranks=(W1, W2), facts=lambda worker_id: facts)
    setup.router.queue_by(queue_profile(None, 0.0, "fcfs"), asyncio.get_running_loop())
    for name in ("a", "b"):
        await setup.router.admit(ask(name))
    setup.indexers.holds = dict.fromkeys((W1, W2), TierOverlap(3, 0, 0))
    waiting = asyncio.create_task(setup.router.admit(ask("c")))
    while not len(setup.router.admission.queue):
        await asyncio.sleep(0)
    setup.indexers.holds.clear()
    for name in ("a", "b"):
        setup.router.complete_prefill(name)
    booked = await waiting
    assert booked.choice.overlap_blocks == 3
    assert booked.choice.positions == ((PLACE, 44),)
    await setup.router.close()


async def test_whether_a_prompt_stays_on_its_decode_worker_is_asked_of_indexers_too():
    frames = {number: [[{"token_ids": [5], "finish_reason": "stop"}]] for number in (1, 2, 3)}
    decode, prefill = Setup(script=frames), Setup(ranks=(W3,), script=frames)
    decode.indexers.holds[W2] = TierOverlap(3, 0, 0)

    async def prefill_router():
        return prefill.router

    disagg = DisaggRouter(
        decode.router, prefill_router, block_size=BLOCK, rng=random.Random(1),
        policy=ConditionalDisagg(8, 0.5, None, None),
    )  # fmt: skip
    async for _ in disagg.stream(ask(), {"token_ids": list(range(16))}, Context("r")):
        pass
    assert disagg.counters.kept_local == 1
    assert [number for number, _ in decode.client.asked] == [2]
