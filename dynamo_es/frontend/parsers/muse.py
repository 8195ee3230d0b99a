"""Muse Glimmer: messages that are addressed, `` to=self<|message|>...<|eom|>``; calls as tags with JSON values.

``<|start|>assistant to=f<|message|><atem:function_calls><atem:invoke name="f"><atem:parameter name="n">42
</atem:parameter></atem:invoke></atem:function_calls><|eom|>``. A value that is no JSON is a string.
"""

from __future__ import annotations

import re

from dynamo_es.frontend.parsers.tags import unfinished
from dynamo_es.frontend.parsers.tape import Emit, Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import ObjectWriter, json_or_text

START = "<|start|>"
MESSAGE = "<|message|>"
EOM = "<|eom|>"
EOT = "<|eot|>"
CALLS = "<atem:function_calls>"
CALLS_END = "</atem:function_calls>"
INVOKE = "<atem:invoke"
INVOKE_END = "</atem:invoke>"
PARAMETER = "<atem:parameter"
PARAMETER_END = "</atem:parameter>"
MARKERS = (START, MESSAGE, EOM, EOT, CALLS, CALLS_END, INVOKE, INVOKE_END, PARAMETER, PARAMETER_END)

_OUTSIDE = Markers(START, EOM, EOT)
_BODY = Markers(EOM, EOT, START)
_TOOL_BODY = Markers(EOM, EOT, START, CALLS, CALLS_END, INVOKE)
_HEADER = Markers(MESSAGE, EOM, EOT, "\n")
_CLOSE = Markers(">", "<")
_IN_CALL = Markers(PARAMETER, INVOKE_END, CALLS_END, EOM, EOT)
_VALUE_ENDS = Markers(PARAMETER_END, INVOKE_END)
_TO = re.compile(r"\bto=([^\s<]+)")
_NAME = re.compile(r"""\bname\s*=\s*["']([^"']+)["']""")
_MAX_TAG = 1024


class Muse:
    """One choice's reader; ``run`` is its grammar's coroutine.

    Args:
        reasoning: What is addressed to the model itself is reasoning; otherwise it is content.
        tools: Calls are told apart; otherwise they are content as they stand.
    """

    __slots__ = ("_reasoning", "_tape", "_tools")

    def __init__(self, tape: Tape, *, reasoning: bool, tools: bool) -> None:
        self._tape = tape
        self._reasoning = reasoning
        self._tools = tools

    def run(self) -> Step[None]:
        tape = self._tape
        look = tape.look()
        yield from look.spaces()
        if (yield from look.literal("to=")):
            yield from self._message(0)
        while True:
            marker = yield from tape.flow(_OUTSIDE, tape.content)
            if marker is None:
                return
            if marker == START:
                yield from self._message(len(marker))
            else:
                tape.take(len(marker))

    def _message(self, begin: int) -> Step[None]:
        tape = self._tape
        look = Look(tape, begin)
        found = yield from look.until(_HEADER, _MAX_TAG)
        if found is None or found[1] != MESSAGE:
            if found is not None or not tape.ended or tape.pos + begin < len(tape.text):
                tape.content(tape.take(max(begin, 1)))
            else:
                tape.take(begin)
            return
        look.commit()
        recipient = _TO.search(found[0])
        to = "user" if recipient is None else recipient.group(1)
        if to == "self" and self._reasoning:
            yield from self._body(tape.reasoning)
        elif to in ("self", "user") or not self._tools:
            yield from self._body(tape.content)
        else:
            yield from self._tool_body()

    def _body(self, emit: Emit) -> Step[None]:
        marker = yield from self._tape.flow(_BODY, emit)
        if marker in (EOM, EOT):
            self._tape.take(len(marker))

    def _tool_body(self) -> Step[None]:
        tape = self._tape
        while True:
            look = tape.look()
            yield from look.spaces()
            look.commit()
            marker = yield from tape.flow(_TOOL_BODY, tape.content)
            if marker is None or marker == START:
                return
            if marker == INVOKE:
                if not (yield from self._call()):
                    tape.content(tape.take(len(marker)))
                continue
            tape.take(len(marker))
            if marker in (EOM, EOT):
                return

    def _call(self) -> Step[bool]:
        tape = self._tape
        look = Look(tape, len(INVOKE))
        name = yield from self._name(look)
        yield from look.spaces()
        start = look.at
        known = yield from look.one_of((PARAMETER, INVOKE_END))
        if name is None or known is None or (known == PARAMETER and (yield from self._name(look)) is None):
            return False
        look.at = start
        look.commit()
        tape.call(name)
        writer = ObjectWriter(tape.arguments)
        while True:
            look = tape.look()
            yield from look.spaces()
            look.commit()
            marker = yield from tape.flow(_IN_CALL, tape.content)
            if marker is None:
                return True
            if marker != PARAMETER:
                if marker == INVOKE_END:
                    tape.take(len(marker))
                writer.close()
                return True
            look = Look(tape, len(PARAMETER))
            key = yield from self._name(look)
            if key is None:
                yield from unfinished(tape, marker, _CLOSE)
                continue
            look.commit()
            writer.key(key)
            if (yield from json_or_text(tape, _VALUE_ENDS, tape.arguments)) == PARAMETER_END:
                tape.take(len(PARAMETER_END))

    def _name(self, look: Look) -> Step[str | None]:
        found = yield from look.until(_CLOSE, _MAX_TAG)
        match = None if found is None or found[1] != ">" else _NAME.search(found[0])
        return None if match is None else match.group(1).strip()
