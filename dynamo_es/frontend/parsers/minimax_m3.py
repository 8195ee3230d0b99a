"""MiniMax M3: tags that each have a namespace token before them; parameters are named by their tags and may nest.

``N<tool_call>N<invoke name="f">N<n>42N</n>N<o>N<a>1N</a>N</o>N</invoke>N</tool_call>`` where N is ``]<]minimax[>[``.
A list is a series of ``item`` tags.
"""

from __future__ import annotations

import re
from typing import Any

from dynamo_es.frontend.parsers.json_blocks import reject
from dynamo_es.frontend.parsers.schema import ALL, ToolSchemas, child, item, types_of
from dynamo_es.frontend.parsers.tape import Look, Markers, Step, Tape
from dynamo_es.frontend.parsers.writer import ObjectWriter, typed_value

NAMESPACE = "]<]minimax[>["
BLOCK = NAMESPACE + "<tool_call>"
BLOCK_END = NAMESPACE + "</tool_call>"
INVOKE = NAMESPACE + "<invoke"
INVOKE_END = NAMESPACE + "</invoke>"
MARKERS = (NAMESPACE, BLOCK, BLOCK_END, INVOKE, INVOKE_END)

_NAME = re.compile(r"""\s+name\s*=\s*(?:"([^"]+)"|'([^']+)'|([^\s"'>]+))""")
_CLOSE = Markers(">", "<", "\n")
_NEXT = Markers(NAMESPACE)
_OUTSIDE = Markers(BLOCK, INVOKE)
_STOPS = Markers(BLOCK, BLOCK_END, INVOKE)
_MAX_TAG = 1024
_MAX_DEPTH = 32


class MinimaxM3:
    """One choice's reader; ``run`` is its grammar's coroutine."""

    __slots__ = ("_tape", "_tools")

    def __init__(self, tape: Tape, tools: ToolSchemas) -> None:
        self._tape = tape
        self._tools = tools

    def run(self) -> Step[None]:
        tape = self._tape
        marker = yield from tape.prose(_OUTSIDE)
        while marker is not None:
            look = tape.look()
            if marker == BLOCK:
                look.at = len(marker)
                yield from look.spaces()
            if not (yield from self._call(look)):
                yield from reject(tape, marker)
                marker = yield from tape.prose(_OUTSIDE)
                continue
            marker = yield from self._block()

    def _block(self) -> Step[str | None]:
        """More calls, up to the block's end; then text up to the next marker, which is returned."""
        tape = self._tape
        while True:
            look = tape.look()
            yield from look.spaces()
            if (yield from look.literal(BLOCK_END)) or look.at_end:
                look.commit()
                return (yield from tape.prose(_OUTSIDE))
            if (yield from self._call(look)):
                continue
            marker = yield from tape.flow(_STOPS, tape.content)
            if marker != BLOCK_END:
                return marker

    def _call(self, look: Look) -> Step[bool]:
        tape = self._tape
        look = Look(tape, look.at)
        if not (yield from look.literal(INVOKE)):
            return False
        head = yield from look.until(_CLOSE, _MAX_TAG)
        match = None if head is None or head[1] != ">" else _NAME.match(head[0])
        if match is None:
            return False
        name = (match[1] or match[2] or match[3] or "").strip()
        yield from look.spaces()
        start = look.at
        if not name or (yield from self._tag(look)) is None:
            return False
        look.at = start
        look.commit()
        tape.call(name)
        root, schema = self._tools.schema(name)
        if (yield from self._members(root, schema, 0)):
            yield from self._pass_tag()
        return True

    def _members(self, root: Any, schema: Any, depth: int) -> Step[bool]:
        """An object's members, up to a closing tag, which is not consumed. False if the text broke off."""
        writer = ObjectWriter(self._tape.arguments)
        while True:
            name = yield from self._open_tag()
            if name is None:
                return False
            if not name:
                writer.close()
                return True
            writer.key(name)
            if not (yield from self._value(root, child(root, schema, name), depth)):
                return False

    def _items(self, root: Any, schema: Any, depth: int) -> Step[bool]:
        emit = self._tape.arguments
        begin = "["
        while True:
            name = yield from self._open_tag()
            if name is None:
                return False
            if not name:
                emit("[]" if begin == "[" else "]")
                return True
            emit(begin)
            begin = ","
            if not (yield from self._value(root, item(root, schema), depth)):
                return False

    def _value(self, root: Any, schema: Any, depth: int) -> Step[bool]:
        """A value and its closing tag."""
        tape = self._tape
        types = types_of(root, schema) if schema is not None else ALL
        look = tape.look()
        yield from look.spaces()
        inner = yield from self._tag(look)
        if inner and depth < _MAX_DEPTH:
            yield from self._to_namespace()
            is_list = inner == "item" and ("array" in types or "object" not in types)
            parts = self._items(root, schema, depth + 1) if is_list else self._members(root, schema, depth + 1)
            complete = yield from parts
        else:
            end = yield from typed_value(tape, _NEXT, types, tape.arguments)
            complete = end is not None
        if complete:
            yield from self._pass_tag()
        return complete

    def _tag(self, look: Look) -> Step[str | None]:
        """Pass a tag; its name, empty for a closing one, None if there is none."""
        if not (yield from look.literal(NAMESPACE + "<")):
            return None
        found = yield from look.until(_CLOSE, _MAX_TAG)
        if found is None or found[1] != ">" or not found[0]:
            return None
        return "" if found[0].startswith("/") else found[0].strip()

    def _open_tag(self) -> Step[str | None]:
        """Pass an opening tag and white space before it. Empty: a closing one comes. None: the text broke off.

        What is no tag is content.
        """
        tape = self._tape
        while True:
            look = tape.look()
            yield from look.spaces()
            start = look.at
            name = yield from self._tag(look)
            if name is not None:
                if name:
                    look.commit()
                else:
                    tape.take(start)
                return name
            if (yield from Look(tape, start).literal(NAMESPACE)):
                tape.content(tape.take(start + len(NAMESPACE)))
            if (yield from tape.flow(_NEXT, tape.content)) is None:
                return None

    def _to_namespace(self) -> Step[None]:
        look = self._tape.look()
        yield from look.spaces()
        look.commit()

    def _pass_tag(self) -> Step[None]:
        """Pass the closing tag that comes next, whatever it closes."""
        look = self._tape.look()
        if (yield from self._tag(look)) == "":
            look.commit()
