from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.engine import Frame, MockEngine
from dynamo_es.engines.mock.text import SENTENCES, FixedText, OutputTokens, PlainTokens, SentenceTokens
from dynamo_es.engines.scheduling.scheduler import ADMISSION_ERROR
from dynamo_es.engines.scheduling.telemetry import EngineTelemetry
from dynamo_es.errors import EngineShutdown, InvalidArgument
from dynamo_es.router.hashing import hash_prompt
from dynamo_es.runtime.context import Context
from schemas.forward_pass import FORWARD_PASS
from schemas.worker_load import WORKER_LOAD
from tests.unit.publishers.support import Reader, Scope


class VirtualTime:
    """A clock that a simulated sleep moves, at once."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)


@asynccontextmanager
async def running(
    output: OutputTokens | None = None, scope: Scope | None = None, time: VirtualTime | None = None, **config: Any
) -> AsyncIterator[MockEngine]:
    time = time or VirtualTime()
    settings = {"num_gpu_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | config
    engine = MockEngine(
        MockEngineConfig(**settings), clock=time.clock, output_tokens=output or PlainTokens(), sleep=time.sleep
    )
    if scope is not None:
        engine.publish_to(scope)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def ask(tokens: Any, max_tokens: int | None = 4, **fields: Any) -> dict[str, Any]:
    return {"token_ids": list(tokens), "stop_conditions": {"max_tokens": max_tokens}, **fields}


async def frames_of(engine: MockEngine, request: dict[str, Any], context: Context | None = None) -> list[Frame]:
    return [frame async for frame in engine.generate(request, context)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0)


async def test_frames_have_the_recorded_shape() -> None:
    async with running() as engine:
        frames = await frames_of(engine, ask(range(13), 5))
        assert [len(frame["token_ids"]) for frame in frames] == [1, 1, 1, 1, 1, 0]
        assert [frame.get("finish_reason") for frame in frames] == [None] * 5 + ["length"]
        assert [index for index, frame in enumerate(frames) if "completion_usage" in frame] == [0, 5]
        details = {"audio_tokens": None, "cached_tokens": 0}
        assert frames[0]["completion_usage"] == {
            "prompt_tokens": 13, "completion_tokens": 1, "total_tokens": 14, "prompt_tokens_details": details,
        }  # fmt: skip
        assert frames[5]["completion_usage"] == {
            "prompt_tokens": 13, "completion_tokens": 5, "total_tokens": 18, "prompt_tokens_details": details,
        }  # fmt: skip
        again = await frames_of(engine, ask(range(13), 5))
        assert again[0]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 12
        assert [frame["token_ids"] for frame in again] == [frame["token_ids"] for frame in frames]
        assert len(await frames_of(engine, ask([], 3))) == 4


async def test_a_finite_text_finishes_with_stop() -> None:
    async with running(FixedText([5, 6])) as engine:
        frames = await frames_of(engine, ask(range(4), 10))
    assert [frame["token_ids"] for frame in frames] == [[5], [6], []]
    assert frames[-1]["finish_reason"] == "stop"
    assert frames[-1]["completion_usage"]["completion_tokens"] == 2


async def test_the_default_text_reads_as_sentences() -> None:
    async with running(SentenceTokens(lambda text: list(text.encode())), max_num_batched_tokens=None) as engine:
        texts = set()
        for start in range(20):
            frames = await frames_of(engine, ask(range(start, start + 8), 120))
            text = bytes(token for frame in frames for token in frame["token_ids"]).decode()
            assert text.startswith(SENTENCES) or any(sentence.startswith(text) for sentence in SENTENCES)
            texts.add(text)
    assert len(texts) > 3, "different prompts begin differently"


async def test_PROTO_10_each_of_n_choices_has_its_own_text_and_end() -> None:
    def output(request: Any, choice: int) -> Any:
        return iter([choice * 10 + number for number in range(3 - choice)])

    async with running(output) as engine:
        frames = await frames_of(engine, ask(range(13), 9, sampling_options={"n": 3}))
        of_choice = {index: [frame for frame in frames if frame["index"] == index] for index in range(3)}
        tokens = {index: [frame["token_ids"] for frame in found] for index, found in of_choice.items()}
        assert tokens == {0: [[0], [1], [2], []], 1: [[10], [11], []], 2: [[20], []]}
        for found in of_choice.values():
            assert [frame.get("finish_reason") for frame in found] == [None] * (len(found) - 1) + ["stop"]
            assert found[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert found[-1]["completion_usage"]["completion_tokens"] == len(found) - 1
        assert "index" not in (await frames_of(engine, ask(range(13), 1, sampling_options={"n": 1})))[0]
        assert engine.schedulers[0].blocks.available == 64


async def test_stopping_one_request_of_many_choices_frees_them_all() -> None:
    context = Context()
    async with (
        running(max_num_seqs=2) as engine,
        aclosing(engine.generate(ask(range(13), 40, sampling_options={"n": 4}), context)) as frames,
    ):
        await anext(frames)
        context.stop_generating()
        async for _ in frames:
            pass
        assert not engine.schedulers[0].has_work


@pytest.mark.parametrize(("prompt", "tokens"), [(250, 7), (256, 1), (3, 20)])
async def test_a_default_length_is_cut_to_what_fits(prompt: int, tokens: int) -> None:
    time = VirtualTime()
    engine = MockEngine(
        MockEngineConfig(num_gpu_blocks=64, block_size=4), clock=time.clock, output_tokens=PlainTokens(),
        sleep=time.sleep, default_max_tokens=20,
    )  # fmt: skip
    await engine.start()
    frames = await frames_of(engine, ask(range(prompt), None))
    assert (len(frames) - 1, frames[-1]["finish_reason"]) == (tokens, "length")
    await engine.close()


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (ask([1], sampling_options={"n": 0}), "n must be 1 to 128, it is 0"),
        (ask([1], sampling_options={"n": "2"}), "n must be 1 to 128"),
        (ask([1], None), "max_output_tokens must be specified for mocker"),
        ({"token_ids": [1]}, "max_output_tokens must be specified for mocker"),
        (ask([1], 0), "live requests must generate at least one output token"),
        (ask([1], dp_rank=5), "dp_rank 5 is out of bounds for dp_size 2"),
        (ask([1], routing={"dp_rank": 2}), "dp_rank 2 is out of bounds for dp_size 2"),
        (ask([-1]), "token_ids must be a list"),
        (ask(["a"]), "token_ids must be a list"),
        ({"stop_conditions": {"max_tokens": 1}}, "token_ids must be a list"),
    ],
)
async def test_what_cannot_be_served_is_refused(request_: dict[str, Any], text: str) -> None:
    async with running(dp_size=2) as engine:
        with pytest.raises(InvalidArgument, match=text):
            await frames_of(engine, request_)
        assert len(await frames_of(engine, ask(range(3), 1))) == 2


async def test_a_request_over_the_pool_gets_an_error_and_the_engine_serves_on() -> None:
    async with running() as engine:
        for request in (ask(range(300), 1), ask(range(250), 20)):
            (frame,) = await frames_of(engine, request)
            assert frame["token_ids"] == []
            assert frame["finish_reason"]["error"].startswith(ADMISSION_ERROR)
        assert len(await frames_of(engine, ask(range(5), 2))) == 3


async def test_a_default_length_serves_requests_that_name_none() -> None:
    engine = MockEngine(
        MockEngineConfig(speedup_ratio=0), clock=SystemClock(), output_tokens=PlainTokens(), default_max_tokens=3
    )
    await engine.start()
    assert len(await frames_of(engine, {"token_ids": [1, 2]})) == 4
    await engine.close()


async def test_passes_take_the_modelled_time() -> None:
    time = VirtualTime()
    async with running(time=time) as engine:
        await frames_of(engine, ask(range(13), 3))
    assert time.slept == pytest.approx([0.025115195, 0.008616691, 0.008816277], abs=1e-6)
    time = VirtualTime()
    async with running(time=time, speedup_ratio=0, startup_time=2.5) as engine:
        await frames_of(engine, ask(range(13), 3))
    assert time.slept == [2.5, 0, 0, 0]


async def test_a_stopped_context_ends_the_stream_and_frees_its_blocks() -> None:
    async with running(scope=Scope()) as engine:
        context = Context("r")
        got = []
        async with aclosing(engine.generate(ask(range(13), 200), context)) as stream:
            async for frame in stream:
                got.append(frame)
                if len(got) == 3:
                    context.stop_generating()
        assert 3 <= len(got) < 10
        assert got[-1].get("finish_reason") is None
        assert engine.schedulers[0].blocks.used == 0


async def test_a_stream_that_is_closed_early_frees_its_blocks_within_a_pass() -> None:
    async with running() as engine:
        async with aclosing(engine.generate(ask(range(13), 200))) as stream:
            await anext(stream)
        assert engine.schedulers[0].blocks.used == 0
        assert not engine.schedulers[0].has_work
        task = asyncio.create_task(frames_of(engine, ask(range(13), 200)))
        await until(lambda: engine.schedulers[0].blocks.used > 0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.schedulers[0].blocks.used == 0


async def test_frames_of_one_pass_are_there_before_any_consumer_runs() -> None:
    async with running() as engine:
        seen: list[int] = []

        async def consume(number: int) -> None:
            async for _ in engine.generate_batches(ask([number] * 4, 3)):
                seen.append(engine.passes)

        await asyncio.gather(*(consume(number) for number in range(4)))
    assert all(seen.count(passes) == 4 for passes in set(seen))


async def test_ranks_without_a_wish_take_turns() -> None:
    scope = Scope(dp_size=2)
    async with running(scope=scope, dp_size=2) as engine:
        for number in range(4):
            await frames_of(engine, ask([number] * 5, 1))
        await frames_of(engine, ask([9] * 5, 1, routing={"dp_rank": 1}))
    reader = Reader().apply_all(scope.sink.kv)
    assert (len(reader.held(0)), len(reader.held(1))) == (2, 3)


async def test_events_passes_and_load_reach_the_log() -> None:
    time = VirtualTime()
    scope = Scope(clock=time.clock, worker_id=42)
    async with running(scope=scope, time=time) as engine:
        await frames_of(engine, ask(range(13), 5))
        assert engine.schedulers[0].blocks.used == 0
    records = scope.sink.kv
    assert (records[0].reset, records[0].events, records[0].worker_id) == (True, [], 42)
    reader = Reader().apply_all(records)
    assert reader.depth(hash_prompt(list(range(13)), 4)[1]) == 3
    assert len(reader.held()) == 4
    passes = scope.sink.values(FORWARD_PASS)
    assert [value.counter for value in passes] == [1, 2, 3, 4, 5]
    assert passes[0].wall_time_s == pytest.approx(0.025115195, abs=1e-6)
    loads = scope.sink.values(WORKER_LOAD)
    assert (loads[0].kv_used_blocks, loads[0].total_kv_blocks, loads[0].active_decode_blocks) == (0, 64, None)
    assert max(value.kv_used_blocks for value in loads) >= 4
    assert (loads[-1].kv_used_blocks, loads[-1].running, loads[-1].waiting) == (0, 0, 0)


async def test_events_that_nobody_takes_do_not_pile_up() -> None:
    async with running() as engine:
        await frames_of(engine, ask(range(40)))
        await until(lambda: not engine.schedulers[0].has_work)
        assert engine.schedulers[0].blocks.cached
        assert engine.schedulers[0].blocks.drain_events() == []


async def test_evictions_are_told_and_the_view_is_what_the_engine_has() -> None:
    scope = Scope()
    async with running(scope=scope, speedup_ratio=0) as engine:
        await asyncio.gather(*(frames_of(engine, ask([number] * 40, 12)) for number in range(20)))
        reader = Reader().apply_all(scope.sink.kv)
        expected = set(engine.schedulers[0].blocks._first)
        assert reader.held() == expected
        assert reader.gaps == 0
        assert engine.reset_prefix_cache()
        assert not Reader().apply_all(scope.sink.kv).held()


async def test_after_a_loss_or_a_new_registration_everything_is_told_again() -> None:
    time = VirtualTime()
    scope = Scope(clock=time.clock)
    async with running(scope=scope, time=time) as engine:
        await frames_of(engine, ask(range(13), 1))
        scope.sink.room = 0
        await frames_of(engine, ask(range(100, 113), 1))
        scope.sink.room = None
        time.clock.advance(10)
        await until(lambda: len(Reader().apply_all(scope.sink.kv).held()) == 6)
        telemetry = engine._telemetry
        assert isinstance(telemetry, EngineTelemetry)
        incarnation = scope.sink.kv[-1].incarnation
        telemetry.begin_incarnation()
        assert scope.sink.kv[-1].incarnation != incarnation
        telemetry.resync()
        assert scope.sink.kv[-1].reset
        assert len(Reader().apply_all(scope.sink.kv).held()) == 6


async def test_an_idle_engine_sends_heartbeats() -> None:
    time = VirtualTime()
    scope = Scope(clock=time.clock)
    async with running(scope=scope, time=time):
        for expected in (1, 2):
            time.clock.advance(1.1)
            async with asyncio.timeout(60):
                while len(scope.sink.values(FORWARD_PASS)) < expected:
                    await asyncio.sleep(0.01)
        time.clock.advance(11)
        async with asyncio.timeout(60):
            while len(scope.sink.values(WORKER_LOAD)) < 2:
                await asyncio.sleep(0.01)
    assert [value.wall_time_s for value in scope.sink.values(FORWARD_PASS)][:2] == [0.0, 0.0]


async def test_a_closed_engine_ends_its_streams_and_takes_no_more() -> None:
    async with running(time=VirtualTime()) as engine:
        stream = engine.generate(ask(range(13), 100))
        await anext(stream)
        await engine.close()
        with pytest.raises(EngineShutdown):
            async for _ in stream:
                pass
        with pytest.raises(EngineShutdown):
            await frames_of(engine, ask(range(3), 1))
        await engine.close()


async def test_a_text_that_breaks_fails_requests_instead_of_hanging(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any, choice: int) -> Any:
        def tokens() -> Any:
            yield 1
            raise RuntimeError("no more")

        return tokens()

    async with running(broken) as engine:
        with pytest.raises(EngineShutdown, match="broke down"):
            await frames_of(engine, ask(range(3), 5))
    assert "the mock engine broke down" in caplog.text


async def handed_over(tokens: Any, **prefill_config: Any) -> dict[str, Any]:
    async with running(worker_type="prefill", **prefill_config) as engine:
        frames = await frames_of(engine, ask(tokens, 1))
    params = [frame["disaggregated_params"] for frame in frames if "disaggregated_params" in frame]
    assert len(params) == 1
    return {"disaggregated_params": params[0], "prompt_tokens_details": {"cached_tokens": 8}}


async def test_a_prefill_worker_hands_its_prompt_to_a_decode_worker() -> None:
    result = await handed_over(range(20))
    time = VirtualTime()
    async with running(worker_type="decode", time=time) as engine:
        frames = await frames_of(engine, ask(range(20), 3, prefill_result=result))
    assert [len(frame["token_ids"]) for frame in frames] == [1, 1, 1, 0]
    assert frames[0]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    assert all("disaggregated_params" not in frame for frame in frames)
    computing = VirtualTime()
    async with running(worker_type="decode", time=computing) as engine:
        await frames_of(engine, ask(range(20), 3))
    assert sum(time.slept) < sum(computing.slept)


async def test_what_is_of_another_prompt_is_refused() -> None:
    result = await handed_over(range(20))
    async with running(worker_type="decode") as engine:
        for tokens, wrong in ((range(21), result), (range(20), {"disaggregated_params": None}), (range(20), "x")):
            with pytest.raises(InvalidArgument, match="prefill_result is not of this prompt"):
                await frames_of(engine, ask(tokens, 3, prefill_result=wrong))


async def test_an_address_without_a_room_is_refused() -> None:
    async with running(worker_type="decode") as engine:
        with pytest.raises(InvalidArgument, match="bootstrap_info must have bootstrap_host"):
            await frames_of(engine, ask(range(4), 1, bootstrap_info={"bootstrap_host": "h"}))


async def test_an_aggregated_worker_computes_prompts_whatever_is_handed_over() -> None:
    async with running() as engine:
        frames = await frames_of(engine, ask(range(20), 1, prefill_result={"disaggregated_params": {"x": 1}}))
    assert frames[0]["completion_usage"]["prompt_tokens_details"]["cached_tokens"] == 0
