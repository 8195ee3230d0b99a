"""gpt-oss's Harmony format: messages with a header, a channel and sometimes a recipient.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json
<|message|>{...}<|call|>``. Analysis is reasoning; commentary without a recipient and final are content.
"""

from __future__ import annotations

import re

from dynamo_es.frontend.parsers.json_calls import NO_ARGUMENTS, json_arguments
from dynamo_es.frontend.parsers.tape import Emit, Look, Markers, Step, Tape

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"
MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

_OUTSIDE = Markers(START, CHANNEL, MESSAGE, END, CALL, RETURN)
_HEADER_ENDS = Markers(MESSAGE, END, CALL, RETURN)
_BODY_ENDS = Markers(END, CALL, RETURN, START, CHANNEL)
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_FUNCTIONS = "functions."
_MAX_HEADER = 1024


class Harmony:
    """One choice's reader; ``run`` is its grammar's coroutine.

    Args:
        reasoning: Analysis is reasoning; otherwise it is content.
        tools: Messages to functions are calls; otherwise they are content as they stand.
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
            if marker in (START, CHANNEL):
                yield from self._message(len(marker))
            else:
                tape.take(len(marker))

    def _message(self, begin: int) -> Step[None]:
        """A message; its header's beginning, so many characters long, was seen."""
        tape = self._tape
        look = Look(tape, begin)
        found = yield from look.until(_HEADER_ENDS, _MAX_HEADER)
        if found is None:
            yield from self._broken_header(begin)
            return
        header = tape.text[tape.pos : tape.pos + begin] + found[0]
        channel = header.rpartition(CHANNEL)[2].split("<")[0].split(" ")[0].strip()
        if found[1] != MESSAGE:
            look.commit()
            tape.content(header.rpartition(CHANNEL)[2] if CHANNEL in header else "")
            return
        recipients = _RECIPIENT.findall(header)
        if recipients and recipients[-1].startswith(_FUNCTIONS):
            yield from self._function(look, header + MESSAGE, recipients[-1].removeprefix(_FUNCTIONS))
            return
        look.commit()
        thought = self._reasoning and channel == "analysis"
        yield from self._body(tape.reasoning if thought else tape.content)

    def _broken_header(self, begin: int) -> Step[None]:
        """A header without an end. One that names a recipient is told, it holds more than marks."""
        tape = self._tape
        look = Look(tape, begin)
        while not look.at_end and look.at - begin <= _MAX_HEADER and (yield from look.peek()):
            look.at += 1
        if _RECIPIENT.search(tape.text, tape.pos, tape.pos + look.at) or not look.at_end:
            tape.content(tape.take(look.at))
        else:
            look.commit()

    def _function(self, look: Look, header: str, name: str) -> Step[None]:
        tape = self._tape
        first = yield from look.spaces()
        if not self._tools or not name or not (first == "{" or (yield from look.one_of((CALL, END, RETURN)))):
            tape.take(len(header))
            tape.content(header)
            yield from self._body(tape.content, keep_end=True)
            return
        look.commit()
        tape.call(name)
        if first != "{":
            tape.arguments(NO_ARGUMENTS)
            return
        yield from json_arguments(tape, _BODY_ENDS)
        yield from self._body(tape.content)

    def _body(self, emit: Emit, *, keep_end: bool = False) -> Step[None]:
        tape = self._tape
        look = tape.look()
        if emit == tape.content and not keep_end:
            yield from look.spaces()
            if (yield from look.one_of((END, CALL, RETURN))) or look.at_end:
                look.commit()
                return
        marker = yield from tape.flow(_BODY_ENDS, emit)
        if marker in (END, CALL, RETURN):
            end = tape.take(len(marker))
            if keep_end:
                tape.content(end)
