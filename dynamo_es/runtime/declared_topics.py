"""The topics that a fleet shall have: those of ``schemas``, with what the configuration says about replicas and age."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from dynamo_es.config.topic_retention import parse_topic_retention
from dynamo_es.config.tree import LogConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import TopicConfig
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.topic import TopicSpec


def declared_topics(config: LogConfig, topics: Sequence[TopicSpec] = TOPICS) -> list[TopicConfig]:
    """What a log of this configuration shall have.

    An embedded log trims ``kv-events`` below its snapshots only. Kafka's brokers drop it by age: a view starts from
    a snapshot, and whoever finds neither snapshot nor record asks the sources to announce themselves anew.

    Raises:
        ConfigError: Options that contradict each other.
    """
    _check_replicas(config)
    by_broker = urlsplit(config.url).scheme == "kafka"
    ages = parse_topic_retention(config.retention) if config.retention is not None else {}
    if KV_EVENTS.name in ages and not by_broker:
        raise ConfigError(
            f"--topic-retention {KV_EVENTS.name}: on an embedded log it is trimmed below its snapshots, never by age"
        )
    declared = []
    for spec, topic in zip(topics, topic_configs(config.namespace, config.replication, topics), strict=True):
        age = ages.get(spec.name, spec.retention_ms if by_broker else topic.retention_ms)
        declared.append(replace(topic, retention_ms=age, min_insync_replicas=config.min_insync_replicas))
    return declared


def numbered_alike(namespace: str) -> Mapping[str, str]:
    """Topics whose records go to the partition of the same number as what they stand for, with that topic."""
    return {KV_SNAPSHOTS.qualified(namespace): KV_EVENTS.qualified(namespace)}


def _check_replicas(config: LogConfig) -> None:
    least, copies = config.min_insync_replicas, config.replication
    if least is not None and copies is not None and least > copies:
        raise ConfigError(
            f"--topic-min-insync-replicas {least} is more than --topic-replication {copies}: every append would fail; "
            f"use at most {max(1, copies - 1)}, so that a broker may be away"
        )
