"""Bodies and events of Anthropic's Messages API (spec/frontend.md 1.9). Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.frontend.anthropic_errors import error_value
from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.responses import CallText, ChoiceText

_encode = msgspec.json.encode
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class MessageWriter:
    """A ``Writer``.

    Args:
        message_id: 32 hex digits.
        model: Primary name.
        estimate: Gives what ``message_start`` says of the prompt; the events after it have the real count.
        new_id: Makes 32 hex digits.
    """

    running_usage = True

    def __init__(self, message_id: str, model: str, estimate: Callable[[], int], new_id: Callable[[], str]) -> None:
        self._id = f"msg_{message_id}"
        self._model = model
        self._estimate = estimate
        self._new_id = new_id
        self._block = -1
        self._open: str | int | None = None
        self._finish_reason: str | None = None
        self._stop: str | None = None

    # -- stream ----------------------------------------------------------------------------------------------------

    def head(self) -> bytes:
        usage = {"input_tokens": self._estimate(), "output_tokens": 0, "cache_creation_input_tokens": 0}
        return _event("message_start", {"message": self._message([], None, None, usage)})

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        self._finish_reason = delta.finish_reason or self._finish_reason
        self._stop = delta.stop or self._stop
        counts = _usage(usage or {}, running=True)
        events: list[bytes] = []
        if delta.reasoning:
            events += self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}, counts)
            events.append(self._delta({"type": "thinking_delta", "thinking": delta.reasoning}, counts))
        if delta.text:
            events += self._enter("text", {"type": "text", "text": ""}, counts)
            events.append(self._delta({"type": "text_delta", "text": delta.text}, counts))
        for call in delta.calls:
            events += self._call(call, counts)
        return b"".join(events)

    def tail(self, usage: Mapping[str, Any]) -> bytes:
        counts = _usage(usage, running=False)
        delta: dict[str, Any] = {"stop_reason": stop_reason(self._finish_reason, self._stop)}
        if self._stop is not None and self._finish_reason == "stop":
            delta["stop_sequence"] = self._stop
        events = self._leave(_usage(usage, running=True))
        events.append(_event("message_delta", {"delta": delta, "usage": counts}))
        events.append(_event("message_stop", {}))
        return b"".join(events)

    def failure(self, error: ApiError) -> bytes:
        _, status, message = error.stream_form()
        return _event("error", {"error": error_value(status, message)})

    def _call(self, call: CallDelta, counts: Mapping[str, Any]) -> list[bytes]:
        events: list[bytes] = []
        if self._open != call.call:
            block = {"type": "tool_use", "id": f"toolu_{self._new_id()}", "name": call.name or "", "input": {}}
            events += self._enter(call.call, block, counts)
        if call.arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": call.arguments}, counts))
        return events

    def _enter(self, what: str | int, block: Mapping[str, Any], counts: Mapping[str, Any]) -> list[bytes]:
        """Begin a block, unless this one is open."""
        if self._open == what:
            return []
        events = self._leave(counts)
        self._block += 1
        self._open = what
        events.append(_event("content_block_start", {"index": self._block, "content_block": block}))
        return events

    def _leave(self, counts: Mapping[str, Any]) -> list[bytes]:
        """End the open block."""
        if self._open is None:
            return []
        events = []
        if self._open == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": "erased"}, counts))
        events.append(_event("content_block_stop", {"index": self._block}))
        self._open = None
        return events

    def _delta(self, delta: Mapping[str, Any], counts: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._block, "delta": delta, "usage": counts})

    # -- whole -----------------------------------------------------------------------------------------------------

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        choice = choices[0]
        content: list[dict[str, Any]] = []
        if choice.reasoning:
            content.append({"type": "thinking", "thinking": "".join(choice.reasoning), "signature": ""})
        content += [self._used(call) for call in choice.calls]
        text = "".join(choice.parts)
        if text:
            content.append({"type": "text", "text": text})
        reason = stop_reason(choice.finish_reason, choice.stop)
        sequence = choice.stop if reason == "stop_sequence" else None
        return _encode(self._message(content, reason, sequence, _usage(usage or {}, running=False)))

    def _used(self, call: CallText) -> dict[str, Any]:
        written = "".join(call.parts)
        try:
            arguments = msgspec.json.decode(written) if written else {}
        except (msgspec.DecodeError, RecursionError):
            arguments = {}  # It broke off: the answer came to its length.
        return {
            "type": "tool_use",
            "id": f"toolu_{self._new_id()}",
            "name": call.name,
            "input": arguments if isinstance(arguments, dict) else {},
        }

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "content": content,
            "model": self._model,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }


def stop_reason(finish_reason: str | None, stop: str | None) -> str | None:
    """Anthropic's name for the end of an answer; None: it came to no regular end."""
    if finish_reason is None:
        return None
    if finish_reason == "stop" and stop is not None:
        return "stop_sequence"
    return _STOP_REASONS.get(finish_reason, "end_turn")


def _usage(usage: Mapping[str, Any], *, running: bool) -> dict[str, Any]:
    counts = {
        "input_tokens": usage.get("prompt_tokens", 0),
        "output_tokens": usage.get("completion_tokens", 0),
        "cache_creation_input_tokens": 0,
    }
    if running:
        counts["total_tokens"] = usage.get("total_tokens", 0)
    return counts


def _event(kind: str, more: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **more}))
