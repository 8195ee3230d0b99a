"""JSON calls between markers, or bare: hermes, nemotron_deci, jamba, phi4, llama3_json, mistral, default.

``<tool_call>{"name": "f", "arguments": {...}}</tool_call>``; ``<TOOLCALL>[{...}, {...}]</TOOLCALL>``;
``functools[{...}]``; ``<|python_tag|>{...}; {...}``; ``[TOOL_CALLS]f{...}``, ``[TOOL_CALLS]f[ARGS]{...}``.
"""

from __future__ import annotations

from typing import NamedTuple

from dynamo_es.frontend.parsers.json_calls import MARKED, UNMARKED, bare_calls, calls, json_arguments
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape

_CALL_ID = "[CALL_ID]"
_ARGS = "[ARGS]"


class JsonBlocks(NamedTuple):
    """A format of this kind. Calling it gives the grammar's coroutine.

    Attributes:
        starts: Markers before a call or a list of calls.
        ends: Markers after them; may be empty.
        bare: An output that begins with a call's JSON needs no marker.
        named: After a marker may come ``name{...}`` or ``name[ARGS]{...}``.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    bare: bool = False
    named: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings with a meaning."""
        return (*self.starts, *self.ends, *((_CALL_ID, _ARGS) if self.named else ()))

    def __call__(self, tape: Tape) -> Step[None]:
        starts = Markers(*self.starts)
        if self.bare:
            yield from bare_calls(tape, UNMARKED)
        while True:
            marker = yield from tape.prose(starts)
            if marker is None:
                return
            if not (yield from self._block(tape, marker)):
                yield from reject(tape, marker)

    def _block(self, tape: Tape, marker: str) -> Step[bool]:
        look = Look(tape, len(marker))
        ends = Markers(*self.ends, *self.starts) if self.ends or self.named else None
        first = yield from look.spaces()
        if self.named and first not in ("{", "["):
            return (yield from self._named(tape, look, ends))
        if not (yield from calls(tape, look, MARKED, ends)):
            return False
        yield from self._after(tape, ends)
        return True

    def _after(self, tape: Tape, ends: Markers | None) -> Step[None]:
        """More calls in the same block, then its end marker."""
        while True:
            look = tape.look()
            separator = yield from look.spaces()
            if not separator and look.at_end:
                look.commit()
                return
            if separator == ";" and not self.ends:
                look.at += 1
                yield from look.spaces()
            marker = yield from look.one_of(self.ends)
            if marker is not None:
                look.commit()
                return
            if not (yield from calls(tape, look, MARKED, ends)):
                return

    def _named(self, tape: Tape, look: Look, ends: Markers | None) -> Step[bool]:
        name = yield from look.word(_in_name)
        if not name:
            return False
        yield from look.spaces()
        if (yield from look.literal(_CALL_ID)):
            yield from look.word(str.isalnum)
        yield from look.literal(_ARGS)
        if (yield from look.spaces()) != "{":
            return False
        look.commit()
        tape.call(name)
        yield from json_arguments(tape, ends)
        return True


def reject(tape: Tape, marker: str) -> Step[None]:
    """What follows a marker is no call: the marker is text, and so is what follows.

    A marker after which only white space comes says nothing: the model was stopped there, and the marker goes.
    """
    look = Look(tape, len(marker))
    if (yield from look.spaces()) or not look.at_end:
        tape.content(tape.take(len(marker)))
    else:
        look.commit()


def _in_name(char: str) -> bool:
    return char.isalnum() or char in "_-./"
