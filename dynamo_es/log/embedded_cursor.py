"""Walking along the segments of one partition. Blocks; used by one thread at a time."""

from __future__ import annotations

import bisect
from collections.abc import Callable

from dynamo_es.log.base import Bounds, TopicPartition
from dynamo_es.log.embedded_layout import LogLayout, list_bases
from dynamo_es.log.embedded_segment import Chunk, SegmentReader
from dynamo_es.log.errors import LogUnavailable, OffsetOutOfRange

# A segment may be trimmed between looking at the folder and opening it; then the folder is looked at again.
_OPEN_ATTEMPTS = 5


class PartitionCursor:
    """Reads a partition from any offset on, across its segments.

    A reader moves on only from a sealed segment that it read to its end, so it sees every committed record once, in
    order. In a compacted topic whole segments may be missing; elsewhere only at the front.
    """

    def __init__(self, layout: LogLayout, position: TopicPartition, compacted: bool, check: Callable[[], None]) -> None:
        """``check`` raises ``LogReplaced`` if another log or topic is in place now."""
        self._layout = layout
        self._position = position
        self._folder = layout.partition(position)
        self._compacted = compacted
        self._check = check
        self._segment: SegmentReader | None = None
        self._expected = -1

    def read(self, offset: int, max_records: int, max_bytes: int) -> tuple[Chunk, int]:
        """Records from ``offset`` on and the offset behind them; ``exhausted`` means the end for now.

        Raises:
            OffsetOutOfRange: ``offset`` was trimmed, or was never reached.
            LogReplaced, LogUnavailable, LogFormatError: The files cannot be read.
        """
        try:
            return self._read(offset, max_records, max_bytes)
        except LogUnavailable:
            self.close()
            raise

    def check_in_place(self) -> None:
        """Let go of a segment whose file was deleted, so that the next ``read`` sees what has become of it."""
        if self._segment is not None and not self._segment.is_in_place():
            self.close()

    def close(self) -> None:
        """Release the connection; the next ``read`` opens one again."""
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def _read(self, offset: int, max_records: int, max_bytes: int) -> tuple[Chunk, int]:
        segment = self._segment
        if segment is None or segment.is_outdated or offset != self._expected:
            segment = self._open_at(offset)
        sealed = segment.is_known_sealed
        while True:
            chunk = segment.records(offset, max_records, max_bytes)
            if chunk.records:
                # A sealed segment has a successor; who sealed it rang before this read, perhaps for both.
                sealed = sealed or segment.sealed_end() is not None
                if not sealed and not segment.is_in_place():
                    # Written into a file that was deleted: its writer was told that it failed.
                    segment = self._open_at(offset)
                    continue
                self._expected = chunk.records[-1].offset + 1
                return chunk._replace(exhausted=chunk.exhausted and not sealed), self._expected
            if not sealed:
                if segment.sealed_end() is None:
                    break
                # Sealed after the read: what came in between is still to be read.
                sealed = True
                continue
            following = self._open_following(segment, offset)
            if following is None:
                offset = max(offset, segment.end())
                break
            segment = following
            offset = max(offset, segment.base)
            sealed = segment.is_known_sealed
        self._expected = offset
        return Chunk([], 0, True), offset

    def _open_at(self, offset: int) -> SegmentReader:
        self.close()
        self._check()
        for _ in range(_OPEN_ATTEMPTS):
            bases = list_bases(self._folder)
            index = bisect.bisect_right(bases, offset) - 1
            if index < 0 and (offset < 0 or not self._compacted):
                raise self._out_of_range(offset)
            segment = self._open(bases[max(index, 0)])
            if segment is None:
                continue
            if index == len(bases) - 1 and offset > segment.end():
                sealed = segment.is_known_sealed
                segment.close()
                if sealed:
                    continue
                raise self._out_of_range(offset)
            self._segment = segment
            return segment
        raise self._out_of_range(offset)

    def _open_following(self, segment: SegmentReader, offset: int) -> SegmentReader | None:
        """The segment after a sealed one; None if nobody made it yet."""
        self._check()
        end = segment.end()
        for _ in range(_OPEN_ATTEMPTS):
            bases = list_bases(self._folder)
            index = bisect.bisect_left(bases, end)
            if index == len(bases):
                return None
            if bases[index] > end and not self._compacted:
                break
            following = self._open(bases[index])
            if following is not None:
                self.close()
                self._segment = following
                return following
        raise self._out_of_range(max(offset, end))

    def _open(self, base: int) -> SegmentReader | None:
        """None if the segment has just been trimmed."""
        try:
            return SegmentReader(self._position, self._folder, base)
        except LogUnavailable:
            if base in list_bases(self._folder):
                raise
            return None

    def _out_of_range(self, offset: int) -> OffsetOutOfRange:
        bounds = read_bounds(self._layout, self._position, self._compacted)
        return OffsetOutOfRange(self._position.topic, self._position.partition, offset, bounds.start, bounds.end)


def read_bounds(layout: LogLayout, position: TopicPartition, compacted: bool) -> Bounds:
    """Bounds of a partition. That of a compacted one always starts at 0: what is missing was superseded, not trimmed.

    Raises:
        LogUnavailable, LogFormatError: The files cannot be read.
    """
    folder = layout.partition(position)
    for attempt in range(_OPEN_ATTEMPTS):
        bases = list_bases(folder)
        try:
            segment = SegmentReader(position, folder, bases[-1])
        except LogUnavailable:
            if attempt == _OPEN_ATTEMPTS - 1 or bases[-1] in list_bases(folder):
                raise
            continue
        try:
            return Bounds(0 if compacted else bases[0], segment.end())
        finally:
            segment.close()
    raise AssertionError("unreachable")


def find_offset(layout: LogLayout, position: TopicPartition, timestamp_ms: int) -> int:
    """Smallest offset whose timestamp is >= ``timestamp_ms``; the end if there is none. Raises as ``read_bounds``."""
    folder = layout.partition(position)
    end = 0
    for base in list_bases(folder):
        try:
            segment = SegmentReader(position, folder, base)
        except LogUnavailable:
            if base in list_bases(folder):
                raise
            continue
        try:
            end = segment.end()
            newest_ms = segment.newest_ms()
            if newest_ms is not None and newest_ms < timestamp_ms:
                continue
            found = segment.first_since(timestamp_ms)
            if found is not None:
                return found
        finally:
            segment.close()
    return end
