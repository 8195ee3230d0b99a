"""Recorded answers of Dynamo's frontend with tool calls and thoughts, byte for byte but for ids and times.

What differs is told here, each with its reason; what a client gets in all is compared then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.asgi import FrontendApp
from dynamo_es.frontend.contracts import ServedModel
from dynamo_es.frontend.tokenizer_files import load_tokenizer
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import application, card
from tests.unit.frontend.golden_replay import MODEL_DIR, flat, masked, recorded, request_bytes
from tests.unit.frontend.golden_worker import GoldenWorker

GROUPS = ("tools", "reasoning", "dispatch_flags")
PARSERS: Mapping[str, dict[str, str]] = {
    "s-plain": {},
    "s-hermes": {"tool_call_parser": "hermes"},
    "s-llama": {"tool_call_parser": "llama3_json"},
    "s-r1": {"reasoning_parser": "deepseek_r1"},
    "s-qwen": {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"},
    "s-basic": {"reasoning_parser": "basic"},
}
FLAGS = {
    "reasoning_stream": {"reasoning_field_name": "reasoning", "enable_streaming_reasoning_dispatch": True},
    "reasoning_unary": {"reasoning_field_name": "reasoning", "enable_streaming_reasoning_dispatch": True},
    "tool_stream": {"enable_streaming_tool_dispatch": True},
    "required_stream": {"enable_streaming_tool_dispatch": True},
}


class Answer(NamedTuple):
    """What a client has in the end: content, thoughts, calls as (name, arguments), finish reason."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]
    finish: str | None


PONDERED = Answer("\n\nThe answer is 4.", "\nI ponder.\n", [], "stop")
CUT = Answer("", "\nI ponder and pond", [], "length")
# The same answer in other frames.
FRAMES_HERE = {
    "tools/hermes_stream": "arguments are streamed as they are written",
    "tools/llama_json_stream": "arguments are streamed as they are written",
    "tools/tool_stream_usage": "arguments are streamed as they are written",
    "tools/partial_marker_text": "text is held only while it may become a marker",
    "dispatch_flags/tool_stream": "arguments are streamed; the event tells the call when it is complete",
    "dispatch_flags/required_stream": "the event tells the call when it is complete, not its first fragment",
}
# Another answer.
_ANY_CUT = "a marker is found however it is cut into chunks"
_AS_WRITTEN = "what a model wrote does not vanish"
ANSWERS_HERE: Mapping[str, tuple[str, Answer]] = {
    "tools/malformed_tool_stream": (_AS_WRITTEN, Answer("", "", [("get_weather", '{"city": \n')], "tool_calls")),
    "tools/unterminated_tool_length": (_AS_WRITTEN, Answer('<tool_call>\n{"name": "get_', "", [], "length")),
    "reasoning/s-qwen_unary": (_ANY_CUT, PONDERED),
    "reasoning/s-basic_unary": (_ANY_CUT, PONDERED),
    "reasoning/qwen_stream": (_ANY_CUT, PONDERED),
    "reasoning/qwen_usage_details": (_ANY_CUT, PONDERED),
    "reasoning/qwen_enable_thinking_false": (_ANY_CUT, PONDERED),
    "reasoning/qwen_effort_none": (_ANY_CUT, PONDERED),
    "reasoning/s-qwen_truncated": (_ANY_CUT, CUT),
    "reasoning/s-basic_truncated": (_ANY_CUT, CUT),
    "reasoning/qwen_tool_after_think": (_ANY_CUT, Answer("\n\n", "\nuse tool\n", [("f", "{}")], "tool_calls")),
}
# Another parser of JSON tells what is wrong in other words.
PARSER_TEXT_HERE = ("tools/assistant_tool_calls_bad_args",)


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture(scope="module")
def models() -> list[ServedModel]:
    tokenizer, renderer = load_tokenizer(str(MODEL_DIR))
    return [
        ServedModel(
            name,
            card(name, context_length=8192, runtime_config=config),
            tokenizer,
            renderer,
            GoldenWorker(tokenizer),
            0,
        )
        for name, config in PARSERS.items()
    ]


@pytest.fixture(scope="module")
def app(models: list[ServedModel], executor: ThreadPoolExecutor) -> FrontendApp:
    return application(*models, executor=executor)


def chunks_of(text: str) -> list[Any]:
    return [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {") and '"choices"' in line]


def answer_of(text: str) -> Answer:
    """What a client puts together, from a stream or a whole answer."""
    if text.startswith("{"):
        choice = json.loads(text)["choices"][0]
        message = choice["message"]
        calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", ())]
        return Answer(message["content"] or "", message.get("reasoning_content") or "", calls, choice["finish_reason"])
    content, reasoning, finish = "", "", None
    called: list[list[str]] = []
    for chunk in chunks_of(text):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            for one in delta.get("tool_calls", ()):
                if "id" in one:
                    assert one["index"] == len(called)
                    called.append([one["function"]["name"], ""])
                called[one["index"]][1] += one["function"]["arguments"]
            finish = choice["finish_reason"] or finish
    return Answer(content, reasoning, [(name, arguments) for name, arguments in called], finish)


def usage_of(text: str) -> Any:
    if text.startswith("{"):
        return json.loads(text).get("usage")
    return next((chunk["usage"] for chunk in chunks_of(text) if "usage" in chunk), None)


def app_with(flags: dict[str, Any], models: list[ServedModel], executor: ThreadPoolExecutor) -> FrontendApp:
    return application(*models, executor=executor, config=FrontendConfig(http_host="127.0.0.1", http_port=0, **flags))


@pytest.mark.parametrize(("name", "item"), [pytest.param(*one, id=one[0]) for one in recorded(GROUPS)])
async def test_answer_is_that_of_dynamo(
    name: str, item: dict[str, Any], app: FrontendApp, models: list[ServedModel], executor: ThreadPoolExecutor
) -> None:
    flags = FLAGS.get(item["name"]) if name.startswith("dispatch_flags/") else None
    used = app if flags is None else app_with(flags, models, executor)
    reply = await call(
        used, item["path"], request_bytes(item["body"]), method=item["method"], headers=item["headers"] or {}
    )
    text, theirs = masked(reply.text), masked(item["response_body"])
    assert reply.status == item["status"]
    if reply.status >= 400:
        text = flat(text)
    if name in FRAMES_HERE:
        assert answer_of(text) == answer_of(theirs)
        assert usage_of(text) == usage_of(theirs)
        assert text.endswith("data: [DONE]\n\n")
    elif name in ANSWERS_HERE:
        assert answer_of(text) == ANSWERS_HERE[name][1]
        assert answer_of(theirs) != ANSWERS_HERE[name][1]
    elif name in PARSER_TEXT_HERE:
        assert text.split(" string: ")[0] == theirs.split(" string: ")[0]
    else:
        assert text == theirs


async def test_call_is_dispatched_as_a_whole_before_the_frame_that_completes_it(
    models: list[ServedModel], executor: ThreadPoolExecutor
) -> None:
    item = next(item for name, item in recorded(("dispatch_flags",)) if name == "dispatch_flags/tool_stream")
    used = app_with(FLAGS["tool_stream"], models, executor)
    reply = await call(used, item["path"], request_bytes(item["body"]), headers=item["headers"])
    theirs = masked(item["response_body"])
    events = [block for block in masked(reply.text).split("\n\n") if block.startswith("event:")]
    assert events == [block for block in theirs.split("\n\n") if block.startswith("event:")]


def test_every_departure_is_one() -> None:
    names = {name for name, _ in recorded(GROUPS)}
    told = (*FRAMES_HERE, *ANSWERS_HERE, *PARSER_TEXT_HERE)
    assert names.issuperset(told)
    assert len(told) == len(set(told))
