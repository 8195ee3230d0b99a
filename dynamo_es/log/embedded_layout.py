"""Folders and small files of the embedded log: where things are, what they are called, and how they come to be.

    log.json                                    format version, log id
    lock, maintenance.lock                      flock: creating things; retention and compaction
    bell/<topic>.<partition>                    the end offset, rewritten after each commit (see ``doorbell``)
    topics/<topic>/topic.json                   topic id, partitions, configuration
    topics/<topic>/<partition>/lock             flock: the turnstile of its writers
    topics/<topic>/<partition>/<base>.sqlite    one segment; the base offset has 20 digits

Everything here blocks and belongs in a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sqlite3
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dynamo_es.folders import why_not_made
from dynamo_es.log.base import TopicConfig, TopicPartition
from dynamo_es.log.errors import LogError, LogFormatError, LogFull, LogUnavailable

FORMAT_VERSION = 1
_SEGMENT_NAME = re.compile(r"(\d{20})\.sqlite")
# A fresh volume's root is not empty; neither is a folder in which another process just started to make the log.
_HARMLESS_NAMES = frozenset(("lock", "lost+found"))
_LOCK_POLL_S = 0.002
LOCK_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class EmbeddedOptions:
    """Settings of one handle. Handles of one log may differ; each writer rolls segments by its own.

    Attributes:
        durability: ``os``: an acknowledged record survives the end of any process. ``fsync``: also a loss of power.
        segment_bytes: Size at which a segment is sealed.
        segment_ms: Age at which it is, once it has a record; less in a topic whose retention is short.
        append_timeout_s: An append that waited this long (for room, for a lock, for the disk) fails.
        queue_records, queue_bytes: Appends that wait for a writer thread, one for each topic (16 at most); more
            wait in their tasks.
        recheck_s: How often a waiting reader looks without a ring of the doorbell.
    """

    durability: str = "os"
    segment_bytes: int = 64 * 1024 * 1024
    segment_ms: int = 3_600_000
    append_timeout_s: float = 30.0
    queue_records: int = 65_536
    queue_bytes: int = 64 * 1024 * 1024
    recheck_s: float = 0.25

    @property
    def synchronous(self) -> str:
        return "FULL" if self.durability == "fsync" else "NORMAL"

    def segment_age_ms(self, topic: TopicConfig) -> int:
        """Age at which a segment of ``topic`` is sealed: retention drops whole segments, so it needs about eight."""
        if topic.retention_ms is None or topic.compacted:
            return self.segment_ms
        return min(self.segment_ms, max(topic.retention_ms // 8, 1_000))


class LockHeld(LogUnavailable):
    """Another process held a lock for as long as this one was willing to wait."""


class LogFile(msgspec.Struct):
    """``log.json``."""

    format: int
    log_id: str


class TopicFile(msgspec.Struct):
    """``topic.json``."""

    topic_id: str
    partitions: int
    compacted: bool
    retention_ms: int | None
    max_record_bytes: int


@dataclass(frozen=True, slots=True)
class LogLayout:
    """Names of all files below ``root``."""

    root: Path

    @property
    def log_file(self) -> Path:
        return self.root / "log.json"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def maintenance_lock(self) -> Path:
        return self.root / "maintenance.lock"

    @property
    def topics(self) -> Path:
        return self.root / "topics"

    @property
    def bells(self) -> Path:
        return self.root / "bell"

    def topic_file(self, topic: str) -> Path:
        return self.topics / topic / "topic.json"

    def partition(self, position: TopicPartition) -> Path:
        return self.topics / position.topic / str(position.partition)

    def bell(self, position: TopicPartition) -> Path:
        return self.bells / f"{position.topic}.{position.partition}"


def segment_path(folder: Path, base: int) -> Path:
    """The segment of a partition that starts at offset ``base``."""
    return folder / f"{base:020d}.sqlite"


def list_bases(folder: Path) -> list[int]:
    """Base offsets of a partition's segments, ascending; never empty.

    Raises:
        LogUnavailable: The folder is gone.
        LogFormatError: It has no segment.
    """
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise map_os_error(folder, error, "read") from error
    bases = sorted(int(match[1]) for match in map(_SEGMENT_NAME.fullmatch, names) if match)
    if not bases:
        raise LogFormatError(f"{folder} has no segment files; restore it from a backup, or delete the whole log folder")
    return bases


def map_os_error(path: Path, error: OSError, doing: str) -> LogError:
    """What an operating system error means for the log. ``doing``: read, written, created."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LogFull(f"{path} cannot be {doing}: {error.strerror}; free space, appends work again by themselves")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return LogUnavailable(
            f"{path} cannot be {doing}: {error.strerror}; give this user write access to it, or choose another folder "
            "with --log embedded:///dir"
        )
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE):
        return LogUnavailable(
            f"{path} cannot be {doing}: {error.strerror}; the log's folder was moved or deleted: put it back, or make "
            "a new one (dynamo-es topics create), on which running processes start over"
        )
    return LogUnavailable(f"{path} cannot be {doing}: {error.strerror or error}")


def _map_creation_error(root: Path, error: OSError) -> LogError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return map_os_error(root, error, "created")
    return LogUnavailable(
        f"{root} cannot be used: {why_not_made(root, error)}; choose another folder with --log embedded:///dir"
    )


def map_sqlite_error(path: Path, error: sqlite3.Error) -> LogError:
    """What an SQLite error means for the log."""
    code = getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    primary = code & 0xFF
    if primary == sqlite3.SQLITE_FULL or (
        primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and _is_full(path)
    ):
        return LogFull(f"no space left for {path}; free space, appends work again by themselves")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LogUnavailable(f"{path} is locked by another process ({error}); it is tried again")
    if primary in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
        return LogFormatError(
            f"{path} is not a readable segment ({error}); restore it from a backup, or move the log folder away"
        )
    if not path.exists():
        return LogUnavailable(f"{path} is gone ({name}); the log's folder was moved or deleted, or the segment trimmed")
    return LogUnavailable(f"{path}: {error} ({name}); check the disk and the permissions of the folder")


def _is_full(path: Path) -> bool:
    """SQLite reports a full disk as an I/O error where it grows its shared-memory file."""
    try:
        free = os.statvfs(path.parent)
    except OSError:
        return False
    return free.f_bavail * free.f_frsize < 65_536


@contextmanager
def exclusive_lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold ``path`` against every other holder on this machine, threads included. Ends with the process at the latest.

    Raises:
        LockHeld: Another holder kept it for longer than ``timeout_s``.
        LogUnavailable: It cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise map_os_error(path, error, "opened") from error
    try:
        deadline = time.monotonic() + timeout_s
        while not _try_lock(descriptor):
            if time.monotonic() >= deadline:
                raise LockHeld(f"{path} was held by another process for {timeout_s:g} s; is one of them stopped?")
            time.sleep(_LOCK_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_folder(layout: LogLayout) -> str:
    """Open the log folder or make one; the log id.

    Raises:
        LogUnavailable: It cannot be created or read.
        LogFormatError: Newer format, or the folder belongs to something else (nothing is written then).
    """
    try:
        layout.root.mkdir(parents=True, exist_ok=True)
        found = os.listdir(layout.root)
    except OSError as error:
        raise _map_creation_error(layout.root, error) from error
    if layout.log_file.name not in found:
        _refuse_foreign(layout, found)
        with exclusive_lock(layout.lock):
            if not layout.log_file.exists():
                _make_folder(layout)
    return read_log_id(layout)


def _refuse_foreign(layout: LogLayout, names: Sequence[str]) -> None:
    foreign = sorted(name for name in names if name not in _HARMLESS_NAMES and not name.startswith(".log.json."))
    # With the lock there, another process may be half way through making the log; without it nobody of ours was here.
    if foreign and not ("lock" in names and set(foreign) <= {"topics", "bell", "log.json"}):
        raise LogFormatError(
            f"{layout.root} is not an event log and not empty (it holds {foreign[0]!r}); choose an empty folder"
        )


def _make_folder(layout: LogLayout) -> None:
    try:
        layout.topics.mkdir(exist_ok=True)
        layout.bells.mkdir(exist_ok=True)
        write_file(layout.log_file, msgspec.json.encode(LogFile(FORMAT_VERSION, uuid.uuid4().hex)))
    except OSError as error:
        raise map_os_error(layout.root, error, "written") from error


def read_log_id(layout: LogLayout) -> str:
    """Identity of the log that is in the folder now. Raises as ``open_folder``."""
    try:
        content = layout.log_file.read_bytes()
    except OSError as error:
        raise map_os_error(layout.log_file, error, "read") from error
    try:
        # A newer format may have changed everything but this number.
        version = msgspec.json.decode(content, type=dict[str, msgspec.Raw]).get("format")
        number = msgspec.json.decode(version, type=int) if version is not None else None
        if number is not None and number > FORMAT_VERSION:
            raise LogFormatError(
                f"{layout.root} has log format {number}, this version knows {FORMAT_VERSION}; upgrade dynamo-es, or "
                "choose another folder"
            )
        return msgspec.json.decode(content, type=LogFile).log_id
    except msgspec.DecodeError as error:
        raise LogFormatError(f"{layout.log_file} cannot be read: {error}; restore it, or choose another folder") from (
            error
        )


def write_file(path: Path, content: bytes) -> None:
    """Write a small file so that it is either not there or complete, also after a power loss."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
        os.rename(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_topic(layout: LogLayout, topic: str) -> TopicConfig | None:
    """Configuration of a topic; None if there is no such topic."""
    found = read_topic_file(layout, topic)
    if found is None:
        return None
    return TopicConfig(topic, found.partitions, found.compacted, found.retention_ms, found.max_record_bytes)


def read_topic_file(layout: LogLayout, topic: str) -> TopicFile | None:
    """``topic.json`` of a topic; None if there is no such topic.

    Raises:
        LogUnavailable: The log's folder itself is gone or cannot be read.
        LogFormatError: The file is damaged.
    """
    path = layout.topic_file(topic)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        if not layout.log_file.exists():
            raise map_os_error(layout.root, error, "read") from error
        return None
    except OSError as error:
        raise map_os_error(path, error, "read") from error
    try:
        return msgspec.json.decode(content, type=TopicFile)
    except msgspec.DecodeError as error:
        raise LogFormatError(f"{path} cannot be read: {error}; restore it from a backup") from error


def list_topics(layout: LogLayout) -> list[str]:
    """Names of all topics, sorted."""
    try:
        return sorted(name for name in os.listdir(layout.topics) if not name.startswith(".tmp-"))
    except OSError as error:
        raise map_os_error(layout.topics, error, "read") from error
