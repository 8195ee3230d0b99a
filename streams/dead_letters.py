"""Turning a refused record into a dead letter."""

from __future__ import annotations

from typing import Protocol

from dynamo_es.log.base import Record
from schemas.dead_letters import DEAD_LETTERS, MAX_KEPT_BYTES, DeadLetter


class DeadLetterSink(Protocol):
    """Where refused records go. Must not block and must not raise."""

    def offer_dead_letter(self, letter: DeadLetter) -> None:
        """Keep the letter, or count that it could not be kept."""


def dead_letter_for(record: Record, reader: str, reason: str, detail: str) -> DeadLetter:
    """The letter for a record that ``reader`` refused. ``detail`` is cut to 500 characters."""
    value = record.value
    return DeadLetter(
        version=DEAD_LETTERS.version,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        timestamp_ms=record.timestamp_ms,
        reason=reason,
        detail=detail[:500],
        reader=reader,
        key=record.key[:MAX_KEPT_BYTES] if record.key is not None else None,
        value=value[:MAX_KEPT_BYTES] if value is not None else None,
        value_bytes=len(value) if value is not None else 0,
    )
