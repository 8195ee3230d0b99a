"""Telling about engine events that could not be used: a counter, a log line, a dead letter."""

from __future__ import annotations

import logging
from collections import Counter

from dynamo_es.clock import Clock
from dynamo_es.publishers.engine_events import Rejected
from dynamo_es.publishers.sink import EventSink
from schemas.dead_letters import DEAD_LETTERS, DeadLetter, key_dead_letter

logger = logging.getLogger(__name__)

# An engine that only sends what we do not understand must not flood the log: one letter for each reason in this time.
LETTER_INTERVAL_S = 1.0
_LETTER_REASON = {
    "undecodable_batch": "undecodable",
    "undecodable_event": "undecodable",
    "lora_without_name": "missing_identity",
    "missing_rank": "missing_identity",
}


class RejectionReporter:
    """Reports for one publisher. A dead letter says what was wrong and how long the event was; its bytes are left out,
    because an engine event holds the token ids of prompts.
    """

    def __init__(self, sink: EventSink, clock: Clock, source: str) -> None:
        self._sink = sink
        self._clock = clock
        self._source = source
        self._next_letter: dict[str, float] = {}
        self._unreported: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()

    def report(self, rejected: Rejected, engine_seq: int) -> None:
        """Count it, and tell the log at most once a second for each reason. ``engine_seq`` -1: it has none."""
        reason = rejected.reason
        self.counts[reason] += 1
        now = self._clock.monotonic()
        if now < self._next_letter.get(reason, 0.0):
            self._unreported[reason] += 1
            return
        self._next_letter[reason] = now + LETTER_INTERVAL_S
        more = self._unreported.pop(reason, 0)
        detail = rejected.detail + (f" ({more} more like it since the last letter)" if more else "")
        logger.warning("%s: event of batch %d refused: %s: %s", self._source, engine_seq, reason, detail)
        letter = DeadLetter(
            version=DEAD_LETTERS.version,
            topic=self._source,
            partition=-1,
            offset=engine_seq,
            timestamp_ms=self._clock.now_ms(),
            reason=_LETTER_REASON.get(reason, "rejected"),
            detail=f"{reason}: {detail}",
            reader="kv-event-publisher",
            key=None,
            value=None,
            value_bytes=len(rejected.data),
        )
        self._sink.offer(DEAD_LETTERS, key_dead_letter(self._source, -1, engine_seq), letter)
