"""The Transformers engine around a model that pretends: batching, blocks, events, ends, and what goes wrong."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.engines.lora.errors import AdapterNotHere
from dynamo_es.engines.transformers_engine.engine import EngineSettings, ModelLimits, TransformersEngine
from dynamo_es.errors import EngineShutdown, InvalidArgument, StreamIncomplete
from dynamo_es.router.hashing import block_seed, hash_prompt
from dynamo_es.runtime.context import Context
from schemas.forward_pass import FORWARD_PASS
from schemas.worker_load import WORKER_LOAD
from tests.support.pretend_model import VOCAB, PretendModel, answer
from tests.support.runtimes import wait_for
from tests.unit.publishers.support import Reader, Scope

BLOCK = 4
PROMPT = list(range(8, 22))
THREAD = "model"


@asynccontextmanager
async def running(
    model: PretendModel | None = None, scope: Scope | None = None, context_length: int = 200, **settings
) -> AsyncIterator[TransformersEngine]:
    sizes = {"num_blocks": 64, "block_size": BLOCK, "max_num_seqs": 4, "max_num_batched_tokens": 8} | settings
    executor = ThreadPoolExecutor(1, THREAD)
    limits = ModelLimits(context_length, VOCAB, (2,), adapters=frozenset({"poet"}))
    model = model or PretendModel(BLOCK)
    rng = random.Random(1)
    engine = TransformersEngine(EngineSettings(**sizes), limits, model, executor, clock=SystemClock(), rng=rng)
    if scope is not None:
        engine.publish_to(scope)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        executor.shutdown()


def ask(prompt, max_tokens=4, **fields):
    sampling = {"temperature": 0.0, **fields.pop("sampling_options", {})}
    stop = {"max_tokens": max_tokens, **fields.pop("stop_conditions", {})}
    return {"token_ids": list(prompt), "sampling_options": sampling, "stop_conditions": stop, **fields}


async def frames_of(engine, request, context=None):
    async with aclosing(engine.generate_batches(request, context)) as batches:
        return [frame async for frames in batches for frame in frames]


async def tokens_of(engine, request):
    return [token for frame in await frames_of(engine, request) for token in frame["token_ids"]]


async def test_an_answer_comes_token_by_token_and_says_why_it_ends():
    model = PretendModel(BLOCK)
    async with running(model) as engine:
        frames = await frames_of(engine, ask(PROMPT, 3))
    assert [frame["token_ids"] for frame in frames] == [[token] for token in answer(PROMPT, 3)]
    assert [frame.get("finish_reason") for frame in frames] == [None, None, "length"]
    usage = frames[-1]["completion_usage"]
    assert usage == {
        "prompt_tokens": 14,
        "completion_tokens": 3,
        "total_tokens": 17,
        "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": 0},
    }
    assert "completion_usage" in frames[0]
    assert "completion_usage" not in frames[1]
    # The prompt took two passes of at most 8 tokens, and all of them ran on the model's own thread.
    assert [[len(work.tokens) for work in works] for works in model.seen] == [[8], [6], [1], [1]]
    assert model.threads == {f"{THREAD}_0"}


async def test_requests_share_passes_and_do_not_disturb_each_other():
    model = PretendModel(BLOCK)
    prompts = [[8 + (7 * place + step) % 50 for step in range(3 + 5 * place)] for place in range(6)]
    async with running(model) as engine:
        answers = await asyncio.gather(*(tokens_of(engine, ask(prompt, 9)) for prompt in prompts))
    assert answers == [answer(prompt, 9) for prompt in prompts]
    assert max(len(works) for works in model.seen) == 4  # max_num_seqs


async def test_a_prefix_that_is_cached_is_not_computed_again_and_routers_hear_of_it():
    """Blocks are announced with their parents as they are filled, under the hashes that routers compute."""
    model, scope = PretendModel(BLOCK), Scope()
    async with running(model, scope) as engine:
        first = await frames_of(engine, ask(PROMPT, 3))
        passes = len(model.seen)
        longer = [*PROMPT, *answer(PROMPT, 2), 30, 31]
        second = await frames_of(engine, ask(longer, 3))
        reader = Reader()
        reader.apply_all(scope.sink.kv)
        _, hashes = hash_prompt([*longer, *answer(longer, 3)], BLOCK)
        await wait_for(lambda: len(scope.sink.values(FORWARD_PASS)) >= engine.passes)
    details = [frames[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] for frames in (first, second)]
    assert details == [0, 16]
    assert next(work.start for works in model.seen[passes:] for work in works) == 16
    assert [frame["token_ids"][0] for frame in second] == answer(longer, 3)
    assert reader.held() >= set(hashes[:5])
    passes_told = [value for value in scope.sink.values(FORWARD_PASS) if value.wall_time_s > 0]
    assert sum(value.scheduled.sum_prefill_tokens for value in passes_told) == len(PROMPT) + len(longer) - 16
    assert scope.sink.values(WORKER_LOAD)[-1].running == 0


async def test_adapters_and_salts_keep_their_blocks_apart():
    model, scope = PretendModel(BLOCK), Scope()
    async with running(model, scope) as engine:
        for routing in ({}, {"lora_name": "poet"}, {"cache_salt": "tenant"}):
            frames = await frames_of(engine, ask(PROMPT, 2, routing=routing))
            assert frames[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            expected = answer(PROMPT, 2, routing.get("lora_name"))
            assert [frame["token_ids"][0] for frame in frames] == expected
        reader = Reader()
        reader.apply_all(scope.sink.kv)
    for seed in (block_seed(None, None), block_seed("poet", None), block_seed(None, "tenant")):
        assert set(hash_prompt(PROMPT, BLOCK, seed)[1]) <= reader.held()


async def test_what_does_not_fit_makes_room_for_what_does_and_is_computed_again():
    """A small pool: cached blocks go, oldest first; a request that ran out of blocks starts over, with its tokens."""
    scope = Scope()
    async with running(PretendModel(BLOCK), scope, num_blocks=8) as engine:
        prompts = [[20 + place, *range(9, 20)] for place in range(4)]
        answers = await asyncio.gather(*(tokens_of(engine, ask(prompt, 12)) for prompt in prompts))
        assert answers == [answer(prompt, 12) for prompt in prompts]
        assert engine.scheduler.preemptions > 0
        reader = Reader()
        reader.apply_all(scope.sink.kv)
        assert len(reader.held()) <= 8


async def test_it_stops_at_a_stop_token_but_not_before_the_least_length():
    told = answer(PROMPT, 12)
    async with running() as engine:
        stop = {"stop_token_ids": [told[2]], "stop_token_ids_hidden": None}
        frames = await frames_of(engine, ask(PROMPT, 12, stop_conditions=stop))
        assert [frame["token_ids"][0] for frame in frames] == told[:3]
        assert (frames[-1]["finish_reason"], frames[-1]["completion_usage"]["completion_tokens"]) == ("stop", 3)
        later = await tokens_of(engine, ask(PROMPT, 12, stop_conditions={**stop, "min_tokens": 3}))
        assert told[2] not in later[:3]
        # Without a number the answer may be as long as the context.
        endless = await frames_of(engine, ask(PROMPT, None))
        assert endless[-1]["finish_reason"] == "length"
        assert endless[-1]["completion_usage"]["total_tokens"] == 200


async def test_log_probabilities_come_with_their_tokens():
    async with running() as engine:
        frames = await frames_of(engine, ask(PROMPT, 2, output_options={"logprobs": 2}))
    for frame in frames:
        (token,), (logprob,), (top,) = frame["token_ids"], frame["log_probs"], frame["top_logprobs"]
        assert top[0] == {"rank": 1, "token_id": token, "logprob": logprob}
        assert len(top) == 2
    assert frames[-1]["cum_log_probs"] == pytest.approx(sum(frame["log_probs"][0] for frame in frames))


async def test_each_choice_is_drawn_for_itself_and_a_seed_repeats_them():
    async with running() as engine:
        request = ask(PROMPT, 6, sampling_options={"temperature": 20.0, "n": 3, "seed": 11})
        told = []
        for _ in range(2):
            choices = {0: [], 1: [], 2: []}
            for frame in await frames_of(engine, request):
                choices[frame["index"]] += frame["token_ids"]
            told.append(choices)
    assert told[0] == told[1]
    assert len({tuple(choice) for choice in told[0].values()}) == 3


async def test_a_request_that_is_given_up_leaves_within_a_pass_and_the_loop_never_waits():
    gate, entered = threading.Event(), threading.Event()

    def before_pass() -> None:
        entered.set()
        assert gate.wait(60)

    model = PretendModel(BLOCK, before_pass)
    async with running(model) as engine:
        context = Context()
        asked = asyncio.create_task(frames_of(engine, ask(PROMPT, 100), context))
        await wait_for(entered.is_set)
        # The model computes, and the loop goes on: requests are taken and given up meanwhile.
        other = asyncio.create_task(tokens_of(engine, ask(PROMPT, 2)))
        context.stop_generating()
        await wait_for(lambda: engine.scheduler.waiting)
        gate.set()
        assert await other == answer(PROMPT, 2)
        assert sum(len(frame["token_ids"]) for frame in await asked) <= 1
        third = engine.generate_batches(ask(PROMPT, 100))
        await anext(third)
        await third.aclose()
        assert not engine.scheduler.has_work
        assert engine.scheduler.blocks.used == 0


@pytest.mark.parametrize(
    ("request_", "named"),
    [
        (ask(range(8, 60), 200), "context of 200 tokens.* 52 tokens and max_tokens is 200; ask for at most 148"),
        (ask([9] * 201, None), "context of 200 tokens: its prompt has 201 tokens; shorten the prompt"),
        (ask([], 4), "empty"),
        (ask([VOCAB], 4), "no token id below"),
        (ask(PROMPT, 0), "max_tokens must be at least 1"),
        (ask(PROMPT, routing={"lora_name": ["painter"]}), "lora_name must be a string"),
        (ask(PROMPT, sampling_options={"guided_decoding": {"regex": "a"}}), "guided_decoding"),
        (ask(PROMPT, sampling_options={"n": 129}), "n must be 1 to 128"),
        ({"stop_conditions": {}}, "token_ids must be a list"),
    ],
)  # fmt: skip
async def test_a_request_that_cannot_be_served_is_told_why(request_, named):
    async with running() as engine:
        with pytest.raises(InvalidArgument, match=named):
            await frames_of(engine, request_)
        assert not engine.scheduler.has_work


async def test_a_request_that_can_never_fit_the_pool_is_refused():
    async with running(num_blocks=8) as engine:
        with pytest.raises(
            InvalidArgument, match="KV cache of 32 tokens: its prompt has 14 tokens and max_tokens is 40"
        ):
            await frames_of(engine, ask(PROMPT, 40))


async def test_a_model_that_fails_ends_its_requests_and_is_known_to_be_broken(caplog):
    def fail() -> None:
        raise RuntimeError("out of memory")

    async with running(PretendModel(BLOCK, fail)) as engine:
        with pytest.raises(EngineShutdown, match="broke down"):
            await frames_of(engine, ask(PROMPT, 4))
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.broken()
        with pytest.raises(EngineShutdown, match="not running"):
            await frames_of(engine, ask(PROMPT, 4))
    assert "broke down" in caplog.text


async def test_requests_that_are_open_at_the_end_are_told_so():
    async with running() as engine:
        stream = engine.generate_batches(ask(PROMPT, 150))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineShutdown, match="closed"):
            async for _ in stream:
                pass


async def test_an_adapter_comes_and_goes_between_passes_and_its_blocks_go_with_it():
    model, routing = PretendModel(BLOCK), {"lora_name": "cook"}
    async with running(model, Scope()) as engine:
        with pytest.raises(AdapterNotHere, match="no LoRA adapter 'cook'"):
            await tokens_of(engine, ask(PROMPT, routing=routing))
        with pytest.raises(InvalidArgument, match="does not fit"):
            await engine.load_adapter("cook", "/misfit")
        with pytest.raises(AdapterNotHere, match="no LoRA adapter 'cook'"):
            await tokens_of(engine, ask(PROMPT, routing=routing))
        for folder in ("/one", "/another"):
            await engine.load_adapter("cook", folder)
            for cached in (0, 12):
                frames = await frames_of(engine, ask(PROMPT, routing=routing))
                assert [token for frame in frames for token in frame["token_ids"]] == answer(PROMPT, 4, folder)
                assert frames[0]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == cached
            assert engine.scheduler.blocks.cached == 4
            await engine.unload_adapter("cook")
            assert engine.scheduler.blocks.cached == 0
        assert model.threads == {f"{THREAD}_0"}
        # The base and other adapters go on.
        assert await tokens_of(engine, ask(PROMPT)) == answer(PROMPT, 4)
        assert await tokens_of(engine, ask(PROMPT, routing={"lora_name": "poet"})) == answer(PROMPT, 4, "poet")


async def test_unloading_waits_for_open_requests_and_takes_no_others():
    go_on = threading.Event()
    go_on.set()
    model = PretendModel(BLOCK, lambda: go_on.wait(60) and None)
    routing = {"lora_name": "poet"}
    async with running(model) as engine:
        async with aclosing(engine.generate_batches(ask(PROMPT, 6, routing=routing))) as batches:
            tokens = [token for frame in await anext(batches) for token in frame["token_ids"]]
            go_on.clear()
            unloading = asyncio.create_task(engine.unload_adapter("poet"))
            await asyncio.sleep(0)
            assert not unloading.done()
            with pytest.raises(AdapterNotHere, match="no LoRA adapter 'poet'"):
                await tokens_of(engine, ask(PROMPT, routing=routing))
            go_on.set()
            async for frames in batches:
                tokens += [token for frame in frames for token in frame["token_ids"]]
        await unloading
        assert tokens == answer(PROMPT, 6, "poet")
        assert engine.scheduler.blocks.cached == 0


async def test_a_request_that_takes_too_long_to_end_goes_to_another_worker():
    async with running(PretendModel(BLOCK)) as engine:
        async with aclosing(engine.generate_batches(ask(PROMPT, 150, routing={"lora_name": "poet"}))) as batches:
            await anext(batches)
            await engine._adapters.close("poet", finish_s=0.0)
            with pytest.raises(StreamIncomplete, match="'poet' is being unloaded"):
                while True:
                    await anext(batches)
        assert (engine.scheduler.blocks.used, engine.scheduler.blocks.cached) == (0, 0)
    with pytest.raises(EngineShutdown):
        await engine.load_adapter("cook", "/x")
