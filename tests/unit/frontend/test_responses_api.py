"""OpenAI's responses: what becomes of their input, tools and choices, and how streams are written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import msgspec
import pytest

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.requests import AssistantMessage, NamedTool, SystemMessage, ToolMessage, UserMessage
from dynamo_es.frontend.responses_api import ResponsesRequest, chat_request, echoed
from dynamo_es.frontend.responses_api_input import chat_messages
from dynamo_es.frontend.responses_api_writer import ResponseWriter
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def request(**members: Any) -> ResponsesRequest:
    return msgspec.convert({"model": "m", "input": "x", **members}, ResponsesRequest)


# -- input -------------------------------------------------------------------------------------------------------------


def test_items_become_messages_in_order() -> None:
    messages = chat_messages(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "c"}, {"type": "refusal", "refusal": "no"}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "2", "name": "g", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "1", "output": "r"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "s"}]},
            {"role": "developer", "content": "d"},
        ],
        "Be brief",
    )
    assert [type(message).__name__ for message in messages] == [
        "SystemMessage",
        "UserMessage",
        "AssistantMessage",
        "ToolMessage",
        "ToolMessage",
        "DeveloperMessage",
    ]
    system, user, assistant, first, second, _ = messages
    assert isinstance(system, SystemMessage)
    assert system.content == "Be brief"
    assert isinstance(user, UserMessage)
    assert [part.text for part in user.content] == ["a", "b"]  # type: ignore[union-attr]
    assert isinstance(assistant, AssistantMessage)
    assert assistant.reasoning_content == "hm"
    assert [(call.id, call.function.name) for call in assistant.tool_calls or ()] == [("1", "f"), ("2", "g")]
    assert isinstance(first, ToolMessage)
    assert isinstance(second, ToolMessage)
    assert [(message.tool_call_id, message.content) for message in (first, second)] == [("1", "r"), ("2", "s")]


def test_calls_of_different_turns_are_of_different_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
    messages = chat_messages([call, {"role": "user", "content": "x"}, call], None)
    assert [type(message).__name__ for message in messages] == ["AssistantMessage", "UserMessage", "AssistantMessage"]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("x", "`input[0]` must be an object"),
        ({"type": "item_reference", "id": "1"}, "`input[0]` has the type `item_reference`, which is not supported"),
        ({"role": "wizard", "content": "x"}, "`input[0].role` must be"),
        ({"role": "user"}, "`input[0].content` must be a string or an array of parts"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "`input[0]` has a part of type `input_file`"),
        ({"role": "user", "content": ["x"]}, "`input[0]` has a part of type `None`"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "`input[0].call_id` must be a string"),
        ({"type": "function_call_output", "call_id": "1"}, "`input[0].output` must have an array of parts"),
    ],
)
def test_item_that_cannot_be_said_in_a_chat_is_refused(item: Any, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_messages([item], None)
    assert message in refused.value.message
    assert (refused.value.status, refused.value.param) == (400, "input")


# -- tools and formats -------------------------------------------------------------------------------------------------


def test_choices_and_tools_become_those_of_a_chat() -> None:
    assert chat_request(request(tools=[TOOL], tool_choice="required")).tool_choice == "required"
    named = chat_request(request(tools=[TOOL], tool_choice={"type": "function", "name": "f"})).tool_choice
    assert isinstance(named, NamedTool)
    assert named.function.name == "f"
    other = {**TOOL, "name": "g", "strict": True}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    made = chat_request(request(tools=[TOOL, other], tool_choice=allowed))
    assert made.tool_choice == "required"
    assert [(tool.function.name, tool.function.strict) for tool in made.tools or ()] == [("g", True)]
    assert chat_request(request(parallel_tool_calls=False)).parallel_tool_calls is False


@pytest.mark.parametrize(
    ("members", "status", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, 400, "tools"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"tool_choice": "sometimes"}, 400, "tool_choice"),
        ({"tool_choice": "function"}, 400, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, 400, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, 400, "tool_choice"),
        ({"text": {"format": {"type": "yaml"}}}, 400, "text"),
        ({"previous_response_id": "resp_1"}, 501, "previous_response_id"),
        ({"background": True}, 501, "background"),
        ({"model": None}, 400, "model"),
        ({"input": []}, 400, "input"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_field(members: dict[str, Any], status: int, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat_request(request(**members))
    assert (refused.value.status, refused.value.param) == (status, param)


async def test_fields_of_errors_have_the_routes_own_names(executor: Executor) -> None:
    app = application(served(ScriptedEngine(says(frame("x", "stop")))), executor=executor)
    for members, param in (
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "", "schema": {}}}}, "text"),
        ({"temperature": 3}, "temperature"),
    ):
        body = json.dumps({"model": "m", "input": "x", **members}).encode()
        reply = await call(app, "/v1/responses", body)
        assert (reply.status, reply.json()["error"]["param"]) == (400, param)


# -- writing -----------------------------------------------------------------------------------------------------------


def writer(*, reasoning: bool = False) -> ResponseWriter:
    numbers = iter(range(100))
    return ResponseWriter(
        echoed(request()),
        "m",
        1,
        now_s=lambda: 2,
        new_id=lambda: f"{next(numbers):032x}",
        response_id="0" * 32,
        wants_reasoning=reasoning,
    )


def delta(text: str = "", finish: str | None = None, reasoning: str = "", calls: Sequence[CallDelta] = ()) -> Delta:
    return Delta(0, text, finish, first=False, tokens=1, reasoning=reasoning, calls=calls)


def events(blocks: bytes) -> list[dict[str, Any]]:
    result = []
    for block in blocks.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        result.append(event)
    return result


def test_text_around_calls_is_one_item_that_is_closed_last() -> None:
    made = writer()
    blocks = made.head()
    for one in (
        delta("a"),
        delta(calls=[CallDelta(0, "call-1", "f", "{")]),
        delta(calls=[CallDelta(0, None, None, "}")]),
        delta("b", calls=[CallDelta(1, "call-2", "g", "{}")]),
        delta(finish="tool_calls"),
    ):
        blocks += made.chunk(one, None)
    blocks += made.tail(USAGE)
    seen = events(blocks)
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    added = [event for event in seen if event["type"] == "response.output_item.added"]
    assert [event["output_index"] for event in added] == [0, 1, 2]
    done = [event["item"] for event in seen if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["function_call", "function_call", "message"]
    assert done[2]["content"][0]["text"] == "ab"
    arguments = [event["arguments"] for event in seen if event["type"] == "response.function_call_arguments.done"]
    assert arguments == ["{}", "{}"]
    last = seen[-1]["response"]
    assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
    assert last["usage"]["total_tokens"] == 5


def test_output_without_anything_is_a_response_without_items() -> None:
    made = writer()
    blocks = made.head() + made.chunk(delta(finish="stop"), None) + made.tail(USAGE)
    assert [event["type"] for event in events(blocks)] == [
        "response.created",
        "response.in_progress",
        "response.completed",
    ]


def test_failure_closes_what_is_open() -> None:
    made = writer(reasoning=True)
    blocks = made.head() + made.chunk(delta(reasoning="hm"), None) + made.failure(ApiError(429, "x"))
    *_, part, item, last = events(blocks)
    assert (part["type"], item["type"], last["type"]) == (
        "response.content_part.done",
        "response.output_item.done",
        "response.failed",
    )
    assert item["item"]["status"] == "incomplete"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "rate_limit_exceeded", "message": "Rate limit exceeded"}
    assert last["response"]["completed_at"] is None


def test_answer_that_came_to_its_length_leaves_its_last_item_incomplete() -> None:
    made = writer()
    blocks = made.chunk(delta("a", calls=[CallDelta(0, "call-1", "f", '{"x')]), None)
    blocks += made.chunk(delta(finish="length"), None) + made.tail(USAGE)
    last = events(blocks)[-1]
    assert last["type"] == "response.incomplete"
    assert [item["status"] for item in last["response"]["output"]] == ["completed", "incomplete"]
