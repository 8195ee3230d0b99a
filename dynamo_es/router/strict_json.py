"""Reading JSON of a known shape as strictly as Dynamo does, and refusing it in the same words (serde_json's).

Stricter than ``json``: members of a known name may stand only once, 1.0 and 18446744073709551616 and -0 are floats
and never integers, a byte order mark, NaN and lone surrogates are refused. More lenient in one thing: what belongs to
a member that nobody reads is only checked for its syntax, at any depth and without recursion. Structs may come as
arrays of their members in order.

A refusal ends in ``at line L column C``: lines from 1, columns in bytes. The rules for that place are serde_json's
too: a value of the wrong type is reported behind it (a list or an object at its bracket), a wrong character on it,
and a missing or repeated member behind the bracket that closes the struct, if that comes next.

Everything runs on a cursor over the bytes; no document is built. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from dynamo_es.router.json_scanner import (
    BAD_VALUE,
    EOF_VALUE,
    LIST,
    OBJECT,
    QUOTE,
    JsonScanner,
    cut,
    show_float,
)

REQUIRED: Final = object()
"""Default of a member that must be there."""

_EOF = {LIST: "EOF while parsing a list", OBJECT: "EOF while parsing an object"}
_CLOSE = {LIST: b"]", OBJECT: b"}"}
_COMMA_OR_CLOSE = {LIST: "expected `,` or `]`", OBJECT: "expected `,` or `}`"}

Reader = Callable[["JsonCursor"], Any]


class UnplacedRefusal(Exception):
    """A refusal whose place the surrounding struct adds. Raised by readers of values, never seen by their caller."""


class Member(NamedTuple):
    """One member of a struct.

    Attributes:
        default: Value if an object does not have it.
        list_default: Value if a list ends before it.
    """

    name: str
    read: Reader
    default: Any = REQUIRED
    list_default: Any = REQUIRED


class Shape:
    """A struct: its name in messages, and its members in order."""

    def __init__(self, name: str, *members: Member) -> None:
        self.name = name
        self.members = members
        self.places = {member.name: place for place, member in enumerate(members)}
        count = len(members)
        self.described = f"struct {name} with {count} element{'s' if count != 1 else ''}"


class JsonCursor(JsonScanner):
    """A place in a JSON text. Every ``read_…`` begins with the next value and stands behind it afterwards.

    All raise ``JsonRefusal``.
    """

    def read_integer(self, expected: str, limit: int) -> int:
        """An integer of 0 to ``limit - 1``; ``expected`` names its type in refusals."""
        mark = self.next_mark() or self.refuse(EOF_VALUE)
        if not (mark == b"-" or mark.isdigit()):
            self.refuse_type(expected)
        number = self._number()
        if isinstance(number, float):
            self.refuse(f"invalid type: {show_float(number)}, expected {expected}", 0)
        if not 0 <= number < limit:
            self.refuse(f"invalid value: integer `{number}`, expected {expected}", 0)
        return number

    def read_optional(self, read: Reader) -> Any:
        """None for ``null``, else what ``read`` reads."""
        if self.next_mark() == b"n":
            self._identifier(b"null")
            return None
        return read(self)

    def read_null(self, expected: str) -> None:
        """``null`` and nothing else."""
        mark = self.next_mark() or self.refuse(EOF_VALUE)
        if mark != b"n":
            self.refuse_type(expected)
        self._identifier(b"null")

    def read_list(self, read: Reader) -> list[Any]:
        """A list of any length."""
        self._open(LIST, "a sequence")
        items: list[Any] = []
        while self._another(LIST, first=not items):
            items.append(read(self))
        self._at += 1
        return items

    def read_tuple(self, read: Reader, size: int) -> list[Any]:
        """A list of ``size`` values."""
        expected = f"a tuple of size {size}"
        self._open(LIST, expected)
        return self._inside(LIST, lambda: self._tuple_items(read, size, expected))

    def read_struct(self, shape: Shape) -> list[Any]:
        """The values of the struct's members, in their order."""
        mark = self.next_mark() or self.refuse(EOF_VALUE)
        if mark == OBJECT:
            self._at += 1
            return self._inside(OBJECT, lambda: self._members_of_object(shape))
        self._open(LIST, f"struct {shape.name}")
        return self._inside(LIST, lambda: self._members_of_list(shape))

    def read_tagged(self, tags: Sequence[str], read: Callable[[JsonCursor, str, bool], Any]) -> Any:
        """An enum: ``"tag"`` or ``{"tag": value}``, the tag one of ``tags``.

        ``read(cursor, tag, alone)`` gives its value; where the tag stands alone, there is nothing to read for it.
        """
        mark = self.next_mark() or self.refuse(EOF_VALUE)
        if mark == QUOTE:
            return read(self, self._tag(tags), True)
        if mark != OBJECT:
            self.refuse(BAD_VALUE)
        self._at += 1
        mark = self.next_mark()
        if mark != QUOTE:
            self.refuse(self._what_for_key(mark))
        tag = self._tag(tags)
        self._colon()
        value = read(self, tag, False)
        self._space()
        if self._mark() != b"}":
            self.refuse(BAD_VALUE if self._mark() else _EOF[OBJECT], 0)
        self._at += 1
        return value

    def end(self) -> None:
        """Refuse anything but white space to the end."""
        if self.next_mark():
            self.refuse("trailing characters")

    def refuse_type(self, expected: str) -> NoReturn:
        """Raise ``JsonRefusal`` for the value that begins here, unless its syntax is wrong already."""
        mark = self.next_mark()
        self.refuse(f"invalid type: {self._describe(mark)}, expected {expected}", 0)

    def skip(self) -> None:
        """Pass over a value of any kind."""
        open_brackets: list[bytes] = []
        while True:
            mark = self.next_mark() or self.refuse(EOF_VALUE)
            if mark in (LIST, OBJECT):
                self._at += 1
                open_brackets.append(mark)
                first = True
            else:
                self._skip_scalar(mark)
                first = False
            while open_brackets and not self._another_to_skip(open_brackets[-1], first=first):
                self._at += 1
                open_brackets.pop()
                first = False
            if not open_brackets:
                return

    def _open(self, bracket: bytes, expected: str) -> None:
        mark = self.next_mark() or self.refuse(EOF_VALUE)
        if mark != bracket:
            self.refuse_type(expected)
        self._at += 1

    def _inside(self, bracket: bytes, read: Callable[[], list[Any]]) -> list[Any]:
        """What stands in an open bracket, and its close. A refusal without a place gets the one behind the close."""
        try:
            values = read()
        except UnplacedRefusal as refusal:
            self._approach_close(bracket)
            self.refuse(str(refusal), 0)
        mark = self.next_mark() or self.refuse(_EOF[bracket])
        if mark != _CLOSE[bracket]:
            if mark == b"," and bracket == LIST:
                self._at += 1
                mark = self.next_mark()
                self.refuse("trailing comma" if mark == b"]" else "trailing characters")
            self.refuse("trailing comma" if mark == b"," else "trailing characters")
        self._at += 1
        return values

    def _approach_close(self, bracket: bytes) -> None:
        mark = self.next_mark()
        if mark == _CLOSE[bracket]:
            self._at += 1
        elif mark == b"," and bracket == LIST:
            self._at += 1
            self._space()

    def _another(self, bracket: bytes, *, first: bool) -> bool:
        """Is there another item or member? Stands on it then, else on the closing bracket."""
        mark = self.next_mark() or self.refuse(_EOF[bracket])
        if mark == _CLOSE[bracket]:
            return False
        if not first:
            if mark != b",":
                self.refuse(_COMMA_OR_CLOSE[bracket])
            self._at += 1
            mark = self.next_mark() or self.refuse(EOF_VALUE)
            if mark == _CLOSE[bracket]:
                self.refuse("trailing comma")
        if bracket == OBJECT and mark != QUOTE:
            self.refuse("key must be a string")
        return True

    def _tuple_items(self, read: Reader, size: int, expected: str) -> list[Any]:
        items: list[Any] = []
        while len(items) < size:
            if not self._another(LIST, first=not items):
                raise UnplacedRefusal(f"invalid length {len(items)}, expected {expected}")
            items.append(read(self))
        return items

    def _members_of_list(self, shape: Shape) -> list[Any]:
        values: list[Any] = []
        for place, member in enumerate(shape.members):
            if self._another(LIST, first=not place):
                values.append(member.read(self))
            elif member.list_default is REQUIRED:
                raise UnplacedRefusal(f"invalid length {place}, expected {shape.described}")
            else:
                values.append(member.list_default)
        return values

    def _members_of_object(self, shape: Shape) -> list[Any]:
        found: dict[int, Any] = {}
        first = True
        while self._another(OBJECT, first=first):
            first = False
            name = self._string()
            place = shape.places.get(name)
            if place is None:
                self._colon()
                self.skip()
                continue
            if place in found:
                raise UnplacedRefusal(f"duplicate field `{name}`")
            self._colon()
            found[place] = shape.members[place].read(self)
        for place, member in enumerate(shape.members):
            if found.setdefault(place, member.default) is REQUIRED:
                raise UnplacedRefusal(f"missing field `{member.name}`")
        return [found[place] for place in range(len(shape.members))]

    def _tag(self, known: Sequence[str]) -> str:
        tag = self._string()
        if tag not in known:
            listed = ", ".join(f"`{name}`" for name in known)
            self.refuse(f"unknown variant `{cut(tag)}`, expected one of {listed}", 0)
        return tag

    def _colon(self) -> None:
        mark = self.next_mark() or self.refuse(_EOF[OBJECT])
        if mark != b":":
            self.refuse("expected `:`")
        self._at += 1

    def _what_for_key(self, mark: bytes) -> str:
        if not mark:
            return _EOF[OBJECT]
        return BAD_VALUE if mark == b"}" else "key must be a string"

    def _another_to_skip(self, bracket: bytes, *, first: bool) -> bool:
        """As ``_another``, with the refusals of a value that nobody reads; passes over a member's name."""
        mark = self.next_mark() or self.refuse(_EOF[bracket])
        if mark == _CLOSE[bracket]:
            return False
        if not first:
            if mark != b",":
                self.refuse(_COMMA_OR_CLOSE[bracket])
            self._at += 1
        if bracket == OBJECT:
            mark = self.next_mark() or self.refuse(_EOF[OBJECT])
            if mark != QUOTE:
                self.refuse("key must be a string")
            self._at += 1
            self._text(keep=False)
            self._colon()
        return True


def read_document(data: bytes, read: Reader) -> Any:
    """One JSON document, of which ``read`` reads the value. Raises ``JsonRefusal``."""
    cursor = JsonCursor(data)
    value = read(cursor)
    cursor.end()
    return value
