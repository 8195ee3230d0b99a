"""The tape that parsers read, and the machine that runs them.

A parser is a generator that yields while it waits for text. It reads only through the primitives here, all of which
wait until what they are asked for is decided by the text itself; so its events, put together, cannot depend on how
the text was cut into chunks (a deterministic reader of one stream, as in a Kahn network).

Bounds: at most ``MAX_UNDECIDED`` characters are looked at ahead of a decision (is this a call, and of what?). Beyond
it the answer is no, and the text is content. What is decided is handed on at once and not kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

from dynamo_es.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning

T = TypeVar("T")
Step = Generator[None, None, T]
"""A part of a parser: yields while it needs more text, returns its result."""
Emit = Callable[[str], None]

MAX_UNDECIDED = 64 * 1024
"""Characters that a parser may hold while it cannot tell what they are."""
SPACES = " \t\r\n"


class Markers:
    """Literal strings to look for. The one that begins first wins; of two that begin together, the longer."""

    __slots__ = ("_firsts", "_longest", "_search", "texts")

    def __init__(self, *texts: str) -> None:
        self.texts = tuple(sorted(set(texts), key=len, reverse=True))
        self._search = re.compile("|".join(map(re.escape, self.texts))).search
        self._longest = len(self.texts[0])
        self._firsts = sorted({text[0] for text in texts})

    def find(self, text: str, start: int, *, ended: bool) -> tuple[int, str | None]:
        """The first marker of ``text[start:]``.

        Returns:
            Where it begins, and the marker. Without one: where the text begins that may become one (the text's end,
            if none may), and None.
        """
        match = self._search(text, start)
        found = len(text) if match is None else match.start()
        if not ended:
            possible = self._possible(text, start, found)
            if possible <= found and possible < len(text):
                return possible, None
        return (found, None) if match is None else (found, match.group())

    def _possible(self, text: str, start: int, before: int) -> int:
        """Where the end of ``text`` is a proper beginning of a marker; leftmost place."""
        low = max(start, len(text) - self._longest + 1)
        best = len(text)
        for first in self._firsts:
            place = text.find(first, low, min(best, before + 1))
            while place >= 0:
                tail = text[place:]
                if any(len(marker) > len(tail) and marker.startswith(tail) for marker in self.texts):
                    best = place
                    break
                place = text.find(first, place + 1, min(best, before + 1))
        return best


class Thoughts(Protocol):
    """Marks of thoughts in prose."""

    @property
    def in_prose(self) -> tuple[str, ...]:
        """The marks that count now."""

    def meet(self, tape: Tape, marker: str) -> Step[None]:
        """Read on from a mark, where the tape stands, to the next prose."""


class Tape:
    """Text of one choice, and what was found in it.

    Attributes:
        thoughts: Marks of thoughts that may come in prose, or None.
    """

    __slots__ = ("_prose", "ended", "events", "pos", "text", "thoughts")

    def __init__(self) -> None:
        self.text = ""
        self.pos = 0
        self.ended = False
        self.events: list[Event] = []
        self.thoughts: Thoughts | None = None
        self._prose: dict[tuple[str, ...], Markers] = {}

    # -- what was found --------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        """Text for the reader."""
        if text:
            self.events.append(Content(text))

    def reasoning(self, text: str) -> None:
        """A thought."""
        if text:
            self.events.append(Reasoning(text))

    def call(self, name: str, call_id: str | None = None) -> None:
        """A call begins."""
        self.events.append(CallStart(name, call_id))

    def arguments(self, text: str) -> None:
        """More of the call's arguments."""
        if text:
            self.events.append(Arguments(text))

    # -- reading ---------------------------------------------------------------------------------------------------

    def drain(self, emit: Emit) -> Step[None]:
        """Hand all of the text to ``emit``."""
        while (yield from self.more()):
            emit(self.take(len(self.text) - self.pos))

    def take(self, count: int) -> str:
        """Move on over text that is there, and return it."""
        start, self.pos = self.pos, self.pos + count
        return self.text[start : self.pos]

    def more(self) -> Step[bool]:
        """Wait until there is text; False at the end."""
        while self.pos >= len(self.text):
            if self.ended:
                return False
            yield
        return True

    def flow(self, markers: Markers, emit: Emit) -> Step[str | None]:
        """Hand text to ``emit`` as it comes, up to the next marker, which is returned and not consumed.

        Returns:
            The marker; None if the text ended before one.
        """
        while True:
            place, marker = markers.find(self.text, self.pos, ended=self.ended)
            if place > self.pos:
                emit(self.take(place - self.pos))
            if marker is not None:
                return marker
            if self.ended:
                return None
            yield

    def prose(self, starts: Markers | None) -> Step[str | None]:
        """Content and thoughts up to the next of ``starts``, which is returned and not consumed; None at the end.

        Grammars read with it what is no part of a call.
        """
        while True:
            thoughts = self.thoughts
            in_prose = () if thoughts is None else thoughts.in_prose
            own = () if starts is None else starts.texts
            if not in_prose and starts is None:
                yield from self.drain(self.content)
                return None
            markers = starts if not in_prose and starts is not None else self._both(own, in_prose)
            marker = yield from self.flow(markers, self.content)
            if marker is None or marker in own or thoughts is None:
                return marker
            yield from thoughts.meet(self, marker)

    def _both(self, starts: tuple[str, ...], marks: tuple[str, ...]) -> Markers:
        texts = (*starts, *marks)
        found = self._prose.get(texts)
        if found is None:
            found = self._prose[texts] = Markers(*texts)
        return found

    def look(self) -> Look:
        """Begin to look ahead."""
        return Look(self)


class Look:
    """Looks ahead of a tape's position; nothing is consumed before ``commit``.

    What it reads ends at the text's end and at ``MAX_UNDECIDED`` characters alike.
    """

    __slots__ = ("at", "tape")

    def __init__(self, tape: Tape, at: int = 0) -> None:
        self.tape = tape
        self.at = at

    @property
    def at_end(self) -> bool:
        """Whether the text is over and all of it was looked at."""
        return self.tape.ended and self.tape.pos + self.at >= len(self.tape.text)

    def commit(self) -> None:
        """Consume what was looked at."""
        self.tape.pos += self.at
        self.at = 0

    def peek(self) -> Step[str]:
        """The next character; empty at the end."""
        tape = self.tape
        while True:
            if self.at >= MAX_UNDECIDED:
                return ""
            place = tape.pos + self.at
            if place < len(tape.text):
                return tape.text[place]
            if tape.ended:
                return ""
            yield

    def spaces(self) -> Step[str]:
        """Skip white space; returns the character after it (empty at the end)."""
        while True:
            char = yield from self.peek()
            if char not in SPACES or not char:
                return char
            self.at += 1

    def literal(self, text: str) -> Step[bool]:
        """Skip ``text`` if it comes next."""
        for place, expected in enumerate(text):
            char = yield from Look(self.tape, self.at + place).peek()
            if char != expected:
                return False
        self.at += len(text)
        return True

    def one_of(self, markers: Sequence[str]) -> Step[str | None]:
        """Skip the marker that comes next, and return it. Longer ones must come first in ``markers``."""
        for marker in markers:
            if (yield from self.literal(marker)):
                return marker
        return None

    def until(self, markers: Markers, limit: int = MAX_UNDECIDED) -> Step[tuple[str, str] | None]:
        """Text up to the next marker, and the marker; both are passed. None if none comes within ``limit``."""
        tape = self.tape
        scanned = self.at
        while True:
            place, marker = markers.find(tape.text, tape.pos + scanned, ended=tape.ended)
            length = place - tape.pos - self.at
            if length > limit:
                return None
            if marker is not None:
                start = tape.pos + self.at
                self.at += length + len(marker)
                return tape.text[start:place], marker
            if tape.ended:
                return None
            scanned = place - tape.pos
            yield

    def word(self, allowed: Callable[[str], bool], limit: int = 256) -> Step[str]:
        """The longest run of allowed characters, at most ``limit``."""
        start = self.at
        while self.at - start < limit:
            char = yield from self.peek()
            if not char or not allowed(char):
                break
            self.at += 1
        return self.tape.text[self.tape.pos + start : self.tape.pos + self.at]


Grammar = Callable[[Tape], Step[None]]


class Machine:
    """Runs one grammar over one choice's text. A ``Parser``."""

    __slots__ = ("_run", "_tape")

    def __init__(self, grammar: Grammar) -> None:
        self._tape = Tape()
        self._run: Step[None] | None = grammar(self._tape)

    @property
    def idle(self) -> bool:
        """Nothing is held back."""
        return self._tape.pos >= len(self._tape.text)

    def feed(self, text: str) -> list[Event]:
        tape = self._tape
        if tape.ended or not text:
            return []
        tape.text = tape.text[tape.pos :] + text if tape.pos < len(tape.text) else text
        tape.pos = 0
        return self._advance()

    def finish(self) -> list[Event]:
        if self._tape.ended:
            return []
        self._tape.ended = True
        return self._advance()

    def _advance(self) -> list[Event]:
        tape = self._tape
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None
        if self._run is None and tape.pos < len(tape.text):
            tape.content(tape.take(len(tape.text) - tape.pos))
        events, tape.events = tape.events, []
        return events
