"""Frontend processes that share a port (``--workers``) ask each other for what one alone cannot answer.

A request to the port reaches any of them, so each can give the metrics of all, and tells the others of thresholds that
an operator sets. They talk over Unix sockets in a folder that only their user can open; the process that supervises
them makes it. One question a connection: a length (four bytes, big-endian) and msgpack, answered by a length and bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from dynamo_es.frontend.contracts import ModelDirectory
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.metrics_pages import merge_pages
from dynamo_es.router.overload import BusyThresholds

logger = logging.getLogger(__name__)

_DEADLINE_S = 2.0
"""For one question, so that a process that hangs costs a scrape no more than that."""
_MAX_QUESTION = 65_536
_MAX_ANSWER = 64 * 1024 * 1024
_LENGTH = 4


class MetricsAsked(msgspec.Struct, frozen=True, tag=True):
    """Asks for the process's own metrics page."""


class ThresholdsAsked(msgspec.Struct, frozen=True, tag=True):
    """Asks for the thresholds of its models: a map of names to ``BusyThresholds``, in msgpack."""


class ThresholdsSet(msgspec.Struct, frozen=True, tag=True):
    """Tells of a model's thresholds; answered with nothing."""

    model: str
    thresholds: BusyThresholds


Question = MetricsAsked | ThresholdsAsked | ThresholdsSet
Answer = Callable[[Question], bytes]
_QUESTIONS = msgspec.msgpack.Decoder(Question)
_THRESHOLDS = msgspec.msgpack.Decoder(dict[str, BusyThresholds])


class Siblings:
    """One process's end. ``start`` once, ``close`` at the end; belongs to one event loop.

    Attributes:
        index: Of this process, from 0.
        count: How many there are.
    """

    def __init__(self, folder: Path, index: int, count: int) -> None:
        """``folder``: where their sockets are; at most about 90 bytes long (a bound of Unix sockets)."""
        self.index = index
        self.count = count
        self._folder = folder
        self._server: asyncio.Server | None = None
        self._answer: Answer = lambda question: b""

    async def start(self, answer: Answer) -> None:
        """Answer the others with ``answer``, which must not block. A socket that a dead process left is replaced."""
        self._answer = answer
        path = self._path(self.index)
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, path)

    def answer_with(self, answer: Answer) -> None:
        """From now on, answer with this."""
        self._answer = answer

    async def ask(self, question: Question) -> Mapping[int, bytes]:
        """Answers of the others, by index; those that are away or do not answer in time are missing."""
        others = [index for index in range(self.count) if index != self.index]
        told = await asyncio.gather(*(self._ask(index, question) for index in others))
        return {index: one for index, one in zip(others, told, strict=True) if one is not None}

    async def thresholds(self) -> Mapping[str, BusyThresholds]:
        """Those of the first other process that knows any, so that a process that starts late agrees with it."""
        answers = await self.ask(ThresholdsAsked())
        return next((known for index in sorted(answers) if (known := _THRESHOLDS.decode(answers[index]))), {})

    async def close(self) -> None:
        """Answer nobody any more. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._path(self.index).unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"{index}.sock"

    async def _ask(self, index: int, question: Question) -> bytes | None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                reader, writer = await asyncio.open_unix_connection(self._path(index))
                try:
                    writer.write(_framed(msgspec.msgpack.encode(question)))
                    return await _read(reader, _MAX_ANSWER)
                finally:
                    await _close(writer)
        except (OSError, EOFError, TimeoutError) as error:
            logger.debug("frontend process %d does not answer: %s", index, error or type(error).__name__)
            return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                question = _QUESTIONS.decode(await _read(reader, _MAX_QUESTION))
                writer.write(_framed(self._answer(question)))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, msgspec.MsgspecError) as error:
            logger.debug("a question of another frontend process failed: %s", error or type(error).__name__)
        finally:
            await _close(writer)


async def page_of_all(siblings: Siblings | None, own: bytes) -> bytes:
    """The metrics page to show: this process's own, or that of all that answer."""
    if siblings is None:
        return own
    pages = {siblings.index: own, **await siblings.ask(MetricsAsked())}
    return merge_pages({index: page.decode() for index, page in pages.items()}).encode()


def answers_of(metrics: FrontendMetrics, directory: ModelDirectory | None) -> Answer:
    """How a process answers the others; while it is starting it has no ``directory``."""

    def answer(question: Question) -> bytes:
        if isinstance(question, MetricsAsked):
            return metrics.text()
        known = {} if directory is None else directory.thresholds()
        if isinstance(question, ThresholdsAsked):
            return msgspec.msgpack.encode(known)
        if directory is not None and question.model in known:
            directory.set_thresholds(question.model, question.thresholds)
        return b""

    return answer


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH, "big") + body


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    size = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    if size > limit:
        raise OSError(f"{size} bytes are more than the limit of {limit}")
    return await reader.readexactly(size)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
