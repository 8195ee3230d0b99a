"""Frames on their way from an engine's passes to the consumers of its requests. All on one event loop.

After each pass the frames of all requests are in their streams before any consumer runs, so a transport can send them
in one message. A stream holds at most one frame a token, and the last one.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dynamo_es.engines.scheduling.request import EngineRequest
from dynamo_es.errors import DynamoException, EngineShutdown, InvalidArgument

Frame = dict[str, Any]
MAX_CHOICES = 128


class RequestContext(Protocol):
    """What an engine asks of a request's context."""

    def is_stopped(self) -> bool:
        """The caller wants no more."""


class FrameStream:
    """Frames of one request's choices. Made on the loop on which it is used."""

    __slots__ = ("_loop", "choices", "context", "error", "frames", "open", "rank", "waiter")

    def __init__(self, choices: Sequence[EngineRequest], rank: int, context: RequestContext | None) -> None:
        # Asked for once: each time costs a system call (getpid), and a token is not much more.
        self._loop = asyncio.get_running_loop()
        self.choices = choices
        self.open = len(choices)
        self.rank = rank
        self.context = context
        self.frames: list[Frame] = []
        self.error: DynamoException | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """No frame will follow."""
        return self.open == 0

    @property
    def stopped(self) -> bool:
        """Its caller wants no more."""
        return self.context is not None and self.context.is_stopped()

    async def take(self) -> list[Frame]:
        """The frames that are there; waits for one, or for the end."""
        if not self.frames and not self.ended:
            self.waiter = self._loop.create_future()
            await self.waiter
        frames, self.frames = self.frames, []
        return frames

    def wake(self) -> None:
        """Its consumer runs when the loop comes to it."""
        waiter = self.waiter
        if waiter is not None:
            self.waiter = None
            if not waiter.done():
                waiter.set_result(None)


class _Place(NamedTuple):
    """Where a choice's frames go. ``choice``: its index; None if the request has one choice only."""

    stream: FrameStream
    choice: int | None


class OpenStreams:
    """The streams of an engine's open requests: ``open``, then ``push`` and ``end`` for each choice, or ``abort``."""

    def __init__(self, on_abort: Callable[[int, Sequence[EngineRequest]], None]) -> None:
        """``on_abort`` is told the rank and the choices that were not over, and ends them in the scheduler."""
        self._on_abort = on_abort
        self._places: dict[EngineRequest, _Place] = {}
        self._left: list[asyncio.Future[None]] = []

    def open(self, stream: FrameStream) -> None:
        """Its choices are in the scheduler."""
        several = len(stream.choices) > 1
        for index, choice in enumerate(stream.choices):
            self._places[choice] = _Place(stream, index if several else None)

    def of(self, request: EngineRequest) -> FrameStream:
        """The stream of an open choice."""
        return self._places[request].stream

    def push(self, request: EngineRequest, frame: Frame) -> None:
        """One more frame of an open choice."""
        stream, choice = self._places[request]
        if choice is not None:
            frame["index"] = choice
        stream.frames.append(frame)

    def end(self, request: EngineRequest) -> None:
        """A choice is over."""
        self._places.pop(request).stream.open -= 1
        self._wake_waiting()

    def abort(self, stream: FrameStream) -> None:
        """End a stream with no further frame. Idempotent."""
        stream.open = 0
        aborted = [choice for choice in stream.choices if self._places.pop(choice, None) is not None]
        if aborted:
            self._on_abort(stream.rank, aborted)
            self._wake_waiting()

    def drop_stopped(self) -> None:
        """Abort the streams whose callers want no more."""
        for stream in [place.stream for place in self._places.values() if place.stream.stopped]:
            self.abort(stream)
            stream.wake()

    async def finish_adapter(self, lora_name: str, timeout_s: float, late: DynamoException) -> None:
        """Wait until no request of an adapter is open; after ``timeout_s`` the rest end with ``late``.

        The caller sees to it that no further ones come.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._of_adapter(lora_name):
                    left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._left.append(left)
                    await left
        except TimeoutError:
            for stream in self._of_adapter(lora_name):
                stream.error = late
                self.abort(stream)
                stream.wake()

    def _of_adapter(self, lora_name: str) -> set[FrameStream]:
        open_ones = self._places.items()
        return {place.stream for request, place in open_ones if request.lora_name == lora_name and place.stream.open}

    def _wake_waiting(self) -> None:
        left, self._left = self._left, []
        for future in left:
            if not future.done():
                future.set_result(None)

    def fail(self, reason: str) -> None:
        """End every stream with ``EngineShutdown``."""
        for stream in {place.stream for place in self._places.values()}:
            stream.error = EngineShutdown(reason)
            stream.open = 0
            stream.wake()
        self._wake_waiting()


def read_prompt(request: Mapping[str, Any]) -> array[int]:
    """The prompt of a preprocessed request. Raises ``InvalidArgument``."""
    try:
        return array("I", request["token_ids"])
    except (KeyError, TypeError, OverflowError) as error:
        raise InvalidArgument("token_ids must be a list of token ids, each a u32") from error


def read_choice_count(request: Mapping[str, Any]) -> int:
    """How many choices it wants. Raises ``InvalidArgument``."""
    return checked_choice_count((request.get("sampling_options") or {}).get("n"))


def checked_choice_count(count: Any) -> int:
    """``n`` of a request; None: 1. Callers of the request plane may send anything. Raises ``InvalidArgument``."""
    if count is None:
        return 1
    if type(count) is not int or not 1 <= count <= MAX_CHOICES:
        raise InvalidArgument(f"n must be 1 to {MAX_CHOICES}, it is {str(count)[:32]}")
    return count


def usage_of(request: EngineRequest, stream: FrameStream) -> dict[str, Any]:
    """``completion_usage``. The prompt counts as cached as its first choice found it: the others find that one's."""
    generated = request.generated
    return {
        "prompt_tokens": request.prompt_length,
        "completion_tokens": generated,
        "total_tokens": request.prompt_length + generated,
        "prompt_tokens_details": {"audio_tokens": None, "cached_tokens": stream.choices[0].cached_tokens},
    }
