from __future__ import annotations

import pytest

from dynamo_es.config.topic_retention import parse_topic_retention
from dynamo_es.config.tree import LogConfig
from dynamo_es.errors import ConfigError
from dynamo_es.runtime.declared_topics import declared_topics

HOUR_MS = 3_600_000
KAFKA = "kafka://broker:9092"


def test_ages_are_read():
    assert parse_topic_retention("requests=24h, dead-letters=forever,forward-pass=90min,embedding-cache=2d") == {
        "requests": 24 * HOUR_MS, "dead-letters": None, "forward-pass": 90 * 60_000, "embedding-cache": 48 * HOUR_MS,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("24h", "expected topic=age"),
        ("requests", "expected topic=age"),
        ("requests=24", "expected a number of min, h or d"),
        ("requests=-1h", "expected a number of min, h or d"),
        ("requests=1s", "expected a number of min, h or d"),
        ("requests=24h,", "expected topic=age"),
        ("requests=0h", "must be between 1min and 36500d"),
        ("requests=99999d", "must be between 1min and 36500d"),
        ("requests=1h,requests=2h", "requests is given twice"),
        ("nope=1h", "no topic 'nope'; there are kv-events"),
        ("registry=1h", "registry keeps the newest record of each key"),
    ],
)
def test_what_is_wrong_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        parse_topic_retention(text)


def by_name(config):
    return {topic.name.removeprefix("dynamo."): topic for topic in declared_topics(config)}


def test_options_reach_the_declared_topics():
    topics = by_name(LogConfig(url=KAFKA, replication=3, min_insync_replicas=2, retention="requests=24h"))
    assert topics["requests"].retention_ms == 24 * HOUR_MS
    assert topics["dead-letters"].retention_ms == 7 * 24 * HOUR_MS
    assert {topic.replication for topic in topics.values()} == {3}
    assert {topic.min_insync_replicas for topic in topics.values()} == {2}


def test_kv_events_go_by_age_on_kafka_and_below_their_snapshots_on_an_embedded_log():
    assert by_name(LogConfig(url=KAFKA))["kv-events"].retention_ms == 7 * 24 * HOUR_MS
    assert by_name(LogConfig(url=KAFKA, retention="kv-events=12h"))["kv-events"].retention_ms == 12 * HOUR_MS
    assert by_name(LogConfig(url="embedded:///x"))["kv-events"].retention_ms is None
    with pytest.raises(ConfigError, match="--topic-retention kv-events: on an embedded log it is trimmed below"):
        declared_topics(LogConfig(url="embedded:///x", retention="kv-events=12h"))


def test_more_in_sync_replicas_than_replicas_are_refused():
    with pytest.raises(ConfigError, match="--topic-min-insync-replicas 3 is more than --topic-replication 2"):
        declared_topics(LogConfig(url=KAFKA, replication=2, min_insync_replicas=3))
