"""Asking workers for their whole KV state when events of theirs are known to be missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from schemas.registry import REGISTRY, ResyncAsked, key_resync
from streams.kv_index_state import Source, SourceKey

# A gap is often closed by the publisher itself, which knows what it lost: it is given so long before it is asked.
GRACE_S = 2.0
# A worker that does not answer is asked again after this.
REPEAT_S = 30.0


class ResyncStep(NamedTuple):
    """One record to append: ``value`` None withdraws the question."""

    key: bytes
    value: ResyncAsked | None


class DegradedSources:
    """Which sources to ask, and which questions are settled. Pure: time is handed in.

    Several routers may run one; a question that another one asked is not asked again.
    """

    def __init__(self, name: str, repeat_s: float = REPEAT_S) -> None:
        """``name``: who asks. ``repeat_s``: after this a worker that did not answer is asked again."""
        self._name = name
        self._repeat_s = repeat_s
        self._degraded_since: dict[SourceKey, float] = {}
        self._asked_at: dict[bytes, tuple[ResyncAsked, float]] = {}

    def steps(
        self, sources: Mapping[SourceKey, Source], open_questions: Mapping[bytes, ResyncAsked], now: float
    ) -> list[ResyncStep]:
        """What to append now (monotonic ``now``, seconds)."""
        degraded = {key: source for key, source in sources.items() if not source.exact and not source.retired}
        self._degraded_since = {key: self._degraded_since.get(key, now) for key in degraded}
        found: list[ResyncStep] = []
        for key, since in self._degraded_since.items():
            source = degraded[key]
            record_key = key_resync(*key)
            if now - since >= GRACE_S and not self._is_waiting(record_key, source, open_questions, now):
                last = open_questions.get(record_key)
                question = ResyncAsked(
                    REGISTRY.version, key.model, key.worker_id, key.dp_rank, source.incarnation, source.next_seq,
                    1 if last is None else last.attempt + 1, self._name,
                )  # fmt: skip
                self._asked_at[record_key] = (question, now)
                found.append(ResyncStep(record_key, question))
        wanted = {key_resync(*key) for key in degraded}
        found += [ResyncStep(key, None) for key in open_questions if key not in wanted]
        self._asked_at = {key: asked for key, asked in self._asked_at.items() if key in wanted}
        return found

    def _is_waiting(self, key: bytes, source: Source, open_questions: Mapping[bytes, ResyncAsked], now: float) -> bool:
        question = open_questions.get(key)
        known, asked_at = self._asked_at.get(key, (None, now))
        if question is not None and question.incarnation == source.incarnation and question != known:
            # Somebody else asked: the worker has as long to answer as for a question of this one's own.
            self._asked_at[key] = (question, now)
            return True
        return known is not None and known.incarnation == source.incarnation and now - asked_at < self._repeat_s
