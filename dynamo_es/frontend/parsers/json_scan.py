"""Finds the end of a JSON value in text that comes in pieces. Pure; time in proportion to the text.

It exists because the pieces of a call's arguments are handed on as the model writes them: a parser of partial JSON
would read the whole value again for each piece, and tells values, not where their text ends.
"""

from __future__ import annotations

import json
import re

MAX_DEPTH = 512
"""Nesting beyond it counts as malformed."""
_MAX_SCALAR = 4096
_SPACES = frozenset(" \t\r\n")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_SCALAR = re.compile(r"(?:true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?)\Z")
_ESCAPES = frozenset('"\\/bfnrtu')

_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _AFTER, _STRING, _ESCAPE, _WORD = range(9)


class JsonScanner:
    """Reads one value. ``done``: it is complete. ``bad``: what comes is no JSON.

    What models get wrong within strings is mended on the way: raw control characters are escaped, and the backslash
    of an escape that JSON does not know is doubled (a regular expression's ``\\d``).
    """

    __slots__ = ("_is_key", "_stack", "_state", "_word", "bad", "done")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state = _VALUE
        self._is_key = False
        self._word = ""
        self.done = False
        self.bad = False

    def scan(self, text: str, start: int) -> tuple[int, str]:
        """Read on from ``start``.

        Returns:
            Where reading stopped: the text's end, the end of the value (``done``), or what is no JSON (``bad``); and
            the text of the value so far, mended.
        """
        parts: list[str] = []
        mark = place = start
        size = len(text)
        while place < size and not self.done and not self.bad:
            if self._state == _STRING:
                match = _PLAIN.match(text, place)
                if match is not None:
                    place = match.end()
                    continue
            char = text[place]
            added = self._step(char)
            if added is None:
                place += 1
            elif added == "":
                continue  # the character ended a word and is read again, or it is bad, or lies after the value
            else:
                parts.append(text[mark:place])
                parts.append(added)
                place += 1
                mark = place
        parts.append(text[mark:place])
        return place, "".join(parts)

    def finish(self) -> None:
        """The text is over: a number at top level is complete, anything else that is not ``done`` is not."""
        if self._state == _WORD and not self._stack:
            self._end_word()

    def _step(self, char: str) -> str | None:  # noqa: PLR0911 - one for each state
        """None: the character stands as it is. Empty: it is not consumed. Else: what stands for it."""
        state = self._state
        if state == _STRING:
            return self._in_string(char)
        if state == _ESCAPE:
            self._state = _STRING
            if char in _ESCAPES:
                return None
            return "\\" + (self._in_string(char) or char)
        if state == _WORD:
            if char in _SCALAR_CHARS and len(self._word) < _MAX_SCALAR:
                self._word += char
                return None
            self._end_word()
            return ""
        if char in _SPACES:
            return None
        return None if self._structure(state, char) else ""

    def _in_string(self, char: str) -> str | None:
        if char == '"':
            if self._is_key:
                self._state = _COLON
            else:
                self._after()
        elif char == "\\":
            self._state = _ESCAPE
        elif char < " ":
            return json.dumps(char)[1:-1]
        return None

    def _structure(self, state: int, char: str) -> bool:
        if state in (_VALUE, _FIRST_ITEM):
            return self._value(state, char)
        if state in (_FIRST_KEY, _KEY):
            if char == '"':
                self._state, self._is_key = _STRING, True
                return True
            return self._close(char) if state == _FIRST_KEY else self._fail()
        if state == _COLON:
            self._state = _VALUE
            return char == ":" or self._fail()
        if char == ",":
            self._state = _KEY if self._stack[-1] == "{" else _VALUE
            return True
        return self._close(char)

    def _value(self, state: int, char: str) -> bool:
        if char == '"':
            self._state, self._is_key = _STRING, False
        elif char in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return self._fail()
            self._stack.append(char)
            self._state = _FIRST_KEY if char == "{" else _FIRST_ITEM
        elif char in _SCALAR_CHARS:
            self._state, self._word = _WORD, char
        elif state == _FIRST_ITEM:
            return self._close(char)
        else:
            return self._fail()
        return True

    def _close(self, char: str) -> bool:
        if not self._stack or char != ("}" if self._stack[-1] == "{" else "]"):
            return self._fail()
        self._stack.pop()
        self._after()
        return True

    def _end_word(self) -> None:
        if _SCALAR.match(self._word):
            self._after()
        else:
            self._fail()

    def _after(self) -> None:
        self._state = _AFTER
        self.done = not self._stack

    def _fail(self) -> bool:
        self.bad = True
        return False
