"""Output of a request that demands a call (``tool_choice`` required or a function's name): JSON without markers.

An output that is no such JSON is in the model's own format, or text: not every engine binds its model to a schema.
"""

from __future__ import annotations

from dynamo_es.frontend.parsers.json_calls import MARKED, bare_calls
from dynamo_es.frontend.parsers.tape import Grammar, Step, Tape


def required(tape: Tape, native: Grammar | None) -> Step[None]:
    """A list of ``{"name", "parameters"}``, or one of them."""
    if (yield from bare_calls(tape, MARKED)):
        look = tape.look()
        yield from look.spaces()
        if look.at_end:
            look.commit()
    yield from _otherwise(tape, native)


def named(tape: Tape, name: str, native: Grammar | None) -> Step[None]:
    """From its brace on, the whole output is the arguments of a call of ``name``, as it stands."""
    look = tape.look()
    if (yield from look.spaces()) != "{":
        yield from _otherwise(tape, native)
        return
    look.commit()
    tape.call(name)
    yield from tape.drain(tape.arguments)


def _otherwise(tape: Tape, native: Grammar | None) -> Step[None]:
    yield from tape.prose(None) if native is None else native(tape)
