"""SGLang's scheduling in the mock engine: prompts before tokens, parts, admission, who gives way, the page cache."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import pytest

from dynamo_es.engines.mock.build import build_scheduler
from dynamo_es.engines.mock.config import MockEngineConfig, SglangConfig
from dynamo_es.engines.mock.sglang_scheduler import SglangScheduler
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from tests.support.passes import run

SMALL = MockEngineConfig(engine_type="sglang", num_gpu_blocks=64, block_size=4, max_num_seqs=8)


def scheduler(settings: dict[str, Any] | None = None, **changes: Any) -> SglangScheduler:
    engine = build_scheduler(dataclasses.replace(SMALL, sglang=SglangConfig(**(settings or {})), **changes))
    assert isinstance(engine, SglangScheduler)
    return engine


def request(prompt: Sequence[int], max_tokens: int, *, transferred: bool = False) -> EngineRequest:
    return EngineRequest(list(prompt), max_tokens, repeat(7), transferred=transferred)


def counts(plans: list[PassPlan]) -> list[tuple[int, int]]:
    return [(plan.scheduled.num_prefill_requests, plan.scheduled.num_decode_requests) for plan in plans]


def test_a_pass_computes_prompts_or_gives_tokens() -> None:
    engine = scheduler()
    engine.add(request(range(10), 4))
    plans = []
    for number in range(2):
        plans.append(engine.schedule())
        engine.complete(plans[-1])
        if not number:
            engine.add(request(range(100, 110), 2))
    assert counts([*plans, *run(engine)]) == [(1, 0), (1, 0), (0, 2), (0, 1), (0, 1)]


def test_a_long_prompt_is_computed_in_parts_and_nobody_generates_before_it_is_through() -> None:
    engine = scheduler({"chunked_prefill_size": 18})
    engine.add(request(range(10), 4))
    engine.complete(engine.schedule())
    engine.add(request(range(100, 150), 1))
    plans = run(engine)
    assert [list(plan.work.values()) for plan in plans[:4]] == [[16], [16], [16], [2]]
    assert counts(plans[4:]) == [(0, 1)] * 3


def test_without_chunks_a_prompt_is_computed_whole() -> None:
    engine = scheduler({"chunked_prefill_size": 18}, enable_chunked_prefill=False)
    engine.add(request(range(100, 150), 1))
    assert [list(plan.work.values()) for plan in run(engine)] == [[50]]


def test_a_pass_takes_no_more_prompt_tokens_than_its_limit_and_a_longer_prompt_goes_alone() -> None:
    engine = scheduler({"max_prefill_tokens": 30})
    for number, length in enumerate((20, 10, 10, 50)):
        engine.add(request([number] * length, 1))
    assert [list(plan.work.values()) for plan in run(engine)] == [[20, 10], [10], [50]]


def test_room_for_the_output_decides_who_is_let_in() -> None:
    """64 blocks of 4: a prompt of 40 with 80 more takes 30 blocks; a third one fits only where less is kept free."""
    for conservativeness, let_in in ((1.0, 2), (0.0, 3)):
        engine = scheduler({"schedule_conservativeness": conservativeness})
        for number in range(3):
            engine.add(request([number] * 40, 81))
        engine.complete(engine.schedule())
        assert len(engine.running) == let_in
        run(engine)


def test_output_above_the_clip_is_not_reckoned_with() -> None:
    engine = scheduler({"clip_max_new_tokens": 8})
    for number in range(3):
        engine.add(request([number] * 40, 81))
    engine.complete(engine.schedule())
    assert len(engine.running) == 3
    run(engine)
    assert engine.preemptions


def test_who_gives_way_generated_least_and_queues_at_the_end() -> None:
    engine = scheduler({"schedule_conservativeness": 0.0, "clip_max_new_tokens": 1}, num_gpu_blocks=10, max_num_seqs=2)
    first, second = request([1] * 16, 20), request([2] * 20, 20)
    for item in (first, second):
        engine.add(item)
    engine.complete(engine.schedule())
    late = request([3] * 4, 1)
    engine.add(late)
    before = engine.share
    engine.complete(engine.schedule())
    assert engine.preemptions == 1
    assert list(engine.waiting) == [late, second]
    assert engine.share > before
    run(engine)
    assert (first.generated, second.generated, late.generated) == (20, 20, 1)


def test_the_share_that_is_kept_free_falls_with_every_good_pass() -> None:
    engine = scheduler()
    first = engine.share
    assert first == pytest.approx(0.7)
    engine.add(request(range(8), 100))
    run(engine)
    assert engine.share == pytest.approx(first - 99 * first * 0.86 / 600)


def test_the_longest_match_comes_first_if_asked_for() -> None:
    for policy, expected in (("fifo", [1, 2, 0]), ("fcfs", [1, 2, 0]), ("lpm", [2, 0, 1])):
        engine = scheduler({"schedule_policy": policy}, max_num_seqs=1)
        engine.add(request(range(32), 1))
        run(engine)
        waiting = [request(range(16), 1), request(range(50, 60), 1), request(range(32), 1)]
        order = [waiting[1], waiting[2], waiting[0]]
        for item in order:
            engine.add(item)
        served = [next(iter(plan.work)) for plan in run(engine)]
        assert [waiting.index(item) for item in served] == expected


def test_equal_pages_are_shared_at_once() -> None:
    engine = scheduler()
    same = [request(range(20), 10) for _ in range(3)]
    for item in same:
        engine.add(item)
    engine.complete(engine.schedule())
    assert engine.blocks.used == 5, "three prompts of five equal pages"
    run(engine)


def test_what_was_generated_is_cached_when_the_request_is_done() -> None:
    engine = scheduler()
    item = request(range(8), 9)
    engine.add(item)
    for _ in range(8):
        engine.complete(engine.schedule())
    assert engine.blocks.cached == 2
    run(engine)
    assert engine.blocks.cached == 4, "of 17 tokens 16 were computed"


def test_a_page_may_be_one_token() -> None:
    engine = scheduler(block_size=1, num_gpu_blocks=100)
    first, again = request(range(10), 5), request([*range(10), 7, 7, 50], 1)
    engine.add(first)
    run(engine)
    engine.add(again)
    run(engine)
    assert again.cached_tokens == 12


def test_a_prompt_from_another_worker_generates_at_once() -> None:
    engine = scheduler(worker_type="decode")
    engine.add(request(range(16), 3, transferred=True))
    assert counts(run(engine)) == [(0, 1)] * 3
    follower = request(range(16), 1)
    engine.add(follower)
    run(engine)
    assert follower.cached_tokens == 12


@pytest.mark.parametrize("seed", range(8))
def test_everything_is_served_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    engine = scheduler(
        {"chunked_prefill_size": rng.choice((4, 10, 64)), "max_prefill_tokens": rng.choice((8, 64)),
         "schedule_policy": rng.choice(("lpm", "fifo")), "schedule_conservativeness": rng.choice((0.0, 0.3, 1.0)),
         "clip_max_new_tokens": rng.choice((1, 16, 4096))},
        block_size=rng.choice((1, 4, 16)), num_gpu_blocks=rng.choice((24, 64)), max_num_seqs=rng.choice((1, 4, 8)),
        enable_prefix_caching=rng.random() < 0.8, enable_chunked_prefill=rng.random() < 0.8,
    )  # fmt: skip
    requests = []
    for _ in range(60):
        length = rng.randrange(0, 20)
        item = request([rng.randrange(2)] * length, rng.randrange(1, 6), transferred=rng.random() < 0.2)
        if engine.refusal(length, item.max_tokens) is None:
            requests.append(item)
            engine.add(item)
        if rng.random() < 0.5 and engine.has_work:
            engine.complete(engine.schedule())
        if rng.random() < 0.05 and requests:
            engine.abort(requests.pop(rng.randrange(len(requests))))
    run(engine)
    assert all(item.generated == item.max_tokens for item in requests)
