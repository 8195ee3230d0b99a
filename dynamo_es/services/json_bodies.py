"""JSON bodies of the standalone services: read into plain data, and refused in the words of Dynamo's reader. Pure.

A body is an object whose members a ``BodyShape`` names; others are passed over. What is wrong is told with the member,
the item in its list, and the place in the text (1-based line, byte column).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

import msgspec

from dynamo_es.frontend import json_places, serde

_SYNTAX = "Failed to parse the request body as JSON: "
_SHAPE = "Failed to deserialize the JSON body into the target type: "
_BLANK = " \t\r\n"


class BodyRefused(ValueError):
    """The body is no JSON (``status`` 400), or not of its shape (422)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Member:
    """One member: what its value must be, what each item of it must be if it is a list, whether it must be there."""

    check: serde.Check
    item: serde.Check | None = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class BodyShape:
    """A kind of body; ``name`` is Dynamo's."""

    name: str
    members: Mapping[str, Member]


def u64(*, required: bool = False) -> Member:
    """An unsigned integer of 64 bits."""
    return Member(_not_null(serde.integer(0, 2**64 - 1, "u64"), "u64", required), required=required)


def u32(*, required: bool = False) -> Member:
    """An unsigned integer of 32 bits."""
    return Member(_not_null(serde.UNSIGNED_32, "u32", required), required=required)


def text(*, required: bool = False) -> Member:
    """A string."""
    return Member(serde.typed(str, "a string", null=not required), required=required)


def token_list(*, required: bool = False) -> Member:
    """A list of token ids."""
    return Member(
        serde.typed(list, "a sequence", null=not required), _not_null(serde.UNSIGNED_32, "u32", True), required
    )


def hash_list(*, required: bool = False) -> Member:
    """A list of hashes, each a signed integer of 64 bits."""
    item = _not_null(serde.integer(-(2**63), 2**63 - 1, "i64"), "i64", True)
    return Member(serde.typed(list, "a sequence", null=not required), item, required)


def one_of(*names: str) -> Member:
    """One of these words."""
    return Member(lambda value: serde.variant(value, names) or serde.TEXT(value))


def read_body(body: bytes, shape: BodyShape) -> dict[str, Any]:
    """The members that are given; also those that the shape does not name.

    Raises:
        BodyRefused: It is no JSON, or not of the shape.
    """
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _syntax(body) from error
    if not isinstance(document, dict):
        found = f"invalid type: {serde.unexpected(document)}, expected struct {shape.name}"
        raise BodyRefused(422, f"{_SHAPE}{found} {serde.position(body, len(body.rstrip()))}")
    for name, value in document.items():
        member = shape.members.get(name)
        if member is not None:
            _check(body, name, value, member)
    for name, member in shape.members.items():
        if member.required and name not in document:
            raise refused_shape(body, f"missing field `{name}`")
    return document


def refused_shape(body: bytes, why: str) -> BodyRefused:
    """A refusal of the body as a whole."""
    return BodyRefused(422, f"{_SHAPE}{why} {serde.position(body, len(body.rstrip()))}")


def _check(body: bytes, name: str, value: Any, member: Member) -> None:
    wrong = member.check(value)
    if wrong is not None:
        raise BodyRefused(422, f"{_SHAPE}{name}: {wrong} {serde.position(body, _end_of(body, name, None))}")
    if member.item is None or value is None:
        return
    for index, item in enumerate(value):
        wrong = member.item(item)
        if wrong is not None:
            place = serde.position(body, _end_of(body, name, index))
            raise BodyRefused(422, f"{_SHAPE}{name}[{index}]: {wrong} {place}")


def _syntax(body: bytes) -> BodyRefused:
    fault = serde.syntax_fault(body)
    if fault is None:
        return BodyRefused(400, f"{_SYNTAX}recursion limit exceeded {serde.position(body, len(body))}")
    member = None if fault.offset is None else json_places.open_member(body[: fault.offset])
    return BodyRefused(400, _SYNTAX + (fault.detail if member is None else f"{member}: {fault.detail}"))


def _not_null(check: serde.Check, expected: str, required: bool) -> serde.Check:
    if not required:
        return check
    return lambda value: f"invalid type: null, expected {expected}" if value is None else check(value)


def _end_of(body: bytes, name: str, index: int | None) -> int:
    """Bytes up to the end of a member of a valid body, or of an item of it."""
    whole = body.decode()
    for key, start, end in _members(whole):
        if key == name:
            if index is None:
                return len(whole[:end].encode())
            ends = _items(whole, start + 1)
            return len(whole[: next(stop for place, stop in enumerate(ends) if place == index)].encode())
    return len(body.rstrip())


def _members(whole: str) -> Iterator[tuple[str, int, int]]:
    """Name, start and end of the value of each member of an object."""
    decoder = JSONDecoder()
    at = _past_blank(whole, whole.index("{") + 1)
    while whole[at] == '"':
        key, at = decoder.raw_decode(whole, at)
        start = _past_blank(whole, whole.index(":", at) + 1)
        _, at = decoder.raw_decode(whole, start)
        yield key, start, at
        at = _past_blank(whole, at)
        if whole[at] != ",":
            return
        at = _past_blank(whole, at + 1)


def _items(whole: str, at: int) -> Iterator[int]:
    """End of each item of a list whose first item begins at ``at``."""
    decoder = JSONDecoder()
    while True:
        _, at = decoder.raw_decode(whole, _past_blank(whole, at))
        yield at
        at = _past_blank(whole, at) + 1


def _past_blank(whole: str, at: int) -> int:
    while at < len(whole) and whole[at] in _BLANK:
        at += 1
    return at
