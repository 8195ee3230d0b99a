from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.engines.mock.build import build_scheduler
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.timing import decode_ms, pass_seconds, prefill_ms
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.engines.scheduling.scheduler import ADMISSION_ERROR, Scheduler
from dynamo_es.errors import ConfigError
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksStored
from tests.support.passes import run

GOLDEN = Path(__file__).parents[2] / "data/golden/services"
TIMING = json.loads((GOLDEN / "mocker_timing_fpm.json").read_text())
EVENTS = json.loads((GOLDEN / "mocker_kv_events.json").read_text())
RECORDED = MockEngineConfig(num_gpu_blocks=64, block_size=4, max_num_seqs=8, max_num_batched_tokens=64)


def scheduler(**changes: Any) -> Scheduler:
    config = dataclasses.replace(RECORDED, **changes)
    return build_scheduler(config)


def request(prompt: Any, max_tokens: int, output: Iterator[int] | None = None) -> EngineRequest:
    return EngineRequest(list(prompt), max_tokens, output if output is not None else repeat(7))


def check(plans: list[PassPlan], recorded: list[dict[str, Any]]) -> None:
    assert len(plans) == len(recorded)
    for plan, expected in zip(plans, recorded, strict=True):
        assert pass_seconds(plan.times, 1, 1) == pytest.approx(expected["wall_time"], abs=1e-6)
        assert msgspec.structs.asdict(plan.scheduled) == pytest.approx(expected["scheduled_requests"])
        assert msgspec.structs.asdict(plan.queued) == pytest.approx(expected["queued_requests"])


def test_a_single_prompt_takes_the_recorded_passes() -> None:
    engine = scheduler()
    engine.add(request(range(13), 5))
    check(run(engine), TIMING["single_13_prompt_5_out"])


def test_a_chunked_prompt_takes_the_recorded_passes() -> None:
    engine = scheduler()
    engine.add(request(range(150), 3))
    check(run(engine), TIMING["chunked_150_prompt"])


def test_eight_prompts_with_preemption_take_the_recorded_passes_and_blocks() -> None:
    engine = scheduler()
    for number in range(8):
        engine.add(request([number] * 40, 12))
    plans, used = [], [0]
    while engine.has_work:
        plan = engine.schedule()
        engine.complete(plan)
        plans.append(plan)
        if engine.blocks.used != used[-1]:
            used.append(engine.blocks.used)
    check(plans, TIMING["eight_concurrent_40x12"])
    assert used == TIMING["kv_used_blocks_sequence"]
    assert engine.preemptions == 1


def test_events_of_a_single_prompt_are_the_recorded_ones() -> None:
    engine = scheduler()
    engine.add(request([*range(1, 14)], 5, output=count(14)))
    recorded = [
        event["event"]["data"]["stored"]
        for _, topic, events in EVENTS["first_13"]
        if topic == "kv-events"
        for event in events
    ]
    found = []
    while engine.has_work:
        engine.complete(engine.schedule())
        found += engine.blocks.drain_events()
    assert all(isinstance(event, BlocksStored) for event in found)
    assert len(found) == len(recorded) == 2
    first, second = found
    expected = [[block["block_hash"] for block in stored["blocks"]] for stored in recorded]
    assert list(unpack_u64(first.sequence_hashes)) == expected[0]
    assert list(unpack_u64(first.tokens_hashes)) == [block["tokens_hash"] for block in recorded[0]["blocks"]]
    assert second.parent == recorded[1]["parent_hash"]


@pytest.mark.parametrize(("length", "cached"), [(13, 12), (12, 8), (4, 0), (3, 0), (16, 12), (0, 0)])
def test_a_repeated_prompt_leaves_something_to_compute(length: int, cached: int) -> None:
    engine = scheduler()
    first, again = request(range(length), 2), request(range(length), 2)
    for item in (first, again):
        engine.add(item)
        run(engine)
    assert (first.cached_tokens, again.cached_tokens) == (0, cached)


def test_generated_blocks_are_reused_by_the_next_turn() -> None:
    engine = scheduler()
    first = request(range(6), 7, output=iter(range(100, 200)))
    engine.add(first)
    run(engine)
    turn = request([*first.tokens, 1, 2, 3], 1)
    engine.add(turn)
    run(engine)
    assert turn.cached_tokens == 12, "of 13 tokens 12 were computed, the last one was only sampled"


def test_adapters_and_tenants_share_nothing() -> None:
    engine = scheduler()
    engine.add(request(range(13), 1))
    run(engine)
    other = EngineRequest(list(range(13)), 1, repeat(7), seed=99)
    engine.add(other)
    run(engine)
    assert other.cached_tokens == 0


def test_without_prefix_caching_nothing_is_reused_or_told() -> None:
    engine = scheduler(enable_prefix_caching=False)
    for _ in range(2):
        item = request(range(13), 8)
        engine.add(item)
        run(engine)
        assert item.cached_tokens == 0
    assert engine.blocks.drain_events() == []


def test_a_finite_text_ends_with_stop_and_an_endless_one_with_length() -> None:
    engine = scheduler()
    reasons = {}
    for name, output in (("finite", iter([1, 2])), ("endless", repeat(1))):
        item = request(range(5), 4, output=output)
        engine.add(item)
        while engine.has_work:
            for _, token, reason in engine.complete(engine.schedule()):
                if reason:
                    reasons[name] = (reason, token, item.generated)
    assert reasons == {"finite": ("stop", None, 2), "endless": ("length", 1, 4)}


@pytest.mark.parametrize(
    ("length", "max_tokens", "refused"), [(256, 1, None), (257, 1, ""), (250, 7, None), (250, 8, ": 250 prompt tokens")]
)
def test_a_request_that_can_never_fit_is_refused(length: int, max_tokens: int, refused: str | None) -> None:
    refusal = scheduler().refusal(length, max_tokens)
    if refused is None:
        assert refusal is None
        engine = scheduler()
        engine.add(request(range(length), max_tokens))
        run(engine)
    else:
        assert refusal is not None
        assert refusal.startswith(ADMISSION_ERROR + refused)
    assert scheduler(max_model_len=20).refusal(18, 3) == ADMISSION_ERROR


@pytest.mark.parametrize("mode", ["lifo", "fifo"])
@pytest.mark.parametrize("chunked", [True, False])
def test_more_than_fits_is_served_in_the_end(mode: str, chunked: bool) -> None:
    engine = scheduler(preemption_mode=mode, num_gpu_blocks=16, enable_chunked_prefill=chunked)
    requests = [request([number] * 20, 30) for number in range(6)]
    for item in requests:
        engine.add(item)
    run(engine)
    assert [item.generated for item in requests] == [30] * 6
    assert engine.preemptions > 0


def test_who_gives_way_is_the_newest_or_the_oldest() -> None:
    for mode, victim in (("lifo", 1), ("fifo", 0)):
        engine = scheduler(preemption_mode=mode, num_gpu_blocks=8)
        requests = [request([number] * 15, 12) for number in range(2)]
        for item in requests:
            engine.add(item)
        while not engine.preemptions:
            engine.complete(engine.schedule())
        assert engine.waiting[0] is requests[victim]


def test_running_requests_and_the_budget_are_bounded() -> None:
    engine = scheduler(max_num_seqs=3, max_num_batched_tokens=10)
    for number in range(6):
        engine.add(request([number] * 8, 4))
    while engine.has_work:
        plan = engine.schedule()
        assert sum(plan.work.values()) <= 10
        assert len(engine.running) <= 3
        engine.complete(plan)


def test_without_chunks_a_prompt_larger_than_the_budget_runs_alone() -> None:
    engine = scheduler(enable_chunked_prefill=False, max_num_batched_tokens=10)
    engine.add(request([1] * 8, 3))
    engine.add(request([2] * 9, 1))
    plans = run(engine)
    assert list(plans[0].work.values()) == [8]
    assert all(sum(plan.work.values()) <= 10 for plan in plans)


def test_an_aborted_request_frees_its_blocks_at_once_even_in_a_pass() -> None:
    engine = scheduler()
    running, waiting = request(range(40), 10), request([5] * 200, 10)
    engine.add(running)
    engine.add(waiting)
    plan = engine.schedule()
    engine.abort(running)
    engine.abort(waiting)
    assert engine.blocks.used == 0
    assert engine.complete(plan) == []
    assert not engine.has_work
    engine.abort(running)
    late = request(range(40), 1)
    engine.add(late)
    engine.abort(late)
    assert not engine.has_work


def test_prefill_workers_pay_no_decode_time() -> None:
    engine = scheduler(worker_type="prefill")
    engine.add(request(range(13), 1))
    (plan,) = run(engine)
    assert plan.times.decode_ms == 0
    assert pass_seconds(plan.times, 1, 1) * 1000 == pytest.approx(prefill_ms([0], [13]))


def test_the_timing_model_gives_the_published_values() -> None:
    assert prefill_ms([0], [13]) + decode_ms(13, 256) == pytest.approx(25.115195, abs=1e-6)
    assert [decode_ms(length, 256) for length in (14, 15, 16)] == pytest.approx(
        [8.616691, 8.816277, 9.015078], abs=1e-6
    )
    assert prefill_ms([0], [64]) == pytest.approx(17.474885, abs=1e-6)
    assert prefill_ms([24, 0, 0], [16, 40, 7]) + decode_ms(41 + 40 + 40, 256) == pytest.approx(42.977395, abs=1e-6)
    assert (prefill_ms([], []), decode_ms(0, 256)) == (0, 0)


def test_speedups_divide_and_zero_means_no_delay() -> None:
    engine = scheduler()
    engine.add(request(range(13), 1))
    (plan,) = run(engine)
    whole = pass_seconds(plan.times, 1, 1)
    assert pass_seconds(plan.times, 2, 1) == pytest.approx(whole / 2)
    assert pass_seconds(plan.times, 1, 2) == pytest.approx(whole - plan.times.decode_ms / 2000)
    assert pass_seconds(plan.times, 0, 1) == 0
    assert pass_seconds(plan.times, 1, 0) == pytest.approx(plan.times.prefill_ms / 1000)


@pytest.mark.parametrize(
    "change",
    [{"num_gpu_blocks": 0}, {"block_size": 1}, {"max_num_seqs": 0}, {"speedup_ratio": -1},
     {"speedup_ratio": float("nan")}, {"dp_size": 0}, {"worker_type": "x"}, {"preemption_mode": "x"},
     {"startup_time": -1}],
)  # fmt: skip
def test_bad_settings_are_named(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        MockEngineConfig(**change)


def test_a_prompt_that_another_worker_computed_takes_room_and_only_decode_time() -> None:
    engine = scheduler(worker_type="decode")
    engine.add(EngineRequest(range(13), 3, repeat(7), transferred=True))
    first, *rest = run(engine)
    assert (first.scheduled.num_prefill_requests, first.scheduled.num_decode_requests) == (0, 1)
    assert first.times.prefill_ms == 0
    assert first.times.decode_ms == decode_ms(13, 256)
    assert len(rest) == 2


def test_its_blocks_are_cached_where_they_arrived() -> None:
    engine = scheduler(worker_type="decode")
    engine.add(EngineRequest(range(16), 1, repeat(7), transferred=True))
    plan = engine.schedule()
    assert engine.blocks.used == 4
    engine.complete(plan)
    follower = request(range(16), 1)
    engine.add(follower)
    engine.schedule()
    assert follower.cached_tokens == 12


def test_one_that_had_to_give_way_is_computed_here() -> None:
    engine = scheduler(worker_type="decode", num_gpu_blocks=4)
    for start in (0, 100):
        engine.add(EngineRequest(range(start, start + 7), 6, repeat(7), transferred=True))
    plans = run(engine)
    assert engine.preemptions
    assert any(plan.scheduled.num_prefill_requests for plan in plans)


@pytest.mark.parametrize("length", [0, 1, 4])
def test_short_prompts_can_be_handed_over_too(length: int) -> None:
    engine = scheduler(worker_type="decode")
    engine.add(EngineRequest(range(length), 2, repeat(7), transferred=True))
    assert len(run(engine)) == 2


def test_with_room_kept_for_the_whole_output_nobody_gives_way() -> None:
    """TensorRT-LLM's GUARANTEED_NO_EVICT."""
    engine = scheduler(num_gpu_blocks=16, engine_type="trtllm")
    requests = [request([number] * 20, 30) for number in range(6)]
    for item in requests:
        engine.add(item)
    run(engine)
    assert [item.generated for item in requests] == [30] * 6
    assert engine.preemptions == 0


def test_IDX_07_events_carry_their_parent_whatever_was_cached_before() -> None:
    """A, B and C are cached; then ABCD stores D under C, and after an eviction of C, ABC stores C under B."""
    engine = scheduler(num_gpu_blocks=5)
    for length in (8, 12, 16):
        engine.add(request(range(length), 1))
        run(engine)
    events = [event for event in engine.blocks.drain_events() if isinstance(event, BlocksStored)]
    chain = [block for event in events for block in unpack_u64(event.sequence_hashes)]
    assert len(chain) == len(set(chain)) == 4
    assert [event.parent for event in events] == [None]
    engine.add(request([99] * 12, 1))
    run(engine)
    engine.blocks.drain_events()
    engine.add(request(range(12), 1))
    run(engine)
    again = [event for event in engine.blocks.drain_events() if isinstance(event, BlocksStored)]
    assert [event.parent for event in again] == [chain[1]]
    assert list(unpack_u64(again[0].sequence_hashes)) == [chain[2]]
