"""Calls that models write as JSON: arguments handed on as they come, and the envelopes around them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from dynamo_es.frontend.parsers.json_scan import JsonScanner
from dynamo_es.frontend.parsers.tape import MAX_UNDECIDED, SPACES, Look, Markers, Step, Tape

NAME_KEYS = frozenset({"name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
NO_ARGUMENTS = "{}"
_ENVELOPE_KEYS = frozenset({"type", "id"})


class Envelope(NamedTuple):
    """How an object says what it calls.

    Attributes:
        strict: Only known keys may come before the name, and arguments must be there; for formats without markers,
            where the object may be an answer.
        argument_keys: Keys of the arguments.
    """

    strict: bool = False
    argument_keys: frozenset[str] = ARGUMENT_KEYS


MARKED = Envelope()
UNMARKED = Envelope(strict=True)


def stream_value(tape: Tape, emit: Callable[[str], None]) -> Step[bool]:
    """Hand the JSON value that comes next to ``emit``; False if it breaks off or is no JSON from some place on."""
    scanner = JsonScanner()
    while (yield from tape.more()):
        place, text = scanner.scan(tape.text, tape.pos)
        tape.pos = place
        if text:
            emit(text)
        if scanner.done:
            return True
        if scanner.bad:
            return False
    return False


def json_arguments(tape: Tape, ends: Markers | None) -> Step[bool]:
    """Arguments of an announced call. What is no JSON is handed on as it is, up to one of ``ends`` or the end.

    Returns:
        Whether they are complete.
    """
    complete = yield from stream_value(tape, tape.arguments)
    if complete:
        return True
    if ends is not None:
        yield from tape.flow(ends, tape.arguments)
        return False
    yield from tape.drain(tape.arguments)
    return False


def skip_value(look: Look) -> Step[str | None]:
    """Pass the JSON value that comes next; its text, or None if there is none within bounds."""
    scanner = JsonScanner()
    start = look.at
    parts: list[str] = []
    while (yield from look.peek()):
        tape = look.tape
        origin = tape.pos + look.at
        limit = tape.pos + MAX_UNDECIDED
        visible = tape.text if len(tape.text) <= limit else tape.text[:limit]
        place, text = scanner.scan(visible, origin)
        look.at += place - origin
        parts.append(text)
        if scanner.done:
            return "".join(parts)
        if scanner.bad:
            break
    look.at = start
    return None


def json_string(look: Look) -> Step[str | None]:
    """Pass the JSON string that comes next; None if it is none."""
    if (yield from look.peek()) != '"':
        return None
    text = yield from skip_value(look)
    return None if text is None else _decoded(text)


def _decoded(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


class _Head(NamedTuple):
    """What was read of an envelope before its arguments are decided."""

    name: str | None = None
    arguments: str | None = None


def call_object(  # noqa: PLR0911 - a rule of a grammar has many ways not to match
    tape: Tape, look: Look, envelope: Envelope, ends: Markers | None
) -> Step[bool]:
    """One ``{"name": ..., "arguments": {...}}``; ``look`` stands at its brace.

    If it is a call, it is consumed with all that was looked at before it. If not, nothing is.

    Args:
        ends: Where arguments end that are no JSON; None: at the end of the text.
    """
    if not (yield from look.literal("{")):
        return False
    head = _Head()
    while True:
        key = yield from _key(look)
        if key is None:
            return False
        if key in NAME_KEYS and head.name is None:
            name = yield from json_string(look)
            if not name:
                return False
            head = _Head(name, head.arguments)
        elif key in envelope.argument_keys and head.arguments is None:
            if head.name is not None:
                return (yield from _call_with_arguments(tape, look, head.name, ends))
            text = yield from skip_value(look)
            if text is None or _object_text(text) is None:
                return False
            head = _Head(None, _object_text(text))
        elif (envelope.strict and key not in _ENVELOPE_KEYS) or (yield from skip_value(look)) is None:
            return False
        separator = yield from look.spaces()
        if separator == "}":
            look.at += 1
            return _whole_call(tape, look, head, envelope)
        if not (yield from look.literal(",")):
            return False


def _key(look: Look) -> Step[str | None]:
    yield from look.spaces()
    key = yield from json_string(look)
    if key is None:
        return None
    yield from look.spaces()
    if not (yield from look.literal(":")):
        return None
    yield from look.spaces()
    return key


def _whole_call(tape: Tape, look: Look, head: _Head, envelope: Envelope) -> bool:
    if head.name is None or (envelope.strict and head.arguments is None):
        return False
    look.commit()
    tape.call(head.name)
    tape.arguments(head.arguments or NO_ARGUMENTS)
    return True


def _object_text(text: str) -> str | None:
    """Text of the arguments: an object, or one as text in a string; null is none."""
    text = text.strip(SPACES)
    if text.startswith("{"):
        return text
    if text == "null":
        return NO_ARGUMENTS
    inner = _decoded(text) if text.startswith('"') else None
    return inner if inner is not None and inner.lstrip(SPACES).startswith("{") else None


def _call_with_arguments(tape: Tape, look: Look, name: str, ends: Markers | None) -> Step[bool]:
    first = yield from look.peek()
    if first == "{":
        look.commit()
        tape.call(name)
        if (yield from json_arguments(tape, ends)):
            yield from _rest_of_object(tape)
        return True
    text = yield from skip_value(look)
    arguments = None if text is None else _object_text(text)
    if arguments is None:
        return False
    look.commit()
    tape.call(name)
    tape.arguments(arguments)
    yield from _rest_of_object(tape)
    return True


def _rest_of_object(tape: Tape) -> Step[None]:
    """Members after the arguments say nothing that a client gets; what is no JSON stays where it is."""
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if char == "}":
            look.at += 1
            look.commit()
            return
        if not (yield from look.literal(",")):
            return
        if (yield from _key(look)) is None or (yield from skip_value(look)) is None:
            return
        look.commit()


def call_list(tape: Tape, look: Look, envelope: Envelope, ends: Markers | None) -> Step[bool]:
    """``[{...}, {...}]``; ``look`` stands at its bracket. True if its first item is a call; then it is consumed."""
    if not (yield from look.literal("[")):
        return False
    yield from look.spaces()
    if not (yield from call_object(tape, look, envelope, ends)):
        return False
    while True:
        look = tape.look()
        char = yield from look.spaces()
        if char == "]":
            look.at += 1
            look.commit()
            return True
        if not (yield from look.literal(",")):
            return True
        yield from look.spaces()
        if not (yield from call_object(tape, look, envelope, ends)):
            return True


def bare_calls(tape: Tape, envelope: Envelope) -> Step[bool]:
    """Calls without markers, one after the other or separated by ``;`` or a comma; whether there were any."""
    found = False
    while True:
        look = tape.look()
        if (yield from look.spaces()) in (";", ",") and found:
            look.at += 1
            yield from look.spaces()
        if not (yield from calls(tape, look, envelope, None)):
            return found
        found = True


def calls(tape: Tape, look: Look, envelope: Envelope, ends: Markers | None) -> Step[bool]:
    """An object or a list of them, whatever comes next."""
    if (yield from look.peek()) == "[":
        return (yield from call_list(tape, look, envelope, ends))
    return (yield from call_object(tape, look, envelope, ends))
