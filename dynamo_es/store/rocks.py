"""A state store in RocksDB, through rocksdict in raw mode (bytes only: nothing is ever pickled)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from rocksdict import (
    AccessType,
    BlockBasedOptions,
    Cache,
    ColumnFamily,
    DbClosedError,
    Options,
    Rdict,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from dynamo_es.log.base import TopicPartition
from dynamo_es.store.base import Change, Delete, Put
from dynamo_es.store.errors import StoreClosed, StoreError, StoreFormatError, StoreFull, StoreLocked
from dynamo_es.store.layout import (
    FORMAT_KEY,
    FORMAT_VERSION,
    META_FAMILY,
    POSITIONS_FAMILY,
    owner_prefix,
    pack_offset,
    parse_position,
    position_key,
    prefix_end,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")
_LOCK_RETRY_S = 0.05
_BLOCK_CACHE_BYTES = 64 * 1024 * 1024
# What was written and is in no table file yet, of all families of a store; RocksDB may hold it twice while it writes
# the file. Its own 64 MiB a family fill over hours, the seldom written families last, which looks like a leak.
_WRITE_BUFFER_BYTES = 2 * 1024 * 1024
# A buffer grows by so much of its bound, and a family that is hardly written has one such piece.
_WRITE_BUFFER_PIECES = 64
# Table files that a store keeps open; RocksDB keeps all by default, which are more and more for hours. What is read of
# others opens them again: writing never does.
OPEN_TABLES = 64
OPEN_TABLES_OF_PARTITION = 10
# Of `max_open_files` RocksDB keeps so many for other files.
_OTHER_OPEN_FILES = 10
# A start reads so much of the write-ahead log again, at most.
_WAL_BYTES = 32 * 1024 * 1024


def _map_error(path: str, error: Exception) -> StoreError:
    """rocksdict raises bare ``Exception``: the text is all there is to tell a held lock from a full disk."""
    text = str(error)
    if "lock hold by current process" in text:
        return StoreLocked(path, "already open in this process; each process needs a --state-dir of its own")
    if "LOCK" in text and ("temporarily unavailable" in text or "lock" in text.lower()):
        return StoreLocked(path, "held by another process; stop it, or give this one its own --state-dir")
    if "No space left" in text or "no space" in text.lower():
        return StoreFull(path, "no space left on the device; free space, the last committed state is intact")
    if "Corruption" in text or "does not exist" in text or "Invalid argument" in text:
        return StoreFormatError(
            path, f"cannot be read ({text[:200]}); delete the folder, it is folded anew from the log"
        )
    return StoreError(path, text[:300])


class RocksMemory:
    """How much the stores of a process may hold in memory, and open."""

    def __init__(
        self,
        cache_bytes: int = _BLOCK_CACHE_BYTES,
        write_buffer_bytes: int = _WRITE_BUFFER_BYTES,
        open_tables: int = OPEN_TABLES,
    ) -> None:
        """``cache_bytes``: blocks that were read, of all stores together. ``write_buffer_bytes``: of each store.
        ``open_tables``: table files of each store, at least 10.
        """
        self.cache = Cache(cache_bytes)
        self.write_buffer_bytes = write_buffer_bytes
        self.open_tables = open_tables

    @classmethod
    def for_partitions(cls) -> RocksMemory:
        """For a process that has a store for each partition, dozens of them."""
        return cls(write_buffer_bytes=_WRITE_BUFFER_BYTES // 8, open_tables=OPEN_TABLES_OF_PARTITION)


class RocksStore:
    """A ``StateStore`` in one RocksDB. One process has it open at a time; tools may open it read-only beside.

    Commits are not fsynced one by one: they survive SIGKILL, and after a power loss a prefix of them survives, which
    is as good, because positions travel in the same batch and the log has the rest.

    After an error of the disk RocksDB refuses everything until it is opened again: the next write does that. When a
    full disk has room again it finds out by itself, within 5 s.
    """

    def __init__(
        self,
        path: Path,
        families: Sequence[str],
        *,
        read_only: bool = False,
        lock_timeout_s: float = 0.0,
        memory: RocksMemory | None = None,
    ) -> None:
        """Open or create.

        Args:
            path: Folder, created if missing.
            families: Column families that will be used.
            read_only: Look at a store that another process may have open; shows the state at the time of opening.
            lock_timeout_s: How long to wait for another process to let go of it.
            memory: Shared with other stores of this process; None: its own.

        Raises:
            StoreLocked, StoreFormatError, StoreError: With what to do.
        """
        self._path = str(path)
        self._read_only = read_only
        self._memory = memory or RocksMemory()
        self._wanted = [*families, POSITIONS_FAMILY, META_FAMILY]
        if not read_only:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    self._path, f"cannot be created: {error.strerror}; choose another --state-dir"
                ) from error
        self._closed = False
        # A write failed, and RocksDB takes no other. Folds share a store, each with a thread of its own: it is opened
        # again only while no call is under way.
        self._failed = False
        self._users = 0
        self._mutex = threading.Lock()
        self._db = self._open(lock_timeout_s)
        self._tables: dict[str, Rdict] = {}
        self._handles: dict[str, ColumnFamily] = {}
        self._find_families()
        self._check_format()

    @property
    def path(self) -> str:
        return self._path

    def get(self, family: str, key: bytes) -> bytes | None:
        with self._using():
            value: bytes | None = self._guard(lambda: self._table(family).get(key))
            return value

    def scan(self, family: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        with self._using():
            yield from self._scan(family, prefix)

    def _scan(self, family: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        table = self._table(family)
        options = ReadOptions()
        options.set_iterate_upper_bound(prefix_end(prefix))
        # Whoever scans reads a family once, from its start to its end. Snapshots do so all the time, over files that
        # are new each time: the cache would fill with blocks that nobody asks for again.
        options.fill_cache(False)  # type: ignore[call-arg]  # the stub knows no argument
        iterator = self._guard(lambda: table.iter(options))
        iterator.seek(prefix)
        while iterator.valid():
            yield iterator.key(), iterator.value()
            iterator.next()
        # A row that cannot be read ends the loop as well.
        self._guard(iterator.status)

    def positions(self, owner: str) -> Mapping[TopicPartition, int]:
        rows = self.scan(POSITIONS_FAMILY, owner_prefix(owner))
        return dict(parse_position(owner, key, value) for key, value in rows)

    def identity(self, owner: str) -> Mapping[str, str]:
        prefix = owner_prefix(owner)
        return {key[len(prefix) :].decode(): value.decode() for key, value in self.scan(META_FAMILY, prefix)}

    def commit(
        self,
        owner: str,
        changes: Sequence[Change],
        positions: Mapping[TopicPartition, int],
        identity: Mapping[str, str] | None = None,
    ) -> None:
        self._reopen_if_failed()
        with self._using():
            self._commit(owner, changes, positions, identity or {})

    def _commit(
        self,
        owner: str,
        changes: Sequence[Change],
        positions: Mapping[TopicPartition, int],
        identity: Mapping[str, str],
    ) -> None:
        self._table(META_FAMILY)
        batch = WriteBatch(raw_mode=True)
        handles = self._handles
        for change in changes:
            handle = handles[change.family]
            if isinstance(change, Put):
                batch.put(change.key, change.value, handle)
            elif isinstance(change, Delete):
                batch.delete(change.key, handle)
            else:
                batch.delete_range(change.start, change.end, handle)
        for position, offset in positions.items():
            batch.put(position_key(owner, position), pack_offset(offset), handles[POSITIONS_FAMILY])
        for name, text in identity.items():
            batch.put(owner_prefix(owner) + name.encode(), text.encode(), handles[META_FAMILY])
        self._write(batch)

    def wipe(self, owner: str, families: Sequence[str]) -> None:
        self._reopen_if_failed()
        with self._using():
            self._table(META_FAMILY)
            batch = WriteBatch(raw_mode=True)
            for family in families:
                batch.delete_range(b"", prefix_end(b""), self._handles[family])
            for family in (POSITIONS_FAMILY, META_FAMILY):
                prefix = owner_prefix(owner)
                batch.delete_range(prefix, prefix_end(prefix), self._handles[family])
            self._write(batch)

    def close(self) -> None:
        with self._mutex:
            if not self._closed:
                self._closed = True
                self._let_go()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._mutex:
            self._users += 1
        try:
            yield
        finally:
            with self._mutex:
                self._users -= 1

    def _write(self, batch: WriteBatch) -> None:
        try:
            self._guard(lambda: self._db.write(batch, WriteOptions()))
        except (StoreFull, StoreClosed):
            raise
        except StoreError:
            self._failed = True
            raise

    def _reopen_if_failed(self) -> None:
        with self._mutex:
            if self._closed or not self._failed:
                return
            if self._users:
                raise StoreError(self._path, "failed, and others use it just now; it is opened again after that")
            self._let_go()
            self._db = self._open(0.0)
            self._find_families()
            self._failed = False
        logger.warning("state store %s was opened again after an error", self._path)

    def _let_go(self) -> None:
        self._tables = {}
        self._handles = {}
        try:
            self._guard(self._db.close)
        except StoreClosed:
            return  # Before, and then it could not be opened.
        except StoreError as error:
            # What was committed is in its log; closing writes more only to make the next start quicker.
            logger.warning("%s", error)

    def _find_families(self) -> None:
        for family in self._wanted:
            self._tables[family] = self._db.get_column_family(family)
            if not self._read_only:
                self._handles[family] = self._db.get_column_family_handle(family)

    def _open(self, lock_timeout_s: float) -> Rdict:
        deadline = time.monotonic() + lock_timeout_s
        while True:
            try:
                return self._open_once()
            except StoreLocked:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOCK_RETRY_S)

    def _open_once(self) -> Rdict:
        options = self._options()
        options.create_if_missing(not self._read_only)
        options.create_missing_column_families(not self._read_only)
        existing = self._existing_families(options)
        names = dict.fromkeys([*existing, *([] if self._read_only else self._wanted)])
        families = {name: self._options() for name in names if name != "default"}
        access = AccessType.read_only() if self._read_only else AccessType.read_write()
        return self._guard(lambda: Rdict(self._path, options, column_families=families, access_type=access))

    def _existing_families(self, options: Options) -> list[str]:
        if not (Path(self._path) / "CURRENT").exists():
            if self._read_only:
                raise StoreError(self._path, "there is no state store here")
            if any(Path(self._path).iterdir()):
                raise StoreFormatError(self._path, "the folder is not empty and not a state store; choose another")
            return []
        return self._guard(lambda: Rdict.list_cf(self._path, options))

    def _options(self) -> Options:
        options = Options(raw_mode=True)
        table = BlockBasedOptions()
        table.set_block_cache(self._memory.cache)
        options.set_block_based_table_factory(table)
        write_buffer_bytes = self._memory.write_buffer_bytes
        options.set_write_buffer_size(write_buffer_bytes)
        # Of all families together: when it is reached, the family with the oldest rows goes to a file.
        options.set_db_write_buffer_size(write_buffer_bytes)
        options.set_arena_block_size(write_buffer_bytes // _WRITE_BUFFER_PIECES)
        options.set_max_total_wal_size(_WAL_BYTES)
        options.set_max_open_files(self._memory.open_tables + _OTHER_OPEN_FILES)
        # One piece: each of several may hold one file more than its part.
        options.set_table_cache_num_shard_bits(0)
        options.set_keep_log_file_num(3)
        options.set_max_log_file_size(1024 * 1024)
        return options

    def _check_format(self) -> None:
        found = self.get(META_FAMILY, FORMAT_KEY)
        if found is None:
            if not self._read_only:
                batch = WriteBatch(raw_mode=True)
                batch.put(FORMAT_KEY, str(FORMAT_VERSION).encode(), self._handles[META_FAMILY])
                self._guard(lambda: self._db.write(batch, WriteOptions()))
        elif found != str(FORMAT_VERSION).encode():
            self.close()
            raise StoreFormatError(
                self._path,
                f"is of format {found.decode(errors='replace')}, this version knows {FORMAT_VERSION}; use the newer "
                "version, or delete the folder: it is folded anew from the log",
            )

    def _table(self, family: str) -> Rdict:
        try:
            return self._tables[family]
        except KeyError:
            if self._closed:
                raise StoreClosed(self._path, "used after close") from None
            if self._failed:
                raise StoreError(self._path, "is not open after an error; the next write opens it again") from None
            raise

    def _guard(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except DbClosedError as error:
            raise StoreClosed(self._path, "used after close") from error
        except StoreError:
            raise
        except Exception as error:  # rocksdict has no class of its own for RocksDB's errors
            raise _map_error(self._path, error) from error
