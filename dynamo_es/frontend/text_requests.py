"""What workers that get text get and send: the client's request, and OpenAI's chunks (spec/frontend.md 4.1). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from dynamo_es.frontend.errors import EngineFailed, OutputError
from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import MAX_CHOICE_INDEX, Delta
from dynamo_es.frontend.requests import ChatRequest, CompletionRequest

_FINISHES = frozenset(("stop", "length", "content_filter", "tool_calls"))
_JOINED = frozenset(("content", "reasoning_content", "reasoning", "refusal", "text", "arguments"))
"""Members of deltas that are fragments of a text."""


def text_request(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The request as the client wrote it, without members that are not set, as a stream.

    One that is no stream asks for its token counts, which nobody but the worker knows.
    """
    result = written_request(request)
    if not request.stream:
        result["stream_options"] = {"include_usage": True}
    return {**result, "stream": True}


def written_request(request: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """The request as the client wrote it, without members that are not set."""
    return {name: value for name in request.__struct_fields__ if (value := _plain(getattr(request, name))) is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value) if bytes(value) else None
    return _set_only(msgspec.to_builtins(value))


def _set_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _set_only(item) for name, item in value.items() if item is not None}
    return [_set_only(item) for item in value] if isinstance(value, list) else value


class TextChunk:
    """One item of such a worker, checked as far as it is read here.

    Attributes:
        value: The item.
        deltas: What its choices gained; empty for one that only counts tokens.
    """

    __slots__ = ("deltas", "value")

    def __init__(self, item: Any, seen: set[int]) -> None:
        """``seen``: choices that gained something before; those of this item are added.

        Raises:
            EngineFailed: It is an error.
            OutputError: It is no chunk.
        """
        if not isinstance(item, dict):
            raise OutputError("an item that is no chunk")
        if item.get("error") is not None:
            raise EngineFailed.of(item["error"])
        choices = item.get("choices")
        if not isinstance(choices, list):
            raise OutputError("a chunk without choices")
        self.value: dict[str, Any] = item
        self.deltas = [_delta(choice, seen) for choice in choices]


def _delta(choice: Any, seen: set[int]) -> Delta:
    try:
        index = choice.get("index") or 0
        if type(index) is not int or not 0 <= index <= MAX_CHOICE_INDEX:
            raise OutputError("a choice without a proper index")
        first = index not in seen
        seen.add(index)
        told = choice.get("delta") or {}
        finish = choice.get("finish_reason")
        if finish is not None and finish not in _FINISHES:
            raise OutputError("a finish reason that is not known")
        return Delta(
            index,
            _text(told.get("content") or choice.get("text")),
            finish,
            first,
            1,
            reasoning=_text(told.get("reasoning_content") or told.get("reasoning")),
            calls=[_call(call) for call in told.get("tool_calls") or ()],
        )
    except (AttributeError, TypeError, KeyError) as error:
        raise OutputError(f"a chunk that cannot be understood: {type(error).__name__}") from error


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError("no text")
    return value or ""


def _call(call: Mapping[str, Any]) -> CallDelta:
    function = call.get("function") or {}
    return CallDelta(int(call["index"]), call.get("id"), function.get("name"), _text(function.get("arguments")))


class Folded:
    """The unary answer that chunks of a stream make together. Add all chunks in order, then ask for ``body``."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: Any = None

    def add(self, chunk: TextChunk) -> None:
        """The next chunk."""
        value = chunk.value
        self._head = {**value, **self._head}
        if value.get("usage") is not None:
            self._usage = value["usage"]
        for choice, delta in zip(value["choices"], chunk.deltas, strict=True):
            known = self._choices.setdefault(delta.choice, {"delta": {}})
            for name, gained in choice.items():
                if name in ("delta", "logprobs") and isinstance(gained, dict):
                    known[name] = _merged(known.get(name) or {}, gained)
                elif name == "text":
                    known[name] = known.get(name, "") + _text(gained)
                elif gained is not None:
                    known[name] = gained

    def body(self) -> bytes:
        """The answer as JSON; ids, names and times are the worker's."""
        is_chat = str(self._head.get("object", "")).startswith("chat")
        made = _chat_choice if is_chat else _text_choice
        answer = {
            "id": self._head.get("id"),
            "choices": [made(index, self._choices[index]) for index in sorted(self._choices)],
            "created": self._head.get("created"),
            "model": self._head.get("model"),
            **({} if is_chat else {"system_fingerprint": self._head.get("system_fingerprint")}),
            "object": "chat.completion" if is_chat else "text_completion",
        }
        known = {*answer, "usage"}
        answer |= {name: value for name, value in self._head.items() if name not in known and value is not None}
        if self._usage is not None:
            answer["usage"] = self._usage
        return msgspec.json.encode(answer)


def _chat_choice(index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    told = dict(choice["delta"])
    message = {"content": told.pop("content", None) or None, "refusal": told.pop("refusal", None)}
    calls = told.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [
            {name: value for name, value in calls[place].items() if name != "index"} for place in sorted(calls)
        ]
    message["role"] = told.pop("role", None) or "assistant"
    message |= {name: value for name, value in told.items() if value is not None}
    result = {"index": index, "message": message, "finish_reason": choice.get("finish_reason")}
    return {**result, "logprobs": choice.get("logprobs")}


def _text_choice(index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    result = {"text": choice.get("text", ""), "index": index}
    return result | {name: choice[name] for name in ("logprobs", "finish_reason") if choice.get(name) is not None}


def _merged(known: dict[str, Any], gained: Mapping[str, Any]) -> dict[str, Any]:
    """Fragments put together: texts and lists one after the other, calls by their number; of the rest the last."""
    result = dict(known)
    for name, value in gained.items():
        before = result.get(name)
        if name == "tool_calls" and isinstance(value, list):
            calls = dict(before or {})
            for call in value:
                calls[call["index"]] = _merged(calls.get(call["index"], {}), call)
            result[name] = calls
        elif isinstance(value, dict):
            result[name] = _merged(before or {}, value)
        elif isinstance(value, list):
            result[name] = [*(before or ()), *value]
        elif isinstance(value, str) and isinstance(before, str) and name in _JOINED:
            result[name] = before + value
        elif value is not None or name not in result:
            result[name] = value
    return result
