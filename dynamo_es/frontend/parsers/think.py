"""Reasoning between two marks, ``<think>...</think>``: most families, each with its own marks.

Marks count in prose only: within a call's arguments they are text.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.frontend.parsers.tape import Markers, Step, Tape


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a format.

    Attributes:
        opens, closes: Around thoughts; all spellings.
        stops: Marks of calls that end a thought without its own mark; they are prose.
        label: Comes right after an opening mark and is no text.
        once: Only the first thought counts, and a closing mark in prose is text; otherwise that goes.
    """

    opens: tuple[str, ...] = ("<think>",)
    closes: tuple[str, ...] = ("</think>",)
    stops: tuple[str, ...] = ()
    label: str = ""
    once: bool = False


class MarkedThoughts:
    """Thoughts of one choice; the ``Thoughts`` of its tape.

    Args:
        marks: Of the format.
        interrupts: Marks of calls that end a thought which the prompt or the model's habit began, not a mark.
    """

    __slots__ = ("_after_mark", "_implicit", "_marks", "in_prose")

    def __init__(self, marks: Marks, interrupts: tuple[str, ...] = ()) -> None:
        self._marks = marks
        self._after_mark = Markers(*marks.closes, *marks.stops)
        self._implicit = Markers(*marks.closes, *marks.stops, *interrupts)
        self.in_prose = marks.opens if marks.once else (*marks.opens, *marks.closes)

    def begin(self, tape: Tape, *, thinking: bool, bound: bool) -> Step[None]:
        """Read what comes before prose.

        Args:
            thinking: The text begins within a thought.
            bound: The text after thoughts is bound to be JSON. Whether an engine lets the model think before it can
                be seen from the first character only; and a thought may come where none was expected.
        """
        look = tape.look()
        first = yield from look.spaces()
        marked = yield from look.one_of(self._marks.opens)
        if thinking and (marked is not None or not bound or first not in ("{", "[", '"')):
            if marked is not None:
                yield from look.literal(self._marks.label)
                look.commit()
            yield from self._read(tape, self._after_mark if marked is not None else self._implicit)
        elif marked is not None:
            spaces = tape.take(look.at - len(marked))
            if not bound:
                tape.content(spaces)
            yield from self.meet(tape, marked)

    def meet(self, tape: Tape, marker: str) -> Step[None]:
        """A mark in prose, where the tape stands."""
        look = tape.look()
        look.at = len(marker)
        if marker in self._marks.opens:
            yield from look.literal(self._marks.label)
            look.commit()
            yield from self._read(tape, self._after_mark)
            if self._marks.once:
                self.in_prose = ()
        else:
            look.commit()

    def _read(self, tape: Tape, ends: Markers) -> Step[None]:
        marker = yield from tape.flow(ends, tape.reasoning)
        if marker in self._marks.closes:
            tape.take(len(marker or ""))
