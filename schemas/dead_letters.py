"""Topic ``dead-letters``: records that a reader refused, with the reason. They stop nothing and mean nothing else."""

from __future__ import annotations

import msgspec

from schemas.topic import DAY_MS, Cleanup, TopicSpec

MAX_KEPT_BYTES = 65_536
REASONS = ("undecodable", "unknown_version", "too_large", "missing_identity", "rejected")


class DeadLetter(msgspec.Struct, tag="dead-letter", array_like=True):
    """A refused record.

    Attributes:
        topic, partition, offset: Where it stands (partition -1: it never reached a topic, ``topic`` names its source).
        reason: ``undecodable``, ``unknown_version``, ``too_large``, ``missing_identity`` or ``rejected``.
        detail: What was wrong, one sentence.
        reader: Fold or publisher that refused it.
        key, value: The bytes, each cut to 65,536.
        value_bytes: Length before the cut.
    """

    version: int
    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    reason: str
    detail: str
    reader: str
    key: bytes | None
    value: bytes | None
    value_bytes: int


DEAD_LETTERS = TopicSpec(
    name="dead-letters",
    version=1,
    value=DeadLetter,
    key="<topic>:<partition>:<offset>",
    partitions=1,
    cleanup=Cleanup.RETENTION,
    retention_ms=7 * DAY_MS,
    description="Records that a reader refused, with the reason.",
)


def key_dead_letter(topic: str, partition: int, offset: int) -> bytes:
    """Record key: two readers that refuse the same record write the same key."""
    return f"{topic}:{partition}:{offset}".encode()
