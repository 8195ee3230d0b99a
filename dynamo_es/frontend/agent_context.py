"""Which session of an agent a request belongs to: from its headers to the worker request (spec/frontend.md 3.2). Pure.

``x-dynamo-session-id`` goes before the headers that agents send of themselves. The session is what the router keeps
together, and workers get it as ``agent_context``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_es.frontend.requests import ChatRequest, CompletionRequest, FunctionMessage, ToolMessage, UserMessage

# The session's header and the one that names its parent, by precedence.
_SOURCES: Sequence[tuple[bytes, bytes | None]] = (
    (b"x-dynamo-session-id", b"x-dynamo-parent-session-id"),
    (b"x-claude-code-session-id", None),
    (b"thread-id", b"x-codex-parent-thread-id"),
    (b"x-deepseek-harness-session-id", None),
    (b"x-session-id", b"x-parent-session-id"),
)
_FINAL = b"x-dynamo-session-final"
AGENT_HEADERS = frozenset(name for pair in _SOURCES for name in pair if name is not None) | {_FINAL}
_TRUE = frozenset({b"true", b"1", b"yes", b"on"})


def agent_context(headers: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    """The context that ``AGENT_HEADERS`` of a request stand for; None: it is of no session."""
    for name, parent_name in _SOURCES:
        session_id = _text(headers.get(name))
        if session_id:
            context: dict[str, Any] = {"session_id": session_id}
            parent = _text(headers.get(parent_name)) if parent_name is not None else ""
            if parent:
                context["parent_session_id"] = parent
            if _FINAL in headers:
                context["session_final"] = headers[_FINAL].strip().lower() in _TRUE
            return context
    return None


def input_trigger(request: ChatRequest | CompletionRequest) -> str:
    """What made the agent ask: ``user_message``, ``tool_result`` or ``other``."""
    last = request.messages[-1] if isinstance(request, ChatRequest) and request.messages else None
    if isinstance(last, UserMessage):
        return "user_message"
    return "tool_result" if isinstance(last, ToolMessage | FunctionMessage) else "other"


def add_agent_context(
    requests: Sequence[dict[str, Any]], request: ChatRequest | CompletionRequest, context: Mapping[str, Any] | None
) -> None:
    """Put the context into the worker requests of a request; None: nothing."""
    if context is not None:
        trigger = input_trigger(request)
        for item in requests:
            item["agent_context"] = {**context, "input_trigger": trigger}


def _text(value: bytes | None) -> str:
    return "" if value is None else value.strip().decode("utf-8", "replace")
