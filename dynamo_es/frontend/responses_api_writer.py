"""Bodies and events of OpenAI's responses (spec/frontend.md 1.8, 2.7). Pure.

Every output item has its place when it begins. Calls and thoughts are closed when the next item begins, text at the end
of the stream, as Dynamo does. Thoughts are an item only if the request asked for reasoning.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.frontend.errors import ApiError
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.preprocess import single_precision
from dynamo_es.frontend.responses import ChoiceText

_encode = msgspec.json.encode
_MEMBERS = (
    *("background", "billing", "conversation", "created_at", "completed_at", "error", "id", "incomplete_details"),
    *("instructions", "max_output_tokens", "max_tool_calls", "metadata", "model", "object", "output"),
    *("parallel_tool_calls", "previous_response_id", "prompt", "prompt_cache_key", "prompt_cache_retention"),
    *("reasoning", "safety_identifier", "service_tier", "status", "temperature", "text", "tool_choice", "tools"),
    *("top_logprobs", "top_p", "truncation", "usage"),
)
_LAST = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


class ResponseWriter:
    """A ``Writer``.

    Args:
        echoed: What a response repeats of its request.
        model: Primary name.
        created: Unix seconds.
        now_s: Unix seconds at the end.
        new_id: Makes 32 hex digits.
        response_id: 32 hex digits.
        wants_reasoning: Thoughts are output items.
    """

    running_usage = False

    def __init__(
        self,
        echoed: Mapping[str, Any],
        model: str,
        created: int,
        *,
        now_s: Callable[[], int],
        new_id: Callable[[], str],
        response_id: str,
        wants_reasoning: bool,
    ) -> None:
        self._echoed = echoed
        self._model = model
        self._created = created
        self._now_s = now_s
        self._new_id = new_id
        self._response_id = f"resp_{response_id}"
        self._wants_reasoning = wants_reasoning
        self._sequence = 0
        self._items: list[_Item] = []
        self._text: _TextItem | None = None
        self._finish_reason: str | None = None

    # -- stream ----------------------------------------------------------------------------------------------------

    def head(self) -> bytes:
        response = self._response("in_progress", None)
        return self._event("response.created", {"response": response}) + self._event(
            "response.in_progress", {"response": response}
        )

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        self._finish_reason = delta.finish_reason or self._finish_reason
        events: list[bytes] = []
        if delta.reasoning and self._wants_reasoning:
            events += self._think(delta.reasoning)
        if delta.text:
            events += self._say(delta.text)
        for call in delta.calls:
            events += self._call(call)
        return b"".join(events)

    def tail(self, usage: Mapping[str, Any]) -> bytes:
        reason = _INCOMPLETE.get(self._finish_reason or "")
        status = "completed" if reason is None else "incomplete"
        events = self._close_all(lambda item: status if item is self._items[-1] else "completed")
        response = self._response(status, usage, incomplete=reason)
        return b"".join([*events, self._event(f"response.{status}", {"response": response})])

    def failure(self, error: ApiError) -> bytes:
        _, code, message = error.stream_form()
        events = self._close_all(lambda item: "incomplete")
        response = self._response("failed", None)
        response["error"] = {"code": _FAILURES.get(code, "server_error"), "message": message}
        return b"".join([*events, self._event("response.failed", {"response": response})])

    # -- whole -----------------------------------------------------------------------------------------------------

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        choice = choices[0]
        self._fill(choice)
        reason = _INCOMPLETE.get(choice.finish_reason or "")
        status = "completed" if reason is None else "incomplete"
        for item in self._items:
            item.status = status if item is self._items[-1] else "completed"
        response = self._response(status, usage, incomplete=reason)
        last = {name: response.pop(name) for name in (*_LAST, "store")}
        set_members = {name: value for name, value in response.items() if value is not None}
        return _encode({**set_members, **{name: None for name in response if name not in set_members}, **last})

    def _fill(self, choice: ChoiceText) -> None:
        if choice.reasoning and self._wants_reasoning:
            self._think("".join(choice.reasoning))
        text = "".join(choice.parts)
        if text:
            self._say(text)
        for place, call in enumerate(choice.calls):
            self._call(CallDelta(place, call.id, call.name, "".join(call.parts)))

    # -- items -----------------------------------------------------------------------------------------------------

    def _think(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        item = self._items[-1] if self._items else None
        if not isinstance(item, _ThoughtItem) or item.status != "in_progress":
            item = _ThoughtItem(f"rs_{self._new_id()}", len(self._items))
            events += self._open(item)
            events.append(self._part(item, "added", ""))
        item.parts.append(text)
        events.append(self._of_item(item, "response.reasoning_text.delta", {"content_index": 0, "delta": text}))
        return events

    def _say(self, text: str) -> list[bytes]:
        events: list[bytes] = []
        item = self._text
        if item is None:
            item = self._text = _TextItem(f"msg_{self._new_id()}", len(self._items))
            events += self._open(item)
            events.append(self._part(item, "added", ""))
        item.parts.append(text)
        more = {"content_index": 0, "delta": text, "logprobs": []}
        events.append(self._of_item(item, "response.output_text.delta", more))
        return events

    def _call(self, call: CallDelta) -> list[bytes]:
        events: list[bytes] = []
        item = self._items[-1] if self._items else None
        if not isinstance(item, _CallItem) or item.number != call.call:
            item = _CallItem(f"fc_{self._new_id()}", len(self._items), call)
            events += self._open(item)
        if call.arguments:
            item.parts.append(call.arguments)
            events.append(self._of_item(item, "response.function_call_arguments.delta", {"delta": call.arguments}))
        return events

    def _open(self, item: _Item) -> list[bytes]:
        events = self._close_last("completed")
        events.append(
            self._event("response.output_item.added", {"output_index": item.place, "item": item.shown(begun=True)})
        )
        self._items.append(item)
        return events

    def _close_last(self, status: str) -> list[bytes]:
        """Close the latest item; text stays open."""
        last = self._items[-1] if self._items else None
        if last is None or last is self._text or last.status != "in_progress":
            return []
        return self._close(last, status)

    def _close_all(self, status_of: Callable[[_Item], str]) -> list[bytes]:
        """Close what is open, text last."""
        items = [item for item in self._items if item.status == "in_progress"]
        items.sort(key=lambda item: item is self._text)
        return [event for item in items for event in self._close(item, status_of(item))]

    def _close(self, item: _Item, status: str) -> list[bytes]:
        item.status = status
        text = "".join(item.parts)
        events = []
        if isinstance(item, _CallItem):
            more: dict[str, Any] = {"name": item.name, "arguments": text}
            events.append(self._of_item(item, "response.function_call_arguments.done", more))
        elif isinstance(item, _ThoughtItem):
            more = {"content_index": 0, "text": text}
            events.append(self._of_item(item, "response.reasoning_text.done", more))
            events.append(self._part(item, "done", text))
        elif isinstance(item, _TextItem):
            more = {"content_index": 0, "text": text, "logprobs": []}
            events.append(self._of_item(item, "response.output_text.done", more))
            events.append(self._part(item, "done", text))
        events.append(self._event("response.output_item.done", {"output_index": item.place, "item": item.shown()}))
        return events

    def _part(self, item: _PartedItem, what: str, text: str) -> bytes:
        return self._of_item(item, f"response.content_part.{what}", {"content_index": 0, "part": item.part(text)})

    def _of_item(self, item: _Item, kind: str, more: Mapping[str, Any]) -> bytes:
        return self._event(kind, {"item_id": item.id, "output_index": item.place, **more})

    def _event(self, kind: str, more: Mapping[str, Any]) -> bytes:
        data = _encode({"type": kind, "sequence_number": self._sequence, **more})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _response(
        self, status: str, usage: Mapping[str, Any] | None, *, incomplete: str | None = None
    ) -> dict[str, Any]:
        echoed = self._echoed
        known: dict[str, Any] = {
            **echoed,
            "background": False,
            "created_at": self._created,
            "completed_at": self._now_s() if status == "completed" else None,
            "id": self._response_id,
            "incomplete_details": None if incomplete is None else {"reason": incomplete},
            "model": self._model,
            "object": "response",
            "output": [item.shown() for item in self._items],
            "service_tier": "auto",
            "status": status,
            "temperature": _number(echoed["temperature"]),
            "top_logprobs": 0,
            "top_p": _number(echoed["top_p"]),
            "usage": None if usage is None else _usage(usage),
        }
        return {**{name: known.get(name) for name in _MEMBERS}, **_LAST, "store": echoed["store"]}


class _Item(abc.ABC):
    """An output item that grows."""

    def __init__(self, item_id: str, place: int) -> None:
        self.id = item_id
        self.place = place
        self.parts: list[str] = []
        self.status = "in_progress"

    @abc.abstractmethod
    def shown(self, *, begun: bool = False) -> dict[str, Any]:
        """As it is in a response; ``begun``: it has no content yet."""


class _PartedItem(_Item):
    """An item with one content part."""

    @abc.abstractmethod
    def part(self, text: str) -> dict[str, Any]:
        """The part, with this text."""


class _TextItem(_PartedItem):
    def part(self, text: str) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [], "text": text}

    def shown(self, *, begun: bool = False) -> dict[str, Any]:
        content = [] if begun else [self.part("".join(self.parts))]
        return {"type": "message", "content": content, "id": self.id, "role": "assistant", "status": self.status}


class _ThoughtItem(_PartedItem):
    def part(self, text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}

    def shown(self, *, begun: bool = False) -> dict[str, Any]:
        content = [] if begun else [self.part("".join(self.parts))]
        return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": self.status}


class _CallItem(_Item):
    def __init__(self, item_id: str, place: int, call: CallDelta) -> None:
        super().__init__(item_id, place)
        self.number = call.call
        self.call_id = call.id or ""
        self.name = call.name or ""

    def shown(self, *, begun: bool = False) -> dict[str, Any]:
        return {
            "type": "function_call",
            "arguments": "".join(self.parts),
            "call_id": self.call_id,
            "name": self.name,
            "id": self.id,
            "status": self.status,
        }


def _number(value: float | None) -> float:
    """What the worker got; 1.0 stands for what it takes by itself."""
    single = single_precision(value)
    return 1.0 if single is None else single


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    prompt = usage.get("prompt_tokens_details") or {}
    completion = usage.get("completion_tokens_details") or {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": prompt.get("cached_tokens") or 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }
