from __future__ import annotations

import msgspec
import pytest

from dynamo_es.frontend.agent_context import add_agent_context, agent_context
from dynamo_es.frontend.headers import read_headers
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest

USER, TOOL = {"role": "user", "content": "Hi"}, {"role": "tool", "tool_call_id": "1", "content": "42"}


def chat(*messages):
    return msgspec.convert({"model": "m", "messages": list(messages)}, ChatRequest)


@pytest.mark.parametrize(
    ("headers", "context"),
    [
        ({}, None),
        ({b"x-dynamo-session-id": b" "}, None),
        ({b"x-dynamo-parent-session-id": b"p"}, None),
        ({b"x-dynamo-session-id": b"a", b"x-session-id": b"b"}, {"session_id": "a"}),
        (
            {b"x-dynamo-session-id": b"a", b"x-dynamo-parent-session-id": b"p", b"x-dynamo-session-final": b"True"},
            {"session_id": "a", "parent_session_id": "p", "session_final": True},
        ),
        ({b"x-session-id": b"b", b"x-dynamo-session-final": b"0"}, {"session_id": "b", "session_final": False}),
        ({b"x-claude-code-session-id": b"c", b"thread-id": b"t"}, {"session_id": "c"}),
        ({b"thread-id": b"t", b"x-codex-parent-thread-id": b"u"}, {"session_id": "t", "parent_session_id": "u"}),
        ({b"x-deepseek-harness-session-id": b"d"}, {"session_id": "d"}),
        ({b"x-session-id": b"b", b"x-parent-session-id": b"q"}, {"session_id": "b", "parent_session_id": "q"}),
        ({b"x-session-id": "é".encode()}, {"session_id": "é"}),
        ({b"x-session-id": b"\xff"}, {"session_id": "\ufffd"}),
    ],
)
def test_the_session_is_that_of_the_first_header_that_names_one(headers, context):
    assert agent_context(headers) == context
    assert read_headers(headers.items()).agent == context


@pytest.mark.parametrize(
    ("request_", "trigger"),
    [
        (chat(USER), "user_message"),
        (chat(USER, {"role": "assistant", "content": "?"}, TOOL), "tool_result"),
        (chat(USER, {"role": "assistant", "content": "and"}), "other"),
        (CompletionRequest(model="m", prompt="Hi"), "other"),
    ],
)
def test_workers_get_it_with_what_made_the_agent_ask(request_, trigger):
    items = [{"token_ids": [1]}, {"token_ids": [2]}]
    add_agent_context(items, request_, {"session_id": "a"})
    assert [item["agent_context"] for item in items] == [{"session_id": "a", "input_trigger": trigger}] * 2


def test_a_request_of_no_session_has_no_context():
    items = [{"token_ids": [1]}]
    add_agent_context(items, chat(USER), None)
    assert items == [{"token_ids": [1]}]
