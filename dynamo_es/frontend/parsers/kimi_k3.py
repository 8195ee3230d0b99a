"""Kimi K3: channels between ``<|open|>name<|sep|>`` and ``<|close|>name<|sep|>``, calls with typed arguments in one.

``<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="n" type="number"<|sep|>42
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>``.
"""

from __future__ import annotations

import html
import re

from dynamo_es.frontend.parsers.schema import NOT_TEXT, STRING, Types
from dynamo_es.frontend.parsers.tags import unfinished
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import ObjectWriter, typed_value

OPEN = "<|open|>"
CLOSE = "<|close|>"
SEP = "<|sep|>"
END = "<|end_of_msg|>"
THINK = OPEN + "think" + SEP
MARKERS = (OPEN, CLOSE, SEP, END)

_CHANNELS = ("think", "response", "tools", "message")
_STOPS = Markers(
    *(mark + name + SEP for mark in (OPEN, CLOSE) for name in _CHANNELS), OPEN + "call", CLOSE + "call" + SEP, END
)
_TOOLS = OPEN + "tools" + SEP
_CALL = OPEN + "call"
_CALL_END = CLOSE + "call" + SEP
_ARGUMENT = OPEN + "argument"
_ARGUMENT_END = CLOSE + "argument" + SEP
_SEP = Markers(SEP, OPEN, CLOSE)
_VALUE_ENDS = Markers(_ARGUMENT_END, _CALL_END, CLOSE + "tools" + SEP)
_BODY = Markers(_ARGUMENT, _CALL_END, CLOSE + "tools" + SEP, _CALL)
_ATTRIBUTE = re.compile(r"""(\w+)="([^"]*)\"""")
_MAX_TAG = 1024


class KimiK3:
    """One choice's reader; ``run`` is its grammar's coroutine.

    Args:
        reasoning: Thoughts are told apart; otherwise they are content.
        tools: Calls are told apart; otherwise they are content as they stand.
        thinking: The prompt ended within a thought.
    """

    __slots__ = ("_reasoning", "_tape", "_thinking", "_tools")

    def __init__(self, tape: Tape, *, reasoning: bool, tools: bool, thinking: bool) -> None:
        self._tape = tape
        self._reasoning = reasoning
        self._tools = tools
        self._thinking = thinking

    def run(self) -> Step[None]:
        tape = self._tape
        thinking = self._thinking
        in_tools = False
        while True:
            if in_tools:
                look = tape.look()
                yield from look.spaces()
                look.commit()
            emit = tape.reasoning if thinking and self._reasoning else tape.content
            marker = yield from tape.flow(_STOPS, emit)
            if marker is None:
                return
            if marker == _CALL and self._tools:
                if not (yield from self._call()):
                    tape.content(tape.take(len(marker)))
                thinking = False
            elif not self._tools and (marker in (_CALL, _CALL_END) or "tools" in marker):
                tape.content(tape.take(len(marker)))
            else:
                tape.take(len(marker))
                thinking = marker == THINK
                in_tools = marker == _TOOLS

    def _call(self) -> Step[bool]:
        tape = self._tape
        look = Look(tape, len(_CALL))
        attributes = yield from self._attributes(look)
        name = "" if attributes is None else attributes.get("tool", "")
        if attributes is None or not name:
            return False
        yield from look.spaces()
        start = look.at
        known = yield from look.one_of((_ARGUMENT, _CALL_END))
        if known is None or (known == _ARGUMENT and (yield from self._attributes(look)) is None):
            return False
        look.at = start
        look.commit()
        index = attributes.get("index", "")
        tape.call(name, f"{name}:{int(index) - 1}" if index.isdecimal() and len(index) < 8 and int(index) > 0 else None)
        yield from self._arguments(ObjectWriter(tape.arguments))
        return True

    def _arguments(self, writer: ObjectWriter) -> Step[None]:
        tape = self._tape
        while True:
            look = tape.look()
            yield from look.spaces()
            look.commit()
            marker = yield from tape.flow(_BODY, tape.content)
            if marker is None:
                return
            if marker != _ARGUMENT:
                if marker == _CALL_END:
                    tape.take(len(marker))
                writer.close()
                return
            look = Look(tape, len(_ARGUMENT))
            attributes = yield from self._attributes(look)
            if attributes is None or "key" not in attributes:
                yield from unfinished(tape, marker, _SEP)
                continue
            look.commit()
            writer.key(attributes["key"])
            end = yield from typed_value(tape, _VALUE_ENDS, _types(attributes.get("type")), tape.arguments)
            if end == _ARGUMENT_END:
                tape.take(len(end))

    def _attributes(self, look: Look) -> Step[dict[str, str] | None]:
        found = yield from look.until(_SEP, _MAX_TAG)
        if found is None or found[1] != SEP:
            return None
        return {key: html.unescape(value) for key, value in _ATTRIBUTE.findall(found[0])}


def _types(told: str | None) -> Types:
    return STRING if told in (None, "string") else NOT_TEXT
