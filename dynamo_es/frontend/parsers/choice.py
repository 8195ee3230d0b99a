"""From a request and its model's formats to the parser of each choice."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo_es.frontend.parsers.events import Arguments, CallStart, Content, Event, Reasoning
from dynamo_es.frontend.parsers.forced import named, required
from dynamo_es.frontend.parsers.registry import ChannelFormat, ReasoningFormat, ToolFormat
from dynamo_es.frontend.parsers.schema import ToolSchemas
from dynamo_es.frontend.parsers.shield import BREAK
from dynamo_es.frontend.parsers.tape import Grammar, Machine, Step, Tape
from dynamo_es.frontend.parsers.think import MarkedThoughts

Choice = Literal["none", "auto", "required", "named"]
_SURROGATE = re.compile("[\ud800-\udfff]")


class CallDelta(NamedTuple):
    """What one call gained.

    Attributes:
        call: Number of the call within its choice.
        id, name: Of a call that begins here; None later.
        arguments: Fragment of the JSON text.
    """

    call: int
    id: str | None
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """What text of a choice turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[CallDelta] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True)
class Parsing:
    """How a request's output is to be read. Shared by its choices.

    Attributes:
        reasoning: Format of thoughts, or None.
        tools: Format of calls, or None; without one only a forced call is read.
        choice: The request's ``tool_choice``; ``none`` also without tools.
        function: The function that it names.
        schemas: The request's functions.
        thinking: The output begins within a thought.
        bound: What comes after thoughts is bound to be JSON (a forced call, a response format).
        single: Only the first call counts (``parallel_tool_calls`` false).
        specials: Text of the special tokens that the formats need, by id.
    """

    reasoning: ReasoningFormat | ChannelFormat | None = None
    tools: ToolFormat | ChannelFormat | None = None
    choice: Choice = "none"
    function: str = ""
    schemas: ToolSchemas = field(default_factory=lambda: ToolSchemas({}))
    thinking: bool = False
    bound: bool = False
    single: bool = False
    specials: Mapping[int, str] = field(default_factory=dict)

    @property
    def reads_calls(self) -> bool:
        """Whether calls are looked for."""
        return self.choice in ("required", "named") or (self.choice == "auto" and self.tools is not None)

    def parser(self, new_call_id: Callable[[], str]) -> ChoiceParser:
        """The parser of one choice."""
        return ChoiceParser(self, [Machine(grammar) for grammar in self._stages()], new_call_id)

    def _stages(self) -> list[Grammar]:
        """Grammars in order: a next one reads what the one before makes content. One does, but for odd pairs."""
        reasoning, tools = self.reasoning, self.tools if self.reads_calls else None
        if isinstance(reasoning, ChannelFormat):
            together = tools is None or tools is reasoning
            channels = self._channels(reasoning, tools=tools is not None)
            if together:
                return [self._with_choice(channels)]
            return [self._channels(reasoning, tools=False), self._calls(tools)]
        if isinstance(tools, ChannelFormat) and reasoning is not None:
            return [self._thoughts(reasoning, _only_prose), self._calls(tools)]
        after = self._calls(tools) if self.reads_calls else _only_prose
        return [after if reasoning is None else self._thoughts(reasoning, after)]

    def _channels(self, channels: ChannelFormat, *, tools: bool) -> Grammar:
        told_apart = self.reasoning is channels
        return lambda tape: channels.grammar(tape, told_apart, tools, self.thinking)

    def _thoughts(self, reasoning: ReasoningFormat, after: Grammar) -> Grammar:
        reads = self.reads_calls and isinstance(self.tools, ToolFormat)
        interrupts = self.tools.interrupts if reads and isinstance(self.tools, ToolFormat) else ()

        def grammar(tape: Tape) -> Step[None]:
            tape.thoughts = thoughts = MarkedThoughts(reasoning.marks, interrupts)
            yield from thoughts.begin(tape, thinking=self.thinking, bound=self.bound)
            yield from after(tape)

        return grammar

    def _calls(self, tools: ToolFormat | ChannelFormat | None) -> Grammar:
        if tools is None:
            return self._with_choice(None)
        if isinstance(tools, ChannelFormat):
            return self._with_choice(self._channels(tools, tools=True))
        read = tools.grammar
        return self._with_choice(lambda tape: read(tape, self.schemas))

    def _with_choice(self, native: Grammar | None) -> Grammar:
        if self.choice == "required":
            return lambda tape: required(tape, native)
        if self.choice == "named":
            return lambda tape: named(tape, self.function, native)
        return native or _only_prose


def _only_prose(tape: Tape) -> Step[None]:
    yield from tape.prose(None)


class ChoiceParser:
    """Reads one choice: the text goes through the stages in order, what a stage makes content is the next one's text.

    ``called``: a call was found.
    """

    __slots__ = ("_count", "_machines", "_new_call_id", "_single", "called")

    def __init__(self, parsing: Parsing, machines: list[Machine], new_call_id: Callable[[], str]) -> None:
        self._machines = machines
        self._new_call_id = new_call_id
        self._single = parsing.single
        self._count = 0
        self.called = False

    @property
    def idle(self) -> bool:
        """Nothing is held back."""
        return all(machine.idle for machine in self._machines)

    def feed(self, text: str, *, over: bool = False) -> Parsed:
        """What more text makes known; ``over``: it is the last, and what was held back is told too.

        Text after the last is ignored.
        """
        events = self._through(0, text) if text else []
        if over:
            for place, machine in enumerate(self._machines):
                for event in machine.finish():
                    events.extend(self._onward(place, event))
        return self._collect(events)

    def _through(self, place: int, text: str) -> list[Event]:
        if place == len(self._machines):
            return [Content(text)] if text else []
        events: list[Event] = []
        for event in self._machines[place].feed(text):
            events.extend(self._onward(place, event))
        return events

    def _onward(self, place: int, event: Event) -> list[Event]:
        return self._through(place + 1, event.text) if isinstance(event, Content) else [event]

    def _collect(self, events: list[Event]) -> Parsed:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[CallDelta] = []
        for event in events:
            if isinstance(event, Content):
                content.append(_unbroken(event.text))
            elif isinstance(event, Reasoning):
                reasoning.append(_unbroken(event.text))
            elif isinstance(event, CallStart):
                self._count += 1
                self.called = True
                if not self._dropped:
                    call_id = event.id or self._new_call_id()
                    calls.append(CallDelta(self._count - 1, _unbroken(call_id), _unbroken(event.name), ""))
            elif not self._dropped:
                self._add(calls, event)
        return Parsed("".join(content), "".join(reasoning), calls)

    @property
    def _dropped(self) -> bool:
        return self._single and self._count > 1

    def _add(self, calls: list[CallDelta], event: Arguments) -> None:
        index, text = self._count - 1, _unbroken(event.text)
        if calls and calls[-1].call == index:
            calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
        else:
            calls.append(CallDelta(index, None, None, text))


def _unbroken(text: str) -> str:
    """Text as a client gets it; half a surrogate pair, which an escape in JSON can name, is no text."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text.replace(BREAK, ""))
