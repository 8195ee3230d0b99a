"""Formats that write a call as tags with bare values: qwen3_coder, nemotron_nano, minimax_m2, glm45, DeepSeek's DSML.

``<tool_call><function=f><parameter=n>42</parameter></function></tool_call>``,
``<invoke name="f"><parameter name="n">42</parameter></invoke>``,
``<tool_call>f<arg_key>n</arg_key><arg_value>42</arg_value></tool_call>``.

Values are raw: entities in them are not decoded, for models write code in them and their templates do not encode it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from dynamo_es.frontend.parsers.json_blocks import reject
from dynamo_es.frontend.parsers.json_calls import NO_ARGUMENTS, json_arguments
from dynamo_es.frontend.parsers.schema import NOT_TEXT, STRING, ToolSchemas, Types
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import ObjectWriter, ValueWriter

_NAME = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^"'>]+))""")
_IS_STRING = re.compile(r"""\sstring\s*=\s*["'](true|false)["']""")
_CLOSE = Markers(">", "\n", "<")
_MAX_TAG = 1024


class Tags(NamedTuple):
    """A format of this kind; ``grammar`` gives its coroutine for a request's tools.

    Attributes:
        block_begins, block_ends: Around all calls.
        call_begin, call_end: Around a call; ``call_begin`` is followed by its name and ``>``.
        value_begin, value_end: Around a value; ``value_begin`` is followed by its name and ``>``.
        lines: A value may have lines of its own: one line end after ``value_begin`` and one before ``value_end`` go,
            and a next value or ``call_end`` on a new line ends it too. ``value_end`` counts only before what can
            follow a value; models write about this format in it.
        json_body: A call may have a JSON object instead of values.
    """

    block_begins: tuple[str, ...]
    block_ends: tuple[str, ...]
    call_begin: str
    call_end: str
    value_begin: str
    value_end: str
    lines: bool = False
    json_body: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings with a meaning."""
        inner = (self.call_begin, self.call_end, self.value_begin, self.value_end)
        return (*self.block_begins, *self.block_ends, *inner)

    def grammar(self, tape: Tape, tools: ToolSchemas) -> Step[None]:
        """The coroutine."""
        return _TagReader(self, tape, tools).run()


class _TagReader:
    """One choice's reader."""

    __slots__ = ("_ends", "_format", "_inside", "_line_ends", "_tape", "_tools")

    def __init__(self, tags: Tags, tape: Tape, tools: ToolSchemas) -> None:
        self._format = tags
        self._tape = tape
        self._tools = tools
        self._inside = Markers(tags.value_begin, tags.call_end, tags.call_begin, *tags.block_ends)
        self._ends = Markers(tags.value_end)
        on_new_line = ("\n" + mark for mark in (tags.value_end, tags.value_begin, tags.call_end))
        self._line_ends = Markers(tags.value_end, *on_new_line)

    def run(self) -> Step[None]:
        tags, tape = self._format, self._tape
        outside = Markers(*tags.block_begins, tags.call_begin)
        while True:
            marker = yield from tape.prose(outside)
            if marker is None:
                return
            look = tape.look()
            if marker != tags.call_begin:
                look.at = len(marker)
                yield from look.spaces()
            if (yield from self._call(look)):
                yield from self._block(began=marker != tags.call_begin)
            else:
                yield from reject(tape, marker)

    def _block(self, *, began: bool) -> Step[None]:
        """More calls, up to the block's end. Other text is content; without a beginning it is no part of a block."""
        tags, tape = self._format, self._tape
        stops = Markers(*tags.block_begins, *tags.block_ends, tags.call_begin)
        while True:
            look = tape.look()
            yield from look.spaces()
            end = yield from look.one_of(tags.block_ends)
            if end is not None or (began and look.at_end):
                look.commit()
                return
            if (yield from self._call(look)):
                continue
            if not began:
                return
            if (yield from look.literal(tags.call_begin)):
                tape.content(tape.take(look.at))
            marker = yield from tape.flow(stops, tape.content)
            if marker is None or marker in tags.block_begins:
                return

    def _head(self, look: Look) -> Step[str | None]:
        """Pass the rest of an opening tag; what it names, or None if it is none."""
        found = yield from look.until(_CLOSE, _MAX_TAG)
        if found is None or found[1] != ">":
            return None
        return found[0]

    def _call(self, look: Look) -> Step[bool]:
        """A call; ``look`` stands where it should begin. False if it is none, then nothing is consumed."""
        tags, tape = self._format, self._tape
        look = Look(tape, look.at)
        head = (yield from self._head(look)) if (yield from look.literal(tags.call_begin)) else None
        match = _NAME.match(head or "")
        name = "" if match is None else _name_of(match)
        if head is None or not name:
            return False
        if head.endswith("/"):
            look.commit()
            tape.call(name)
            tape.arguments(NO_ARGUMENTS)
            return True
        first = yield from look.spaces()
        if tags.json_body and first == "{":
            look.commit()
            tape.call(name)
            yield from json_arguments(tape, Markers(tags.call_end, *tags.block_ends))
            yield from self._values(None, name)
            return True
        start = look.at
        known = yield from look.one_of((tags.value_begin, tags.call_end))
        if known is None or (known == tags.value_begin and (yield from self._head(look)) is None):
            return False
        look.at = start
        look.commit()
        tape.call(name)
        yield from self._values(ObjectWriter(tape.arguments), name)
        return True

    def _values(self, writer: ObjectWriter | None, function: str) -> Step[None]:
        """Values up to the call's end. Anything between them but white space is content.

        Where the text breaks off within a value's tag, the tag goes: the call is seen to be incomplete.
        """
        tags, tape = self._format, self._tape
        while True:
            look = tape.look()
            yield from look.spaces()
            look.commit()
            marker = yield from tape.flow(self._inside, tape.content)
            if marker is None:
                return
            if marker == tags.value_begin and writer is not None:
                if not (yield from self._value(writer, function)):
                    yield from unfinished(tape, marker, _CLOSE)
                continue
            if marker == tags.call_end:
                tape.take(len(marker))
            if writer is not None:
                writer.close()
            return

    def _value(self, writer: ObjectWriter, function: str) -> Step[bool]:
        tags, tape = self._format, self._tape
        look = Look(tape, len(tags.value_begin))
        head = yield from self._head(look)
        match = None if head is None else _NAME.match(head)
        if head is None or match is None:
            return False
        name = _name_of(match)
        if tags.lines:
            yield from look.literal("\n")
        look.commit()
        types = self._types(function, name, head)
        writer.key(name)
        value = ValueWriter(tape.arguments, types)
        own_line = tags.lines and tape.text[tape.pos - 1] == "\n"
        while True:
            end = yield from tape.flow(self._line_ends if own_line else self._ends, value.add)
            if end is None:
                return True
            if not tags.lines or (yield from self._is_end(end)):
                break
            value.add(tape.take(len(end)))
        value.close()
        tape.take(len(end) if end.endswith(tags.value_end) else 1)
        return True

    def _is_end(self, end: str) -> Step[bool]:
        """Whether a mark within a value ends it: only what can follow a value comes next."""
        tags = self._format
        look = Look(self._tape, len(end))
        if end.endswith(tags.value_begin):
            return (yield from self._head(look)) is not None
        after = (tags.value_begin, tags.call_end) if end.endswith(tags.value_end) else (tags.call_begin,)
        if not (yield from look.spaces()):
            return look.at_end
        return (yield from look.one_of((*after, *tags.block_begins, *tags.block_ends))) is not None

    def _types(self, function: str, name: str, head: str) -> Types:
        told = _IS_STRING.search(head)
        if told is not None:
            return STRING if told[1] == "true" else NOT_TEXT
        return self._tools.types(function, name)


def _name_of(match: re.Match[str]) -> str:
    return (match[1] or match[2] or match[3] or "").strip()


class KeyValueTags(NamedTuple):
    """GLM's format: the name after ``call_begin``, then pairs of key and value. ``grammar`` gives its coroutine.

    A ``call_end`` within a value ends it (and the call) only if the text or another call follows: the model forgot
    the value's own end.
    """

    call_begin: str = "<tool_call>"
    call_end: str = "</tool_call>"
    key_begin: str = "<arg_key>"
    key_end: str = "</arg_key>"
    value_begin: str = "<arg_value>"
    value_end: str = "</arg_value>"

    @property
    def markers(self) -> tuple[str, ...]:
        """All strings with a meaning."""
        return tuple(self)

    def grammar(self, tape: Tape, tools: ToolSchemas) -> Step[None]:
        """The coroutine."""
        return _KeyValueReader(self, tape, tools).run()


def unfinished(tape: Tape, marker: str, ends: Markers) -> Step[None]:
    """A mark within a call that does not begin what it should: it is content, or goes if the text breaks off there."""
    look = tape.look()
    if (yield from look.until(ends, _MAX_TAG)) is None and tape.ended and len(tape.text) - tape.pos <= _MAX_TAG:
        tape.take(len(tape.text) - tape.pos)
    else:
        tape.content(tape.take(len(marker)))


class _KeyValueReader:
    """One choice's reader."""

    __slots__ = ("_format", "_tape", "_tools")

    def __init__(self, tags: KeyValueTags, tape: Tape, tools: ToolSchemas) -> None:
        self._format = tags
        self._tape = tape
        self._tools = tools

    def run(self) -> Step[None]:
        tape = self._tape
        begin = Markers(self._format.call_begin)
        while True:
            marker = yield from tape.prose(begin)
            if marker is None:
                return
            if not (yield from self._call()):
                yield from reject(tape, marker)

    def _call(self) -> Step[bool]:
        tags, tape = self._format, self._tape
        look = Look(tape, len(tags.call_begin))
        yield from look.spaces()
        name = yield from look.word(lambda char: char not in "<\n\r\t {\"'", 256)
        yield from look.spaces()
        start = look.at
        if not name or not ((yield from look.literal(tags.call_end)) or (yield from self._key(look)) is not None):
            return False
        look.at = start
        look.commit()
        tape.call(name)
        yield from self._pairs(ObjectWriter(tape.arguments), name)
        return True

    def _pairs(self, writer: ObjectWriter, function: str) -> Step[None]:
        tags, tape = self._format, self._tape
        inside = Markers(tags.key_begin, tags.call_end, tags.call_begin)
        while True:
            look = tape.look()
            yield from look.spaces()
            look.commit()
            marker = yield from tape.flow(inside, tape.content)
            if marker is None:
                return
            if marker != tags.key_begin:
                if marker == tags.call_end:
                    tape.take(len(marker))
                writer.close()
                return
            look = tape.look()
            key = yield from self._key(look)
            if key is None:
                yield from unfinished(tape, marker, Markers(tags.value_begin))
                continue
            look.commit()
            writer.key(key)
            yield from self._typed(self._tools.types(function, key))

    def _key(self, look: Look) -> Step[str | None]:
        """Pass a key and the mark before its value."""
        tags = self._format
        if not (yield from look.literal(tags.key_begin)):
            return None
        key = yield from look.until(Markers(tags.key_end, tags.value_begin, tags.call_end), _MAX_TAG)
        if key is None or key[1] != tags.key_end:
            return None
        yield from look.spaces()
        return key[0].strip() if (yield from look.literal(tags.value_begin)) else None

    def _typed(self, types: Types) -> Step[None]:
        """A value of these types, in as many pieces as there are ends in it that are none."""
        tags, tape = self._format, self._tape
        ends = Markers(tags.value_end, tags.call_end)
        value = ValueWriter(tape.arguments, types)
        while True:
            marker = yield from tape.flow(ends, value.add)
            if marker is None:
                return
            if marker == tags.value_end:
                tape.take(len(marker))
                break
            look = Look(tape, len(marker))
            if not (yield from look.spaces()) or (yield from look.literal(tags.call_begin)):
                break
            value.add(tape.take(len(marker)))
        value.close()
