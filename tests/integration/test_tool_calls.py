"""Tool calls and thoughts from a worker's card to OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo_es.config.tree import WorkerConfig
from dynamo_es.frontend.contracts import ServedModel
from tests.integration.test_frontend_clients import openai_client, running
from tests.support.served_fleet import CHAT, served_fleet
from tests.unit.frontend.fakes import ScriptedEngine, frame, says, served

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
MESSAGES: Any = [{"role": "user", "content": "How is the weather?"}]
TEXT = (
    "<think>\nThey ask for two places.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
)
CARD = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
CITIES = ["Paris", "Zürich"]


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def model(text: str, size: int = 1, **config: Any) -> ServedModel:
    """A model that says ``text``, so many characters a frame."""
    pieces = [frame(text[place : place + size]) for place in range(0, len(text), size)]
    return served(ScriptedEngine(says(*pieces, frame("", "stop"))), runtime_config=config)


async def test_the_client_gets_parallel_calls_and_thoughts(executor: ThreadPoolExecutor) -> None:
    async with running(executor, model(TEXT, **CARD)) as server, openai_client(server) as client:
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL])
    choice = answer.choices[0]
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments)["city"] for call in calls if call.type == "function"] == CITIES
    assert (choice.message.content or "").strip() == "I look."
    assert (choice.message.model_extra or {})["reasoning_content"].strip() == "They ask for two places."


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_the_clients_stream_helper_puts_the_same_together(executor: ThreadPoolExecutor, size: int) -> None:
    async with running(executor, model(TEXT, size, **CARD)) as server, openai_client(server) as client:
        kinds: list[str] = []
        async with client.chat.completions.stream(model="m", messages=MESSAGES, tools=[TOOL]) as stream:
            async for event in stream:
                kinds.append(event.type)
            answer = await stream.get_final_completion()
    calls = answer.choices[0].message.tool_calls or []
    assert [json.loads(call.function.arguments)["city"] for call in calls] == CITIES
    assert [call.id for call in calls] == sorted({call.id for call in calls}, key=[call.id for call in calls].index)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert kinds.count("tool_calls.function.arguments.done") == 2
    assert kinds.count("tool_calls.function.arguments.delta") >= (2 if size == 1000 else 6)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("required", '[{"name": "get_weather", "parameters": {"city": "Paris"}}]'),
        ({"type": "function", "function": {"name": "get_weather"}}, '{"city": "Paris"}'),
    ],
)
async def test_forced_calls_need_no_parser(executor: ThreadPoolExecutor, choice: Any, text: str) -> None:
    shown = model(text)
    async with running(executor, shown) as server, openai_client(server) as client:
        answer = await client.chat.completions.create(model="m", messages=MESSAGES, tools=[TOOL], tool_choice=choice)
    call = (answer.choices[0].message.tool_calls or [])[0]
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
    assert isinstance(shown.engine, ScriptedEngine)
    assert "json" in shown.engine.requests[0]["sampling_options"]["guided_decoding"]


async def test_a_workers_card_names_the_parsers() -> None:
    async with served_fleet() as fleet:
        batches = [[frame(TEXT[:30]), frame(TEXT[30:50])], [frame(TEXT[50:], "stop")]]
        requests = await fleet.scripted_worker(batches, runtime_config=CARD)
        reply = await fleet.ask(CHAT, tools=[TOOL])
        plain = await fleet.ask(CHAT)
    message = reply.json()["choices"][0]["message"]
    assert [json.loads(one["function"]["arguments"])["city"] for one in message["tool_calls"]] == CITIES
    assert message["reasoning_content"].strip() == "They ask for two places."
    assert "tool_calls" not in plain.json()["choices"][0]["message"]
    assert len(requests) == 2


async def test_options_of_a_worker_reach_its_card() -> None:
    worker = WorkerConfig(model_name="m", tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    async with served_fleet() as fleet:
        await fleet.mock_worker(worker)
        parsers = fleet.models.find("m").parsers
        reply = await fleet.ask(CHAT, max_tokens=8)
    assert parsers.tools is not None
    assert parsers.reasoning is not None
    assert reply.json()["choices"][0]["message"]["content"] is None
    # Leading white space is held back until the first word, so its frame brings no thought.
    assert reply.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 7}


async def test_a_name_that_nobody_knows_is_told_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with served_fleet() as fleet:
        await fleet.scripted_worker([[frame(TEXT, "stop")]], runtime_config={"tool_call_parser": "mystery"})
        reply = await fleet.ask(CHAT, tools=[TOOL])
    assert reply.json()["choices"][0]["message"]["content"] == TEXT
    assert "tool_call_parser mystery is no parser" in caplog.text
