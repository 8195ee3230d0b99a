"""Errors of the event log. Driver errors are mapped to these at the backend's edge (``raise ... from``)."""

from __future__ import annotations

from dynamo_es.errors import DynamoException


class LogError(DynamoException):
    """Root of the log's errors."""


class LogUnavailable(LogError):
    """The log cannot be reached just now (broker away, disk gone, lock held). Appends wait in their buffer."""

    retriable = True


class LogReplaced(LogUnavailable):
    """The log, or a topic, was deleted and another one made in its place.

    Retriable, since the old one may be put back, and since its user can start over on the new one: readers anew from
    its start, appends once ``EventLog.reopen`` was called (for a topic alone they go to the new one by themselves).
    Nothing that was read or appended before is in it.
    """

    def __init__(self, what: str, found: str, expected: str) -> None:
        super().__init__(
            f"{what} was deleted and made anew (id {found}, it was {expected}); what was appended before is gone"
        )
        self.what = what
        self.found = found
        self.expected = expected


class LogFull(LogUnavailable):
    """No space left for appends. What was appended stays readable."""


class LogClosed(LogError):
    """The log or reader was used after ``close``."""


class LogFormatError(LogError):
    """A folder or file is of a newer format than this version reads, or is not ours."""


class UnknownTopic(LogError):
    """The topic does not exist."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} does not exist; create it first (dynamo-es topics)")
        self.topic = topic


class TopicMismatch(LogError):
    """A topic exists with another partition count; the order per key would break."""

    def __init__(self, topic: str, found: int, wanted: int) -> None:
        super().__init__(
            f"topic {topic!r} has {found} partitions, the configuration says {wanted}; a partition count never "
            f"changes in place: set it back to {found}, or use another namespace"
        )
        self.topic = topic
        self.found = found
        self.wanted = wanted


class RecordTooLarge(LogError):
    """The record exceeds what the log takes."""

    def __init__(self, topic: str, size: int, limit: int) -> None:
        super().__init__(f"record of {size} bytes for {topic!r} exceeds the limit of {limit} bytes")
        self.topic = topic
        self.size = size
        self.limit = limit


class OffsetOutOfRange(LogError):
    """The position asked for is not in the log any more, or not yet."""

    def __init__(self, topic: str, partition: int, offset: int, start: int, end: int) -> None:
        super().__init__(f"{topic}[{partition}]: offset {offset} is outside of [{start}, {end}]")
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.start = start
        self.end = end
