"""Gemma 4: ``<|tool_call>call:f{city:<|"|>Paris<|"|>,n:42}<tool_call|>``; bare keys, marked strings, nesting."""

from __future__ import annotations

import json

from dynamo_es.frontend.parsers.json_blocks import reject
from dynamo_es.frontend.parsers.schema import NOT_TEXT, json_of
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import escaped

BEGIN = "<|tool_call>"
END = "<tool_call|>"
QUOTE = '<|"|>'
MARKERS = (BEGIN, END, QUOTE)

_BEGIN = Markers(BEGIN)
_END = Markers(END, BEGIN)
_QUOTE = Markers(QUOTE)
_BARE_ENDS = Markers(",", "}", "]", END, QUOTE)
_KEY_ENDS = Markers(":", ",", "{", "}", "\n", END)
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "nil": "null"}
_MAX_KEY = 256
_MAX_BARE = 64 * 1024
_MAX_DEPTH = 64


def gemma4(tape: Tape) -> Step[None]:
    """The grammar's coroutine."""
    while True:
        marker = yield from tape.prose(_BEGIN)
        if marker is None:
            return
        if not (yield from _call(tape)):
            yield from reject(tape, marker)


def _call(tape: Tape) -> Step[bool]:
    look = Look(tape, len(BEGIN))
    yield from look.spaces()
    if not (yield from look.literal("call:")):
        return False
    name = yield from look.word(lambda char: char.isalnum() or char in "_-.:/")
    yield from look.spaces()
    if not name or not (yield from look.literal("{")):
        return False
    look.commit()
    tape.call(name)
    complete = yield from _members(tape, 0)
    look = tape.look()
    yield from look.spaces()
    if (yield from look.literal(END)) or (complete and look.at_end):
        look.commit()
    elif not complete and (yield from tape.flow(_END, tape.content)) == END:
        tape.take(len(END))
    return True


def _members(tape: Tape, depth: int) -> Step[bool]:
    """Members of an object after its brace. False if the text broke off or is no object from some place on."""
    tape.arguments("{")
    separator = ""
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if char == "}":
            look.at += 1
            look.commit()
            tape.arguments("}")
            return True
        if separator and not (yield from look.literal(",")):
            return False
        yield from look.spaces()
        key = yield from _key(look)
        if key is None:
            return False
        look.commit()
        tape.arguments(separator + json.dumps(key, ensure_ascii=False) + ":")
        separator = ","
        if not (yield from _value(tape, depth)):
            return False


def _key(look: Look) -> Step[str | None]:
    if (yield from look.literal(QUOTE)):
        quoted = yield from look.until(_QUOTE, _MAX_KEY)
        if quoted is None or not (yield from look.literal(":")):
            return None
        return quoted[0]
    found = yield from look.until(_KEY_ENDS, _MAX_KEY)
    if found is None or found[1] != ":" or not found[0].strip():
        return None
    return found[0].strip()


def _value(tape: Tape, depth: int) -> Step[bool]:
    look = tape.look()
    char = yield from look.spaces()
    if (yield from look.literal(QUOTE)):
        look.commit()
        tape.arguments('"')
        if (yield from tape.flow(_QUOTE, lambda text: tape.arguments(escaped(text)))) is None:
            return False
        tape.take(len(QUOTE))
        tape.arguments('"')
        return True
    if char in ("{", "["):
        if depth >= _MAX_DEPTH:
            return False
        look.at += 1
        look.commit()
        return (yield from (_members if char == "{" else _items)(tape, depth + 1))
    bare = yield from look.until(_BARE_ENDS, _MAX_BARE)
    if bare is None or bare[1] == QUOTE:
        return False
    look.at -= len(bare[1])
    look.commit()
    word = bare[0].strip()
    tape.arguments(_WORDS.get(word.lower()) or json_of(word, NOT_TEXT))
    return True


def _items(tape: Tape, depth: int) -> Step[bool]:
    tape.arguments("[")
    separator = ""
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if char == "]":
            look.at += 1
            look.commit()
            tape.arguments("]")
            return True
        if separator:
            if not (yield from look.literal(",")):
                return False
            look.commit()
            tape.arguments(",")
        separator = ","
        if not (yield from _value(tape, depth)):
            return False
