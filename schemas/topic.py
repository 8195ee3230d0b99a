"""What a topic is: name, key, value types, version, partitions, and how long its records are kept."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Cleanup(Enum):
    """Kafka's ``cleanup.policy``: keep by age, or keep the newest record of each key."""

    RETENTION = "delete"
    COMPACTION = "compact"


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """The contract of one topic. A topic's full name is ``<namespace>.<name>``.

    Attributes:
        name: Name without the namespace.
        version: Version of the value layout. A reader refuses (dead-letters) any other.
        value: The msgspec Struct or tagged union that a value decodes to.
        key: How the record key is built, for people; the ``key_…`` helpers of the module build it.
        partitions: Default partition count. It is fixed for the life of the topic: the order per key hangs on it.
        cleanup: Retention by age, or compaction by key.
        retention_ms: Age after which a record may go (``RETENTION`` only); None keeps everything.
        trim_needs_snapshot: The topic is folded into state that only a snapshot can replace, so the embedded log
            never trims it by age alone.
        max_value_bytes: A larger value is refused by writers and dead-lettered by readers.
        description: One sentence for the generated documents.
    """

    name: str
    version: int
    value: Any
    key: str
    partitions: int
    cleanup: Cleanup
    description: str
    retention_ms: int | None = None
    trim_needs_snapshot: bool = False
    max_value_bytes: int = 1_000_000

    def qualified(self, namespace: str) -> str:
        """Full topic name in a log, for example ``dynamo.kv-events``."""
        return f"{namespace}.{self.name}"
