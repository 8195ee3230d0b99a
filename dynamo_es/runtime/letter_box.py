"""Reading the topic of dead letters: the newest that match, or some by their numbers (offsets)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass

from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Bounds, EventLog, LogReader, Record, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from schemas.codec import SchemaError, TopicCodec
from schemas.dead_letters import DEAD_LETTERS, DeadLetter

# Letters that are in memory at a time: each has up to 128 KiB.
_STRETCH = 64
_POLL_S = 1.0
_READ_TIMEOUT_S = 30.0
# The topic has one partition (schemas), so that a letter's number is its offset.
_PARTITION = 0


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Which letters. ``topic`` with or without its namespace; ``since_ms`` is by the letter's own time."""

    topic: str | None = None
    reason: str | None = None
    since_ms: int | None = None

    def takes(self, letter: DeadLetter | SchemaError, namespace: str) -> bool:
        """Does it let the letter through? What is no letter comes through where nothing is asked of letters."""
        if isinstance(letter, SchemaError):
            return self.topic is None and self.reason is None
        if self.topic is not None and letter.topic not in (self.topic, f"{namespace}.{self.topic}"):
            return False
        return self.reason is None or letter.reason == self.reason


@dataclass(frozen=True, slots=True)
class FoundLetter:
    """A record of the topic, and the letter that it is, or why it is none."""

    number: int
    timestamp_ms: int
    size: int
    letter: DeadLetter | SchemaError


class LetterBox:
    """The letters of one namespace. Call ``open`` first and ``close`` last; for one task.

    Every call raises ``LogError``. At most ``_STRETCH`` letters are in memory, however many there are.
    """

    def __init__(self, log: EventLog, namespace: str) -> None:
        self.namespace = namespace
        self._log = log
        self._position = TopicPartition(DEAD_LETTERS.qualified(namespace), _PARTITION)
        self._codec = TopicCodec(DEAD_LETTERS)
        self._bounds = Bounds(0, 0)
        self._reader: LogReader | None = None

    async def open(self) -> None:
        """See what there is now; letters that come later are not seen. Raises ``UnknownTopic`` too."""
        self._bounds = (await self._log.bounds(self._position.topic))[_PARTITION]
        self._reader = self._log.reader({self._position: self._bounds.start})

    async def close(self) -> None:
        """Safe to call twice."""
        if self._reader is not None:
            await self._reader.close()
            self._reader = None

    async def newest(self, wanted: LetterFilter) -> AsyncGenerator[FoundLetter, None]:
        """The letters that the filter takes, the newest first. The newest of a long topic cost little."""
        start, end = self._bounds
        if wanted.since_ms is not None:
            start = max(start, await self._log.offset_at(self._position, wanted.since_ms))
        for stop in range(end, start, -_STRETCH):
            for record in reversed(await self._stretch(max(start, stop - _STRETCH), stop)):
                found = self._found(record)
                if wanted.takes(found.letter, self.namespace):
                    yield found

    async def numbered(self, numbers: Iterable[int]) -> AsyncGenerator[FoundLetter, None]:
        """The letters of these numbers, the lowest first.

        Raises:
            InvalidArgument: There is none of such a number; says which there are. Nothing is yielded then.
        """
        left = sorted(set(numbers))
        for number in (left[0], left[-1]) if left else ():
            self._check(number)
        while left:
            stop = min(left[0] + _STRETCH, left[-1] + 1)
            here = {number for number in left if number < stop}
            for record in await self._stretch(left[0], stop):
                if record.offset in here:
                    yield self._found(record)
            left = left[len(here) :]

    def _check(self, number: int) -> None:
        start, end = self._bounds
        if not start <= number < end:
            there = f"they have {start} to {end - 1}" if end > start else "there is none at all"
            raise InvalidArgument(f"no dead letter has the number {number}; {there}")

    def _found(self, record: Record) -> FoundLetter:
        value = record.value or b""
        letter: DeadLetter | SchemaError
        try:
            letter = self._codec.decode(value, record.headers)
        except SchemaError as error:
            letter = error
        return FoundLetter(record.offset, record.timestamp_ms, len(value), letter)

    async def _stretch(self, start: int, stop: int) -> list[Record]:
        assert self._reader is not None, "open() comes first"
        self._reader.seek(self._position, start)
        records: list[Record] = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _READ_TIMEOUT_S
        while self._reader.positions()[self._position] < stop:
            if loop.time() > deadline:
                raise LogUnavailable(f"letters {start} to {stop - 1} of {self._position.topic} do not arrive")
            for batch in (await self._reader.poll(max_records=stop - start, timeout_s=_POLL_S)).values():
                records += [record for record in batch if start <= record.offset < stop]
        return records
