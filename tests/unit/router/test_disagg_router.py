"""Two hops over real routers and bookings; only the workers are scripted."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import Cancelled, CannotConnect, Disconnected, DynamoException
from dynamo_es.router.active_sequences import NO_LOAD, ActiveSequences, BookedLoad, OtherRouters, WorkerRank
from dynamo_es.router.choosers import RoundRobinChooser
from dynamo_es.router.conditional_disagg import conditional_disagg
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.disagg_router import DisaggRouter
from dynamo_es.router.disaggregation import handed_over_settings, prefill_settings
from dynamo_es.router.errors import NoEligibleWorker, PrefillFailed
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from dynamo_es.runtime.context import Context
from schemas.columns import pack_u64
from schemas.kv_events import BlocksStored, KvEvents
from schemas.requests import Finished, Routed
from streams.kv_index import KvIndexFold
from streams.requests import RequestsFold
from streams.testing import FoldDriver

BLOCK = 4
P1, P2, D1, D2 = (WorkerRank(number, 0) for number in (1, 2, 11, 12))
PROMPT = list(range(32))
PARAMS = {"engine": ["opaque", 7]}
PREFILLED = [{"token_ids": [5], "disaggregated_params": PARAMS}]
TOKENS = [[{"token_ids": [token]}] for token in (5, 6, 7, 8)]


class Workers:
    """Answers by script: lists of frames, exceptions, events to wait for, functions to call on the way."""

    def __init__(self, **scripts):
        self.scripts = {int(name[1:]): script for name, script in scripts.items()}
        self.asked = []

    async def stream(self, request, instance_id, context, lane=None):
        self.asked.append((instance_id, request))
        for step in self.scripts[instance_id]:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                stopped = asyncio.ensure_future(context.async_killed_or_stopped())
                passed = asyncio.ensure_future(step.wait())
                await asyncio.wait((stopped, passed), return_when=asyncio.FIRST_COMPLETED)
                stopped.cancel()
                passed.cancel()
                if context.is_stopped():
                    return
            elif callable(step):
                step()
            else:
                yield step


class Sink:
    def __init__(self):
        self.events = []

    def offer(self, topic, key, value):
        self.events.append(value)
        return True


class Setup:
    def __init__(self, workers, *, settings=None, prefills=(P1,), decodes=(D1,), facts=None, mode="kv", needs=True):
        settings = settings or KvRouterSettings()
        self.workers, self.sink, self.clock = workers, Sink(), ManualClock()
        self.index = FoldDriver(KvIndexFold())
        self.prefill_load, self.decode_load = ActiveSequences(), ActiveSequences()
        self.prefills, self.decodes, self.facts = list(prefills), list(decodes), facts or {}
        self.prefill = self._router(self.prefill_load, self.prefills, prefill_settings(settings), mode)
        self.decode = self._router(self.decode_load, self.decodes, settings, mode, output=True)
        self.router = DisaggRouter(
            self.decode, self._prefill, block_size=BLOCK, rng=random.Random(3),
            policy=conditional_disagg(settings), needs_prefill=lambda: needs,
        )  # fmt: skip

    async def _prefill(self):
        return self.prefill if self.prefills else None

    def _router(self, load, ranks, settings, mode, output=False):
        chooser = RoundRobinChooser()
        if mode == "kv":
            chooser = KvChooser(
                lambda: self.index.state, load, model=lambda: "m", block_size=BLOCK, settings=settings,
                rng=random.Random(1), handed_over=handed_over_settings(settings), decode_only=lambda: output,
            )  # fmt: skip
        return RequestRouter(
            chooser, load, self.workers, lambda: ranks, self.sink, router_id=9, model=lambda: "m", block_size=BLOCK,
            positions=dict, clock=self.clock, facts=lambda worker: self.facts.get(worker, WorkerFacts()),
            track_output_blocks=lambda: output,
        )  # fmt: skip

    def cache(self, worker, tokens):
        column = pack_u64(hash_prompt(tokens, BLOCK)[1])
        self.index.feed(KvEvents(1, "m", worker, 0, 1, 0, BLOCK, True, [BlocksStored("device", None, column, column)]))

    def stream(self, context=None, payload=None, **routing):
        payload = payload or {"token_ids": PROMPT, "stop_conditions": {"max_tokens": 4}, "routing": {"cache_salt": "s"}}
        return self.router.stream(RoutingRequest("r", PROMPT, **routing), payload, context or Context("r"))

    async def ask(self, **options):
        async with aclosing(self.stream(**options)) as batches:
            return [frame for batch in [batch async for batch in batches] for frame in batch]

    def loads(self):
        return self.prefill_load.load(P1), self.decode_load.load(D1)

    @property
    def outcomes(self):
        return {event.attempt: event.outcome for event in self.sink.events if isinstance(event, Finished)}

    @property
    def sent_to(self):
        return [worker for worker, _ in self.workers.asked]


async def test_the_prompt_goes_to_a_prefill_worker_and_its_answer_to_a_decode_worker():
    frame = {**PREFILLED[0], "completion_usage": {"prompt_tokens_details": {"cached_tokens": 8}}}
    setup = Setup(Workers(w1=[[frame]], w11=TOKENS))
    payload = {
        "token_ids": PROMPT, "stop_conditions": {"max_tokens": 4, "min_tokens": 2, "stop": ["x"]},
        "sampling_options": {"n": 3, "seed": 1}, "routing": {"cache_salt": "s"},
    }  # fmt: skip
    assert await setup.ask(payload=payload) == [{"token_ids": [token]} for token in (5, 6, 7, 8)]
    (first, prefill), (second, decode) = setup.workers.asked
    assert (first, second) == (1, 11)
    assert prefill["stop_conditions"] == {"max_tokens": 1, "min_tokens": None, "stop": ["x"]}
    assert prefill["sampling_options"] == {"n": None, "best_of": None, "seed": 1}
    assert "prefill_result" not in prefill
    assert "bootstrap_info" not in prefill
    assert decode["prefill_result"] == {"disaggregated_params": PARAMS, "prompt_tokens_details": {"cached_tokens": 8}}
    assert decode["stop_conditions"] == payload["stop_conditions"]
    assert decode["sampling_options"] == {"n": 3, "seed": 1}
    assert decode["routing"] == {
        "cache_salt": "s", "worker_id": 11, "dp_rank": 0, "overlap_blocks": 0, "prefill_worker_id": 1,
        "prefill_dp_rank": 0,
    }  # fmt: skip
    assert payload["stop_conditions"]["max_tokens"] == 4
    assert setup.router.counters.result == 1


@pytest.mark.parametrize("mode", ["kv", "round-robin"])
async def test_LOAD_08_each_hop_is_charged_with_its_own_work(mode):
    """8 prompt blocks, 4 output blocks: prompt tokens on p1 until its first token, blocks on d1 only, 0 at the end."""
    seen = {}
    setup = Setup(Workers(), mode=mode)
    output = [[{"token_ids": [1] * BLOCK}], lambda: seen.__setitem__("after a block", setup.loads())]
    setup.workers.scripts = {
        1: [lambda: seen.__setitem__("sent", setup.loads()), PREFILLED,
            lambda: seen.__setitem__("prefilled", setup.loads())],
        11: [lambda: seen.__setitem__("handed over", setup.loads()), *output * 4],
    }  # fmt: skip
    await setup.ask()
    blocks = 8 if mode == "kv" else 0  # a mode that hashes nothing books no prompt blocks
    assert seen["sent"] == (BookedLoad(32, 0, 1), NO_LOAD)
    assert seen["prefilled"] == (BookedLoad(0, 0, 1), NO_LOAD)
    assert seen["handed over"] == (NO_LOAD, BookedLoad(0, blocks, 1))
    assert seen["after a block"] == (NO_LOAD, BookedLoad(0, blocks + 4, 1))
    assert setup.loads() == (NO_LOAD, NO_LOAD)
    routed = [event for event in setup.sink.events if isinstance(event, Routed)]
    assert [(event.stage, event.attempt, event.prefill_tokens) for event in routed] == [
        ("prefill", 1, 32), ("decode", 4, 0),
    ]  # fmt: skip
    assert setup.outcomes == {1: "ok", 4: "ok"}


async def test_LOAD_08_other_routers_see_the_same_and_end_at_nothing():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS))
    log, loads = FoldDriver(RequestsFold()), ActiveSequences()
    log.state.observers.append(OtherRouters(loads, own_router_id=1))
    seen = []
    await setup.ask()
    for event in setup.sink.events:
        log.feed(event)
        seen.append((loads.load(P1), loads.load(D1)))
    assert seen[0] == (BookedLoad(32, 0, 1), NO_LOAD)
    assert (NO_LOAD, BookedLoad(0, 8, 1)) in seen
    assert seen[-1] == (NO_LOAD, NO_LOAD)
    assert (log.state.counters.duplicates, log.state.counters.late) == (0, 0)


async def test_with_an_address_both_start_at_once_in_one_room():
    arrived = asyncio.Event()
    setup = Setup(
        Workers(w1=[arrived, PREFILLED], w11=[arrived.set, *TOKENS]),
        facts={1: WorkerFacts(bootstrap=("10.0.0.7", 8998))},
    )
    async with asyncio.timeout(60):
        assert len(await setup.ask()) == 4
    (_, prefill), (_, decode) = setup.workers.asked
    info = prefill["bootstrap_info"]
    assert (info["bootstrap_host"], info["bootstrap_port"]) == ("10.0.0.7", 8998)
    assert 0 <= info["bootstrap_room"] < 2**63
    assert decode["bootstrap_info"] == info
    assert "prefill_result" not in decode
    assert setup.outcomes == {1: "ok", 4: "ok"}
    assert setup.router.counters.bootstrap == 1
    assert setup.loads() == (NO_LOAD, NO_LOAD)


async def test_every_request_has_a_room_of_its_own():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS), facts={1: WorkerFacts(bootstrap=("h", 1))})
    await setup.ask()
    await setup.ask()
    rooms = {request["bootstrap_info"]["bootstrap_room"] for _, request in setup.workers.asked}
    assert len(rooms) == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([[{"token_ids": [5]}]], PrefillFailed),
        ([], PrefillFailed),
        ([[{"token_ids": [], "finish_reason": {"error": "the secret prompt"}}]], PrefillFailed),
        ([PREFILLED, [{"disaggregated_params": {"other": 1}}]], PrefillFailed),
        ([Disconnected("gone")], Disconnected),
        ([Cancelled("drained")], PrefillFailed),
    ],
)
async def test_a_prompt_that_is_not_handed_over_fails_the_request_and_nobody_generates(script, error):
    setup = Setup(Workers(w1=script, w11=TOKENS))
    with pytest.raises(error) as caught:
        await setup.ask()
    assert "secret" not in str(caught.value)
    assert setup.sent_to == [1]
    assert setup.loads() == (NO_LOAD, NO_LOAD)


async def test_a_prompt_that_fails_while_the_decode_worker_waits_for_it_ends_the_request():
    never, waiting = asyncio.Event(), asyncio.Event()
    setup = Setup(
        Workers(w1=[waiting, Disconnected("gone")], w11=[waiting.set, never]),
        facts={1: WorkerFacts(bootstrap=("h", 1))},
    )
    async with asyncio.timeout(60):
        with pytest.raises(Disconnected, match="gone"):
            await setup.ask()
    assert setup.outcomes == {1: "error", 4: "error"}
    assert setup.loads() == (NO_LOAD, NO_LOAD)


async def test_a_prefill_worker_that_cannot_be_reached_is_passed_over():
    setup = Setup(Workers(w1=[CannotConnect("no")], w2=[PREFILLED], w11=TOKENS), prefills=(P1, P2), mode="round-robin")
    assert len(await setup.ask()) == 4
    assert setup.sent_to == [1, 2, 11]
    assert setup.outcomes == {1: "migrated", 2: "ok", 4: "ok"}
    assert setup.workers.asked[2][1]["routing"]["prefill_worker_id"] == 2


async def test_one_whose_address_is_out_already_is_not():
    facts = {1: WorkerFacts(bootstrap=("h", 1)), 2: WorkerFacts(bootstrap=("h", 2))}
    never = asyncio.Event()
    setup = Setup(
        Workers(w1=[CannotConnect("no")], w2=[PREFILLED], w11=[never]), prefills=(P1, P2), facts=facts,
        mode="round-robin",
    )  # fmt: skip
    async with asyncio.timeout(60):
        with pytest.raises(Disconnected, match="had its address"):
            await setup.ask()
    assert 2 not in setup.sent_to


async def test_a_client_that_leaves_frees_both_hops():
    never, there = asyncio.Event(), asyncio.Event()
    for facts in ({}, {1: WorkerFacts(bootstrap=("h", 1))}):
        setup = Setup(Workers(w1=[there.set, never], w11=[never]), facts=facts)
        there.clear()
        context = Context("r")
        task = asyncio.create_task(setup.ask(context=context))
        await there.wait()
        context.stop_generating()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert setup.loads() == (NO_LOAD, NO_LOAD)
        assert set(setup.outcomes.values()) == {"cancelled"}


async def test_a_request_that_is_stopped_during_its_prompt_generates_nothing():
    setup = Setup(Workers())
    context = Context("r")
    setup.workers.scripts = {1: [context.stop_generating], 11: TOKENS}
    assert await setup.ask(context=context) == []
    assert setup.sent_to == [1]


async def test_without_prefill_workers_decode_workers_serve_alone_if_they_can():
    setup = Setup(Workers(w11=TOKENS), prefills=(), needs=False)
    assert len(await setup.ask()) == 4
    assert setup.router.counters.no_prefill == 1
    with pytest.raises(NoEligibleWorker, match="no prefill worker is available"):
        await Setup(Workers(w11=TOKENS), prefills=()).ask()


async def test_pins_say_which_worker_takes_which_hop():
    setup = Setup(Workers(w1=[PREFILLED], w2=[PREFILLED], w11=TOKENS, w12=TOKENS), prefills=(P1, P2), decodes=(D1, D2))
    await setup.ask(worker_id=12, prefill_worker_id=2)
    assert setup.sent_to == [2, 12]
    with pytest.raises(NoEligibleWorker):
        await setup.ask(prefill_worker_id=12)


async def test_the_decode_worker_with_less_to_do_is_chosen_whatever_is_cached_there():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS, w12=TOKENS), decodes=(D1, D2))
    setup.cache(11, PROMPT)
    setup.decode.route(RoutingRequest("other", PROMPT[:8], worker_id=11))
    await setup.ask()
    assert setup.sent_to == [1, 12]


def conditional(**options):
    values = {f"conditional_disagg_{name}": value for name, value in options.items()}
    return KvRouterSettings(conditional_disagg_enabled=True, **values)


async def test_a_prompt_that_is_mostly_cached_at_a_decode_worker_stays_there():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS, w12=TOKENS), settings=conditional(), decodes=(D1, D2), needs=True)
    setup.cache(12, PROMPT[:24])
    await setup.ask()
    assert setup.sent_to == [12]
    assert setup.router.counters.kept_local == 1
    routed = next(event for event in setup.sink.events if isinstance(event, Routed))
    # The decode worker has the rest of the prompt to compute, and is charged with it.
    assert (routed.stage, routed.attempt, routed.prefill_tokens) == ("", 1, 8)


async def test_one_that_is_not_cached_goes_over_a_prefill_worker_and_to_where_it_is_cached_best():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS, w12=TOKENS), settings=conditional(), decodes=(D1, D2))
    setup.cache(12, PROMPT[:8])
    await setup.ask()
    assert setup.sent_to == [1, 12]


@pytest.mark.parametrize(("tokens", "local"), [(50, False), (51, True)])
async def test_a_busy_prefill_worker_leaves_prompts_to_decode_workers(tokens, local):
    settings = conditional(policy="prefill_load", prefill_busy_threshold=0.5)
    setup = Setup(
        Workers(w1=[PREFILLED], w11=TOKENS), settings=settings, facts={1: WorkerFacts(max_num_batched_tokens=100)}
    )
    setup.prefill.route(RoutingRequest("other", list(range(100, 100 + tokens))))
    await setup.ask()
    assert setup.sent_to == ([11] if local else [1, 11])


async def test_a_request_that_names_its_prefill_worker_goes_there():
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS), settings=conditional())
    setup.cache(11, PROMPT)
    await setup.ask(prefill_worker_id=1)
    assert setup.sent_to == [1, 11]


async def test_a_busy_decode_worker_gets_prompts_from_prefill_workers():
    settings = conditional(decode_busy_threshold=0.5)
    setup = Setup(Workers(w1=[PREFILLED], w11=TOKENS), settings=settings, facts={11: WorkerFacts(total_kv_blocks=16)})
    setup.cache(11, PROMPT)
    setup.decode.route(RoutingRequest("other", list(range(100, 136))))
    await setup.ask()
    assert setup.sent_to == [1, 11]


async def test_the_errors_of_a_decode_worker_are_passed_on():
    setup = Setup(Workers(w1=[PREFILLED], w11=[Disconnected("decode is gone")]))
    with pytest.raises(DynamoException, match="decode is gone"):
        await setup.ask()
    assert setup.loads() == (NO_LOAD, NO_LOAD)
