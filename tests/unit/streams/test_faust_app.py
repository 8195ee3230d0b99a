"""The Faust application without a broker: how it is built, and what its agents do."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import faust
import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.clock import ManualClock
from dynamo_es.config.tree import LogConfig, StateConfig, StreamsConfig, SystemConfig
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import Record, TopicConfig, TopicPartition
from dynamo_es.log.memory import MemoryLog
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from streams import faust_app
from streams.faust_agents import hand_on, record_of
from streams.faust_app import build_app
from streams.faust_transport import FETCH_WAIT_MS
from streams.stream_worker import FOLDS, StreamsSettings, StreamWorker, check_partition_counts


def settings(url="kafka://h1:9092,h2:9093", **streams):
    return StreamsSettings(LogConfig(url, "ns"), StateConfig(), StreamsConfig(**streams), SystemConfig())


def app_for(url="kafka://h1:9092,h2:9093", environment=None, **streams):
    return build_app(
        settings(url, **streams), clock=ManualClock(), rng=random.Random(1), registry=CollectorRegistry(),
        environment=environment or {},
    )  # fmt: skip


def test_importing_the_module_makes_nothing():
    program = "import streams.faust_app as module, threading; print('app' in vars(module), threading.active_count())"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["False", "1"]


def test_the_modules_app_is_made_from_the_environment(monkeypatch):
    monkeypatch.setenv("DYN_ES_LOG", "kafka://elsewhere:9999")
    monkeypatch.setenv("DYN_ES_TOPIC_NAMESPACE", "fleet")
    monkeypatch.setenv("DYN_ES_STREAMS_GROUP", "mine")
    monkeypatch.delattr(faust_app, "app", raising=False)
    app = faust_app.app
    try:
        assert app is faust_app.app
        assert app.conf.id == "fleet.mine"
        assert [str(url) for url in app.conf.broker] == ["kafka://elsewhere:9999"]
    finally:
        del faust_app.app
    with pytest.raises(AttributeError, match="has no attribute 'other'"):
        faust_app.other  # noqa: B018


@pytest.mark.parametrize("url", ["embedded:///x", "memory://"])
def test_only_kafka_has_groups(url):
    with pytest.raises(ConfigError, match="share partitions over a Kafka consumer group"):
        app_for(url)


def test_settings_that_keep_a_group_prompt_and_processes_apart():
    conf = app_for(session_timeout_s=20.0).conf
    assert (conf.broker_session_timeout, conf.broker_heartbeat_interval) == (20.0, 6.0)
    assert conf.broker_request_timeout >= conf.broker_session_timeout
    assert app_for().conf.broker_heartbeat_interval == 3.0
    assert not conf.web_enabled, "several workers on one machine must not fight for a port"
    assert not conf.topic_allow_declare
    assert [str(url) for url in conf.broker] == ["kafka://h1:9092", "kafka://h2:9093"]


def test_unrelated_variables_do_not_change_it(monkeypatch):
    monkeypatch.setenv("BROKER_SESSION_TIMEOUT", "1000")
    monkeypatch.setenv("WEB_ENABLED", "true")
    monkeypatch.setenv("NODE_HOSTNAME", "evil")
    conf = app_for().conf
    assert (conf.broker_session_timeout, conf.web_enabled) == (10.0, False)
    assert conf.web_host != "evil"


def test_nothing_from_a_topic_is_unpickled():
    """SEC-05: keys and values stay bytes; our own codec checks them."""
    app = app_for()
    assert len(app.agents) == len(FOLDS)
    for agent in app.agents.values():
        assert (agent.channel.key_serializer, agent.channel.value_serializer) == ("raw", "raw")


def test_logins_and_certificates_are_those_of_the_log():
    secrets = {"DYN_ES_KAFKA_SASL_USERNAME": "u", "DYN_ES_KAFKA_SASL_PASSWORD": "secret"}
    plain = app_for("kafka://h?security_protocol=SASL_PLAINTEXT&sasl_mechanism=SCRAM-SHA-512", secrets)
    credentials = plain.conf.broker_credentials
    assert (credentials.username, credentials.password) == ("u", "secret")
    assert (credentials.mechanism.value, credentials.protocol.value) == ("SCRAM-SHA-512", "SASL_PLAINTEXT")
    assert "secret" not in repr(plain)
    assert app_for("kafka://h?security_protocol=SSL").conf.broker_credentials.protocol.value == "SSL"
    both = app_for("kafka://h?security_protocol=SASL_SSL", secrets).conf.broker_credentials
    assert both.protocol.value == "SASL_SSL"
    assert app_for().conf.broker_credentials is None


class Pool:
    """Covers what it is given, but for partition 9, which is not live."""

    def __init__(self):
        self.taken = []

    async def take(self, place, records, ack):
        self.taken.append((place, [record.offset for record in records]))
        if place.partition != 9:
            ack()


@pytest.fixture
def agent_app():
    app = faust.App("test", broker="kafka://nowhere", store="memory://", env_prefix="TEST_")
    app.consumer = Mock()
    return app


async def test_the_agent_hands_on_batches_by_partition_and_acknowledges_what_is_covered(agent_app):
    """EVT-13: only what the pool covers counts for the group's offsets."""
    pool = Pool()
    topic = agent_app.topic("ns.kv-events", key_serializer="raw", value_serializer="raw")
    events = []

    async def agent(stream):
        await hand_on(lambda: pool, stream)

    async with agent_app.agent(topic)(agent).test_context() as context:
        for partition in (0, 9, 0, 1):
            events.append(await context.put(b"v", key=b"k", partition=partition, wait=False))
            events[-1].message.incref()
        async with asyncio.timeout(60):
            while sum(len(offsets) for _, offsets in pool.taken) < 4:
                await asyncio.sleep(0.001)
    assert sorted(pool.taken) == [
        (TopicPartition("ns.kv-events", 0), [0, 2]),
        (TopicPartition("ns.kv-events", 1), [3]),
        (TopicPartition("ns.kv-events", 9), [1]),
    ]
    assert [event.message.refcount for event in events] == [0, 1, 0, 0]


def event(**message):
    return SimpleNamespace(
        message=SimpleNamespace(
            **{
                "topic": "t", "partition": 2, "offset": 7, "timestamp": 1_700_000_000.123, "key": b"k", "value": b"v",
                "headers": [("schema", b"kv-events/1")], **message,
            }
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({}, Record("t", 2, 7, 1_700_000_000_123, b"k", b"v", (("schema", b"kv-events/1"),))),
        ({"headers": None, "value": None}, Record("t", 2, 7, 1_700_000_000_123, b"k", None, ())),
        ({"headers": {"a": b"1"}, "timestamp": None}, Record("t", 2, 7, -1, b"k", b"v", (("a", b"1"),))),
    ],
)
def test_a_delivered_message_is_the_record_that_the_log_has(message, expected):
    assert record_of(event(**message)) == expected


@pytest.mark.parametrize("ms", [0, 1, 999, 1_700_000_000_001, 1_795_986_057_613, 4_102_444_799_999])
def test_times_survive_fausts_seconds(ms):
    assert record_of(event(timestamp=ms / 1000.0)).timestamp_ms == ms


async def test_events_and_snapshots_with_different_partition_counts_are_refused():
    """EVT-16: one message with both topics, both counts, and what to do."""
    log = MemoryLog("test", ManualClock(), random.Random(1))
    await log.start()
    await check_partition_counts(log, "ns")
    await log.create_topics([TopicConfig(KV_EVENTS.qualified("ns"), 8)])
    await check_partition_counts(log, "ns")
    await log.create_topics([TopicConfig(KV_SNAPSHOTS.qualified("ns"), 4)])
    worker = StreamWorker(
        settings(), open_log=lambda: log, clock=ManualClock(), rng=random.Random(1), registry=CollectorRegistry(),
        on_stalled=lambda error: None,
    )  # fmt: skip
    message = "topic 'ns.kv-events' has 8 partitions and topic 'ns.kv-snapshots' has 4, .* delete 'ns.kv-snapshots'"
    with pytest.raises(ConfigError, match=message):
        await worker.start()
    with pytest.raises(Exception, match="closed"):
        await log.describe("ns.kv-events")


async def test_a_worker_can_be_closed_and_started_again():
    logs = []

    def open_log():
        logs.append(MemoryLog("test", ManualClock(), random.Random(1)))
        return logs[-1]

    registry = CollectorRegistry()
    worker = StreamWorker(
        settings(), open_log=open_log, clock=ManualClock(), rng=random.Random(1), registry=registry,
        on_stalled=lambda error: None,
    )  # fmt: skip
    for _ in range(2):
        await worker.start()
        assert registry.get_sample_value("dynamo_es_streams_ready") == 0.0
        await worker.close()
        assert registry.get_sample_value("dynamo_es_streams_ready") is None
    assert len(logs) == 2


async def test_a_fetch_of_partitions_without_records_does_not_hold_up_the_others():
    """Faust's own 1.5 s would halve what a worker that is behind gets done (see ``streams.faust_transport``)."""
    app = app_for("kafka://h1:9092")
    client = app.consumer._thread._create_worker_consumer(app.transport)
    try:
        assert client._fetch_max_wait_ms == FETCH_WAIT_MS <= 100
    finally:
        await client.stop()
