"""Reading a partition of a compacted topic as it is now: the newest record of each key.

What cannot be decoded counts as missing, and is a dead letter like any other, once for each record and reader.
"""

from __future__ import annotations

import logging
from typing import Any

from dynamo_es.log.base import EventLog, Record, TopicPartition
from schemas.codec import SchemaError, TopicCodec
from schemas.topic import TopicSpec
from streams.dead_letters import DeadLetterSink, dead_letter_for

logger = logging.getLogger(__name__)
_POLL_RECORDS = 256
# A snapshot of this size is one of 60 million blocks in one partition, with the snapshot before it. Beyond it a record
# is left out, as if it were missing: whoever may write to the topic must not be able to fill our memory.
MAX_HELD_BYTES = 1024 * 1024 * 1024


class CompactedTopic:
    """Reads one topic. Belongs to one event loop; holds nothing between reads but how far it has told of refusals."""

    def __init__(
        self,
        spec: TopicSpec,
        log: EventLog,
        namespace: str,
        letters: DeadLetterSink,
        max_held_bytes: int = MAX_HELD_BYTES,
    ) -> None:
        """``letters`` gets what does not decode. ``max_held_bytes``: of the values that one ``read`` returns."""
        self.topic = spec.qualified(namespace)
        self._spec = spec
        self._log = log
        self._letters = letters
        self._max_held_bytes = max_held_bytes
        self._codec = TopicCodec(spec)
        self._told: dict[int, int] = {}

    async def read(self, partition: int, prefix: bytes = b"") -> dict[bytes, Any]:
        """The newest records, decoded, of the keys that begin with ``prefix``. Raises ``LogError``."""
        bounds = (await self._log.bounds(self.topic))[partition]
        if bounds.end < self._told.get(partition, 0):
            self._told[partition] = 0  # The topic was made anew.
        held = _Held(self._max_held_bytes)
        if bounds.start < bounds.end:
            position = TopicPartition(self.topic, partition)
            reader = self._log.reader({position: bounds.start})
            try:
                while reader.positions()[position] < bounds.end:
                    for records in (await reader.poll(max_records=_POLL_RECORDS, timeout_s=1.0)).values():
                        for record in records:
                            self._take(held, record, prefix)
            finally:
                await reader.close()
            self._told[partition] = max(self._told.get(partition, 0), bounds.end)
        if held.left_out:
            logger.error(
                "%s[%d] has more than %d bytes: %d records are left out",
                self.topic, partition, self._max_held_bytes, held.left_out,
            )  # fmt: skip
        return held.values

    def _take(self, held: _Held, record: Record, prefix: bytes) -> None:
        key = record.key
        if key is None:
            self._refuse(record, SchemaError("missing_identity", "it has no key"))
            return
        if not key.startswith(prefix):
            return
        # At once, so that what does not decode is not held until the end.
        held.drop(key)
        if record.value is None:
            return
        try:
            value = self._codec.decode(record.value, record.headers)
        except SchemaError as error:
            self._refuse(record, error)
        else:
            held.put(key, value, len(record.value))

    def _refuse(self, record: Record, error: SchemaError) -> None:
        if record.offset < self._told.get(record.partition, 0):
            return
        logger.warning(
            "%s[%d]@%d is not readable and counts as missing: %s", self.topic, record.partition, record.offset, error
        )
        self._letters.offer_dead_letter(dead_letter_for(record, self._spec.name, error.reason, error.detail))


class _Held:
    """Decoded values by key, with a bound on the bytes that they were made from."""

    def __init__(self, max_bytes: int) -> None:
        self.values: dict[bytes, Any] = {}
        self.left_out = 0
        self._sizes: dict[bytes, int] = {}
        self._bytes = 0
        self._max_bytes = max_bytes

    def drop(self, key: bytes) -> None:
        self._bytes -= self._sizes.pop(key, 0)
        self.values.pop(key, None)

    def put(self, key: bytes, value: Any, size: int) -> None:
        if self._bytes + size > self._max_bytes:
            self.left_out += 1
            return
        self.values[key] = value
        self._sizes[key] = size
        self._bytes += size
