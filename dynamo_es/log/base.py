"""The contract of the event log. ``tests/contract/log_suite.py`` holds every backend to it.

A log has topics, a topic has a fixed number of partitions, a partition is a sequence of records with dense offsets
from 0 (compaction may leave holes; nothing else does). Order is per partition, and a key always goes to the same
partition: Kafka's default partitioner (murmur2), so that producers in other languages agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

Headers = tuple[tuple[str, bytes], ...]

# How long a deletion in a compacted topic stays visible to readers that are behind (Kafka's delete.retention.ms).
TOMBSTONE_RETENTION_MS = 24 * 3_600_000
# Kafka's max.message.bytes counts a record with its batch around it: this much more than the record itself.
RECORD_OVERHEAD_BYTES = 1024


class TopicPartition(NamedTuple):
    """Full topic name and partition number."""

    topic: str
    partition: int


class Position(NamedTuple):
    """Where a record stands."""

    topic: str
    partition: int
    offset: int


class Bounds(NamedTuple):
    """``start``: first offset that can be read. ``end``: offset that the next append gets."""

    start: int
    end: int


class Entry(NamedTuple):
    """What is appended. ``value`` None deletes the key in a compacted topic. ``timestamp_ms`` None: now."""

    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    timestamp_ms: int | None = None
    partition: int | None = None


class Record(msgspec.Struct, gc=False, frozen=True):
    """What is read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """What ``create_topics`` makes, and what ``alter_topic`` makes of a topic.

    ``replication`` and ``min_insync_replicas`` None: the broker's default, or what the topic has (one-machine backends
    ignore both).
    """

    name: str
    partitions: int
    compacted: bool = False
    retention_ms: int | None = None
    max_record_bytes: int = 1_048_576
    replication: int | None = None
    min_insync_replicas: int | None = None


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic as it is. ``topic_id`` changes when the topic is deleted and made anew.

    ``replication`` is that of the partition with the fewest replicas; it and ``min_insync_replicas`` are None where
    the backend has no replicas.
    """

    name: str
    topic_id: str
    partitions: int
    compacted: bool
    retention_ms: int | None = None
    max_record_bytes: int | None = None
    replication: int | None = None
    min_insync_replicas: int | None = None
    details: Mapping[str, str] = field(default_factory=dict)


class LogReader(Protocol):
    """Reads a set of partitions from given positions, for one task; no group, no commit. See ``EventLog.reader``.

    A record is returned once, in offset order within its partition, and only when it can never vanish again: a
    reader sees no uncommitted record and skips no committed one. Nothing is promised about order across partitions.
    """

    async def poll(
        self, *, max_records: int = 10_000, timeout_s: float | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        """The next records, at most ``max_records`` in all.

        Returns at once when there are any. Otherwise waits until there are, or until ``timeout_s`` (None: for ever;
        0: do not wait) and then returns an empty mapping. The position of each partition moves behind what is
        returned. Not to be called from two tasks at a time.

        Raises:
            OffsetOutOfRange: A position fell out of retention (or was never reached); ``seek`` and go on.
            LogReplaced: The log or a topic was deleted and made anew, so that positions mean nothing; this reader is
                of no more use. Where a new topic is already longer than the position, a backend may notice only a few
                seconds later, and return records of the new topic until then.
            LogUnavailable: The log is away; the positions are unchanged, call again later.
            LogClosed: After ``close``.
        """

    def seek(self, position: TopicPartition, offset: int) -> None:
        """Continue ``position`` at ``offset``. Takes effect at the next ``poll``."""

    def positions(self) -> Mapping[TopicPartition, int]:
        """Next offset of every partition."""

    async def close(self) -> None:
        """Release the reader. A waiting ``poll`` raises ``LogClosed``. Safe to call twice."""


class EventLog(Protocol):
    """An append-only log, shared by any number of processes. Belongs to one event loop.

    Call ``start`` first and ``close`` last. Everything else may be called from many tasks at a time. Records that two
    tasks (or processes) append to a partition get some order; each task's own appends keep theirs.
    """

    @property
    def url(self) -> str:
        """The URL it was opened by, without secrets."""

    @property
    def log_id(self) -> str:
        """Identity of this log (cluster id); state that was folded from another log is void. Known after ``start``."""

    async def start(self) -> None:
        """Connect or open.

        Raises:
            LogUnavailable: It cannot be reached or opened; says what to do.
            LogFormatError: The folder is of a newer format or not a log.
        """

    async def reopen(self) -> None:
        """Go on with the log that is in place now, after ``LogReplaced``.

        ``log_id`` is the new one's from then on; readers that were made before go on refusing. Topics of the new log
        may be missing: create them. Does nothing that can be noticed while the log is the same. Never makes a log.

        Raises:
            LogUnavailable, LogFormatError: There is none that can be used; call again later.
        """

    async def close(self) -> None:
        """Finish appends that were accepted, then release everything. Safe to call twice."""

    async def create_topics(self, topics: Sequence[TopicConfig]) -> None:
        """Create what is missing. Idempotent, also from several processes at once.

        Raises:
            TopicMismatch: A topic exists with another partition count.
            LogUnavailable: As for ``append``.
        """

    async def list_topics(self) -> Sequence[str]:
        """Names of all topics, sorted."""

    async def describe(self, topic: str) -> TopicDescription:
        """Raises ``UnknownTopic``."""

    @property
    def alterable(self) -> frozenset[str]:
        """Fields of ``TopicConfig`` that ``alter_topic`` can change in place. Never ``partitions``."""

    async def alter_topic(self, config: TopicConfig) -> None:
        """Give a topic the ``alterable`` settings of ``config``; records, offsets and the topic's id stay.

        Durable on return. A process that has the topic open may keep the settings that it knows for a minute (Kafka)
        or until its next start (embedded).

        Raises:
            UnknownTopic: There is no such topic.
            TopicMismatch: It has another partition count. Nothing was changed.
            InvalidArgument: A setting differs that cannot be changed in place. Nothing was changed.
            LogUnavailable: As for ``append``.
        """

    async def append(self, topic: str, entry: Entry) -> Position:
        """Append one record and wait until it is durable.

        On return the record survives SIGKILL of any process (and, with ``durability=fsync`` or ``acks=all`` on a
        replicated topic, the loss of a machine's power). If it raises or is cancelled, the record may still be there
        or appear: readers must be idempotent.

        Raises:
            UnknownTopic, RecordTooLarge: Nothing was appended.
            LogReplaced: The log was deleted and another one made in its place, which gets nothing until ``reopen``
                was called. Or the topic was: this is told once to each handle (by Kafka within a few seconds, of
                which the new topic has the appends), and then appends go to the new one.
            LogFull, LogUnavailable: Not known to be appended.
            LogClosed: After ``close``.
        """

    async def append_all(self, topic: str, entries: Sequence[Entry]) -> Sequence[Position]:
        """Append many; same promises as ``append`` for all of them. Entries of one partition keep their order.

        It is not a transaction: when it raises, a prefix of each partition's entries may be there.
        """

    def reader(self, positions: Mapping[TopicPartition, int]) -> LogReader:
        """A reader that starts at these offsets. Does no I/O yet."""

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        """Start and end of every partition. Raises ``UnknownTopic``."""

    async def offset_at(self, position: TopicPartition, timestamp_ms: int) -> int:
        """Smallest offset whose record's timestamp is >= ``timestamp_ms``; the end offset if there is none."""

    async def trim(self, position: TopicPartition, before_offset: int) -> int:
        """Drop records below ``before_offset``, in whole storage units; returns the new start offset.

        The start never exceeds ``before_offset``. A backend drops what it can and may drop nothing.
        """

    async def enforce_retention(self, now_ms: int) -> Mapping[TopicPartition, int]:
        """Drop what is older than each topic's retention and compact compacted topics.

        A no-op where the broker does it. Returns the new start of every partition that was trimmed.
        """
