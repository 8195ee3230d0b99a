"""One segment of a partition: an SQLite file in WAL mode with the records of a range of offsets.

A segment takes appends until a writer seals it (``sealed_end`` is set, in a transaction); from then on it never grows.
Its end is the base of the next one. Everything here blocks and belongs in a thread; a connection is used by one thread
at a time and never crosses a fork.
"""

from __future__ import annotations

import os
import sqlite3
from itertools import repeat
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from dynamo_es.log.base import Headers, Record, TopicPartition
from dynamo_es.log.embedded_layout import (
    FORMAT_VERSION,
    map_os_error,
    map_sqlite_error,
    segment_path,
    sync_folder,
)
from dynamo_es.log.errors import LogFormatError, LogUnavailable

# "DyEs": tells our files from any other SQLite file.
_APPLICATION_ID = 0x44794573
BUSY_TIMEOUT_S = 5.0
# Pages that a connection keeps. A process has dozens of connections, and records are read once and in order: larger
# caches fill over hours with pages that nobody asks for again.
_CACHE_KIB = 256
_SCHEMA = f"""
PRAGMA application_id = {_APPLICATION_ID};
PRAGMA user_version = {FORMAT_VERSION};
BEGIN;
CREATE TABLE segment (
    id INTEGER PRIMARY KEY CHECK (id = 1), created_ms INTEGER NOT NULL, sealed_end INTEGER, newest_ms INTEGER
);
CREATE TABLE records (
    offset INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, key BLOB, value BLOB, headers BLOB
);
"""
_ROWS = "SELECT offset, timestamp_ms, key, value, headers FROM records WHERE offset >= ? ORDER BY offset LIMIT ?"
_SEALED = "SELECT sealed_end, newest_ms FROM segment"
_LAST = "SELECT max(offset) FROM records"
_BY_TIME = "SELECT offset FROM records WHERE timestamp_ms >= ? ORDER BY offset LIMIT 1"
# Rows of one step of a read. Small while values are large, so that the byte bound of a read holds closely.
_CHUNK_ROWS = 256
_LARGE_CHUNK_ROWS = 16
_LARGE_VALUE_BYTES = 16_384
_CACHED_HEADERS = 256
_NO_HEADERS: Headers = ()


def create_segment(folder: Path, base: int, created_ms: int) -> Path:
    """Create an empty segment, all at once: a crash leaves no half of one. The caller holds the partition's lock.

    Raises:
        LogFull, LogUnavailable: It could not be made; nothing changed.
    """
    path = segment_path(folder, base)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        connection = _connect(temporary, "rwc")
        try:
            connection.execute("PRAGMA synchronous = OFF")
            connection.executescript(_SCHEMA)
            connection.execute("INSERT INTO segment (id, created_ms) VALUES (1, ?)", (created_ms,))
            connection.execute("COMMIT")
            connection.execute("PRAGMA journal_mode = WAL")
        finally:
            connection.close()
        _sync_file(temporary)
        os.rename(temporary, path)
        sync_folder(folder)
    except sqlite3.Error as error:
        _discard(temporary)
        raise map_sqlite_error(temporary, error) from error
    except OSError as error:
        _discard(temporary)
        raise map_os_error(path, error, "created") from error
    return path


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(temporary: Path) -> None:
    for suffix in ("", "-journal", "-wal", "-shm"):
        try:
            Path(f"{temporary}{suffix}").unlink(missing_ok=True)
        except OSError:
            return


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    return sqlite3.connect(
        f"file:{quote(str(path))}?mode={mode}",
        uri=True,
        isolation_level=None,
        timeout=BUSY_TIMEOUT_S,
        check_same_thread=False,
    )


def open_segment(path: Path, *, synchronous: str = "NORMAL") -> sqlite3.Connection:
    """Open a segment that exists. Never creates one.

    Raises:
        LogFormatError: Not a segment, or of a newer format.
        LogUnavailable: It is not there, or cannot be opened.
    """
    connection: sqlite3.Connection | None = None
    try:
        connection = _connect(path, "rw")
        connection.execute(f"PRAGMA synchronous = {synchronous}")
        connection.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
        connection.execute("PRAGMA journal_size_limit = 8388608")
        _check_format(path, connection)
    except sqlite3.Error as error:
        if connection is not None:
            connection.close()
        raise map_sqlite_error(path, error) from error
    except LogFormatError:
        if connection is not None:
            connection.close()
        raise
    return connection


def _check_format(path: Path, connection: sqlite3.Connection) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if application != _APPLICATION_ID:
        raise LogFormatError(f"{path} is an SQLite file, but no segment of an event log; move it away")
    if version > FORMAT_VERSION:
        raise LogFormatError(
            f"{path} has segment format {version}, this version knows {FORMAT_VERSION}; upgrade dynamo-es"
        )


def _open_for_reading(path: Path) -> tuple[sqlite3.Connection, bool]:
    """A connection that only reads, and whether it is frozen.

    SQLite needs a shared-memory file beside a WAL database, and on a full or read-only disk it cannot make one. While
    there is nothing in the WAL the database itself is all there is, and can be read without: frozen, for as long as
    nobody writes.
    """
    try:
        connection = open_segment(path)
        connection.execute("PRAGMA query_only = ON")
    except LogUnavailable:
        if _disk_state(path) is None:
            raise
        connection = _connect(path, "ro&immutable=1")
        try:
            _check_format(path, connection)
        except sqlite3.Error as error:
            connection.close()
            raise map_sqlite_error(path, error) from error
        return connection, True
    return connection, False


def _disk_state(path: Path) -> tuple[int, int, int] | None:
    """Changes when the database file does; None while its WAL has content, or when it is gone."""
    try:
        if os.path.exists(f"{path}-wal") and os.path.getsize(f"{path}-wal"):
            return None
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class Chunk(NamedTuple):
    """What one read gave.

    Attributes:
        size: Bytes of all values.
        exhausted: These were all records that there are now.
    """

    records: list[Record]
    size: int
    exhausted: bool


class SegmentReader:
    """Reads one segment through a connection of its own; each call is one short read transaction."""

    def __init__(self, position: TopicPartition, folder: Path, base: int) -> None:
        """Raises ``LogUnavailable`` if the segment is gone."""
        self.base = base
        self.path = segment_path(folder, base)
        self._position = position
        self._connection, self._frozen = _open_for_reading(self.path)
        self._frozen_at = _disk_state(self.path) if self._frozen else None
        self._sealed_end: int | None = None
        self._newest_ms: int | None = None
        self._headers: dict[bytes, Headers] = {}
        self._inode = self._read_inode()

    @property
    def is_outdated(self) -> bool:
        """Whether somebody writes to a segment that is read frozen; then it must be opened again."""
        return self._frozen and (self._frozen_at is None or _disk_state(self.path) != self._frozen_at)

    @property
    def is_known_sealed(self) -> bool:
        """Whether a call so far found it sealed; then a read that follows sees all it will ever hold."""
        return self._sealed_end is not None

    def sealed_end(self) -> int | None:
        """Base of the next segment, if this one takes no more records."""
        if self._sealed_end is None:
            self._sealed_end, self._newest_ms = self._one(_SEALED) or (None, None)
        return self._sealed_end

    def newest_ms(self) -> int | None:
        """Newest timestamp of a sealed segment; None if it is not sealed or has no records."""
        return self._newest_ms if self.sealed_end() is not None else None

    def end(self) -> int:
        """Offset behind the last record."""
        sealed = self.sealed_end()
        if sealed is not None:
            return sealed
        (last,) = self._one(_LAST) or (None,)
        return self.base if last is None else last + 1

    def first_since(self, timestamp_ms: int) -> int | None:
        """Smallest offset whose timestamp is >= ``timestamp_ms``."""
        row = self._one(_BY_TIME, timestamp_ms)
        return None if row is None else row[0]

    def records(self, offset: int, max_records: int, max_bytes: int) -> Chunk:
        """Records from ``offset`` on, at least one if there is one, and ``max_bytes`` of values or little more."""
        try:
            cursor = self._connection.execute(_ROWS, (offset, max_records))
            try:
                chunk = self._take(cursor, max_records, max_bytes)
            finally:
                cursor.close()
        except sqlite3.Error as error:
            raise map_sqlite_error(self.path, error) from error
        self._check_frozen()
        return chunk

    def is_in_place(self) -> bool:
        """Whether the file is still the one at its path: a deleted one can be read, but nobody appends to it."""
        return self._inode is not None and self._read_inode() == self._inode

    def close(self) -> None:
        self._connection.close()

    def _take(self, cursor: sqlite3.Cursor, max_records: int, max_bytes: int) -> Chunk:
        topic, partition = repeat(self._position.topic), repeat(self._position.partition)
        records: list[Record] = []
        size = 0
        chunk_rows = _LARGE_CHUNK_ROWS
        while len(records) < max_records and size < max_bytes:
            wanted = min(chunk_rows, max_records - len(records))
            rows = cursor.fetchmany(wanted)
            if not rows:
                return Chunk(records, size, True)
            offsets, stamps, keys, values, blobs = zip(*rows, strict=True)
            # Nearly always one schema header for all of them; looking each one up would cost as much as its record.
            distinct = {blob: self._decode_headers(blob) for blob in set(blobs)}
            headers = repeat(distinct[blobs[0]]) if len(distinct) == 1 else map(distinct.__getitem__, blobs)
            records.extend(map(Record, topic, partition, offsets, stamps, keys, values, headers))
            chunk_bytes = sum(map(len, filter(None, values)))
            size += chunk_bytes
            chunk_rows = _CHUNK_ROWS if chunk_bytes < _LARGE_VALUE_BYTES * len(rows) else _LARGE_CHUNK_ROWS
            if len(rows) < wanted:
                return Chunk(records, size, True)
        return Chunk(records, size, False)

    def _decode_headers(self, blob: bytes | None) -> Headers:
        if blob is None:
            return _NO_HEADERS
        headers = self._headers.get(blob)
        if headers is None:
            try:
                headers = msgspec.msgpack.decode(blob, type=tuple[tuple[str, bytes], ...])
            except msgspec.DecodeError as error:
                raise LogFormatError(f"{self.path}: the headers of a record are damaged ({error})") from error
            if len(self._headers) >= _CACHED_HEADERS:
                self._headers.clear()
            self._headers[blob] = headers
        return headers

    def _one(self, statement: str, *arguments: int) -> tuple[int | None, ...] | None:
        try:
            row: tuple[int | None, ...] | None = self._connection.execute(statement, arguments).fetchone()
        except sqlite3.Error as error:
            raise map_sqlite_error(self.path, error) from error
        self._check_frozen()
        return row

    def _check_frozen(self) -> None:
        # Nothing is locked then: what was read counts only if the file stayed as it was.
        if self.is_outdated:
            raise LogUnavailable(f"{self.path} was written to while it was read on a full disk; it is tried again")

    def _read_inode(self) -> int | None:
        try:
            return os.stat(self.path).st_ino
        except OSError:
            return None
