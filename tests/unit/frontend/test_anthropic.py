"""Anthropic's messages: what becomes of a body, and what its stream and errors look like."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from typing import Any

import msgspec
import pytest

from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.anthropic_convert import chat_request, estimated_tokens
from dynamo_es.frontend.anthropic_errors import error_body
from dynamo_es.frontend.anthropic_requests import MessagesRequest
from dynamo_es.frontend.anthropic_writer import MessageWriter, stop_reason
from dynamo_es.frontend.errors import ApiError, model_not_found
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.requests import AssistantMessage, JsonSchemaFormat, NamedTool, SystemMessage, ToolMessage
from dynamo_es.frontend.responses import CallText, ChoiceText
from tests.unit.frontend.asgi_client import call
from tests.unit.frontend.fakes import ScriptedEngine, application, frame, says, served

HELLO = {"role": "user", "content": "Hi"}
BILLING = "x-anthropic-billing-header: cch=1;"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def request(**members: Any) -> MessagesRequest:
    return msgspec.convert({"model": "m", "max_tokens": 9, "messages": [HELLO], **members}, MessagesRequest)


def converted(**members: Any) -> Any:
    return chat_request(request(**members), strip_preamble=True)


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_blocks_become_messages_in_order() -> None:
    made = converted(
        system=[{"type": "text", "text": BILLING}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        messages=[
            HELLO,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "c"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "before"},
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "r"}]},
                    {"type": "tool_result", "tool_use_id": "2"},
                    {"type": "text", "text": "after"},
                ],
            },
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
        ],
    )
    kinds = [type(message).__name__ for message in made.messages]
    assert kinds == [
        *("SystemMessage", "UserMessage", "AssistantMessage", "UserMessage", "ToolMessage", "ToolMessage"),
        *("UserMessage", "SystemMessage"),
    ]
    system, _, assistant, before, result, empty, after, _ = made.messages
    assert system.content == "a\nb"
    assert isinstance(assistant, AssistantMessage)
    assert (assistant.content, assistant.reasoning_content) == ("c", "hm")
    assert assistant.tool_calls is not None
    assert assistant.tool_calls[0].function.arguments == '{"a":1}'
    assert (before.content, after.content) == ("before", "after")
    assert isinstance(result, ToolMessage)
    assert (result.tool_call_id, result.content, empty.content) == ("1", "r", "")


def test_billing_preamble_goes_unless_it_is_to_stay() -> None:
    text = f"{BILLING}\nBe brief"
    stripped = converted(system=text).messages[0]
    kept = chat_request(request(system=text), strip_preamble=False).messages[0]
    assert isinstance(stripped, SystemMessage)
    assert isinstance(kept, SystemMessage)
    assert (stripped.content, kept.content) == ("Be brief", text)


def test_settings_become_those_of_a_chat() -> None:
    made = converted(
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        stop_sequences=["S"],
        tools=[{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
        metadata={"user_id": "u"},
        unknown=1,
    )
    assert (made.temperature, made.top_p, made.top_k, made.stop, made.max_tokens) == (0.5, 0.25, 7, ["S"], 9)
    assert made.tools[0].function.name == "f"
    assert isinstance(made.tool_choice, NamedTool)
    assert made.parallel_tool_calls is False
    assert (made.thinking, made.thinking_token_budget) == ({"type": "enabled"}, 1024)
    assert made.reasoning_effort == "low"
    assert isinstance(made.response_format, JsonSchemaFormat)
    assert made.nvext.extra_fields == ["stop_reason"]
    for given, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        assert converted(tool_choice={"type": given}).tool_choice == expected
    assert converted(thinking={"type": "odd"}).thinking is None
    assert converted(thinking={"type": "disabled"}).thinking == {"type": "disabled"}


@pytest.mark.parametrize(
    ("members", "status", "message"),
    [
        ({"max_tokens": 0}, 400, "max_tokens: must be greater than 0"),
        ({"messages": []}, 400, "messages: field required"),
        ({"model": " "}, 404, "Model not found"),
        ({"tools": [{"name": "f"}]}, 400, "tools[0].input_schema: field required for client tools"),
        ({"tools": [{"name": "w", "type": "web_search_1"}]}, 501, 'tools[0]: server tool type "web_search_1"'),
        ({"tool_choice": {"type": "odd"}}, 400, "tool_choice.type: must be"),
        ({"tool_choice": {"type": "tool"}}, 400, "tool_choice.type: must be"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role: must be"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "an image block needs `source`"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400, 'content block type "document"'),
        ({"messages": [{"role": "user", "content": ["x"]}]}, 400, 'content block type "None"'),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "a text block needs `text`"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
            400,
            "a tool_use block needs `input`",
        ),
        ({"output_config": {"effort": "odd"}}, 400, "output_config.effort: must be one of"),
        ({"output_config": {"format": {"type": "xml"}}}, 400, "output_config.format: must have"),
    ],
)
def test_what_cannot_be_done_is_refused(members: dict[str, Any], status: int, message: str) -> None:
    with pytest.raises(ApiError) as refused:
        converted(**members)
    assert refused.value.status == status
    assert message in refused.value.message


def test_estimate_counts_text_roles_and_tools() -> None:
    assert estimated_tokens(request(messages=[{"role": "user", "content": "hello world how are you"}])) == 9
    more = request(system="abc", tools=[{"name": "f", "description": "d", "input_schema": {}}])
    assert estimated_tokens(more) == (3 + 4 + 2 + 1 + 1 + 2) // 3


# -- answers -----------------------------------------------------------------------------------------------------------


def writer() -> MessageWriter:
    numbers = iter(range(100))
    return MessageWriter("0" * 32, "m", lambda: 7, lambda: f"{next(numbers):032x}")


def delta(text: str = "", finish: str | None = None, **more: Any) -> Delta:
    return Delta(0, text, finish, first=False, tokens=1, **more)


def events(blocks: bytes) -> list[dict[str, Any]]:
    return [json.loads(block.partition("data: ")[2]) for block in blocks.decode().split("\n\n")[:-1]]


def test_blocks_follow_each_other_one_at_a_time() -> None:
    made = writer()
    blocks = made.head()
    for one in (
        delta(reasoning="hm"),
        delta("a", reasoning="!"),
        delta(calls=[CallDelta(0, "1", "f", "{")]),
        delta(calls=[CallDelta(0, None, None, "}"), CallDelta(1, "2", "g", "")]),
        delta("b", "tool_calls"),
    ):
        blocks += made.chunk(one, USAGE)
    blocks += made.tail(USAGE)
    seen = events(blocks)
    opened = [
        (event["index"], event["content_block"]["type"]) for event in seen if event["type"] == "content_block_start"
    ]
    assert opened == [(0, "thinking"), (1, "text"), (2, "tool_use"), (3, "tool_use"), (4, "text")]
    closed = [event["index"] for event in seen if event["type"] == "content_block_stop"]
    assert closed == [0, 1, 2, 3, 4]
    depth = 0
    for event in seen:
        depth += {"content_block_start": 1, "content_block_stop": -1}.get(event["type"], 0)
        assert depth in (0, 1)
    assert seen[-2]["delta"] == {"stop_reason": "tool_use"}
    assert seen[-2]["usage"] == {"input_tokens": 3, "output_tokens": 2, "cache_creation_input_tokens": 0}


def test_empty_output_is_a_message_without_blocks() -> None:
    made = writer()
    seen = events(made.head() + made.chunk(delta(finish="stop"), USAGE) + made.tail(USAGE))
    assert [event["type"] for event in seen] == ["message_start", "message_delta", "message_stop"]
    whole = json.loads(writer().body([ChoiceText(0)], None))
    assert (whole["content"], whole["stop_reason"]) == ([], None)


def test_call_that_broke_off_has_no_input() -> None:
    for arguments in ('{"a', "[1]", ""):
        choice = ChoiceText(0, calls=[CallText("1", "f", [arguments])], finish_reason="length")
        whole = json.loads(writer().body([choice], USAGE))
        assert whole["content"][0]["input"] == {}
        assert whole["stop_reason"] == "max_tokens"


def test_ends_have_anthropics_names() -> None:
    assert stop_reason(None, None) is None
    assert stop_reason("stop", None) == "end_turn"
    assert stop_reason("stop", "S") == "stop_sequence"
    assert stop_reason("tool_calls", None) == "tool_use"
    assert stop_reason("content_filter", None) == "refusal"


@pytest.mark.parametrize(
    ("error", "status", "kind", "message"),
    [
        (ApiError(400, "Validation: x"), 400, "invalid_request_error", "x"),
        (model_not_found(), 404, "not_found_error", "Model 'zz' not found"),
        (ApiError(413, "big"), 413, "request_too_large", "big"),
        (ApiError(429, "slow"), 429, "rate_limit_error", "slow"),
        (ApiError(500, "bad"), 500, "api_error", "bad"),
        (ApiError(503, "away"), 503, "api_error", "away"),
        (ApiError(529, "full"), 507, "overloaded_error", "full"),
    ],
)
def test_errors_have_anthropics_types(error: ApiError, status: int, kind: str, message: str) -> None:
    body = json.loads(error_body(error, status, "zz"))
    assert (body["type"], body["error"]["type"], body["error"]["message"]) == ("error", kind, message)
    assert (body["message"], body["code"]) == (message, status)


async def test_thinking_budget_and_stop_reason_reach_the_worker(executor: Executor) -> None:
    engine = ScriptedEngine(says(frame("x", "stop")))
    config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
    app = application(served(engine), executor=executor, config=config)
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [HELLO],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    assert (await call(app, "/v1/messages", json.dumps(body).encode())).status == 200
    sent = engine.requests[0]
    assert sent["stop_conditions"]["max_thinking_tokens"] == 1024
    assert sent["extra_args"] == {"nvext": {"extra_fields": ["stop_reason"]}}


async def test_stop_sequence_at_which_the_worker_stopped_by_itself_is_told(executor: Executor) -> None:
    for named, reason, sequence in (("S", "stop_sequence", "S"), (7, "end_turn", None), ("other", "end_turn", None)):
        engine = ScriptedEngine(says(frame("x"), frame("", "stop", stop_reason=named)))
        config = FrontendConfig(http_host="127.0.0.1", http_port=0, enable_anthropic_api=True)
        app = application(served(engine), executor=executor, config=config)
        body = {"model": "m", "max_tokens": 9, "messages": [HELLO], "stop_sequences": ["S"]}
        answer = (await call(app, "/v1/messages", json.dumps(body).encode())).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)
