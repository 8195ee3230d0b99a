"""Formats with a section of calls, each a header and JSON: deepseek_v3, deepseek_v3_1, kimi_k2, kimi_k25.

A call counts without its section too. Within a section, white space between calls is no text.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo_es.frontend.parsers.json_blocks import reject
from dynamo_es.frontend.parsers.json_calls import NO_ARGUMENTS, json_arguments
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape

_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:]+)(?::\d+)?")
_MAX_HEADER = 1024


class Sections(NamedTuple):
    """A format of this kind. Calling it gives the grammar's coroutine.

    Attributes:
        begins, ends: Of a section; all spellings.
        call_begin, call_end: Of a call.
        separator: Between a call's header and what follows.
        typed: The header is a type, and ``name``, a line end and fenced JSON follow (DeepSeek V3).
        native_ids: The header is the call's id, ``functions.name:0`` (Kimi).
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    call_begin: str
    call_end: str
    separator: str
    typed: bool = False
    native_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings with a meaning."""
        return (*self.begins, *self.ends, self.call_begin, self.call_end, self.separator)

    def __call__(self, tape: Tape) -> Step[None]:
        outside = Markers(*self.begins, self.call_begin)
        inside = Markers(*self.begins, *self.ends, self.call_begin)
        in_section = False
        while True:
            if in_section:
                yield from _between(tape)
                marker = yield from tape.flow(inside, tape.content)
            else:
                marker = yield from tape.prose(outside)
            if marker is None:
                return
            if marker in self.ends:
                tape.take(len(marker))
                in_section = False
            elif marker == self.call_begin:
                if not (yield from self._call(tape)):
                    yield from reject(tape, marker)
                    in_section = False
            else:
                in_section = yield from self._begin(tape, marker)

    def _begin(self, tape: Tape, marker: str) -> Step[bool]:
        """Pass the beginning of a section; whether a call follows. An empty section goes, any other is text."""
        look = Look(tape, len(marker))
        found = yield from look.until(Markers(self.call_begin, *self.ends), _MAX_HEADER)
        if found is not None and found[1] == self.call_begin:
            tape.take(len(marker))
            return True
        if found is not None and not found[0].strip():
            look.commit()
        else:
            yield from reject(tape, marker)
        return False

    def _call(self, tape: Tape) -> Step[bool]:
        look = Look(tape, len(self.call_begin))
        stops = Markers(self.separator, self.call_begin, self.call_end, *self.begins, *self.ends)
        header = yield from look.until(stops, _MAX_HEADER)
        if header is None or header[1] != self.separator:
            return False
        name, call_id = header[0].strip(), None
        if self.typed:
            name = (yield from look.word(lambda char: char != "\n", _MAX_HEADER)).strip()
        elif self.native_ids:
            match = _KIMI_ID.fullmatch(name)
            if match is None:
                return False
            call_id, name = name, match.group(1)
        if not name or "<" in name:
            return False
        return (yield from self._arguments(tape, look, name, call_id))

    def _arguments(self, tape: Tape, look: Look, name: str, call_id: str | None) -> Step[bool]:
        ends = Markers(self.call_end, self.call_begin, *self.begins, *self.ends)
        char = yield from look.spaces()
        if char == "`":
            yield from look.word(lambda one: one == "`" or one.isalpha())
            char = yield from look.spaces()
        if char != "{":
            if not (yield from look.literal(self.call_end)):
                return False
            look.commit()
            tape.call(name, call_id)
            tape.arguments(NO_ARGUMENTS)
            return True
        look.commit()
        tape.call(name, call_id)
        if (yield from json_arguments(tape, ends)):
            after = tape.look()
            if (yield from after.spaces()) == "`":
                yield from after.word(lambda one: one == "`")
                after.commit()
        after = tape.look()
        yield from after.spaces()
        if (yield from after.literal(self.call_end)) or after.at_end:
            after.commit()
        return True


def _between(tape: Tape) -> Step[None]:
    """Pass white space between the marks of a section."""
    look = tape.look()
    yield from look.spaces()
    look.commit()
