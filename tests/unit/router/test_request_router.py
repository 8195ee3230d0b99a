from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import CannotConnect, Disconnected, InvalidArgument, Unknown
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import NO_LOAD, ActiveSequences, BookedLoad, WorkerRank
from dynamo_es.router.approximate_index import TtlIndex
from dynamo_es.router.choosers import RandomChooser, RoundRobinChooser
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.decision_reasons import KV_REASONS
from dynamo_es.router.errors import BookingConflict, NoEligibleWorker, PinNotAllowed, UnknownRequest
from dynamo_es.router.hashing import block_seed, hash_prompt
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.policy_queue import queue_profile
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest, WorkerFacts
from dynamo_es.runtime.context import Context
from schemas.columns import pack_u64, unpack_u64
from schemas.kv_events import BlocksStored, KvEvents
from schemas.requests import Finished, PrefillCompleted, Routed
from streams.kv_index import KvIndexFold
from streams.requests import BookingKey
from streams.testing import FoldDriver

BLOCK = 4
W1, W2, W3 = (WorkerRank(number, 0) for number in (1, 2, 3))


class ListSink:
    def __init__(self):
        self.events = []

    def offer(self, topic, key, value):
        self.events.append(value)
        return True


class ScriptedClient:
    """Answers with the frames, or the exception, that a worker id is scripted with."""

    def __init__(self, script):
        self.script, self.asked = script, []

    async def stream(self, request, instance_id, context, lane=None):
        self.asked.append((instance_id, request))
        for step in self.script[instance_id]:
            if isinstance(step, Exception):
                raise step
            yield step


class Setup:
    def __init__(self, ranks=(W1, W2), chooser=None, script=None, settings=None, **options):
        self.driver = FoldDriver(KvIndexFold())
        self.active = ActiveSequences()
        self.sink, self.clock, self.ranks = ListSink(), ManualClock(), list(ranks)
        self.client = ScriptedClient(script or {})
        self.chooser = chooser or KvChooser(
            lambda: self.driver.state, self.active, model=lambda: "m", block_size=BLOCK,
            settings=settings or KvRouterSettings(), rng=random.Random(1), clock=self.clock,
            approximate=options.pop("approximate", None), decode_only=options.pop("decode_only", lambda: False),
        )  # fmt: skip
        self.router = RequestRouter(
            self.chooser, self.active, self.client, lambda: self.ranks, self.sink,
            router_id=77, model=lambda: "m", block_size=BLOCK,
            positions=lambda: {TopicPartition("d.kv-events", 0): 5}, clock=self.clock, **options,
        )  # fmt: skip

    def cache(self, worker, tokens, tier="device"):
        column = pack_u64(hash_prompt(tokens, BLOCK)[1])
        self.driver.feed(KvEvents(1, "m", worker, 0, 1, 0, BLOCK, True, [BlocksStored(tier, None, column, column)]))


def ask(name="r", tokens=range(16), **options):
    return RoutingRequest(name, list(tokens), **options)


def test_the_warm_worker_is_chosen_and_the_decision_says_why():
    setup = Setup()
    setup.cache(2, list(range(12)))
    choice = setup.router.route(ask()).choice
    assert choice.rank == W2
    assert (choice.overlap_blocks, choice.cached_tokens, choice.prefill_tokens) == (3, 12, 4)
    event = setup.sink.events[0]
    assert isinstance(event, Routed)
    assert (event.worker_id, event.overlap_blocks, event.isl_tokens, event.router_id) == (2, 3, 16, 77)
    assert list(unpack_u64(event.sequence_hashes)) == hash_prompt(list(range(16)), BLOCK)[1]
    assert {row.worker_id: (row.device_blocks, row.cost) for row in event.candidates} == {1: (0, 8.0), 2: (3, 5.0)}
    assert event.positions[0].next_offset == 5
    assert setup.router.counters.decisions == {"overlap": 1}


def test_LOAD_03_a_burst_spreads_because_each_decision_is_booked_at_once():
    setup = Setup()
    for number in range(8):
        tokens = [number * 100 + offset for offset in range(16)]
        setup.router.route(ask(f"r{number}", tokens))
    assert setup.active.load(W1).requests == setup.active.load(W2).requests == 4


def test_LOAD_13_a_popular_prefix_does_not_pull_everything():
    setup = Setup(ranks=(W1, W2, W3, WorkerRank(4, 0)))
    prefix = list(range(64))
    setup.cache(1, prefix)
    for number in range(100):
        setup.router.route(ask(f"r{number}", prefix + [1000 + number] * 16))
    loads = [setup.active.load(rank).requests for rank in setup.ranks]
    assert sum(loads) == 100
    # Dynamo's formula lets the holder take about twice the mean, then others take the prefix over.
    assert max(loads) <= 2.5 * 25
    assert min(loads) >= 10


def test_a_request_id_that_is_booked_is_a_conflict_and_free_again_after_release():
    setup = Setup()
    setup.router.route(ask())
    with pytest.raises(BookingConflict, match=r"Request r already exists \(assigned to worker"):
        setup.router.route(ask())
    setup.router.release("r")
    setup.router.route(ask())
    with pytest.raises(UnknownRequest):
        setup.router.release("other")


def test_the_life_of_a_request_is_in_the_events():
    setup = Setup()
    setup.router.route(ask())
    setup.clock.advance(0.25)
    setup.router.complete_prefill("r")
    setup.router.complete_prefill("r")
    setup.clock.advance(0.5)
    setup.router.release("r")
    kinds = [type(event) for event in setup.sink.events]
    assert kinds == [Routed, PrefillCompleted, Finished]
    assert (setup.sink.events[2].first_token_ms, setup.sink.events[2].duration_ms) == (250, 750)
    assert setup.active.load(W1) == setup.active.load(W2) == NO_LOAD


def test_empty_token_lists_are_refused_and_wedge_nothing():
    setup = Setup()
    with pytest.raises(InvalidArgument, match="token_ids must not be empty"):
        setup.router.route(ask(tokens=[]))
    assert setup.router.route(ask()).choice.rank in (W1, W2)


@pytest.mark.parametrize("tokens", [[-1] * 8, [2**32] * 8, ["x"] * 8, [1.5] * 8])
def test_tokens_that_are_no_u32_are_refused(tokens):
    setup = Setup()
    with pytest.raises(InvalidArgument, match="token_ids"):
        setup.router.route(RoutingRequest("r", tokens))
    assert setup.router.open_requests == 0


def test_nobody_to_route_to():
    with pytest.raises(NoEligibleWorker, match="no endpoints available to route work"):
        Setup(ranks=()).router.route(ask())


def test_pins():
    setup = Setup(ranks=(W1, W2, WorkerRank(2, 1)))
    assert setup.router.route(ask("a", worker_id=2, dp_rank=1)).choice.rank == WorkerRank(2, 1)
    assert setup.router.route(ask("b", dp_rank=1)).choice.rank == WorkerRank(2, 1)
    with pytest.raises(NoEligibleWorker):
        setup.router.route(ask("c", worker_id=9))


def test_IDX_13_salt_and_adapter_are_apart():
    setup = Setup()
    tokens = list(range(8))
    column = pack_u64(hash_prompt(tokens, BLOCK, block_seed(None, "a"))[1])
    setup.driver.feed(KvEvents(1, "m", 2, 0, 1, 0, BLOCK, True, [BlocksStored("device", None, column, column)]))
    assert setup.router.choose(ask(tokens=tokens, cache_namespace="a")).overlap_blocks == 2
    for options in ({"cache_namespace": "b"}, {}, {"lora_name": "a"}):
        assert setup.router.choose(ask(tokens=tokens, **options)).overlap_blocks == 0


def test_an_override_counts_for_its_request_and_is_in_the_digest():
    setup = Setup()
    setup.cache(2, list(range(16)))
    plain = setup.router.choose(ask())
    other = setup.router.choose(ask(config_override={"overlap_score_weight": 0.0}))
    assert plain.rank == W2
    assert plain.config_digest != other.config_digest
    with pytest.raises(InvalidArgument, match="overlap_score_credit must be a finite"):
        setup.router.choose(ask(config_override={"overlap_score_credit": -1}))


def test_an_id_that_another_router_booked_is_a_conflict_too():
    setup = Setup()
    setup.active.book(BookingKey("r", 1), W2, [], 4)
    with pytest.raises(BookingConflict, match="worker_id: 2"):
        setup.router.route(ask())
    assert (setup.router.open_requests, setup.sink.events) == (0, [])


def test_allowed_workers_and_taints_of_a_request_hold():
    taints = {1: {"a"}, 2: {"b"}, 3: {"a", "b"}}
    setup = Setup(ranks=(W1, W2, W3), facts=lambda worker: WorkerFacts(taints=frozenset(taints[worker])))
    assert setup.router.route(ask("a", allowed_worker_ids=[2])).choice.rank == W2
    constraints = RoutingConstraints({"a", "b"})
    assert setup.router.route(ask("b", constraints=constraints)).choice.rank == W3
    with pytest.raises(NoEligibleWorker):
        setup.router.route(ask("c", constraints=constraints, allowed_worker_ids=[1, 2]))
    with pytest.raises(PinNotAllowed):
        setup.router.route(ask("d", worker_id=1, allowed_worker_ids=[2]))


def test_overloaded_workers_get_nothing_in_any_mode():
    for chooser in (None, RoundRobinChooser()):
        setup = Setup(chooser=chooser, overloaded=lambda: frozenset({1}))
        assert {setup.router.route(ask(f"r{number}")).choice.rank for number in range(4)} == {W2}


async def test_requests_wait_while_all_workers_are_busy_and_are_booked_when_it_is_their_turn():
    setup = Setup(facts=lambda worker: WorkerFacts(max_num_batched_tokens=16))
    setup.router.queue_by(queue_profile(None, 0.0, "fcfs"), asyncio.get_running_loop())
    assert {(await setup.router.admit(ask(name, [number] * 16))).choice.rank for number, name in enumerate("ab")} == {
        W1, W2,
    }  # fmt: skip
    waiting = [asyncio.ensure_future(setup.router.admit(ask(name, [9] * 16))) for name in "cd"]
    asking = asyncio.ensure_future(setup.router.select(ask("e")))
    await asyncio.sleep(0)
    assert setup.router.admission.queue.usage() == {"default": (3, 48, 0)}
    setup.router.complete_prefill("a")
    assert (await waiting[0]).key.request_id == "c"
    assert not waiting[1].done()
    setup.router.release("c", "cancelled")
    assert (await waiting[1]).key.request_id == "d"
    setup.router.release("b")
    await asking
    with pytest.raises(BookingConflict):
        await setup.router.admit(ask("d"))


async def test_a_retry_does_not_wait_again():
    setup = Setup(
        facts=lambda worker: WorkerFacts(max_num_batched_tokens=16),
        script={1: [CannotConnect("refused")], 2: [[{"token_ids": [5]}]]},
    )
    setup.router.queue_by(queue_profile(None, 0.0, "fcfs"), asyncio.get_running_loop())
    setup.cache(1, list(range(16)))
    setup.active.book(BookingKey("other", 1), W2, [], 16)
    assert await collect(setup) == [[{"token_ids": [5]}]]


def blocks_after(setup, *counts) -> list[int]:
    seen = []
    for count in counts:
        setup.router.note_output("r", count)
        seen.append(setup.active.load(W1).blocks)
    return seen


def test_output_blocks_count_as_load_if_they_are_tracked():
    setup = Setup(ranks=(W1,), track_output_blocks=lambda: True)
    setup.router.route(ask(tokens=range(15)))
    # 15 tokens are three complete blocks and part of a fourth; the fifth begins with the second generated token.
    assert blocks_after(setup, 1, 1, 3, 9) == [3, 4, 4, 7]
    setup.router.release("r")
    assert setup.active.load(W1) == NO_LOAD


def test_blocks_of_a_request_that_will_end_soon_weigh_less():
    setup = Setup(ranks=(W1,), track_output_blocks=lambda: True)
    setup.router.route(ask(tokens=range(16), expected_output_tokens=16))
    # Four prompt blocks and those of the output, times what is left of the output.
    assert blocks_after(setup, 4, 4, 4, 4, 4) == [4, 3, 2, 0, 0]


def test_LOAD_08_where_output_is_not_tracked_a_request_is_its_prompt_until_it_ends():
    prefill = Setup(ranks=(W1,))
    prefill.router.route(ask())
    assert blocks_after(prefill, 4, 4) == [4, 4]
    prefill.router.complete_prefill("r")
    assert prefill.active.load(W1) == BookedLoad(0, 4, 1)
    settings = KvRouterSettings(router_track_prefill_tokens=False)
    decode = Setup(ranks=(W1,), settings=settings, decode_only=lambda: True, track_output_blocks=lambda: True)
    decode.cache(1, list(range(8)))
    choice = decode.router.route(ask()).choice
    assert (choice.costs[0].cost, decode.active.load(W1)) == (2.0, BookedLoad(0, 4, 1))
    assert blocks_after(decode, 4, 4, 4, 4)[-1] == 8
    for setup in (prefill, decode):
        setup.router.release("r")
        assert setup.active.load(W1) == NO_LOAD


def test_without_block_tracking_only_prompt_tokens_and_requests_are_booked():
    setup = Setup(settings=KvRouterSettings(router_track_active_blocks=False))
    assert setup.router.route(ask()).choice.rank in (W1, W2)
    assert {setup.active.load(rank) for rank in (W1, W2)} == {NO_LOAD, BookedLoad(16, 0, 1)}
    assert setup.router.choose(ask(tokens=range(16))).costs[0].decode_blocks == 0


def test_without_reuse_identities_of_their_own_are_booked_and_told():
    setup = Setup(ranks=(W1,), settings=KvRouterSettings(router_assume_kv_reuse=False))
    for name in "ab":
        setup.router.route(ask(name))
    assert setup.active.load(W1).blocks == 8
    events = setup.sink.events
    assert events[0].sequence_hashes == events[1].sequence_hashes
    assert events[0].tracking_hashes != events[1].tracking_hashes


def test_an_approximate_index_learns_from_what_is_sent_and_only_if_it_is_told_to():
    setup = Setup(approximate=TtlIndex(10.0), settings=KvRouterSettings(use_kv_events=False))
    setup.router.route(ask("a"))
    assert setup.router.choose(ask()).overlap_blocks == 0
    rank = setup.router.route(ask("b", update_indexer=True)).choice.rank
    setup.router.release("a")
    setup.router.release("b")
    choice = setup.router.choose(ask())
    assert (choice.rank, choice.overlap_blocks) == (rank, 4)
    setup.clock.advance(10)
    assert setup.router.choose(ask()).overlap_blocks == 0


def test_a_side_index_fills_in_until_events_come():
    setup = Setup(ranks=(W1,), approximate=TtlIndex(10.0))
    setup.cache(1, list(range(8)))
    assert setup.router.choose(ask()).overlap_blocks == 2
    setup.router.route(ask("a", range(12), update_indexer=True))
    assert setup.router.choose(ask()).overlap_blocks == 3
    setup.clock.advance(10)
    assert setup.router.choose(ask()).overlap_blocks == 2


def test_malformed_objects_of_a_prompt_are_refused():
    with pytest.raises(InvalidArgument, match="block_mm_infos: missing field `mm_objects`"):
        Setup().router.route(ask(block_mm_infos=[{}]))


def test_OPS_02_reasons_are_told_apart():
    setup = Setup()
    setup.router.route(ask("short", [1, 2]))
    setup.router.route(ask("unheard"))
    setup.cache(2, list(range(100, 116)))
    for number in range(8):
        setup.router.route(ask(f"hit{number}", range(100, 116)))
    setup.router.route(ask("none", range(200, 216)))
    setup.cache(1, list(range(100, 116)))
    before = setup.router.counters.selected_blocks
    setup.router.route(ask("alike", range(100, 116)))
    counters = setup.router.counters
    assert set(counters.decisions) == set(KV_REASONS)
    assert {reason: counters.decisions[reason] for reason in KV_REASONS[1:] if reason != "load-over-overlap"} == {
        "equal-overlap": 1, "no-overlap": 1, "no-events": 1, "prompt-under-one-block": 1,
    }  # fmt: skip
    assert counters.queried_blocks == 11 * 4
    assert counters.matched_blocks == 9 * 4
    assert before < 8 * 4
    assert counters.selected_blocks == before + 4


def test_OPS_02_a_block_on_disk_that_is_less_than_half_a_block_is_overlap_all_the_same():
    setup = Setup(ranks=(W2,))
    setup.cache(2, range(4), tier="disk")
    choice = setup.router.route(ask()).choice
    assert (choice.overlap_blocks, choice.costs[0].effective_overlap) == (0, 0.25)
    assert setup.router.counters.decisions == {"overlap": 1}


def test_round_robin_takes_turns_also_when_the_set_changes():
    setup = Setup(ranks=(W1, W2, W3), chooser=RoundRobinChooser())
    chosen = [setup.router.route(ask(f"r{number}")).choice.rank for number in range(4)]
    assert chosen == [W1, W2, W3, W1]
    setup.ranks.remove(W2)
    assert setup.router.route(ask("x")).choice.rank == W3


def test_random_takes_all():
    setup = Setup(chooser=RandomChooser(random.Random(2)))
    assert {setup.router.route(ask(f"r{number}")).choice.rank for number in range(40)} == {W1, W2}


async def collect(setup, context=None, **options):
    context = context or Context("r")
    return [batch async for batch in setup.router.stream(ask(**options), {"token_ids": list(range(16))}, context)]


async def test_a_stream_books_tells_the_worker_its_rank_and_releases():
    frames = [[{"token_ids": [1, 2]}], [{"token_ids": [3], "finish_reason": "stop"}]]
    setup = Setup(ranks=(WorkerRank(1, 3),), script={1: frames})
    assert await collect(setup) == frames
    assert setup.client.asked[0][1]["routing"] == {"worker_id": 1, "dp_rank": 3, "overlap_blocks": 0}
    assert [type(event) for event in setup.sink.events] == [Routed, PrefillCompleted, Finished]
    assert (setup.sink.events[-1].outcome, setup.sink.events[-1].output_tokens) == ("ok", 3)
    assert setup.router.open_requests == 0


async def test_LOAD_01_an_unreachable_worker_is_passed_over_and_released_once():
    setup = Setup(script={1: [CannotConnect("refused")], 2: [[{"token_ids": [5]}]]})
    setup.cache(1, list(range(16)))
    assert await collect(setup) == [[{"token_ids": [5]}]]
    outcomes = [(event.attempt, event.outcome) for event in setup.sink.events if isinstance(event, Finished)]
    assert outcomes == [(1, "migrated"), (2, "ok")]
    assert setup.active.load(W1) == setup.active.load(W2) == NO_LOAD


async def test_when_nobody_can_be_reached_the_failure_is_told():
    setup = Setup(script={1: [CannotConnect("refused")], 2: [CannotConnect("refused")]})
    with pytest.raises(CannotConnect):
        await collect(setup)
    assert setup.router.open_requests == 0
    assert len(setup.client.asked) == 2


async def test_a_failure_in_the_stream_is_not_sent_elsewhere_and_its_text_stays_out_of_the_log():
    setup = Setup(script={1: [[{"token_ids": [5]}], Unknown("the prompt was: secret")], 2: []}, ranks=(W1,))
    with pytest.raises(Unknown):
        await collect(setup)
    finished = setup.sink.events[-1]
    assert (finished.outcome, finished.detail, finished.output_tokens) == ("error", "Unknown", 1)


async def test_LOAD_10_an_abandoned_stream_is_released_as_cancelled():
    setup = Setup(script={1: [[{"token_ids": [5]}]] * 5}, ranks=(W1,))
    stream = setup.router.stream(ask(), {}, Context("r"))
    await anext(stream)
    await stream.aclose()
    assert setup.sink.events[-1].outcome == "cancelled"
    assert setup.active.load(W1) == NO_LOAD


class Resuming:
    def __init__(self, answer=True):
        self.answer, self.asked, self.is_resuming = answer, [], False

    def resumes(self, error, worker_id, attempt):
        self.asked.append((type(error).__name__, worker_id, attempt))
        self.is_resuming = self.answer
        return self.answer


@pytest.mark.parametrize("answer", [True, False])
async def test_who_carries_a_request_on_is_asked_and_the_log_says_so(answer):
    setup = Setup(script={1: [[{"token_ids": [5]}], Disconnected("secret text")], 2: []})
    setup.cache(1, list(range(16)))
    resuming = Resuming(answer)
    with pytest.raises(Disconnected):
        await collect(setup, resumption=resuming)
    assert resuming.asked == [("Disconnected", 1, 1)]
    end = setup.sink.events[-1]
    assert (end.outcome, end.detail) == ("migrated" if answer else "error", "Disconnected")
    frames = [[{"token_ids": [6]}]]
    setup.client.script[2] = frames
    assert await collect(setup, excluded=frozenset({1}), first_attempt=2) == frames
    assert [(event.attempt, event.worker_id) for event in setup.sink.events if isinstance(event, Routed)] == [
        (1, 1), (2, 2),
    ]  # fmt: skip
    assert setup.active.load(W1) == setup.active.load(W2) == NO_LOAD


async def test_nobody_is_asked_without_another_worker_or_with_a_pin():
    resuming = Resuming()
    alone = Setup(script={1: [Disconnected("x")]}, ranks=(W1,))
    pinned = Setup(script={1: [Disconnected("x")]})
    for setup, options in ((alone, {}), (pinned, {"worker_id": 1})):
        with pytest.raises(Disconnected):
            await collect(setup, resumption=resuming, **options)
        assert setup.sink.events[-1].outcome == "error"
    assert not resuming.asked


async def test_a_worker_that_cannot_be_reached_after_it_began_is_not_asked_for_all_of_it_again():
    setup = Setup(script={1: [[{"token_ids": [5]}], CannotConnect("secret")], 2: [[{"token_ids": [5]}]]})
    setup.cache(1, list(range(16)))
    with pytest.raises(CannotConnect):
        await collect(setup)
    assert [worker for worker, _ in setup.client.asked] == [1]
    assert (setup.sink.events[-1].outcome, setup.sink.events[-1].detail) == ("error", "CannotConnect")
