"""Bodies and stream chunks of chat and completions (spec/frontend.md 1.1.1, 1.1.2, 1.2, 4.3). Pure.

What does not change within a stream is encoded once; a chunk adds its text and finish reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from dynamo_es.frontend.parsers.choice import CallDelta
from dynamo_es.frontend.pipeline import Delta, TokenLogprob
from dynamo_es.frontend.response_extras import Extras
from dynamo_es.frontend.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode
_FINISH = {reason: _encode(reason) for reason in ("stop", "length", "content_filter", "tool_calls")}


class Encoder(Protocol):
    """Writes one response, as chunks or as a whole.

    Attributes:
        extras: Gives what is shown beside the answer; None: nothing is.
    """

    extras: Extras | None

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        """One ``data:`` block; ``usage`` is the running count if every chunk is to carry it."""

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        """The block before ``[DONE]`` that holds only token counts."""

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        """The whole unary answer; no ``usage`` member if it is None."""


@dataclass(slots=True)
class CallText:
    """A tool call of a unary answer; ``parts`` of its arguments' JSON text."""

    id: str
    name: str
    parts: list[str]


@dataclass(slots=True)
class ChoiceText:
    """A choice of a unary answer, put together from its deltas: ``parts`` of content, thoughts and calls."""

    index: int
    parts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[CallText] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        """Take the next delta."""
        self.parts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.id is not None and call.name is not None:
                self.calls.append(CallText(call.id, call.name, [call.arguments]))
            else:
                self.calls[-1].parts.append(call.arguments)
        self.finish_reason = delta.finish_reason
        self.stop = delta.stop
        if delta.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *delta.logprobs]


def token_text(tokenizer: Tokenizer, token_id: int, *, as_id: bool) -> str:
    """Text of one token by itself (U+FFFD for part of a character), or ``token_id:<id>``."""
    return f"token_id:{token_id}" if as_id else tokenizer.decode((token_id,), False)


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How a frontend writes thoughts and tool calls (spec/frontend.md 4.4, 4.5).

    Attributes:
        reasoning_field: Member that holds thoughts: ``reasoning_content`` or ``reasoning``.
        dispatches_calls: A stream tells each call as a whole in an event of its own, too, when it is complete.
        dispatches_reasoning: A stream tells thoughts as a whole in an event of its own, too, when they end.
    """

    reasoning_field: str = "reasoning_content"
    dispatches_calls: bool = False
    dispatches_reasoning: bool = False


class ChatEncoder:
    """``chat.completion`` and its chunks.

    Args:
        request_id: UUID of the request.
        model: Primary name.
        created: Unix seconds.
        tokenizer: For the text of log probabilities.
        tokens_as_ids: ``return_tokens_as_token_ids``.
        reads_calls: Tool calls are looked for; chunks with one, and the last, then have content even if it is empty.
        style: Of the frontend.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        tokens_as_ids: bool,
        reads_calls: bool = False,
        style: ChatStyle = ChatStyle(),
    ) -> None:
        self.extras: Extras | None = None
        self._reads_calls = reads_calls
        self._style = style
        self._reasoning_member = b'"%b":' % style.reasoning_field.encode()
        self._thoughts: dict[int, list[str]] = {}
        self._held_calls: dict[int, CallDelta] = {}
        self._id = f"chatcmpl-{request_id}".encode()
        self._tail = b',"created":%d,"model":%s,"object":"chat.completion' % (created, _encode(model))
        self._start = b'data: {"id":"' + self._id + b'","choices":['
        self._end = self._tail + b'.chunk"'
        # Around the text of a chunk that has nothing else to say, which is what most of them are.
        self._before = self._start + b'{"index":0,"delta":{"content":'
        self._after = b'},"finish_reason":null,"logprobs":null}]' + self._end + b"}\n\n"
        self._dispatches = style.dispatches_calls or style.dispatches_reasoning
        self._tokenizer = tokenizer
        self._as_ids = tokens_as_ids

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        index, text, finish, first, _, logprobs, _, reasoning, calls = delta
        more = index or finish or first or logprobs or reasoning or calls or usage or self._dispatches
        if text and not more and self.extras is None:
            return self._before + _encode(text) + self._after
        members = []
        if delta.text or delta.calls or (self._reads_calls and delta.finish_reason and not delta.reasoning):
            members.append(b'"content":' + _encode(delta.text))
        if delta.calls:
            members.append(b'"tool_calls":' + _encode([call_member(call) for call in delta.calls]))
        if delta.first:
            members.append(b'"role":"assistant"')
        if delta.reasoning:
            members.append(self._reasoning_member + _encode(delta.reasoning))
        return self._dispatched(delta) + b'%b{"index":%d,"delta":{%b},"finish_reason":%b,"logprobs":%b}]%b%b%b}\n\n' % (
            self._start,
            delta.choice,
            b",".join(members),
            b"null" if delta.finish_reason is None else _FINISH[delta.finish_reason],
            b"null" if delta.logprobs is None else self._logprobs(delta.logprobs),
            self._end,
            b"" if usage is None else b',"usage":' + _encode(usage),
            b"" if self.extras is None else self.extras.chunk(delta),
        )

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        return b'%b]%b,"usage":%b}\n\n' % (self._start, self._end, _encode(usage))

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        return b'{"id":"%b","choices":[%b]%b"%b%b}' % (
            self._id,
            b",".join(map(self._choice, choices)),
            self._tail,
            b"" if usage is None else b',"usage":' + _encode(usage),
            b"" if self.extras is None else self.extras.body(),
        )

    def _choice(self, choice: ChoiceText) -> bytes:
        text = "".join(choice.parts)
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(call.parts)}}
            for call in choice.calls
        ]
        return (
            b'{"index":%d,"message":{"content":%b,"refusal":null%b,"role":"assistant"%b},"finish_reason":%b,'
            b'"logprobs":%b}'
            % (
                choice.index,
                _encode(text) if text else b"null",
                b',"tool_calls":' + _encode(calls) if calls else b"",
                b"," + self._reasoning_member + _encode("".join(choice.reasoning)) if choice.reasoning else b"",
                b"null" if choice.finish_reason is None else _FINISH[choice.finish_reason],
                b"null" if choice.logprobs is None else self._logprobs(choice.logprobs),
            )
        )

    def _dispatched(self, delta: Delta) -> bytes:
        """Events before a chunk, of their own kind (spec/frontend.md 4.4, 4.5)."""
        events = b""
        if self._style.dispatches_reasoning:
            events += self._dispatched_thoughts(delta)
        if self._style.dispatches_calls:
            events += self._dispatched_calls(delta)
        return events

    def _dispatched_calls(self, delta: Delta) -> bytes:
        complete: list[CallDelta] = []
        held = self._held_calls.pop(delta.choice, None)
        for call in delta.calls:
            if held is None or call.id is not None:
                complete += [] if held is None else [held]
                held = call
            else:
                held = held._replace(arguments=held.arguments + call.arguments)
        if held is not None and (delta.text or delta.finish_reason):
            complete.append(held)
        elif held is not None:
            self._held_calls[delta.choice] = held
        return b"".join(
            b"event: tool_call_dispatch\ndata: %b\n\n"
            % _encode({"choice_index": delta.choice, "tool_call": call_member(call)})
            for call in complete
        )

    def _dispatched_thoughts(self, delta: Delta) -> bytes:
        held = self._thoughts.setdefault(delta.choice, [])
        if delta.reasoning:
            held.append(delta.reasoning)
        if not held or not (delta.text or delta.calls or delta.finish_reason):
            return b""
        event = {"index": delta.choice, "reasoning_content": "".join(held)}
        held.clear()
        return b"event: reasoning_dispatch\ndata: %b\n\n" % _encode(event)

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> bytes:
        content = []
        for entry in entries:
            text = token_text(self._tokenizer, entry.token_id, as_id=self._as_ids)
            content.append(
                {
                    "token": text,
                    "logprob": entry.logprob,
                    "token_id": entry.token_id,
                    "bytes": list(text.encode()),
                    "top_logprobs": [self._alternative(item) for item in entry.top],
                }
            )
        return _encode({"content": content, "refusal": None})

    def _alternative(self, item: Mapping[str, Any]) -> dict[str, Any]:
        text = token_text(self._tokenizer, item["token_id"], as_id=self._as_ids)
        return {"token": text, "logprob": item["logprob"], "bytes": list(text.encode())}


def call_member(call: CallDelta) -> dict[str, Any]:
    """One entry of a delta's ``tool_calls``: id, type and name only where the call begins."""
    if call.id is None:
        return {"index": call.call, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.call, "id": call.id, "type": "function", "function": function}


class CompletionEncoder:
    """``text_completion`` and its chunks.

    Arguments as for ``ChatEncoder``; ``first_index`` is what a prompt of a batch adds to its chunks' choice indices.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        created: int,
        tokenizer: Tokenizer,
        *,
        tokens_as_ids: bool,
        first_index: int = 0,
    ) -> None:
        self.extras: Extras | None = None
        self._head = b'{"id":"cmpl-' + request_id.encode() + b'","choices":['
        self._start = b"data: " + self._head
        self._tail = b'],"created":%d,"model":%s,"system_fingerprint":null,"object":"text_completion"' % (
            created,
            _encode(model),
        )
        self._tokenizer = tokenizer
        self._as_ids = tokens_as_ids
        self._first_index = first_index

    def chunk(self, delta: Delta, usage: Mapping[str, Any] | None) -> bytes:
        return b'%b%b%b,"usage":%b%b}\n\n' % (
            self._start,
            self._choice(self._first_index + delta.choice, delta.text, delta.finish_reason, delta.logprobs),
            self._tail,
            b"null" if usage is None else _encode(usage),
            b"" if self.extras is None else self.extras.chunk(delta),
        )

    def usage_chunk(self, usage: Mapping[str, Any]) -> bytes:
        return b'%b%b,"usage":%b}\n\n' % (self._start, self._tail, _encode(usage))

    def body(self, choices: Sequence[ChoiceText], usage: Mapping[str, Any] | None) -> bytes:
        return b"%b%b%b%b%b}" % (
            self._head,
            b",".join(
                self._choice(choice.index, "".join(choice.parts), choice.finish_reason, choice.logprobs)
                for choice in choices
            ),
            self._tail,
            b"" if usage is None else b',"usage":' + _encode(usage),
            b"" if self.extras is None else self.extras.body(),
        )

    def _choice(self, index: int, text: str, finish: str | None, logprobs: Sequence[TokenLogprob] | None) -> bytes:
        return b'{"text":%b,"index":%d%b%b}' % (
            _encode(text),
            index,
            b"" if logprobs is None else b',"logprobs":' + self._logprobs(logprobs),
            b"" if finish is None else b',"finish_reason":' + _FINISH[finish],
        )

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> bytes:
        texts = [token_text(self._tokenizer, entry.token_id, as_id=self._as_ids) for entry in entries]
        tops = []
        for entry, text in zip(entries, texts, strict=True):
            named = {
                token_text(self._tokenizer, item["token_id"], as_id=self._as_ids): item["logprob"] for item in entry.top
            }
            named[text] = entry.logprob
            tops.append(named)
        values = [entry.logprob for entry in entries]
        return _encode({"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": []})
