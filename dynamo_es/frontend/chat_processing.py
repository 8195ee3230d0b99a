"""What a chat processor other than our own pipeline is to the frontend (``--dyn-chat-processor``). No I/O here.

One request: ``prepare`` once, then the worker request goes to a worker, and every frame of its answer goes to ``push``
of the output that ``open_output`` made, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dynamo_es.frontend.chat_choices import Choice


class Flush(NamedTuple):
    """What frames since the flush before came to.

    Attributes:
        choices: Choices of a chunk; may be empty.
        tokens: Tokens of those frames.
        over: All choices are over; nothing follows.
        cut: They are over and the worker does not know it yet: it is to be told.
        stop: The stop string that ended the output, or None.
    """

    choices: Sequence[Choice]
    tokens: int
    over: bool = False
    cut: bool = False
    stop: str | None = None


class ChatOutput(Protocol):
    """Reads one request's output. Belongs to one task; pure but for the libraries behind it."""

    def push(self, frame: Mapping[str, Any]) -> Flush | None:
        """Take a worker's frame. None: it waits for more, so that several are told at once."""

    def finish(self) -> Flush | None:
        """The stream ended; what is held back. None: nothing is."""


class ProcessedChat(NamedTuple):
    """A request that is ready.

    Attributes:
        worker_request: As ``preprocess.worker_request`` makes them; the worker's alone.
        open_output: Makes its output, once.
        media: Counts of the prompt's media by metric.
    """

    worker_request: dict[str, Any]
    open_output: Callable[[], ChatOutput]
    media: Mapping[str, int] = {}


class ChatProcessor(Protocol):
    """Prepares chat requests of one model and reads their output. Belongs to one event loop."""

    async def prepare(self, request: dict[str, Any]) -> ProcessedChat:
        """Check, render and tokenize; what takes long is done off the event loop.

        Args:
            request: The client's, as JSON without unset members. It may be changed.

        Raises:
            InvalidArgument: It cannot be served; the text is the client's.
            HttpError: The same, with a status.
            Unknown: Something went wrong; the text may quote the prompt.
        """

    def close(self) -> None:
        """Give back what is held; the model is gone. Requests that are being prepared may fail."""
