"""Dropping old records of the embedded log: whole segments by age or offset, superseded records by key.

The last segment of a partition is never dropped: it carries the end offset. Segments go from the front, in order, so a
crash leaves a shorter log and never a hole. Everything here blocks and belongs in a thread.
"""

from __future__ import annotations

import logging
import os
import sqlite3
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dynamo_es.clock import Clock
from dynamo_es.log.base import TOMBSTONE_RETENTION_MS, TopicPartition
from dynamo_es.log.embedded_cursor import read_bounds
from dynamo_es.log.embedded_layout import (
    EmbeddedOptions,
    LockHeld,
    LogLayout,
    exclusive_lock,
    list_bases,
    list_topics,
    map_os_error,
    map_sqlite_error,
    segment_path,
)
from dynamo_es.log.embedded_partition import PartitionWriter
from dynamo_es.log.embedded_segment import SegmentReader, open_segment
from dynamo_es.log.embedded_topics import KnownTopic, check_place, load_topic

logger = logging.getLogger(__name__)

_KEYS = "SELECT offset, key, value IS NULL, timestamp_ms FROM records WHERE key IS NOT NULL ORDER BY offset DESC"
_DELETE = "DELETE FROM records WHERE offset = ?"
_IS_EMPTY = "SELECT NOT EXISTS (SELECT 1 FROM records)"
_FREE = "SELECT (SELECT freelist_count FROM pragma_freelist_count()), (SELECT page_count FROM pragma_page_count())"
_DELETES_A_TRANSACTION = 1_000
# Keys that one compaction remembers. With more, the oldest records of the rest stay until their keys come up again.
_COMPACTION_KEYS = 2_000_000
_BUSY_WAIT_S = 0.05


class RetentionKeeper:
    """Trims and compacts one log. Only one process does so at a time; the others find it busy and leave it to it."""

    def __init__(self, layout: LogLayout, log_id: str, options: EmbeddedOptions, clock: Clock) -> None:
        self._layout = layout
        self._log_id = log_id
        self._options = options
        self._clock = clock
        self._compacted: dict[TopicPartition, tuple[int, ...]] = {}

    def trim(self, position: TopicPartition, before_offset: int) -> int:
        """Drop whole segments below ``before_offset``; the new start. A compacted topic is never trimmed by offset."""
        compacted = load_topic(self._layout, position.topic).config.compacted
        if not compacted:
            with exclusive_lock(self._layout.maintenance_lock):
                bases = list_bases(self._layout.partition(position))
                keep = next((i for i in range(len(bases) - 1) if bases[i + 1] > before_offset), len(bases) - 1)
                self._unlink(position, bases[:keep])
        return read_bounds(self._layout, position, compacted).start

    def enforce(self, now_ms: int) -> Mapping[TopicPartition, int]:
        """``EventLog.enforce_retention``. Does nothing while another process is at it."""
        trimmed: dict[TopicPartition, int] = {}
        try:
            with exclusive_lock(self._layout.maintenance_lock, _BUSY_WAIT_S):
                for name in list_topics(self._layout):
                    topic = load_topic(self._layout, name)
                    for partition in range(topic.config.partitions):
                        self._enforce_one(TopicPartition(name, partition), topic, now_ms, trimmed)
        except LockHeld as error:
            logger.info("retention is left to another process: %s", error)
        return trimmed

    def _enforce_one(
        self, position: TopicPartition, known: KnownTopic, now_ms: int, trimmed: dict[TopicPartition, int]
    ) -> None:
        topic = known.config
        if not topic.compacted and topic.retention_ms is None:
            return
        check = partial(check_place, self._layout, self._log_id, topic.name, known.topic_id)
        writer = PartitionWriter(self._layout, position, topic, self._options, self._clock, check)
        try:
            writer.roll_if_due(now_ms)
        finally:
            writer.close()
        self._remove_orphans(position)
        bases = list_bases(self._layout.partition(position))
        if topic.compacted:
            if self._compacted.get(position) != tuple(bases):
                self._compact(position, bases, now_ms - TOMBSTONE_RETENTION_MS)
                self._compacted[position] = tuple(list_bases(self._layout.partition(position)))
        elif topic.retention_ms is not None:
            old = self._count_older(position, bases, now_ms - topic.retention_ms)
            if old:
                self._unlink(position, bases[:old])
                trimmed[position] = bases[old]

    def _count_older(self, position: TopicPartition, bases: list[int], before_ms: int) -> int:
        """How many segments from the front hold nothing as new as ``before_ms``."""
        for count, base in enumerate(bases[:-1]):
            segment = SegmentReader(position, self._layout.partition(position), base)
            try:
                segment.sealed_end()
                newest_ms = segment.newest_ms()
            finally:
                segment.close()
            if newest_ms is None or newest_ms >= before_ms:
                return count
        return len(bases) - 1

    def _unlink(self, position: TopicPartition, bases: list[int]) -> None:
        folder = self._layout.partition(position)
        for base in bases:
            path = segment_path(folder, base)
            # The database first: without it nobody opens, and so nobody makes, the files beside it.
            for name in (path, Path(f"{path}-wal"), Path(f"{path}-shm")):
                _remove(name)
            logger.info("%s[%d]: dropped the segment at offset %d", *position, base)

    def _remove_orphans(self, position: TopicPartition) -> None:
        """What a crash in ``_unlink`` or in the making of a segment left behind."""
        folder = self._layout.partition(position)
        for name in os.listdir(folder):
            for suffix in ("-wal", "-shm"):
                if name.endswith(f".sqlite{suffix}") and not (folder / name.removesuffix(suffix)).exists():
                    _remove(folder / name)

    # ---- compaction ----

    def _compact(self, position: TopicPartition, bases: list[int], tombstones_before_ms: int) -> None:
        """Delete from sealed segments what newer records supersede, and deletions that are old enough.

        What to delete is collected from the newest segment to the oldest and deleted from the oldest to the newest: a
        crash in between must not drop a deletion and keep what it deleted.
        """
        folder = self._layout.partition(position)
        seen: set[bytes] = set()
        plan: list[tuple[int, list[int]]] = []
        for base in reversed(bases):
            path = segment_path(folder, base)
            connection = open_segment(path)
            try:
                doomed = _superseded(connection, seen, tombstones_before_ms)
            except sqlite3.Error as error:
                raise map_sqlite_error(path, error) from error
            finally:
                connection.close()
            if base != bases[-1]:
                plan.append((base, doomed))
        if len(seen) >= _COMPACTION_KEYS:
            logger.warning("%s[%d] has over %d keys: compaction is incomplete", *position, _COMPACTION_KEYS)
        for base, doomed in reversed(plan):
            if _delete(segment_path(folder, base), sorted(doomed)):
                self._unlink(position, [base])


def _superseded(connection: sqlite3.Connection, seen: set[bytes], tombstones_before_ms: int) -> list[int]:
    """Offsets that may go from one segment; ``seen`` has the keys of all newer records and gets those of this one."""
    doomed: list[int] = []
    for offset, key, is_tombstone, timestamp_ms in connection.execute(_KEYS):
        if key in seen:
            doomed.append(offset)
            continue
        if len(seen) < _COMPACTION_KEYS:
            seen.add(key)
            if is_tombstone and timestamp_ms < tombstones_before_ms:
                doomed.append(offset)
    return doomed


def _delete(path: Path, offsets: list[int]) -> bool:
    """Delete records from a sealed segment in short transactions and give their space back; whether it is empty."""
    connection = open_segment(path)
    try:
        for begin in range(0, len(offsets), _DELETES_A_TRANSACTION):
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_DELETE, ((offset,) for offset in offsets[begin : begin + _DELETES_A_TRANSACTION]))
            connection.execute("COMMIT")
        if connection.execute(_IS_EMPTY).fetchone()[0]:
            return True
        free, pages = connection.execute(_FREE).fetchone()
        if free * 2 > pages:
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    except sqlite3.Error as error:
        raise map_sqlite_error(path, error) from error
    finally:
        connection.close()
    return False


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise map_os_error(path, error, "deleted") from error
