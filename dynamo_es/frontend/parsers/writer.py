"""Writes the arguments of a call as JSON while they are read in another form."""

from __future__ import annotations

import json

from dynamo_es.frontend.parsers.schema import NOT_TEXT, Types, is_text, json_of
from dynamo_es.frontend.parsers.tape import Emit, Markers, Step, Tape

MAX_VALUE = 1024 * 1024
"""Characters of a value that is no string and must be read whole. A longer one becomes a string."""


def escaped(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ObjectWriter:
    """Members of one call's arguments, in order. ``close`` completes them; what breaks off stays incomplete.

    Args:
        emit: Takes the fragments.
    """

    __slots__ = ("_emit", "_empty")

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._empty = True

    def key(self, name: str) -> None:
        """Begin a member."""
        self._emit(("{" if self._empty else ",") + json.dumps(name, ensure_ascii=False) + ":")
        self._empty = False

    def close(self) -> None:
        """No more members."""
        self._emit("{}" if self._empty else "}")


class ValueWriter:
    """One value that is read as bare text, as JSON of the types that its schema allows.

    A string is handed on as it comes; anything else when it is complete, up to ``MAX_VALUE`` characters. ``close``
    completes it; what breaks off stays incomplete.

    Args:
        emit: Takes the fragments.
        types: Of its schema.
    """

    __slots__ = ("_as_string", "_emit", "_held", "_size", "_types")

    def __init__(self, emit: Emit, types: Types) -> None:
        self._emit = emit
        self._types = types
        self._held: list[str] = []
        self._size = 0
        self._as_string = is_text(types)
        if self._as_string:
            emit('"')

    def add(self, text: str) -> None:
        """More of its text."""
        if self._as_string:
            self._emit(escaped(text))
            return
        self._held.append(text)
        self._size += len(text)
        if self._size > MAX_VALUE:
            self._as_string = True
            self._emit('"' + escaped("".join(self._held)))
            self._held.clear()

    def close(self) -> None:
        """It is complete."""
        self._emit('"' if self._as_string else json_of("".join(self._held), self._types))


def typed_value(tape: Tape, ends: Markers, types: Types, emit: Emit) -> Step[str | None]:
    """Text up to one of ``ends`` as a JSON value.

    Returns:
        The end, not consumed; None if the text broke off.
    """
    value = ValueWriter(emit, types)
    end = yield from tape.flow(ends, value.add)
    if end is not None:
        value.close()
    return end


def json_or_text(tape: Tape, ends: Markers, emit: Emit) -> Step[str | None]:
    """Text up to one of ``ends``: as it stands if it is JSON as a whole, otherwise as a string.

    Returns:
        The end, not consumed; None if the text broke off, then nothing was handed on, or too long a string.
    """
    return (yield from typed_value(tape, ends, NOT_TEXT, emit))
