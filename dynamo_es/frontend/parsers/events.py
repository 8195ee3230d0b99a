"""What parsers find in a choice's text."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the client's reader."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thoughts."""

    text: str


class CallStart(NamedTuple):
    """A call begins; its arguments follow as ``Arguments`` until the next ``CallStart``.

    Attributes:
        name: Function, as the model wrote it; it need not be one of the request's.
        id: The model's own id of the call, or None.
    """

    name: str
    id: str | None = None


class Arguments(NamedTuple):
    """A fragment of the JSON text of the latest call's arguments, never empty."""

    text: str


Event = Content | Reasoning | CallStart | Arguments


class Parser(Protocol):
    """Reads one choice's text. Not to be shared between choices."""

    def feed(self, text: str) -> list[Event]:
        """What more text makes known. Text that may still become a marker is held back."""

    def finish(self) -> list[Event]:
        """The text is over: what was held back. Empty when called again."""
