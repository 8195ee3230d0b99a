"""Thoughts and tool calls on their way through the whole frontend, streamed and not."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served
from tests.unit.frontend.test_golden_calls import answer_of, chunks_of, usage_of

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
CARD = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


async def ask(
    executor: ThreadPoolExecutor, frames: list[Any], *, stream: bool = False, card: Any = None, **members: Any
) -> str:
    model = served(ScriptedEngine(says(*frames)), runtime_config=CARD if card is None else card)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [F], "stream": stream, **members}
    reply = await call(application(model, executor=executor), "/v1/chat/completions", json.dumps(body).encode())
    assert reply.status == 200
    return reply.text


def bytewise(text: str, finish: str = "stop") -> list[Any]:
    return [*(frame(one) for one in text), frame("", finish)]


@pytest.mark.parametrize("text", [f"<think>hm</think>Hi {CALL}", f"{CALL}\n{CALL}", "Hi", "<think>hm"])
async def test_streams_and_whole_answers_agree(executor: ThreadPoolExecutor, text: str) -> None:
    whole = await ask(executor, [frame(text, "stop")])
    streams = [await ask(executor, frames, stream=True) for frames in ([frame(text, "stop")], bytewise(text))]
    assert answer_of(whole) == answer_of(streams[0]) == answer_of(streams[1])


async def test_a_call_ends_with_its_own_finish_reason_unless_the_length_ended_it(executor: ThreadPoolExecutor) -> None:
    assert answer_of(await ask(executor, [frame(CALL, "stop")])).finish == "tool_calls"
    assert answer_of(await ask(executor, [frame(CALL, "length")])).finish == "length"
    assert answer_of(await ask(executor, [frame(CALL)])).finish is None
    assert answer_of(await ask(executor, [frame("Hi", "stop")])).finish == "stop"


async def test_PROTO_03_first_fragment_names_the_call_and_later_ones_only_add(executor: ThreadPoolExecutor) -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "' + "word " * 400 + '"}}</tool_call>'
    chunks = chunks_of(await ask(executor, bytewise(text), stream=True))
    entries = [one for chunk in chunks for one in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert len(entries) > 1000
    assert set(entries[0]) == {"index", "id", "type", "function"}
    assert entries[0]["function"]["name"] == "f"
    assert all(set(one) == {"index", "function"} and set(one["function"]) == {"arguments"} for one in entries[1:])
    json.loads("".join(one["function"]["arguments"] for one in entries))


async def test_PROTO_04_a_thoughts_end_and_a_whole_call_in_one_delta(executor: ThreadPoolExecutor) -> None:
    frames = [frame("<think>hm"), frame(f"</think>{CALL}"), frame("", "stop")]
    for stream in (False, True):
        found = answer_of(await ask(executor, frames, stream=stream))
        assert (found.reasoning, found.calls) == ("hm", [("f", '{"a": 1}')])


async def test_PROTO_07_a_stops_tail_goes_through_the_parsers(executor: ThreadPoolExecutor) -> None:
    frames = [frame("<think>hm</thi"), frame("nk>Hi <tool_"), frame(f"{CALL[6:]}", "stop")]
    for stream in (False, True):
        found = answer_of(await ask(executor, frames, stream=stream, stop=["</tool_call>END", "nk>NEVER"]))
        assert (found.content, found.reasoning, found.calls) == ("Hi ", "hm", [("f", '{"a": 1}')])


async def test_a_stop_string_within_a_call_leaves_it_incomplete(executor: ThreadPoolExecutor) -> None:
    found = answer_of(await ask(executor, [frame(CALL, "stop")], stop=["1}"]))
    assert (found.calls, found.finish) == ([("f", '{"a": ')], "tool_calls")


async def test_choices_are_read_each_by_itself(executor: ThreadPoolExecutor) -> None:
    frames = [
        *(frame("<tool_", index=0), frame("<think>x", index=1), frame(CALL[6:], "stop", index=0)),
        *(frame("</think>y", "stop", index=1),),
    ]
    text = await ask(executor, frames, n=2, temperature=1.0)
    first, second = json.loads(text)["choices"]
    assert [one["function"]["name"] for one in first["message"]["tool_calls"]] == ["f"]
    assert (second["message"]["content"], second["message"]["reasoning_content"]) == ("y", "x")


async def test_logprobs_of_hidden_tokens_stay_with_their_choice(executor: ThreadPoolExecutor) -> None:
    def scored(text: str, finish: str | None = None) -> dict[str, Any]:
        return frame(text, finish, log_probs=[-0.5] * len(text), top_logprobs=[[]] * len(text))

    frames = [scored("<tool_call>"), scored(CALL[11:], "stop")]
    whole = json.loads(await ask(executor, frames, logprobs=True))
    streamed = chunks_of(await ask(executor, frames, stream=True, logprobs=True))
    assert len(whole["choices"][0]["logprobs"]["content"]) == len(CALL)
    assert sum(len((chunk["choices"][0]["logprobs"] or {"content": ()})["content"]) for chunk in streamed) == len(CALL)


async def test_usage_tells_the_tokens_of_thoughts(executor: ThreadPoolExecutor) -> None:
    frames = [frame("<think>"), frame("hm"), frame("</think>"), frame("Hi", "stop")]
    usage = usage_of(await ask(executor, frames))
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 + len("</think>")}
    assert "completion_tokens_details" not in usage_of(await ask(executor, frames, card={}))
    told = frame("", None, completion_usage={"completion_tokens_details": {"reasoning_tokens": 7}})
    assert usage_of(await ask(executor, [told, *frames]))["completion_tokens_details"] == {"reasoning_tokens": 7}


async def test_thoughts_are_written_under_the_name_that_the_frontend_is_told(executor: ThreadPoolExecutor) -> None:
    from dynamo_es.config.tree import FrontendConfig

    model = served(ScriptedEngine(says(frame("<think>hm</think>Hi", "stop"))), runtime_config=CARD)
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, reasoning_field_name="reasoning")
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    reply = await call(application(model, executor=executor, config=config), "/v1/chat/completions", body)
    message = json.loads(reply.text)["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("hm", "Hi")
