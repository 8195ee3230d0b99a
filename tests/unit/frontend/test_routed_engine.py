"""The engine over two hops: requests go on when either worker is lost, and both bookings end once."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from dynamo_es.errors import CannotConnect, Disconnected, InvalidArgument
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.migration import MigrationSettings
from dynamo_es.router.active_sequences import NO_LOAD
from dynamo_es.router.routing_request import WorkerFacts
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from tests.unit.router.test_disagg_router import D1, D2, P1, P2, PREFILLED, PROMPT, TOKENS, Setup, Workers

REQUEST = {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 4}, "routing": {}}


class Engine:
    def __init__(self, workers, limit=3, **options):
        self.setup = Setup(workers, prefills=(P1, P2), decodes=(D1, D2), mode="round-robin", **options)
        self.engine = RoutedTokenEngine(self.setup.decode, self.setup.router, MigrationSettings(limit))
        self.context = Context("r")

    async def ask(self, request=REQUEST):
        async with asyncio.timeout(60), aclosing(self.engine.generate(request, self.context)) as batches:
            return [token for batch in [batch async for batch in batches] for token in batch[0]["token_ids"]]

    def check_freed(self):
        loads = [self.setup.prefill_load.load(rank) for rank in (P1, P2)]
        assert loads + [self.setup.decode_load.load(rank) for rank in (D1, D2)] == [NO_LOAD] * 4


async def test_a_decode_worker_that_is_lost_is_replaced_after_a_prefill_of_all_so_far():
    script = [*TOKENS[:2], Disconnected("gone")]
    one = Engine(Workers(w1=[PREFILLED], w2=[PREFILLED], w11=script, w12=TOKENS[2:]))
    assert await one.ask() == [5, 6, 7, 8]
    assert one.setup.sent_to == [1, 11, 2, 12]
    assert one.setup.workers.asked[2][1]["token_ids"] == [*PROMPT, 5, 6]
    assert one.setup.workers.asked[3][1]["stop_conditions"]["max_tokens"] == 2
    assert one.setup.outcomes == {1: "ok", 4: "migrated", 7: "ok", 10: "ok"}
    one.check_freed()


@pytest.mark.parametrize("address", [None, ("h", 1)], ids=["by result", "by address"])
async def test_a_prefill_worker_that_is_lost_is_replaced_and_its_decode_worker_freed(address):
    never, waiting = asyncio.Event(), asyncio.Event()
    facts = {} if address is None else {1: WorkerFacts(bootstrap=address)}
    lost = [Disconnected("gone")] if address is None else [waiting, Disconnected("gone")]
    one = Engine(
        Workers(w1=lost, w2=[PREFILLED], w11=TOKENS if address is None else [waiting.set, never], w12=TOKENS),
        facts=facts,
    )
    assert await one.ask() == [5, 6, 7, 8]
    expected = {1: "migrated", 7: "ok", 10: "ok"} | ({} if address is None else {4: "migrated"})
    assert one.setup.outcomes == expected
    one.check_freed()


async def test_a_prompt_that_was_not_handed_over_is_computed_again():
    one = Engine(Workers(w1=[[{"token_ids": [5]}]], w2=[PREFILLED], w11=TOKENS, w12=TOKENS))
    assert await one.ask() == [5, 6, 7, 8]
    assert one.setup.sent_to[:2] == [1, 2]
    one.check_freed()


async def test_a_client_that_leaves_during_the_second_prefill_frees_both_hops():
    never, reached = asyncio.Event(), asyncio.Event()
    one = Engine(
        Workers(
            w1=[PREFILLED], w2=[reached.set, never], w11=[TOKENS[0], Disconnected("gone")], w12=TOKENS
        )
    )  # fmt: skip
    asking = asyncio.create_task(one.ask())
    async with asyncio.timeout(60):
        await reached.wait()
    one.context.stop_generating()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert one.setup.outcomes == {1: "ok", 4: "migrated", 7: "cancelled"}
    one.check_freed()


async def test_a_context_that_is_stopped_is_not_carried_on():
    one = Engine(Workers(w1=[PREFILLED], w2=[PREFILLED], w11=[], w12=TOKENS))
    one.setup.workers.scripts[11] = [TOKENS[0], one.context.stop_generating, Disconnected("gone")]
    with pytest.raises(Disconnected):
        await one.ask()
    assert 12 not in one.setup.sent_to
    one.check_freed()


@pytest.mark.parametrize("limit", [0, 1])
async def test_the_first_failure_is_told_if_nobody_takes_the_request_on(limit):
    one = Engine(Workers(w1=[PREFILLED], w11=[TOKENS[0], Disconnected("gone")], w12=[Overloaded("full")]), limit)
    one.setup.prefills[:] = [P1]
    with pytest.raises(Disconnected, match="gone"):
        await one.ask()
    one.check_freed()


async def test_refusals_of_the_router_are_told_in_http_terms():
    one = Engine(Workers())
    one.setup.decodes.clear()
    one.setup.prefills.clear()
    with pytest.raises(CannotConnect):
        await one.ask()
    with pytest.raises(InvalidArgument, match="Invalid request"):
        await one.ask({**REQUEST, "routing": {"backend_instance_id": 5}})
    full = Engine(Workers(w1=[PREFILLED], w2=[PREFILLED], w11=[Overloaded("full")], w12=[Overloaded("full")]), 0)
    with pytest.raises(ApiError) as refused:
        await full.ask()
    assert (refused.value.status, refused.value.code) == (529, "worker_full")
