"""Where in a body a fault is, for error messages that say what Dynamo's say. Pure.

Most request types are flattened structures there, whose errors are found at the end of the body; of the others each
error is found behind what is wrong.
"""

from __future__ import annotations

import re

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKENS = re.compile(_STRING + rb"|[\[\]{}:,]", re.DOTALL)
_DIRECT_FIELDS = ("nvext", "chat_template_args", "chat_template_kwargs")
_QUOTED = re.compile(r'unknown field `([^`]+)`|invalid type: string ("(?:[^"\\]|\\.)*")')
_SHOWN_CHARS = 64


def fault_offset(body: bytes, field: str | None, detail: str) -> int:
    """Bytes before a fault of a flattened structure: all, but for members that are structures of their own."""
    if field in _DIRECT_FIELDS:
        start = re.search(rb'"%b"\s*:' % field.encode(), body)
        named = _QUOTED.search(detail)
        if start is not None and named is not None:
            quoted = named.group(2) or f'"{named.group(1)}"'
            place = body.find(quoted.encode(), start.end())
            if place >= 0:
                return place + len(quoted.encode())
    return len(body.rstrip())


def value_end(body: bytes, field: str) -> int:
    """Where a plain structure's error about a member is found: behind its value, or at the end if that is nested."""
    member = re.search(
        rb'"%b"\s*:\s*(?:(%b|true|false|null)|(-?[0-9][0-9.eE+-]*))' % (re.escape(field.encode()), _STRING),
        body,
        re.DOTALL,
    )
    if member is None:
        return len(body.rstrip())
    return member.end() + (member.group(2) is not None)  # The end of a number shows only behind it.


def open_member(body: bytes) -> str | None:
    """The outermost object's member within which broken JSON breaks off or goes wrong; None: outside of members."""
    depth, name, key = 0, None, None
    for match in _TOKENS.finditer(body):
        mark = match.group()[:1]
        if mark in b"[{":
            depth += 1
        elif mark in b"]}":
            depth -= 1
        elif depth == 1 and mark == b'"' and name is None:
            key = match.group()[1:-1]
        elif depth == 1 and mark == b":":
            name = key
        elif depth == 1 and mark == b",":
            name = None
    return None if name is None else name.decode("utf-8", "replace")[:_SHOWN_CHARS]
