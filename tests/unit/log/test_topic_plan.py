from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_es.log.base import TopicConfig, TopicDescription
from dynamo_es.log.topic_plan import Action, Difference, plan_topics

KAFKA = frozenset({"retention_ms", "compacted", "max_record_bytes", "min_insync_replicas"})
EMBEDDED = frozenset({"retention_ms", "max_record_bytes"})
DAY_MS = 86_400_000
AGED = TopicConfig("ns.requests", 4, retention_ms=7 * DAY_MS)
COMPACTED = TopicConfig("ns.registry", 1, compacted=True)


def there(topic, **changes):
    """The topic as a broker that follows the declaration has it."""
    description = TopicDescription(
        topic.name, "id", topic.partitions, topic.compacted, topic.retention_ms, topic.max_record_bytes, 3, 1
    )
    return replace(description, **changes)


def plan(topic, *, alterable=KAFKA, numbered_as=None, **changes):
    found = {topic.name: there(topic, **changes)}
    (step,) = plan_topics([topic], found, alterable, numbered_as or {}).steps
    return step


def test_a_topic_that_is_as_declared_is_kept():
    for topic in (AGED, COMPACTED):
        step = plan(topic)
        assert (step.action, step.differences, step.alteration) == (Action.KEEP, (), None)
    assert plan_topics([AGED], {AGED.name: there(AGED)}, KAFKA, {}).in_force


def test_a_missing_topic_is_created_with_everything_that_it_is_told():
    topic = replace(AGED, replication=3, min_insync_replicas=2)
    result = plan_topics([topic, COMPACTED], {}, KAFKA, {})
    assert [step.action for step in result.steps] == [Action.CREATE, Action.CREATE]
    assert not result.in_force
    assert result.refusal == ""
    assert {setting.setting: setting.declared for setting in result.steps[0].differences} == {
        "partitions": "4",
        "replication.factor": "3",
        "min.insync.replicas": "2",
        "cleanup.policy": "delete",
        "retention.ms": "604800000 (7 d)",
        "max.message.bytes": "1049600",
    }
    # What a broker decides is not told.
    told = {setting.setting for setting in result.steps[1].differences}
    assert told == {"partitions", "cleanup.policy", "max.message.bytes"}


@pytest.mark.parametrize(
    ("topic", "changes", "expected"),
    [
        (AGED, {"retention_ms": DAY_MS}, ("retention.ms", "86400000 (1 d)", "604800000 (7 d)")),
        (AGED, {"retention_ms": None}, ("retention.ms", "-1 (for ever)", "604800000 (7 d)")),
        (replace(AGED, retention_ms=None), {"retention_ms": 90_000}, ("retention.ms", "90000", "-1 (for ever)")),
        (AGED, {"max_record_bytes": 10_000_000}, ("max.message.bytes", "10001024", "1049600")),
        (replace(AGED, min_insync_replicas=2), {}, ("min.insync.replicas", "1", "2")),
        (COMPACTED, {"compacted": False}, ("cleanup.policy", "delete", "compact")),
        (COMPACTED, {"retention_ms": DAY_MS}, ("cleanup.policy", "compact,delete", "compact")),
    ],
)
def test_what_a_broker_can_change_in_place_is_changed(topic, changes, expected):
    step = plan(topic, **changes)
    assert step.action is Action.ALTER
    assert step.differences == (Difference(*expected),)
    assert step.alteration == replace(topic, replication=None)


@pytest.mark.parametrize("count", [4, 12])
def test_EVT_16_a_changed_partition_count_is_refused_with_topic_counts_and_fix(count):
    events = TopicConfig("ns.kv-events", 8)
    result = plan_topics(
        [AGED, events], {AGED.name: there(AGED), events.name: there(events, partitions=count)}, KAFKA, {}
    )
    assert result.of(Action.REFUSE) == [result.steps[1]]
    assert f"ns.kv-events: {count} partitions, declared 8" in result.refusal
    assert "order of its records" in result.refusal
    assert "use another --topic-namespace, or" in result.refusal
    assert "run dynamo-es topics apply" in result.refusal
    assert "ns.requests" not in result.refusal


def test_EVT_16_topics_whose_partitions_go_together_are_both_named():
    events, snapshots = TopicConfig("ns.kv-events", 8), TopicConfig("ns.kv-snapshots", 8, compacted=True)
    found = {"ns.kv-events": there(events), "ns.kv-snapshots": there(snapshots, partitions=4)}
    result = plan_topics([events, snapshots], found, KAFKA, {"ns.kv-snapshots": "ns.kv-events"})
    assert "ns.kv-snapshots: 4 partitions, declared 8" in result.refusal
    assert "numbered by the partitions of ns.kv-events, which has 8" in result.refusal


def test_replicas_are_moved_by_an_administrator_and_the_rest_is_altered():
    step = plan(replace(AGED, replication=3, min_insync_replicas=2), replication=1, retention_ms=DAY_MS)
    assert step.action is Action.BY_HAND
    fixes = {difference.setting: difference.fix for difference in step.differences}
    assert "kafka-reassign-partitions" in fixes["replication.factor"]
    assert "there are only 1 replicas, and every append fails" in fixes["min.insync.replicas"]
    assert fixes["retention.ms"] == ""
    # More in-sync replicas than there are must not be set: every append would fail.
    assert step.alteration == replace(AGED, replication=None, min_insync_replicas=1)


def test_a_topic_that_no_append_can_reach_is_told_although_nothing_was_declared():
    step = plan(AGED, replication=1, min_insync_replicas=2)
    assert (step.action, step.alteration) == (Action.BY_HAND, None)
    assert step.differences[0].setting == "min.insync.replicas"


def test_what_a_log_cannot_change_is_left_and_told():
    step = plan(AGED, alterable=EMBEDDED, compacted=True, retention_ms=None, max_record_bytes=5)
    assert step.action is Action.BY_HAND
    assert "cannot change it in place" in next(d.fix for d in step.differences if d.setting == "cleanup.policy")
    assert step.alteration == replace(AGED, compacted=True, retention_ms=None)


def test_backends_without_replicas_are_not_asked_for_any():
    step = plan(replace(AGED, replication=3, min_insync_replicas=2), replication=None, min_insync_replicas=None)
    assert step.action is Action.KEEP


def test_topics_that_are_not_ours_are_left_alone():
    assert plan_topics([AGED], {AGED.name: there(AGED), "x": there(COMPACTED)}, KAFKA, {}).in_force
