"""Appending typed events: a topic contract and a Struct in, a record out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.log.base import Entry, EventLog, Position, TopicConfig
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.state import AppendWatch
from schemas.catalog import TOPICS
from schemas.codec import TRACE_HEADER, SchemaError, TopicCodec
from schemas.dead_letters import DEAD_LETTERS, DeadLetter, key_dead_letter
from schemas.topic import Cleanup, TopicSpec

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AppendCounters:
    """By topic name; ``dead_letters`` by qualified topic (or other source) of the record, and reason."""

    offered: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)


class TopicAppender:
    """Encodes events and appends them, waiting (``append``) or not (``offer``). Belongs to one event loop.

    It is the ``EventSink`` of publishers and the ``DeadLetterSink`` of fold runners.
    """

    def __init__(
        self,
        log: EventLog,
        buffer: BufferedAppender,
        namespace: str,
        clock: Clock,
        watch: AppendWatch | None = None,
    ) -> None:
        """``watch`` sees the appends that are waited for; the buffer has it as well."""
        self._clock = clock
        self._watch = watch or AppendWatch(clock)
        self._log = log
        self._buffer = buffer
        self._namespace = namespace
        self._codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
        self.counters = AppendCounters()

    def offer(
        self,
        topic: TopicSpec,
        key: bytes,
        value: msgspec.Struct | None,
        timestamp_ms: int | None = None,
        *,
        trace: str = "",
    ) -> bool:
        """Append in the background; never blocks, never raises. ``trace``: goes along as the header ``traceparent``.

        Returns False if the event could not be kept: the buffer is full, or the event is over the topic's bound.
        """
        try:
            entry = self._entry(
                topic, key, value, self._clock.now_ms() if timestamp_ms is None else timestamp_ms, trace
            )
        except SchemaError as error:
            logger.error("event for %s dropped: %s", topic.name, error)
            accepted = False
        else:
            accepted = self._buffer.offer(topic.qualified(self._namespace), entry)
        counts = self.counters.offered if accepted else self.counters.refused
        counts[topic.name] = counts.get(topic.name, 0) + 1
        if isinstance(value, DeadLetter):
            self.counters.dead_letters[value.topic, value.reason] += 1
        return accepted

    async def append(self, topic: TopicSpec, key: bytes, value: msgspec.Struct | None) -> Position:
        """Append and wait until it is durable. ``value`` None deletes the key.

        Raises:
            SchemaError: Over the topic's bound.
            LogError: As ``EventLog.append``.
        """
        name, entry = topic.qualified(self._namespace), self._entry(topic, key, value, None)
        with self._watch.appending(name):
            return await self._log.append(name, entry)

    def offer_dead_letter(self, letter: DeadLetter) -> None:
        """Keep a refused record; logged if it cannot be kept."""
        key = key_dead_letter(letter.topic, letter.partition, letter.offset)
        logger.warning(
            "%s refused %s[%d]@%d: %s: %s",
            letter.reader, letter.topic, letter.partition, letter.offset, letter.reason, letter.detail,
        )  # fmt: skip
        if not self.offer(DEAD_LETTERS, key, letter):
            logger.error("dead letter of %s[%d]@%d lost", letter.topic, letter.partition, letter.offset)

    def _entry(
        self, topic: TopicSpec, key: bytes, value: msgspec.Struct | None, timestamp_ms: int | None, trace: str = ""
    ) -> Entry:
        codec = self._codecs[topic.name]
        headers = (*codec.headers, (TRACE_HEADER, trace.encode())) if trace else codec.headers
        return Entry(None if value is None else codec.encode(value), key, headers, timestamp_ms)


def topic_configs(namespace: str, replication: int | None, topics: Sequence[TopicSpec] = TOPICS) -> list[TopicConfig]:
    """What to create in a log. Topics whose trimming needs a snapshot are never trimmed by age."""
    return [
        TopicConfig(
            name=spec.qualified(namespace),
            partitions=spec.partitions,
            compacted=spec.cleanup is Cleanup.COMPACTION,
            retention_ms=None if spec.trim_needs_snapshot else spec.retention_ms,
            # Room for headers, key and framing beside the value.
            max_record_bytes=spec.max_value_bytes + 48_576,
            replication=replication,
        )
        for spec in topics
    ]
