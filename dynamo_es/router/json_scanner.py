"""The words of JSON: strings, numbers, names and white space, read and refused as serde_json does. Pure.

What is made of them is ``strict_json``'s. A refusal ends in ``at line L column C``: lines from 1, columns in bytes.
"""

from __future__ import annotations

import math
import re
from typing import NoReturn

LIST, OBJECT, QUOTE = b"[", b"{", b'"'
EOF_VALUE = "EOF while parsing a value"
BAD_VALUE = "expected value"
_BACKSLASH = b"\\"
_SPACE = re.compile(rb"[ \t\n\r]*")
_DIGITS = re.compile(rb"[0-9]*")
_PLAIN_TEXT = re.compile(rb'[^"\\\x00-\x1f]*')
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_ESCAPES = {b'"': b'"', _BACKSLASH: _BACKSLASH, b"/": b"/", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r",
            b"t": b"\t"}  # fmt: skip
_SHOWN_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}
_IDENTIFIERS = {b"n": b"null", b"t": b"true", b"f": b"false"}
_EOF_TEXT = "EOF while parsing a string"
_BAD_NUMBER = "invalid number"
_U64_LIMIT = 2**64
_I64_MIN = -(2**63)
_INTEGER_CHARS = 20
_SMALLEST_PLAIN_EXPONENT = -5
_SHOWN_CHARS = 256


class JsonRefusal(ValueError):
    """The bytes are not what was to be read; the text says why and where."""


class JsonScanner:
    """A place in a JSON text, and what a value of one word is there. All raise ``JsonRefusal``."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def next_mark(self) -> bytes:
        """The next byte that is no white space; empty at the end."""
        self._space()
        return self._mark()

    def refuse(self, what: str, read: int = 1) -> NoReturn:
        """Raise ``JsonRefusal``, placed ``read`` bytes further on."""
        offset = min(self._at + read, len(self._data))
        line_start = self._data.rfind(b"\n", 0, offset) + 1
        line = self._data.count(b"\n", 0, offset) + 1
        raise JsonRefusal(f"{what} at line {line} column {offset - line_start}")

    def _mark(self) -> bytes:
        return self._data[self._at : self._at + 1]

    def _space(self) -> None:
        match = _SPACE.match(self._data, self._at)
        assert match is not None
        self._at = match.end()

    def _string(self) -> str:
        """The string that begins here; its quote has been seen."""
        self._at += 1
        raw = self._text(keep=True)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse("invalid unicode code point", 0)

    def _identifier(self, name: bytes) -> None:
        self._at += 1
        for expected in name[1:]:
            mark = self._mark() or self.refuse(EOF_VALUE)
            self._at += 1
            if mark[0] != expected:
                self.refuse("expected ident", 0)

    def _describe(self, mark: bytes) -> str:
        """How a refusal calls the value that begins with ``mark``. Passes over it, unless it has brackets."""
        if mark in _IDENTIFIERS:
            name = _IDENTIFIERS[mark]
            self._identifier(name)
            return "null" if mark == b"n" else f"boolean `{name.decode()}`"
        if mark == b"-" or mark.isdigit():
            number = self._number()
            return show_float(number) if isinstance(number, float) else f"integer `{number}`"
        if mark == QUOTE:
            return f"string {show_text(self._string())}"
        if mark == LIST:
            return "sequence"
        if mark == OBJECT:
            return "map"
        self.refuse(BAD_VALUE)

    def _number(self) -> int | float:
        """The number that begins here. Integers beyond 64 bits, and -0, are floats."""
        literal, is_integer = self._number_literal(EOF_VALUE)
        if is_integer and literal != b"-0" and len(literal) <= _INTEGER_CHARS:
            value = int(literal)
            if _I64_MIN <= value < _U64_LIMIT:
                return value
        number = float(literal)
        if math.isinf(number):
            self.refuse("number out of range", 0)
        return number

    def _number_literal(self, at_end: str) -> tuple[bytes, bool]:
        """A number as it is written, and whether it is an integer. ``at_end``: the refusal if the text breaks off."""
        start = self._at
        is_integer = True
        if self._mark() == b"-":
            self._at += 1
        if self._mark() == b"0":
            self._at += 1
            if self._mark().isdigit():
                self.refuse(_BAD_NUMBER)
        else:
            self._digits(at_end)
        if self._mark() == b".":
            is_integer = False
            self._at += 1
            self._digits(at_end)
        if self._mark() in (b"e", b"E"):
            is_integer = False
            self._at += 1
            if self._mark() in (b"+", b"-"):
                self._at += 1
            self._digits(at_end)
        return self._data[start : self._at], is_integer

    def _digits(self, at_end: str) -> None:
        match = _DIGITS.match(self._data, self._at)
        assert match is not None
        if match.end() == self._at:
            self.refuse(_BAD_NUMBER if self._mark() else at_end)
        self._at = match.end()

    def _text(self, *, keep: bool) -> bytes:
        """The string whose quote has been read. What nobody keeps may hold lone surrogates and no UTF-8."""
        parts = []
        while True:
            match = _PLAIN_TEXT.match(self._data, self._at)
            assert match is not None
            parts.append(match.group())
            self._at = match.end()
            mark = self._mark() or self.refuse(_EOF_TEXT)
            if mark not in (QUOTE, _BACKSLASH):
                self.refuse("control character (\\u0000-\\u001F) found while parsing a string", int(keep))
            self._at += 1
            if mark == QUOTE:
                return b"".join(parts)
            parts.append(self._escape(keep=keep))

    def _escape(self, *, keep: bool) -> bytes:
        mark = self._mark() or self.refuse(_EOF_TEXT)
        self._at += 1
        if mark == b"u":
            unit = self._hex_unit()
            return self._code_point(unit).encode() if keep else b""
        if mark not in _ESCAPES:
            self.refuse("invalid escape", 0)
        return _ESCAPES[mark]

    def _hex_unit(self) -> int:
        digits = self._data[self._at : self._at + 4]
        self._at += len(digits)
        if len(digits) < 4:
            self.refuse(_EOF_TEXT)
        if not _HEX.match(digits):
            self.refuse("invalid escape", 0)
        return int(digits, 16)

    def _code_point(self, unit: int) -> str:
        """The character of an escape whose first unit has been read; reads the second one of a pair."""
        if 0xDC00 <= unit <= 0xDFFF:
            self.refuse("lone leading surrogate in hex escape", 0)
        if not 0xD800 <= unit <= 0xDBFF:
            return chr(unit)
        for expected in (_BACKSLASH, b"u"):
            mark = self._mark() or self.refuse(_EOF_TEXT)
            self._at += 1
            if mark != expected:
                self.refuse("unexpected end of hex escape", 0)
        second = self._hex_unit()
        if not 0xDC00 <= second <= 0xDFFF:
            self.refuse("lone leading surrogate in hex escape", 0)
        return chr(0x10000 + ((unit - 0xD800) << 10) + (second - 0xDC00))

    def _skip_scalar(self, mark: bytes) -> None:
        if mark in _IDENTIFIERS:
            self._identifier(_IDENTIFIERS[mark])
        elif mark == b"-" or mark.isdigit():
            self._number_literal(_BAD_NUMBER)
        elif mark == QUOTE:
            self._at += 1
            self._text(keep=False)
        else:
            self.refuse(BAD_VALUE)


def show_float(number: float) -> str:
    """How a refusal calls a float."""
    text = repr(number)
    mantissa, mark, exponent = text.partition("e")
    if mark:
        if int(exponent) == _SMALLEST_PLAIN_EXPONENT:
            text = f"{number:.{len(mantissa.lstrip('-').replace('.', '')) + 4}f}"
        else:
            text = f"{mantissa}e{int(exponent):+d}"
    return f"floating point `{text}`"


def show_text(text: str) -> str:
    """How a refusal calls a text: in quotes, with Rust's escapes, and only its beginning."""
    shown = "".join(
        _SHOWN_ESCAPES.get(char) or (char if char.isprintable() else f"\\u{{{ord(char):x}}}") for char in cut(text)
    )
    return f'"{shown}"'


def cut(text: str) -> str:
    """The beginning of a long text: what others send must not fill our messages."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
