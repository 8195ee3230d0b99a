"""Calls as Python: ``[get_weather(city="Paris", days=3), get_time()]``.

Nothing marks such a list, so it is one only if it begins with a function of the request and a keyword argument (or
none). Values are literals: strings, numbers, True, False, None, lists, tuples and dicts; they are read here and not
by Python, since what a model wrote is handed on before it is complete.
"""

from __future__ import annotations

import json
import re

from dynamo_es.frontend.parsers.schema import ToolSchemas
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import ObjectWriter, escaped

BEGIN = "<|python_start|>"
END = "<|python_end|>"
MARKERS = (BEGIN, END)

_OUTSIDE = Markers(BEGIN, END, "[")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*)(?:\.\d*)?(?:[eE][+-]?\d+)?|[+-]?\.\d+(?:[eE][+-]?\d+)?")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX_LENGTH = {"x": 2, "u": 4, "U": 8}
_MAX_DEPTH = 64


class Pythonic:
    """One choice's reader; ``run`` is its grammar's coroutine."""

    __slots__ = ("_tape", "_tools")

    def __init__(self, tape: Tape, tools: ToolSchemas) -> None:
        self._tape = tape
        self._tools = tools

    def run(self) -> Step[None]:
        tape = self._tape
        while True:
            marker = yield from tape.prose(_OUTSIDE)
            if marker is None:
                return
            if marker == END:
                tape.take(len(END))
                continue
            look = tape.look()
            if (yield from look.literal(BEGIN)):
                yield from look.spaces()
            if not (yield from look.literal("[")) or not (yield from self._call(look)):
                tape.content(tape.take(1 if marker == "[" else len(marker)))
                continue
            yield from self._rest()

    def _rest(self) -> Step[None]:
        """More calls of the list and its end; what is neither stays where it is."""
        tape = self._tape
        while True:
            look = tape.look()
            if (yield from look.spaces()) == "]":
                look.at += 1
                look.commit()
                return
            if not (yield from look.literal(",")) or not (yield from self._call(look)):
                return

    def _call(self, look: Look) -> Step[bool]:
        """``name(key=value, ...)``; consumed with what was looked at before it, or not at all."""
        tape = self._tape
        yield from look.spaces()
        name = yield from look.word(lambda char: char.isalnum() or char in "_.-")
        if not self._tools.knows(name) or not (yield from look.literal("(")):
            return False
        if (yield from look.spaces()) != ")" and (yield from _keyword(Look(tape, look.at))) is None:
            return False
        look.commit()
        tape.call(name)
        yield from self._keywords(ObjectWriter(tape.arguments))
        return True

    def _keywords(self, writer: ObjectWriter) -> Step[None]:
        """Keyword arguments up to the closing parenthesis."""
        tape = self._tape
        first = True
        while True:
            look = tape.look()
            char = yield from look.spaces()
            if not first and char == ",":
                look.at += 1
                char = yield from look.spaces()
            elif not first and char != ")":
                return
            if char == ")":
                look.at += 1
                look.commit()
                writer.close()
                return
            key = yield from _keyword(look)
            if key is None:
                return
            look.commit()
            writer.key(key)
            first = False
            if not (yield from _value(tape, 0)):
                return


def _keyword(look: Look) -> Step[str | None]:
    """Pass ``key=``."""
    key = yield from look.word(lambda char: char.isalnum() or char == "_")
    yield from look.spaces()
    if not key or key[0].isdigit() or not (yield from look.literal("=")):
        return None
    return key


def _value(tape: Tape, depth: int) -> Step[bool]:  # noqa: PLR0911 - one for each kind of literal
    look = tape.look()
    char = yield from look.spaces()
    look.commit()
    if char in ("'", '"'):
        return (yield from _string(tape, char))
    if char in ("[", "(", "{"):
        if depth >= _MAX_DEPTH:
            return False
        tape.take(1)
        if char == "{":
            return (yield from _dict(tape, depth + 1))
        return (yield from _list(tape, "]" if char == "[" else ")", depth + 1))
    word = yield from look.word(lambda one: one.isalnum() or one in "+-._", 4096)
    after = yield from look.peek()
    if after == "" and look.at_end:
        return False
    text = _word(word)
    if text is None:
        return False
    look.commit()
    tape.arguments(text)
    return True


def _word(word: str) -> str | None:
    if word in _WORDS:
        return _WORDS[word]
    if not _NUMBER.fullmatch(word):
        return None
    plain = word.replace("_", "").removeprefix("+")
    if _JSON_NUMBER.fullmatch(plain):
        return plain
    number = float(plain)
    return None if number in (float("inf"), float("-inf")) else json.dumps(number)


def _string(tape: Tape, quote: str) -> Step[bool]:
    """A string literal, handed on as it comes."""
    look = tape.look()
    quotes = quote * 3 if (yield from look.literal(quote * 3)) else quote
    tape.take(len(quotes))
    stops = Markers(quotes, "\\")
    tape.arguments('"')
    while True:
        marker = yield from tape.flow(stops, lambda text: tape.arguments(escaped(text)))
        if marker is None:
            return False
        tape.take(len(marker))
        if marker == quotes:
            tape.arguments('"')
            return True
        if not (yield from _escape(tape)):
            return False


def _escape(tape: Tape) -> Step[bool]:
    """What follows a backslash."""
    look = tape.look()
    char = yield from look.peek()
    if not char:
        return False
    look.at += 1
    length = _HEX_LENGTH.get(char)
    if length is None:
        text = _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
    else:
        digits = yield from look.word(lambda one: one in "0123456789abcdefABCDEF", length)
        code = int(digits, 16) if len(digits) == length else -1
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            text = chr(code)
        elif 0xD800 <= code <= 0xDFFF:
            look.commit()
            tape.arguments(f"\\u{code:04x}")
            return True
        else:
            text = "\\" + char + digits
    look.commit()
    tape.arguments(escaped(text))
    return True


def _list(tape: Tape, end: str, depth: int) -> Step[bool]:
    tape.arguments("[")
    separator = ""
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if separator and char == ",":
            look.at += 1
            char = yield from look.spaces()
        elif separator and char != end:
            return False
        if char == end:
            look.at += 1
            look.commit()
            tape.arguments("]")
            return True
        look.commit()
        tape.arguments(separator)
        separator = ","
        if not (yield from _value(tape, depth)):
            return False


def _dict(tape: Tape, depth: int) -> Step[bool]:
    tape.arguments("{")
    separator = ""
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if separator and char == ",":
            look.at += 1
            char = yield from look.spaces()
        elif separator and char != "}":
            return False
        if char == "}":
            look.at += 1
            look.commit()
            tape.arguments("}")
            return True
        if char not in ("'", '"'):
            return False
        look.commit()
        tape.arguments(separator)
        separator = ","
        if not (yield from _string(tape, char)):
            return False
        look = tape.look()
        yield from look.spaces()
        if not (yield from look.literal(":")):
            return False
        look.commit()
        tape.arguments(":")
        if not (yield from _value(tape, depth)):
            return False
