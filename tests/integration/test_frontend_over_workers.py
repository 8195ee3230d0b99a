"""The frontend over mock workers: what clients are told, and what the log says of their requests."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.config.tree import WorkerConfig
from dynamo_es.errors import ConfigError, InvalidArgument
from dynamo_es.runtime.context import Context
from streams.kv_index import KvIndexFold
from streams.refold import refold
from tests.support.runtimes import wait_for
from tests.support.served_fleet import CHAT, COMPLETIONS, ReadOnlyAtTimes, served_fleet

SMOLLM = Path(__file__).parent.parent / "data" / "models" / "smollm2-135m-instruct"


@pytest.fixture
async def fleet():
    async with served_fleet() as fleet:
        yield fleet


async def test_a_request_that_a_stop_string_ends_is_recorded_as_served(fleet):
    await fleet.mock_worker()
    for body in ({"stop": "e"}, {"stop": "e", "stream": True}):
        reply = await fleet.ask(CHAT, **body)
        assert '"finish_reason":"stop"' in reply.text
    reply = await fleet.ask(COMPLETIONS, prompt=["a", "b"], stop=["e"])
    assert [choice["finish_reason"] for choice in reply.json()["choices"]] == ["stop", "stop"]
    ends = await fleet.finished(4)
    assert [(end.outcome, end.detail) for end in ends] == [("ok", "")] * 4


async def test_health_names_workers_that_are_not_used_and_what_to_do(fleet):
    await fleet.mock_worker()
    await fleet.mock_worker(WorkerConfig(model_name="m", model_path=str(SMOLLM)))
    await fleet.mock_worker(block_size=64)
    await wait_for(lambda: fleet.models.statuses()["m"].refused and fleet.models.statuses()["m"].other_block_sizes)
    reply = await fleet.get("/health")
    assert (reply.status, reply.json()["status"]) == (200, "healthy")
    model = reply.json()["models"]["m"]
    assert model["ready"] is True
    assert model["refused_workers"]["count"] == 1
    refused = model["refused_workers"]["workers"][0]
    assert refused["instance_id"] in fleet.models.statuses()["m"].refused
    assert "checksum of" in refused["reason"]
    assert "--model-name" in refused["remedy"]
    assert model["other_block_sizes"]["count"] == 1
    other = model["other_block_sizes"]["workers"][0]
    assert "of 64 tokens, the router's of 16" in other["reason"]
    assert other["remedy"] == "start it with --block-size 16"
    page = (await fleet.get("/metrics")).text
    assert 'dynamo_es_refused_workers{model="m"} 1.0' in page
    assert 'dynamo_es_other_block_size_workers{model="m"} 1.0' in page


async def test_health_is_degraded_while_the_log_takes_no_appends_and_serving_goes_on(fleet, caplog):
    await fleet.mock_worker()
    before = (await fleet.get("/health")).json()
    assert (before["status"], before["log"]["state"], before["log"]["reason"]) == ("healthy", "ok", None)
    fleet.frontend_log.read_only = True
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200

    async def states():
        reply = await fleet.get("/health")
        assert reply.status == 200
        return reply.json()["status"], reply.json()["log"]["state"]

    async with asyncio.timeout(60):
        while await states() != ("degraded", "degraded"):
            await asyncio.sleep(0.01)
    log = (await fleet.get("/health")).json()["log"]
    assert "the folder is read-only" in log["reason"]
    assert log["since"] >= before["log"]["since"]
    assert 'dynamo_es_log_state{state="degraded"} 1.0' in (await fleet.get("/metrics")).text
    assert (await fleet.ask(CHAT, max_tokens=2)).status == 200
    fleet.frontend_log.read_only = False
    async with asyncio.timeout(60):
        while await states() != ("healthy", "ok"):
            await asyncio.sleep(0.01)
    told = [record.getMessage() for record in caplog.records if record.name.endswith("log_watch")]
    assert len(told) == 1
    assert "serving goes on" in told[0]


async def test_models_were_created_when_they_were_registered(fleet):
    before = SystemClock().now_ms() // 1000
    await fleet.mock_worker()
    first = (await fleet.get("/v1/models")).json()["data"][0]["created"]
    assert before <= first <= SystemClock().now_ms() // 1000
    fleet.app.service.clock = ManualClock(now_ms=10**13)
    assert (await fleet.get("/v1/models")).json()["data"][0]["created"] == first
    assert (await fleet.get("/v1/models/m")).json()["created"] == first


async def test_PROTO_10_n_choices_are_n_answers(fleet):
    await fleet.mock_worker()
    whole = (await fleet.ask(CHAT, n=3, max_tokens=6)).json()
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in whole["choices"]]
    assert len(set(texts)) == 3
    assert whole["usage"]["completion_tokens"] == 18
    single = (await fleet.ask(CHAT, max_tokens=6)).json()
    assert single["choices"][0]["message"]["content"] == texts[0]
    assert whole["usage"]["prompt_tokens"] == single["usage"]["prompt_tokens"]
    reply = await fleet.ask(CHAT, n=2, max_tokens=6, stream=True)
    chunks = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line.startswith("data: {")]
    for index in range(2):
        of_choice = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in of_choice) == texts[index]
        assert [choice["finish_reason"] for choice in of_choice if choice["finish_reason"]] == ["length"]
        assert [bool(choice["delta"].get("role")) for choice in of_choice].count(True) == 1
    batch = (await fleet.ask(COMPLETIONS, prompt=["a", "b"], n=2, best_of=2, max_tokens=3)).json()
    assert [choice["index"] for choice in batch["choices"]] == [0, 1, 2, 3]
    assert {end.outcome for end in await fleet.finished(5)} == {"ok"}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (CHAT, "logprobs", {"logprobs": True, "top_logprobs": 3}),
        (CHAT, "prompt_logprobs", {"prompt_logprobs": 1}),
        (CHAT, "response_format", {"response_format": {"type": "json_object"}}),
        (CHAT, "guided_regex", {"guided_regex": "a+"}),
        (CHAT, "logit_bias", {"logit_bias": {"5": -100}}),
        (CHAT, "allowed_token_ids", {"allowed_token_ids": [1]}),
        (CHAT, "detokenize", {"detokenize": False}),
        (CHAT, "tool_choice", {"tools": [TOOL], "tool_choice": "required"}),
        (CHAT, "tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}),
        (CHAT, "modalities", {"modalities": ["text", "audio"]}),
        (COMPLETIONS, "logprobs", {"logprobs": 0}),
        (COMPLETIONS, "best_of", {"best_of": 3, "n": 2}),
        (COMPLETIONS, "echo", {"echo": True}),
        (COMPLETIONS, "suffix", {"suffix": "end"}),
    ],
)
async def test_PROTO_11_what_the_mock_engine_cannot_honour_is_refused_by_name(fleet, path, field, body, stream):
    await fleet.mock_worker()
    reply = await fleet.ask(path, max_tokens=8, stream=stream, **body)
    assert reply.status == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert f"`{field}` is not supported by model `m`: " in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"logprobs": False, "top_logprobs": 2, "response_format": {"type": "text"}, "modalities": ["text"]}),
        (CHAT, {"tools": [TOOL], "tool_choice": "auto", "temperature": 0.3, "seed": 7, "logit_bias": {}, "n": 1}),
        (COMPLETIONS, {"echo": False, "best_of": 1, "suffix": None, "detokenize": True}),
    ],
)
async def test_what_asks_for_nothing_special_is_served(fleet, path, body):
    await fleet.mock_worker()
    reply = await fleet.ask(path, max_tokens=2, **body)
    assert reply.status == 200, reply.text


async def test_the_mock_worker_itself_refuses_what_its_card_says(fleet):
    await fleet.mock_worker()
    engine = fleet.models.find("m").engine
    for field, request in (
        ("logprobs", {"output_options": {"logprobs": 1}}),
        ("guided_decoding", {"sampling_options": {"guided_decoding": {"regex": "a"}}}),
        ("best_of", {"sampling_options": {"n": 2, "best_of": 3}}),
        ("echo", {"extra_args": {"echo": True}}),
    ):
        with pytest.raises(InvalidArgument, match=f"`{field}` is not supported by the mock engine"):
            async for _ in engine.generate({"token_ids": [1, 2, 3], **request}, Context()):
                pass


async def test_a_request_that_cannot_fit_is_refused_with_what_would_fit(fleet):
    await fleet.mock_worker(num_gpu_blocks=4)
    reply = await fleet.ask(COMPLETIONS, prompt=[1] * 60, max_tokens=6)
    assert reply.status == 400
    assert reply.json()["message"] == (
        "The request does not fit the worker's KV cache of 64 tokens: its prompt has 60 tokens and max_tokens is 6; "
        "ask for at most 5 tokens."
    )
    reply = await fleet.ask(COMPLETIONS, prompt=[1] * 70, max_tokens=6)
    assert "its prompt has 70 tokens and max_tokens is 6; shorten the prompt" in reply.json()["message"]
    reply = await fleet.ask(COMPLETIONS, prompt=[1] * 60, max_tokens=6, stream=True)
    assert '"code":400' in reply.text
    assert "does not fit" in reply.text
    assert reply.text.endswith("data: [DONE]\n\n")
    for end in await fleet.finished(3):
        assert (end.outcome, end.detail) == ("error", "InvalidArgument")
    served = (await fleet.ask(COMPLETIONS, prompt=[1] * 60, max_tokens=5)).json()
    assert served["usage"]["completion_tokens"] == 5
    cut = (await fleet.ask(COMPLETIONS, prompt=[1] * 60)).json()
    assert (cut["usage"]["completion_tokens"], cut["choices"][0]["finish_reason"]) == (5, "length")


async def test_prompt_and_output_over_the_context_are_refused(fleet):
    await fleet.mock_worker(WorkerConfig(model_name="m", model_path=str(SMOLLM)))
    context = fleet.models.find("m").card.context_length
    reply = await fleet.ask(COMPLETIONS, prompt=[1] * 10, max_tokens=context - 9)
    assert reply.status == 400
    assert f"the model's context of {context} tokens" in reply.json()["message"]
    assert f"ask for at most {context - 10} tokens" in reply.json()["message"]
    too_long = await fleet.ask(COMPLETIONS, prompt=[1] * (context + 1))
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    full = await fleet.ask(COMPLETIONS, prompt=[1] * context)
    assert (full.status, "shorten the prompt" in full.json()["message"]) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("frame", "detail"),
    [
        ({"token_ids": [], "finish_reason": {"error": "SECRET prompt"}}, "EngineFailed"),
        ({"token_ids": [], "finish_reason": "error: SECRET prompt"}, "EngineFailed"),
        ({"token_ids": [], "finish_reason": "SECRET"}, "OutputError"),
    ],
)
async def test_an_error_frame_is_recorded_as_an_error_by_its_class_only(fleet, caplog, frame, detail, stream):
    await fleet.scripted_worker([[{"token_ids": [104]}], [frame]])
    reply = await fleet.ask(COMPLETIONS, stream=stream)
    assert reply.status == (200 if stream else 500)
    if stream:
        assert '"error":{"message":"Internal server error","type":"internal_server_error","code":500}' in reply.text
    (end,) = await fleet.finished()
    assert (end.outcome, end.detail, end.output_tokens) == ("error", detail, 1)
    (line,) = [record.getMessage() for record in caplog.records if "failed at its worker" in record.getMessage()]
    assert line == f"request {end.request_id} failed at its worker: {detail}; answered with 500"
    assert "SECRET" not in reply.text + caplog.text


async def test_a_client_that_goes_away_is_recorded_as_cancelled(fleet):
    await fleet.mock_worker(speedup_ratio=1.0)
    asked = asyncio.create_task(fleet.ask(COMPLETIONS, max_tokens=10_000))
    await wait_for(lambda: fleet.app.service.running)
    (exchange,) = fleet.app.service.running
    await wait_for(lambda: fleet.models.find("m").engine.router.open_requests)
    exchange.interrupt("disconnect")
    await asked
    (end,) = await fleet.finished()
    assert (end.outcome, end.detail) == ("cancelled", "")


@pytest.mark.parametrize("name", ["", "  "])
async def test_a_worker_needs_a_name_that_can_be_asked_for(fleet, name):
    with pytest.raises(ConfigError, match="--model-name must be a non-empty string") as refused:
        await fleet.mock_worker(WorkerConfig(model_name=name))
    assert "\n" not in str(refused.value)


async def test_a_worker_does_not_take_the_current_directory_for_its_model(fleet):
    with pytest.raises(ConfigError, match="--model-path must be a model directory"):
        await fleet.mock_worker(WorkerConfig(model_path=""))


async def test_what_a_worker_could_not_keep_while_the_log_was_away_becomes_a_gap_that_closes_by_itself():
    """Its buffer takes a few events only. No request fails, and afterwards the index has all of its cache again."""
    async with served_fleet(wrap=ReadOnlyAtTimes) as fleet:
        await fleet.mock_worker(buffer_records=5)
        index = fleet.views.kv_index

        def held() -> int:
            return sum(source.counts[0] for source in index.state.sources.values() if source.exact)

        async def ask(number: int) -> None:
            words = f"prompt {number} " * 20
            reply = await fleet.ask(CHAT, messages=[{"role": "user", "content": words}], max_tokens=2)
            assert reply.status == 200, reply.text

        await ask(0)
        await wait_for(held)
        blocks = held()
        fleet.log.read_only = True
        for number in range(1, 31):
            await ask(number)
        assert held() == blocks
        assert not fleet.core.log_state.ok
        fleet.log.read_only = False
        # Prompts share no blocks but their first ones: all of it was announced again, and nothing was made up.
        await wait_for(lambda: held() > 20 * blocks)
        await wait_for(lambda: fleet.core.log_state.ok)
        await fleet.core.buffer.flush(60)
        await fleet.views.wait_caught_up(60)
        truth, _ = await refold(KvIndexFold(), fleet.log, "dynamo")
        assert KvIndexFold().digest(truth) == index.fold.digest(index.state)
        assert all(source.exact for source in truth.sources.values())
