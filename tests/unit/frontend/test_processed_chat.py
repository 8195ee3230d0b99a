"""Chat requests by way of a chat processor: from the client's bytes to the worker and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.errors import InvalidArgument, Unknown
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.chat_choices import choice_of
from dynamo_es.frontend.chat_processing import Flush, ProcessedChat
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.errors import ApiError
from dynamo_es.http_error import HttpError
from tests.unit.frontend.asgi_client import Reply, call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

CHAT = "/v1/chat/completions"
Read = Callable[[str, bool], dict[str, Any]]


def as_content(text: str, over: bool) -> dict[str, Any]:
    return {"content": text}


@dataclass
class Upper:
    """An output that reads each frame by ``read``; it ends by itself at the text ``stop``."""

    read: Read
    stop: str | None
    seen: set[int] = field(default_factory=set)
    left: str = ""

    def push(self, given: Mapping[str, Any]) -> Flush | None:
        text = bytes(given["token_ids"]).decode()
        finish = given.get("finish_reason")
        cut = self.stop is not None and self.stop in text
        if cut:
            text, finish = text.partition(str(self.stop))[0], "stop"
        index = given.get("index") or 0
        choice = choice_of(index, **self.read(text, finish is not None), finish=finish)
        return Flush((choice,), len(given["token_ids"]), finish is not None, cut, self.stop if cut else None)

    def finish(self) -> Flush | None:
        return Flush((choice_of(0, content=self.left),), 0) if self.left else None


@dataclass
class Processor:
    """Prepares ``prompt``; remembers requests."""

    read: Read = as_content
    prompt: tuple[int, ...] = (72, 105)
    stop: str | None = None
    error: Exception | None = None
    left: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    async def prepare(self, request: dict[str, Any]) -> ProcessedChat:
        await asyncio.sleep(0)
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        worker = {
            "model": request["model"],
            "token_ids": list(self.prompt),
            "stop_conditions": {},
            "routing": {},
            "made_by": "processor",
        }
        return ProcessedChat(worker, lambda: Upper(self.read, self.stop, left=self.left))

    def close(self) -> None:
        pass


def processed(processor: Processor, engine: ScriptedEngine, **changes: Any) -> ServedModel:
    return replace(served(engine, **changes), processor=processor)


async def ask(app: FrontendApp, path: str = CHAT, **more: Any) -> Reply:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, **more}
    return await call(app, path, json.dumps(body).encode())


def events(reply: Reply) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(says(frame("Hello"), frame(" you", "stop")))


async def test_a_unary_answer(executor: ThreadPoolExecutor, engine: ScriptedEngine) -> None:
    processor = Processor()
    reply = await ask(application(processed(processor, engine), executor=executor), temperature=0.5)
    body = reply.json()
    assert (reply.status, body["choices"][0]["message"]["content"]) == (200, "Hello you")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    assert engine.requests[0]["made_by"] == "processor"
    assert processor.requests == [
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 99, "temperature": 0.5}
    ]


async def test_a_stream_has_one_role_and_its_usage(executor: ThreadPoolExecutor, engine: ScriptedEngine) -> None:
    app = application(processed(Processor(), engine), executor=executor)
    reply = await ask(app, stream=True, stream_options={"include_usage": True})
    told = events(reply)
    deltas = [chunk["choices"][0]["delta"] for chunk in told[:-1]]
    assert deltas == [{"content": "Hello", "role": "assistant"}, {"content": " you"}]
    assert told[-2]["choices"][0]["finish_reason"] == "stop"
    assert told[-1]["usage"]["completion_tokens"] == 9
    assert reply.text.endswith("data: [DONE]\n\n")
    assert len({chunk["id"] for chunk in told}) == 1


async def test_thoughts_and_calls(executor: ThreadPoolExecutor) -> None:
    def read(text: str, over: bool) -> dict[str, Any]:
        if not over:
            return {"reasoning": text}
        function = {"name": "f", "arguments": text}
        return {"calls": [{"index": 0, "id": "c1", "type": "function", "function": function}]}

    engine = ScriptedEngine(says(frame("hm"), frame("{}", "stop")))
    app = application(processed(Processor(read), engine), executor=executor)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    message = (await ask(app, tools=tools)).json()
    choice = message["choices"][0]["message"]
    assert choice["reasoning_content"] == "hm"
    assert choice["tool_calls"] == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert message["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


async def test_the_worker_is_told_when_the_output_ends_here(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("a"), frame("b#c"), frame("d"), frame("e", "stop")))
    app = application(processed(Processor(stop="#"), engine), executor=executor)
    reply = await ask(app, nvext={"extra_fields": ["stop_reason"]})
    assert reply.json()["choices"][0]["message"]["content"] == "ab"
    assert reply.json()["nvext"]["stop_reason"] == "#"
    assert engine.ended == ["closed"]
    assert engine.contexts[0].is_stopped()


async def test_what_is_held_back_is_told_at_the_end(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("a")))
    reply = await ask(application(processed(Processor(left="!"), engine), executor=executor))
    assert reply.json()["choices"][0]["message"]["content"] == "a!"
    assert "usage" not in reply.json()


async def test_log_probabilities_come_from_the_worker(executor: ThreadPoolExecutor) -> None:
    tops = [[{"rank": 0, "token_id": 97, "logprob": -0.5}, {"rank": 1, "token_id": 98, "logprob": -1.5}]]
    engine = ScriptedEngine(says(frame("a", "stop", log_probs=[-0.5], top_logprobs=tops)))
    app = application(processed(Processor(), engine), executor=executor)
    entry = (await ask(app, logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"][0]
    assert (entry["token"], entry["logprob"]) == ("a", -0.5)
    assert [one["token"] for one in entry["top_logprobs"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InvalidArgument("no such function"), 400, "no such function"),
        (ApiError(529, "no room"), 529, "no room"),
        (HttpError(422, "Validation: no"), 422, "Validation: no"),
        (Unknown("Preprocessing error: <the prompt>"), 400, "Invalid request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_has_a_status_of_its_own(
    executor: ThreadPoolExecutor, engine: ScriptedEngine, error: Exception, status: int, message: str, stream: bool
) -> None:
    app = application(processed(Processor(error=error), engine), executor=executor)
    reply = await ask(app, stream=stream)
    assert (reply.status, reply.json()["message"]) == (status, message)
    assert engine.requests == []


async def test_a_prompt_that_does_not_fit_is_refused(executor: ThreadPoolExecutor, engine: ScriptedEngine) -> None:
    app = application(processed(Processor(prompt=(1, 2, 3)), engine, context_length=2), executor=executor)
    reply = await ask(app)
    assert (reply.status, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_workers_failure_is_told_as_always(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("a"), frame("", "error: boom")))
    app = application(processed(Processor(), engine), executor=executor)
    assert (await ask(app)).status == 500
    assert events(await ask(app, stream=True))[-1]["error"]["code"] == 500


async def test_other_routes_take_the_same_way(executor: ThreadPoolExecutor, engine: ScriptedEngine) -> None:
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
    processor = Processor()
    app = application(processed(processor, engine), executor=executor, config=config)
    responses = await call(app, "/v1/responses", json.dumps({"model": "m", "input": "hi"}).encode())
    assert responses.json()["output"][0]["content"][0]["text"] == "Hello you"
    messages = await ask(app, "/v1/messages")
    assert messages.json()["content"][0]["text"] == "Hello you"
    assert [request["messages"][-1]["content"] for request in processor.requests] == ["hi", "hi"]


async def test_completions_do_not(executor: ThreadPoolExecutor, engine: ScriptedEngine) -> None:
    processor = Processor()
    app = application(processed(processor, engine), executor=executor)
    reply = await call(app, "/v1/completions", json.dumps({"model": "m", "prompt": "hi", "max_tokens": 9}).encode())
    assert (reply.json()["choices"][0]["text"], processor.requests) == ("Hello you", [])


async def test_several_choices(executor: ThreadPoolExecutor) -> None:
    engine = ScriptedEngine(says(frame("a", "stop", index=0), frame("b", "stop", index=1)))
    app = application(processed(Processor(), engine), executor=executor)
    choices = (await ask(app, n=2, temperature=1)).json()["choices"]
    assert [(one["index"], one["message"]["content"]) for one in choices] == [(0, "a"), (1, "b")]
