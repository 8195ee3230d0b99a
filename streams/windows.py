"""Counting by windows of time: rows that a fold adds to, kept in a store, published in topic ``aggregates``.

A row belongs to one source partition, one window and one subject (a rank, or a reason of refusal). It knows the first
offset that it does not cover, so a record that is read again changes nothing, whatever the row was restored from. The
newest time of a partition's records decides which windows are still kept; no clock is asked.

What has to be published survives a crash: a row is due while it covers more than the position of the last publication,
and a row that is no longer kept stays as a tombstone until its deletion was published.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import blake3
import msgspec

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, Put, StateRows
from schemas.aggregates import (
    AGGREGATES,
    RejectedRecords,
    Window,
    key_rank_window,
    key_rejected_records,
)

FAMILY = "windows"
Subject = tuple[Any, ...]
W = TypeVar("W", bound=Window)
_ROW = b"r"
_META = b"m"
_PARTITION = struct.Struct(">I")
_REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """``window_ms``: length of a window. ``kept_ms``: a window that ended so long before the newest record is deleted,
    and a record that belongs into one is not counted. ``max_rows``: rows of one partition; beyond it its oldest window
    is deleted early, and if it has only one, the row that was begun first."""

    window_ms: int = 60_000
    kept_ms: int = 6 * 3_600_000
    max_rows: int = 100_000


@dataclass(slots=True)
class WindowCounters:
    """For metrics, not part of the state's meaning. ``late``: records not counted, their window is gone. ``evicted``:
    rows deleted because there were too many."""

    late: int = 0
    evicted: int = 0


@dataclass(slots=True)
class _Partition:
    """``floor``: rows as restored cover everything below it. ``published``: what the last publication covered."""

    floor: int = 0
    newest_ms: int | None = None
    published: int = 0
    rows: int = 0
    # Windows in the order in which they were begun, each with its rows by subject.
    windows: dict[tuple[int, int], dict[Subject, Window]] = field(default_factory=dict)


class _Meta(msgspec.Struct, array_like=True):
    floor: int
    newest_ms: int | None
    published: int


class WindowTable:
    """Rows of all windows of one topic. ``topic``: its name without namespace."""

    def __init__(self, topic: str, settings: WindowSettings) -> None:
        self.counters = WindowCounters()
        self._topic = topic
        self._settings = settings
        self._partitions: dict[int, _Partition] = {}
        self._unstored: dict[bytes, Window | None] = {}
        self._unpublished: dict[int, dict[bytes, Window | None]] = {}
        self._published_deletions: list[bytes] = []
        self._changed_meta: set[int] = set()
        self._current = (-1, -1)
        self._touched: set[int] = set()

    def row(self, record: Record, subject: Subject, make: Callable[[int, int, int, int], W]) -> W | None:
        """The row that ``record`` adds to, marked as changed by it; None if it must not be counted.

        A record may add to several rows, and to one several times, before the next record. ``make`` is called with
        version, partition, window start and length.
        """
        if self._current != (record.partition, record.offset):
            self._current = (record.partition, record.offset)
            self._touched.clear()
        partition = self._partition(record.partition)
        window_ms = self._settings.window_ms
        start = record.timestamp_ms // window_ms * window_ms
        self.note_time(record)
        if record.offset < partition.floor:
            return None
        if self._has_ended(partition, start, window_ms):
            self.counters.late += 1
            return None
        rows = partition.windows.get((start, window_ms))
        if rows is None:
            rows = partition.windows[start, window_ms] = {}
        row = cast("W | None", rows.get(subject))
        if row is None:
            row = make(AGGREGATES.version, record.partition, start, window_ms)
            rows[subject] = row
            partition.rows += 1
            if partition.rows > self._settings.max_rows:
                self._make_room(record.partition, partition)
                if not self.has(row):
                    return None
        elif record.offset < row.next_offset and id(row) not in self._touched:
            return None
        self._touched.add(id(row))
        row.next_offset = record.offset + 1
        self._mark(record.partition, row)
        return row

    def note_time(self, record: Record) -> None:
        """Let the record's time decide what is kept, whether it is counted or not."""
        partition = self._partition(record.partition)
        before = partition.newest_ms
        if before is not None and record.timestamp_ms <= before:
            return
        partition.newest_ms = record.timestamp_ms
        self._changed_meta.add(record.partition)
        # Windows end with windows, so it is enough to look when the next one begins.
        window_ms = self._settings.window_ms
        if before is None or record.timestamp_ms // window_ms != before // window_ms:
            for window in [window for window in partition.windows if self._has_ended(partition, *window)]:
                self._drop_window(record.partition, partition, window)

    def is_over(self, partition: int, timestamp_ms: int) -> bool:
        """Whether something of that time is no longer kept."""
        newest_ms = self._partition(partition).newest_ms
        return newest_ms is not None and timestamp_ms + self._settings.kept_ms <= newest_ms

    def reject(self, record: Record, reason: str) -> None:
        """Count a record that was refused."""

        def make(version: int, partition: int, start: int, window_ms: int) -> RejectedRecords:
            return RejectedRecords(version, self._topic, partition, 0, start, window_ms, reason)

        row = self.row(record, (_REJECTED, reason), make)
        if row is not None:
            row.records += 1

    def rows(self, partition: int | None = None) -> Iterator[Window]:
        """All rows (of one partition), by window in the order of their beginning."""
        for number in sorted(self._partitions) if partition is None else [partition]:
            for rows in self._partition(number).windows.values():
                yield from rows.values()

    def has(self, row: Window) -> bool:
        """Whether ``row``, which was of this table once, is still kept."""
        rows = self._partition(row.partition).windows.get((row.window_start_ms, row.window_ms), {})
        return rows.get(_subject(row)) is row

    def newest_ms(self, partition: int) -> int | None:
        """Newest time of a record of the partition."""
        return self._partition(partition).newest_ms

    def unpublished(self, partition: int) -> Mapping[bytes, Window | None]:
        """Record keys and values to publish, None for a deletion. Valid until the next call of any method."""
        return self._unpublished.get(partition, {})

    def confirm_published(self, partition: int, next_offset: int) -> None:
        """Everything that ``unpublished`` gave is in the log now; it covers the records below ``next_offset``."""
        for key, row in self._unpublished.pop(partition, {}).items():
            if row is None:
                self._published_deletions.append(key)
        self._partition(partition).published = next_offset
        self._changed_meta.add(partition)

    def restore(
        self, partition: int, rows: Sequence[Window], *, floor: int, newest_ms: int | None, void: Sequence[bytes]
    ) -> None:
        """Take over what was published: rows, what they cover, and keys of rows that mean nothing any more."""
        self._partitions[partition] = _Partition(floor, newest_ms, floor)
        self._changed_meta.add(partition)
        for row in sorted(rows, key=lambda row: row.window_start_ms):
            self._insert(partition, row)
            self._unstored[self.key(row)] = row
        for key in void:
            self._unstored[key] = None
            self._unpublished.setdefault(partition, {})[key] = None

    def changes(self) -> list[Change]:
        """As ``Fold.changes``."""
        changes: list[Change] = []
        encode = msgspec.msgpack.encode
        for key, row in self._unstored.items():
            changes.append(Put(FAMILY, _ROW + key, b"" if row is None else encode(row)))
        changes += [Delete(FAMILY, _ROW + key) for key in self._published_deletions if key not in self._unstored]
        for number in self._changed_meta:
            partition = self._partition(number)
            meta = _Meta(partition.floor, partition.newest_ms, partition.published)
            changes.append(Put(FAMILY, _META + _PARTITION.pack(number), encode(meta)))
        self._unstored = {}
        self._published_deletions = []
        self._changed_meta = set()
        return changes

    def mark_all(self) -> Iterator[None]:
        """As ``Fold.mark_all``."""
        for number, partition in list(self._partitions.items()):
            self._changed_meta.add(number)
            for key, row in self._unpublished.get(number, {}).items():
                if row is None:
                    self._unstored[key] = None
            for window in list(partition.windows):
                yield
                for row in partition.windows.get(window, {}).values():
                    self._unstored[self.key(row)] = row

    def load(self, rows: StateRows) -> None:
        """Fill an empty table from committed rows."""
        for key, data in rows.scan(FAMILY, _META):
            meta = msgspec.msgpack.decode(data, type=_Meta)
            number = _PARTITION.unpack(key[len(_META) :])[0]
            self._partitions[number] = _Partition(meta.floor, meta.newest_ms, meta.published)
        decoder = msgspec.msgpack.Decoder(Window)
        found: list[Window] = []
        for key, data in rows.scan(FAMILY, _ROW):
            if data:
                found.append(decoder.decode(data))
            else:
                self._unpublished.setdefault(_partition_of(key), {})[key[len(_ROW) :]] = None
        for row in sorted(found, key=lambda row: row.window_start_ms):
            self._insert(row.partition, row)

    def digest(self) -> str:
        """Hash of all rows and times."""
        lines = [repr(row) for row in self.rows()]
        lines += [repr((number, partition.newest_ms)) for number, partition in self._partitions.items()]
        return blake3.blake3("\n".join(sorted(lines)).encode()).hexdigest()

    def _partition(self, number: int) -> _Partition:
        partition = self._partitions.get(number)
        if partition is None:
            partition = self._partitions[number] = _Partition()
        return partition

    def _insert(self, number: int, row: Window) -> None:
        partition = self._partition(number)
        partition.windows.setdefault((row.window_start_ms, row.window_ms), {})[_subject(row)] = row
        partition.rows += 1
        if row.next_offset > partition.published:
            self._unpublished.setdefault(number, {})[self.key(row)] = row

    def _mark(self, number: int, row: Window) -> None:
        key = self.key(row)
        self._unstored[key] = row
        self._unpublished.setdefault(number, {})[key] = row

    def key(self, row: Window) -> bytes:
        """Record key of a row."""
        return key_rejected_records(row) if isinstance(row, RejectedRecords) else key_rank_window(self._topic, row)

    def _has_ended(self, partition: _Partition, start: int, window_ms: int) -> bool:
        return partition.newest_ms is not None and start + window_ms + self._settings.kept_ms <= partition.newest_ms

    def _make_room(self, number: int, partition: _Partition) -> None:
        oldest = min(partition.windows)
        before = partition.rows
        if len(partition.windows) > 1:
            self._drop_window(number, partition, oldest)
        else:
            rows = partition.windows[oldest]
            self._drop(number, rows.pop(next(iter(rows))))
            partition.rows -= 1
        self.counters.evicted += before - partition.rows

    def _drop_window(self, number: int, partition: _Partition, window: tuple[int, int]) -> None:
        rows = partition.windows.pop(window)
        partition.rows -= len(rows)
        for row in rows.values():
            self._drop(number, row)

    def _drop(self, number: int, row: Window) -> None:
        key = self.key(row)
        self._unstored[key] = None
        self._unpublished.setdefault(number, {})[key] = None


def _subject(row: Window) -> Subject:
    if isinstance(row, RejectedRecords):
        return (_REJECTED, row.reason)
    return (row.model, row.worker_id, row.dp_rank)


def _partition_of(key: bytes) -> int:
    """The source partition in a row's key: topic names have no slash."""
    return int(key.split(b"/", 2)[1])
