"""Inkling: blocks with a type, ``<|message_model|><|content_thinking|>...<|end_message|>``.

A call is ``<|message_model|>f<|content_invoke_tool_json|>{"name": "f", "args": {...}}<|end_message|>``. The prompt
ends with the first block's ``<|message_model|>``.
"""

from __future__ import annotations

from dynamo_es.frontend.parsers.json_calls import Envelope, call_object
from dynamo_es.frontend.parsers.tape import Emit, Look, Markers, Step, Tape

MODEL = "<|message_model|>"
THINKING = "<|content_thinking|>"
TEXT = "<|content_text|>"
INVOKE = "<|content_invoke_tool_json|>"
IMAGE = "<|content_image|>"
AUDIO = "<|content_audio_input|>"
END = "<|end_message|>"
END_SAMPLING = "<|content_model_end_sampling|>"
MARKERS = (MODEL, THINKING, TEXT, INVOKE, IMAGE, AUDIO, END, END_SAMPLING)

_TYPES = Markers(THINKING, TEXT, INVOKE, IMAGE, AUDIO, MODEL, END, END_SAMPLING)
_ENDS = Markers(END, END_SAMPLING, MODEL)
_ENVELOPE = Envelope(argument_keys=frozenset({"args", "arguments"}))
_MAX_NAME = 256


class Inkling:
    """One choice's reader; ``run`` is its grammar's coroutine.

    Args:
        reasoning: Thinking blocks are reasoning; otherwise they are content.
        tools: Calls are told apart; otherwise they are content as they stand.
    """

    __slots__ = ("_reasoning", "_tape", "_tools")

    def __init__(self, tape: Tape, *, reasoning: bool, tools: bool) -> None:
        self._tape = tape
        self._reasoning = reasoning
        self._tools = tools

    def run(self) -> Step[None]:
        tape = self._tape
        yield from self._header("")
        while True:
            marker = yield from tape.flow(_TYPES, tape.content)
            if marker is None:
                return
            if marker == MODEL:
                yield from self._header(marker)
            else:
                yield from self._block(Look(tape, len(marker)), marker)

    def _header(self, before: str) -> Step[None]:
        """A block's header: nothing, or a function's name, and then the type. Other text stays where it is."""
        tape = self._tape
        look = Look(tape, len(before))
        name = yield from look.word(lambda char: char.isalnum() or char in "_-./: ", _MAX_NAME)
        kind = yield from look.one_of((INVOKE, THINKING, TEXT, IMAGE, AUDIO))
        if kind is None or (name.strip() and kind != INVOKE):
            tape.take(len(before))
            return
        yield from self._block(look, kind)

    def _block(self, look: Look, kind: str) -> Step[None]:
        """The block after its type, where ``look`` stands."""
        tape = self._tape
        if kind == INVOKE:
            yield from self._call(look)
            return
        look.commit()
        if kind == THINKING and self._reasoning:
            yield from self._body(tape.reasoning)
        elif kind in (THINKING, TEXT):
            yield from self._body(tape.content)
        elif kind in (IMAGE, AUDIO):
            yield from self._body(lambda text: None)

    def _body(self, emit: Emit) -> Step[None]:
        marker = yield from self._tape.flow(_ENDS, emit)
        if marker in (END, END_SAMPLING):
            self._tape.take(len(marker))

    def _call(self, look: Look) -> Step[None]:
        tape = self._tape
        marks = look.at
        yield from look.spaces()
        if not self._tools or not (yield from call_object(tape, look, _ENVELOPE, _ENDS)):
            tape.content(tape.take(marks))
            yield from self._body(tape.content)
            return
        look = tape.look()
        yield from look.spaces()
        if (yield from look.literal(END)) or look.at_end:
            look.commit()
