"""The official OpenAI and Anthropic clients against a frontend: routes beside chat and completions."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.engines.mock.embedding import embed_request
from dynamo_es.errors import Disconnected
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.server import FrontendServer, serve
from dynamo_es.runtime.context import Context
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>hm</think>Answer"


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@asynccontextmanager
async def running(executor: ThreadPoolExecutor, *models: ServedModel) -> AsyncIterator[FrontendServer]:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
    server = await serve(application(*models, executor=executor, config=config), config)
    try:
        yield server
    finally:
        await asyncio.wait_for(server.shutdown(), 40)


@asynccontextmanager
async def openai_client(server: FrontendServer) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://127.0.0.1:{server.port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


@asynccontextmanager
async def anthropic_client(server: FrontendServer) -> AsyncIterator[anthropic.AsyncAnthropic]:
    url = f"http://127.0.0.1:{server.port}"
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def pieces(text: str, finish: str = "stop") -> list[dict[str, Any]]:
    """A frame a character, and the end."""
    return [*(frame(letter) for letter in text), frame("", finish)]


def model(text: str, **config: str) -> ServedModel:
    return served(ScriptedEngine(says(*pieces(text))), runtime_config=config)


async def embeds(request: dict[str, Any], context: Context) -> AsyncGenerator[list[dict[str, Any]], None]:
    yield [embed_request(request, 8)]


# -- embeddings --------------------------------------------------------------------------------------------------------


async def test_openai_embeddings_in_either_encoding_are_the_same(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(embeds)
    async with (
        running(executor, served(engine, model_type="Embedding")) as server,
        openai_client(server) as client,
    ):
        # The client asks for base64 by itself, and decodes it.
        answer = await client.embeddings.create(model="m", input=["one", "two", "one"])
        floats = await client.embeddings.create(model="m", input=["one", "two", "one"], encoding_format="float")
    assert engine.requests[0]["encoding_format"] == "base64"
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.data[0].embedding == answer.data[2].embedding != answer.data[1].embedding
    for ours, exact in zip(answer.data, floats.data, strict=True):
        assert ours.embedding == pytest.approx(exact.embedding, rel=1e-6)
        assert np.linalg.norm(exact.embedding) == pytest.approx(1)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (9, 9)


async def test_openai_embeddings_of_tokens_with_fewer_dimensions(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(embeds)
    async with (
        running(executor, served(engine, model_type="Embedding")) as server,
        openai_client(server) as client,
    ):
        answer = await client.embeddings.create(
            model="m", input=[[1, 2], [3]], dimensions=2, encoding_format="base64", user="u"
        )
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.embeddings.create(model="m", input="x", dimensions=9)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.embeddings.create(model="zz", input="x")
    assert engine.requests[0]["token_ids"] == [[1, 2], [3]]
    vectors = [np.frombuffer(base64.b64decode(str(entry.embedding)), "<f4") for entry in answer.data]
    assert [len(vector) for vector in vectors] == [2, 2]
    assert "between 1 and 8" in wrong.value.message
    assert missing.value.code == "model_not_found"


# -- responses ---------------------------------------------------------------------------------------------------------


async def test_openai_responses_unary_and_streamed_say_the_same(executor: ThreadPoolExecutor) -> None:
    async with running(executor, model("Hello")) as server, openai_client(server) as client:
        answer = await client.responses.create(model="m", input="Hi", instructions="Be brief", metadata={"a": "b"})
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        events = [event async for event in stream]
    assert (answer.status, answer.output_text, answer.metadata) == ("completed", "Hello", {"a": "b"})
    assert answer.instructions == "Be brief"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 5
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events if not event.type.endswith(".delta")] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hello"
    assert last.response.usage is not None
    assert last.response.usage.total_tokens == last.response.usage.input_tokens + 5


async def test_openai_responses_call_functions_and_take_their_results(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(*pieces(f"Well. {CALL}")))
    tools: Any = [{"type": "function", "name": "get_weather", "description": "w", "parameters": WEATHER}]
    async with (
        running(executor, served(engine, runtime_config={"tool_call_parser": "hermes"})) as server,
        openai_client(server) as client,
    ):
        answer = await client.responses.create(model="m", input="Paris?", tools=tools)
        stream = await client.responses.create(model="m", input="Paris?", tools=tools, stream=True)
        events = [event async for event in stream]
        call = next(item for item in answer.output if item.type == "function_call")
        history: Any = [
            {"role": "user", "content": "Paris?"},
            *(item.model_dump(exclude_none=True) for item in answer.output),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]
        await client.responses.create(model="m", input=history, tools=tools)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    assert answer.output_text == "Well. "
    fragments = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert "".join(fragments) == done.arguments == call.arguments
    assert len(fragments) > 1
    last = events[-1]
    assert last.type == "response.completed"
    assert [item.type for item in last.response.output] == ["message", "function_call"]
    # Text is closed last, after the calls.
    assert [event.item.type for event in events if event.type == "response.output_item.done"] == [
        "function_call",
        "message",
    ]
    prompt = bytes(token % 256 for token in engine.requests[-1]["token_ids"])
    assert b"sunny" in prompt


async def test_openai_responses_show_thoughts_to_who_asks_for_reasoning(executor: ThreadPoolExecutor) -> None:
    async with (
        running(executor, model(THOUGHT, reasoning_parser="qwen3")) as server,
        openai_client(server) as client,
    ):
        quiet = await client.responses.create(model="m", input="Hi")
        asked = await client.responses.create(model="m", input="Hi", reasoning={"effort": "low"})
        stream = await client.responses.create(model="m", input="Hi", reasoning={"effort": "low"}, stream=True)
        events = [event async for event in stream]
    assert [item.type for item in quiet.output] == ["message"]
    assert quiet.usage is not None
    assert quiet.usage.output_tokens_details.reasoning_tokens > 0
    thought = asked.output[0]
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["hm"]
    assert asked.output_text == "Answer"
    assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]


async def test_openai_responses_follow_a_schema_and_end_incomplete(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(*pieces('{"a": 1}', "length")))
    form: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    async with running(executor, served(engine)) as server, openai_client(server) as client:
        answer = await client.responses.create(model="m", input="Hi", text=form, max_output_tokens=8)
        stream = await client.responses.create(model="m", input="Hi", max_output_tokens=8, stream=True)
        events = [event async for event in stream]
    assert engine.requests[0]["sampling_options"]["guided_decoding"] == {"json": {"type": "object"}}
    assert (answer.status, answer.max_output_tokens) == ("incomplete", 8)
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert events[-1].type == "response.incomplete"
    assert [item.status for item in events[-1].response.output] == ["incomplete"]


async def test_openai_responses_fail_within_a_stream_in_their_own_way(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hal"), Disconnected("gone")))
    async with running(executor, served(engine)) as server, openai_client(server) as client:
        stream = await client.responses.create(model="m", input="Hi", stream=True)
        events = [event async for event in stream]
        with pytest.raises(openai.InternalServerError) as failed:
            await client.responses.create(model="m", input="Hi")
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.responses.create(model="m", input="Hi", max_output_tokens=0)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == (
        "server_error",
        "Service temporarily unavailable",
    )
    assert [item.status for item in last.response.output] == ["incomplete"]
    assert failed.value.status_code == 503
    assert wrong.value.param == "max_output_tokens"


async def test_openai_responses_count_input_tokens(executor: ThreadPoolExecutor) -> None:
    async with running(executor, model("x")) as server, openai_client(server) as client:
        counted = await client.responses.input_tokens.count(model="m", input="hello world this is text")
    assert counted.input_tokens == 9


# -- anthropic ---------------------------------------------------------------------------------------------------------


async def test_anthropic_messages_unary_and_streamed_say_the_same(executor: ThreadPoolExecutor) -> None:
    hello: Any = {"model": "m", "max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}
    async with running(executor, model("Hello")) as server, anthropic_client(server) as client:
        answer = await client.messages.create(**hello, system="Be brief")
        async with client.messages.stream(**hello) as stream:
            events = [event async for event in stream]
            whole = await stream.get_final_message()
        counted = await client.messages.count_tokens(model="m", messages=hello["messages"])
        listed = [entry.id async for entry in client.models.list()]
    assert [block.text for block in answer.content if block.type == "text"] == ["Hello"]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 5)
    assert [block.text for block in whole.content if block.type == "text"] == ["Hello"]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 5)
    assert [event.type for event in events if event.type not in ("content_block_delta", "text")] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert counted.input_tokens == 2
    assert listed == ["m"]


async def test_anthropic_messages_use_tools_and_take_their_results(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(*pieces(f"Well. {CALL}")))
    ask: Any = {
        "model": "m",
        "max_tokens": 100,
        "tools": [{"name": "get_weather", "description": "w", "input_schema": WEATHER}],
    }
    question: Any = {"role": "user", "content": "Paris?"}
    async with (
        running(executor, served(engine, runtime_config={"tool_call_parser": "hermes"})) as server,
        anthropic_client(server) as client,
    ):
        answer = await client.messages.create(**ask, messages=[question])
        async with client.messages.stream(**ask, messages=[question]) as stream:
            events = [event async for event in stream]
            whole = await stream.get_final_message()
        used = next(block for block in answer.content if block.type == "tool_use")
        result: Any = {"type": "tool_result", "tool_use_id": used.id, "content": [{"type": "text", "text": "sunny"}]}
        history: Any = [
            question,
            {"role": "assistant", "content": answer.content},
            {"role": "user", "content": [result, {"type": "text", "text": "Thanks"}]},
        ]
        await client.messages.create(**ask, messages=history)
    assert (used.name, used.input, answer.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    assert [block.type for block in whole.content] == ["text", "tool_use"]
    streamed = whole.content[1]
    assert streamed.type == "tool_use"
    assert streamed.input == {"city": "Paris"}
    assert sum(event.type == "input_json" for event in events) > 1
    prompt = bytes(token % 256 for token in engine.requests[-1]["token_ids"])
    assert prompt.index(b"sunny") < prompt.index(b"Thanks")


async def test_anthropic_messages_think_and_stop_at_sequences(executor: ThreadPoolExecutor) -> None:
    async with (
        running(executor, model(f"{THOUGHT}STOPmore", reasoning_parser="qwen3")) as server,
        anthropic_client(server) as client,
    ):
        ask: Any = {
            "model": "m",
            "max_tokens": 2000,
            "messages": [{"role": "user", "content": "Hi"}],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "stop_sequences": ["STOP"],
        }
        answer = await client.messages.create(**ask)
        async with client.messages.stream(**ask) as stream:
            whole = await stream.get_final_message()
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.type for block in whole.content] == ["thinking", "text"]
    thought, text = whole.content
    assert thought.type == "thinking"
    assert (thought.thinking, thought.signature) == ("hm", "erased")
    assert text.type == "text"
    assert text.text == "Answer"
    assert (whole.stop_reason, whole.stop_sequence) == ("stop_sequence", "STOP")


async def test_anthropic_client_understands_errors(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("Hal"), Disconnected("gone")))
    async with running(executor, served(engine)) as server, anthropic_client(server) as client:
        hello: Any = {"max_tokens": 16, "messages": [{"role": "user", "content": "Hi"}]}
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="zz", **hello)
        with pytest.raises(anthropic.BadRequestError) as wrong:
            await client.messages.create(model="m", **{**hello, "max_tokens": 0})
        with pytest.raises(anthropic.APIStatusError) as cut:
            async with client.messages.stream(model="m", **hello) as stream:
                await stream.get_final_message()
        with pytest.raises(anthropic.InternalServerError) as failed:
            await client.messages.create(model="m", **hello)
    assert missing.value.body["error"]["message"] == "Model 'zz' not found"  # type: ignore[index, call-overload]
    assert "max_tokens" in wrong.value.message
    assert "Service temporarily unavailable" in str(cut.value)
    assert failed.value.status_code == 503


async def test_anthropic_routes_are_not_there_unless_switched_on(executor: ThreadPoolExecutor) -> None:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0)
    server = await serve(application(model("x"), executor=executor, config=config), config)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            reply = await client.post("/v1/messages", json={"model": "m"})
            models = await client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    finally:
        await server.shutdown()
    assert (reply.status_code, reply.json()["message"]) == (404, "Route not found: POST /v1/messages")
    assert models.json()["object"] == "list"
