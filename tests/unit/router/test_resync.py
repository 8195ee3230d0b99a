"""Who is asked for a resync, and when (EVT-01: only a repair makes a source exact again)."""

from __future__ import annotations

from dynamo_es.router.resync import GRACE_S, REPEAT_S, DegradedSources
from schemas.registry import ResyncAsked, key_resync
from streams.kv_index_state import Source, SourceKey

KEY = SourceKey("m", 7, 0)
RECORD = key_resync(*KEY)


def degraded(next_seq: int = 5, incarnation: int = 3) -> dict[SourceKey, Source]:
    return {KEY: Source(KEY, 0, 0, incarnation, 16, next_seq)}


def test_a_source_is_asked_after_a_grace_time_and_once():
    asking = DegradedSources("r1")
    assert asking.steps(degraded(), {}, 10.0) == []
    ((key, question),) = asking.steps(degraded(), {}, 10.0 + GRACE_S)
    assert key == RECORD
    assert question == ResyncAsked(1, "m", 7, 0, 3, 5, 1, "r1")
    # Before the record is folded, and after.
    assert asking.steps(degraded(), {}, 10.5 + GRACE_S) == []
    assert asking.steps(degraded(), {RECORD: question}, 11.0 + GRACE_S) == []


def test_a_question_without_an_answer_is_asked_again():
    asking = DegradedSources("r1")
    asking.steps(degraded(), {}, 0.0)
    ((_, question),) = asking.steps(degraded(), {}, GRACE_S)
    late = GRACE_S + REPEAT_S
    assert asking.steps(degraded(), {RECORD: question}, late - 0.1) == []
    ((_, again),) = asking.steps(degraded(), {RECORD: question}, late)
    assert again is not None
    assert again.attempt == 2


def test_what_another_router_asked_is_not_asked_at_once_again():
    first, second = DegradedSources("r1"), DegradedSources("r2")
    for asking in (first, second):
        asking.steps(degraded(), {}, 0.0)
    ((_, question),) = first.steps(degraded(), {}, GRACE_S)
    assert second.steps(degraded(), {RECORD: question}, GRACE_S) == []
    assert len(second.steps(degraded(), {RECORD: question}, GRACE_S + REPEAT_S)) == 1


def test_a_question_to_an_engine_that_is_gone_does_not_count():
    asking = DegradedSources("r2")
    old = ResyncAsked(1, "m", 7, 0, 2, 5, 1, "r1")
    asking.steps(degraded(incarnation=3), {RECORD: old}, 0.0)
    assert len(asking.steps(degraded(incarnation=3), {RECORD: old}, GRACE_S)) == 1


def test_a_question_that_is_settled_is_withdrawn():
    asking = DegradedSources("r1")
    asking.steps(degraded(), {}, 0.0)
    ((_, question),) = asking.steps(degraded(), {}, GRACE_S)
    exact = degraded()
    exact[KEY].exact = True
    assert asking.steps(exact, {RECORD: question}, GRACE_S + 1) == [(RECORD, None)]
    assert asking.steps(exact, {}, GRACE_S + 2) == []
    retired = degraded()
    retired[KEY].retired = True
    assert asking.steps(retired, {RECORD: question}, GRACE_S + 3) == [(RECORD, None)]
