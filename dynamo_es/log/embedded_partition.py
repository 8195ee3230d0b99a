"""The writing side of one partition: dense offsets across processes, rolling of segments, the doorbell.

An append holds the partition's turnstile (``flock``) from before BEGIN IMMEDIATE until after COMMIT. SQLite's own busy
handler sleeps and retries and starves writers (worst append 730 ms with four of them, 38 ms with the turnstile); the
kernel's queue does not.

Rolling survives a crash at any point: first the old segment is sealed in a transaction, then the next one is created
under its final name at once. A sealed segment without a successor means "end of log", and whoever appends next
creates the successor.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dynamo_es.clock import Clock
from dynamo_es.log.base import TopicConfig, TopicPartition
from dynamo_es.log.doorbell import Doorbell
from dynamo_es.log.embedded_layout import (
    EmbeddedOptions,
    LogLayout,
    exclusive_lock,
    list_bases,
    map_os_error,
    map_sqlite_error,
    segment_path,
)
from dynamo_es.log.embedded_segment import create_segment, open_segment
from dynamo_es.log.errors import LogFull, LogUnavailable

logger = logging.getLogger(__name__)

# (timestamp_ms, key, value, headers as msgpack)
Row = tuple[int, bytes | None, bytes | None, bytes | None]

_STATE = (
    "SELECT sealed_end, created_ms, (SELECT max(offset) FROM records), "
    "(SELECT page_count FROM pragma_page_count()) FROM segment"
)
_INSERT = "INSERT INTO records (offset, timestamp_ms, key, value, headers) VALUES "
# Rows of one INSERT. Each statement gives the interpreter lock away and must win it back from a busy event loop.
_INSERT_ROWS = (256, 64, 16, 4, 1)
_INSERTS = {count: _INSERT + ", ".join(["(?, ?, ?, ?, ?)"] * count) for count in _INSERT_ROWS}
_SEAL = "UPDATE segment SET sealed_end = ?, newest_ms = (SELECT max(timestamp_ms) FROM records)"


class PartitionWriter:
    """Appends to one partition, through a connection of its own. Used by one thread at a time."""

    def __init__(
        self,
        layout: LogLayout,
        position: TopicPartition,
        topic: TopicConfig,
        options: EmbeddedOptions,
        clock: Clock,
        check: Callable[[], None],
    ) -> None:
        """``check`` raises ``LogReplaced`` if another log or topic is in place now; asked before files are opened."""
        self._check = check
        self._folder = layout.partition(position)
        self._options = options
        self._age_ms = options.segment_age_ms(topic)
        self._clock = clock
        self._bell = Doorbell(layout.bell(position))
        self._connection: sqlite3.Connection | None = None
        self._base = 0
        self._path = self._folder
        self._inode = 0
        self._page_bytes = 4096
        self._lock_path = self._folder / "lock"
        self._lock: int | None = None

    def append(self, rows: Sequence[Row]) -> int:
        """Append in one transaction; the offset of the first row, the rest follow densely. Durable on return.

        Raises:
            LogReplaced: Nothing was appended.
            LogFull, LogUnavailable, LogFormatError: Not known to be appended.
        """
        with self._turnstile(), self._mapped_errors():
            first = self._insert(rows)
            self._check_in_place()
            self._bell.ring(first + len(rows))
        return first

    def roll_if_due(self, now_ms: int) -> bool:
        """Seal a segment that has records and is older than its age, so that retention can reach it.

        Raises:
            LogUnavailable: Another process holds the partition.
        """
        with exclusive_lock(self._lock_path), self._mapped_errors():
            connection = self._open_newest()
            connection.execute("BEGIN IMMEDIATE")
            sealed_end, created_ms, last, _ = connection.execute(_STATE).fetchone()
            if sealed_end is None and last is not None and now_ms - created_ms >= self._age_ms:
                self._seal(connection, last + 1)
                return True
            connection.execute("ROLLBACK")
            if sealed_end is not None:
                self._move_on(sealed_end)
            return False

    def close(self) -> None:
        """Release everything; the next append opens it again."""
        self._drop_connection()
        self._bell.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _insert(self, rows: Sequence[Row]) -> int:
        while True:
            connection = self._connection or self._open_newest()
            connection.execute("BEGIN IMMEDIATE")
            sealed_end, created_ms, last, pages = connection.execute(_STATE).fetchone()
            if sealed_end is not None:
                connection.execute("ROLLBACK")
                self._move_on(sealed_end)
                continue
            if last is not None and self._is_full(created_ms, pages):
                self._seal(connection, last + 1)
                continue
            first: int = self._base if last is None else last + 1
            _insert_rows(connection, rows, first)
            connection.execute("COMMIT")
            return first

    def _is_full(self, created_ms: int, pages: int) -> bool:
        if pages * self._page_bytes >= self._options.segment_bytes:
            return True
        return self._clock.now_ms() - created_ms >= self._age_ms

    def _seal(self, connection: sqlite3.Connection, end: int) -> None:
        connection.execute(_SEAL, (end,))
        connection.execute("COMMIT")
        self._move_on(end)

    def _move_on(self, base: int) -> None:
        """Go to the segment that starts at ``base``, the end of a sealed one; create it if nobody has."""
        path = segment_path(self._folder, base)
        if not path.exists():
            # Somebody who slept through several rolls must not bring a trimmed segment back to life.
            if list_bases(self._folder)[-1] > base:
                self._drop_connection()
                return
            # Nothing of ours must come to be in a folder that is another log's by now.
            self._check_in_place()
            self._check()
            create_segment(self._folder, base, self._clock.now_ms())
        self._drop_connection()
        self._open(base)

    def _open_newest(self) -> sqlite3.Connection:
        self._drop_connection()
        self._check()
        return self._open(list_bases(self._folder)[-1])

    def _open(self, base: int) -> sqlite3.Connection:
        path = segment_path(self._folder, base)
        connection = open_segment(path, synchronous=self._options.synchronous)
        self._connection = connection
        # Again: only what was opened before this cannot be another log's. What is put in its place later is noticed
        # by the file itself, which is not in its place then.
        self._check()
        self._base = base
        self._path = path
        self._inode = os.stat(path).st_ino
        self._page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
        return connection

    def _check_in_place(self) -> None:
        """SQLite commits happily into a file that was deleted under it; such a record must not be acknowledged."""
        try:
            inode = os.stat(self._path).st_ino
        except OSError as error:
            self.close()
            self._check()
            raise map_os_error(self._path, error, "written") from error
        if inode != self._inode:
            self.close()
            self._check()
            raise LogUnavailable(f"{self._path} was replaced while it was open; the record was not kept")

    @contextmanager
    def _turnstile(self) -> Iterator[None]:
        try:
            if self._lock is None:
                self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            self._check()
            raise map_os_error(self._lock_path, error, "locked") from error
        try:
            yield
        finally:
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            mapped = map_sqlite_error(self._path, error)
            self._recover(mapped)
            raise mapped from error
        except LogUnavailable as error:
            self._recover(error)
            raise

    def _recover(self, error: Exception) -> None:
        # On a full disk the connection stays: closing the last one removes the shared-memory file that readers need,
        # and there is no room to make it again.
        connection = self._connection
        try:
            if connection is not None and connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error as failed:
            logger.debug("rollback in %s: %s", self._folder, failed)
            self._drop_connection()
        if not isinstance(error, LogFull):
            # Lock and doorbell as well: they may be files of a folder that is gone.
            self.close()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            try:
                connection.close()
            except sqlite3.Error as error:
                logger.warning("closing a segment in %s: %s", self._folder, error)


def _insert_rows(connection: sqlite3.Connection, rows: Sequence[Row], first: int) -> None:
    begin = 0
    for count in _INSERT_ROWS:
        statement = _INSERTS[count]
        while len(rows) - begin >= count:
            chunk = rows[begin : begin + count]
            values = [value for offset, row in enumerate(chunk, first + begin) for value in (offset, *row)]
            connection.execute(statement, values)
            begin += count
