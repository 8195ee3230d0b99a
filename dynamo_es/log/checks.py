"""Checks of what callers hand in, the same for every backend that is ours."""

from __future__ import annotations

import re

from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Entry, TopicConfig
from dynamo_es.log.errors import RecordTooLarge, TopicMismatch

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_MAX_PARTITIONS = 4096
_MAX_TIMESTAMP_MS = 2**63 - 1
# Fields of TopicConfig that a topic of the one-machine backends can change in place. Not ``compacted``: a reader that
# has such a topic open counts on dense offsets.
ALTERABLE = frozenset({"retention_ms", "max_record_bytes"})


def check_topic_config(config: TopicConfig) -> None:
    """Kafka's rules for names, so that a topic can move between backends. Raises ``InvalidArgument``."""
    if not _TOPIC_NAME.fullmatch(config.name) or config.name in (".", ".."):
        raise InvalidArgument(
            f"topic name {config.name!r}: expected 1 to 249 of a-z, A-Z, 0-9, '.', '_' and '-', other than '.' and '..'"
        )
    if not 1 <= config.partitions <= _MAX_PARTITIONS:
        raise InvalidArgument(f"topic {config.name!r}: {config.partitions} partitions, expected 1 to {_MAX_PARTITIONS}")


def check_alteration(wanted: TopicConfig, found: TopicConfig) -> None:
    """What ``EventLog.alter_topic`` refuses on a one-machine backend. Raises ``TopicMismatch``, ``InvalidArgument``."""
    check_topic_config(wanted)
    if wanted.partitions != found.partitions:
        raise TopicMismatch(wanted.name, found.partitions, wanted.partitions)
    if wanted.compacted != found.compacted:
        kinds = {True: "compacted", False: "kept by age"}
        raise InvalidArgument(
            f"topic {wanted.name!r} is {kinds[found.compacted]} and cannot become {kinds[wanted.compacted]} in place"
        )


def entry_size(entry: Entry) -> int:
    """Bytes of key, value and headers."""
    size = (0 if entry.value is None else len(entry.value)) + (0 if entry.key is None else len(entry.key))
    for name, content in entry.headers:
        size += len(name) + len(content)
    return size


def check_entry(topic: str, entry: Entry, partitions: int, max_record_bytes: int) -> int:
    """Size of an entry that may be appended.

    Raises:
        InvalidArgument: Wrong types, a partition that the topic does not have, a negative timestamp.
        RecordTooLarge: Above the topic's bound.
    """
    for name, part in (("key", entry.key), ("value", entry.value)):
        if part is not None and not isinstance(part, bytes):
            raise InvalidArgument(f"{name} of a record for {topic!r} is {type(part).__name__}, expected bytes or None")
    if entry.partition is not None and not 0 <= entry.partition < partitions:
        raise InvalidArgument(f"topic {topic!r} has partitions 0 to {partitions - 1}, not {entry.partition}")
    if entry.timestamp_ms is not None and not 0 <= entry.timestamp_ms <= _MAX_TIMESTAMP_MS:
        raise InvalidArgument(f"timestamp {entry.timestamp_ms} of a record for {topic!r}: expected ms since 1970")
    size = entry_size(entry)
    if size > max_record_bytes:
        raise RecordTooLarge(topic, size, max_record_bytes)
    return size
