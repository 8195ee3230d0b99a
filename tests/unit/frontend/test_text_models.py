"""Models whose workers get text: what they are sent, and how their chunks reach clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import Disconnected
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.servable import NoTokenizer
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, card, says
from tests.unit.frontend.golden_replay import recorded, request_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEAD = {"id": "x", "created": 1, "model": "s-text"}


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": more.pop("index", 0), "delta": delta, "finish_reason": finish, "logprobs": None}
    return {"id": "x", "choices": [choice | more], "created": 1, "model": "s-text", "object": "chat.completion.chunk"}


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {**HEAD, "object": "text_completion", "choices": [{"text": text, "index": 0, "finish_reason": finish}]}


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def ask(executor: ThreadPoolExecutor, engine: ScriptedEngine, path: str = CHAT, **body: Any) -> Reply:
    model = ServedModel("s-text", card("s-text", model_input="Text"), NoTokenizer(), None, engine, 0)
    app = application(model, executor=executor, config=FrontendConfig(enable_anthropic_api=True))
    if path == CHAT and "messages" not in body:
        body["messages"] = [{"role": "user", "content": "hi"}]
    return await call(app, path, json.dumps({"model": "s-text", **body}).encode())


def engine(*items: Any) -> ScriptedEngine:
    return ScriptedEngine(says(*items))


@pytest.mark.parametrize(
    ("name", "item"), [pytest.param(name, item, id=name) for name, item in recorded(["text_model"])]
)
async def test_answer_is_that_of_dynamo(name: str, item: dict[str, Any], executor: ThreadPoolExecutor) -> None:
    worker = engine(chunk({"content": "hello", "role": "assistant"}, "stop"))
    reply = await ask(executor, worker, **json.loads(request_bytes(item["body"])))
    assert (reply.status, reply.text) == (item["status"], item["response_body"])
    (request,) = worker.requests
    assert request == {**item["body"], "stream": True} | (
        {} if item["body"].get("stream") else {"stream_options": {"include_usage": True}}
    )


async def test_workers_get_what_the_client_wrote(executor: ThreadPoolExecutor) -> None:
    worker = engine(chunk({}, "stop"))
    body = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "metadata": {"a": [1]},
        "stop": ["x"],
        "stream": True,
    }
    assert (await ask(executor, worker, **body)).status == 200
    assert worker.requests == [{"model": "s-text", **body}]


async def test_chunks_of_a_stream_are_passed_on_as_they_are(executor: ThreadPoolExecutor) -> None:
    items = [
        chunk({"role": "assistant", "content": "a", "vendor": [1]}) | {"nvext": {"own": 1}},
        chunk({"content": "b"}, "length"),
        {**HEAD, "choices": [], "object": "chat.completion.chunk", "usage": {"prompt_tokens": 3}},
    ]
    reply = await ask(executor, engine(items[:2], items[2]), stream=True, stream_options={"include_usage": True})
    *sent, done, end = reply.text.split("\n\n")
    assert [json.loads(one.removeprefix("data: ")) for one in sent] == items
    assert (done, end) == ("data: [DONE]", "")


async def test_a_unary_answer_is_all_chunks_together(executor: ThreadPoolExecutor) -> None:
    def call_delta(place: int, text: str, **more: Any) -> dict[str, Any]:
        return {"tool_calls": [{"index": place, **more, "function": {"arguments": text, **more.pop("told", {})}}]}

    def logprobs(token: str) -> dict[str, Any]:
        return {"content": [{"token": token, "logprob": -1.0}]}

    first = {"tool_calls": [{"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}]}
    other = {"tool_calls": [{"index": 1, "id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}}]}
    items = [
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning_content": "th"}),
        chunk({"reasoning_content": "ought"}),
        chunk({"content": "Hi"}, logprobs=logprobs("Hi")),
        chunk({"content": " you"}, logprobs=logprobs(" you")),
        chunk(first),
        chunk(call_delta(0, '{"a":')),
        chunk(call_delta(0, "1}")),
        chunk(other),
        chunk({"content": "second"}, "stop", index=1),
        chunk({}, "tool_calls"),
        {**HEAD, "choices": [], "object": "chat.completion.chunk", "usage": {"prompt_tokens": 3, "total_tokens": 9}},
    ]
    reply = (await ask(executor, engine(*items))).json()
    one, two = reply.pop("choices")
    assert reply == {**HEAD, "object": "chat.completion", "usage": {"prompt_tokens": 3, "total_tokens": 9}}
    assert one == {
        "index": 0,
        "message": {
            "content": "Hi you",
            "refusal": None,
            "tool_calls": [
                {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
            "role": "assistant",
            "reasoning_content": "thought",
        },
        "finish_reason": "tool_calls",
        "logprobs": {"content": [*logprobs("Hi")["content"], *logprobs(" you")["content"]]},
    }
    assert (two["message"]["content"], two["finish_reason"]) == ("second", "stop")


async def test_completions(executor: ThreadPoolExecutor) -> None:
    items = [text_chunk("a"), text_chunk("b", "stop")]
    whole = (await ask(executor, engine(*items), COMPLETIONS, prompt="p")).json()
    assert whole == {
        **HEAD,
        "system_fingerprint": None,
        "object": "text_completion",
        "choices": [{"text": "ab", "index": 0, "finish_reason": "stop"}],
    }
    worker = engine(*items)
    streamed = await ask(executor, worker, COMPLETIONS, prompt=["p", "q"], stream=True)
    assert streamed.text.count("data: ") == 3
    assert worker.requests[0]["prompt"] == ["p", "q"]


async def test_routes_that_speak_otherwise_say_what_the_chunks_say(executor: ThreadPoolExecutor) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    items = [
        chunk({"content": "Hi", "role": "assistant"}),
        chunk({"content": " you"}, "stop"),
        {**HEAD, "choices": [], "object": "chat.completion.chunk", "usage": usage},
    ]
    told = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    message = (await ask(executor, engine(*items), "/v1/messages", **told)).json()
    assert message["content"] == [{"type": "text", "text": "Hi you"}]
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (3, 2)
    streamed = await ask(executor, engine(*items), "/v1/messages", stream=True, **told)
    assert '"text":"Hi"' in streamed.text
    assert "event: message_stop" in streamed.text
    answer = (await ask(executor, engine(*items), "/v1/responses", input="x")).json()
    assert answer["output"][0]["content"][0]["text"] == "Hi you"
    assert answer["usage"]["input_tokens"] == 3
    assert "response.completed" in (await ask(executor, engine(*items), "/v1/responses", input="x", stream=True)).text


@pytest.mark.parametrize(
    ("item", "status"),
    [
        *(("text", 500), ({"choices": 5}, 500), ({"choices": [5]}, 500), ({"no": "choices"}, 500)),
        *((chunk({"content": 5}), 500), (chunk({}, "weird"), 500), (chunk({}, index=-1), 500)),
        *((chunk({"tool_calls": [{"id": "c"}]}), 500), ({"error": {"code": 429}}, 429)),
        (Disconnected("gone"), 503),
    ],
)
async def test_what_is_no_chunk_is_an_error(item: Any, status: int, executor: ThreadPoolExecutor) -> None:
    async def script(request: Any, context: Any) -> Any:
        yield [chunk({"content": "a"})]
        if isinstance(item, Exception):
            raise item
        yield [item]

    assert (await ask(executor, ScriptedEngine(script))).status == status
    streamed = await ask(executor, ScriptedEngine(script), stream=True)
    first, failure, done, _ = streamed.text.split("\n\n")
    assert '"content":"a"' in first
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == status
    assert done == "data: [DONE]"
