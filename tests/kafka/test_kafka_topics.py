"""Topics as code on a real cluster."""

from __future__ import annotations

import asyncio
import logging
import uuid

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions

from dynamo_es.cli.main import main
from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, TopicConfig
from dynamo_es.log.errors import RecordTooLarge
from dynamo_es.log.kafka import SETTINGS_S, KafkaLog
from dynamo_es.log.kafka_protocol import SetTopicConfigsRequest
from schemas.catalog import TOPICS

pytestmark = pytest.mark.kafka


@pytest.fixture
def namespace():
    return f"plan-{uuid.uuid4().hex[:8]}"


@pytest.fixture
def topics(kafka_bootstrap, namespace, capsys):
    """Runs one action; exit code and what was printed."""

    def run(action, *flags):
        log = f"kafka://{kafka_bootstrap}"
        code = main(["topics", action, "--log", log, "--topic-namespace", namespace, "--topic-replication=1", *flags])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def administer(bootstrap, change):
    """What somebody does with Kafka's own tools."""

    async def run():
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        try:
            await change(admin)
        finally:
            await admin.close()

    asyncio.run(run())


def set_configs(bootstrap, topic, **configs):
    settings = {name.replace("_", "."): value for name, value in configs.items()}
    administer(bootstrap, lambda admin: admin._client.send(1, SetTopicConfigsRequest(topic, settings)))


def test_apply_makes_a_cluster_as_declared_and_finds_what_others_changed(topics, kafka_bootstrap, namespace):
    assert topics("check")[0] == 1
    code, out, err = topics("apply")
    assert (code, err) == (0, "")
    assert out.count("+ create") == len(TOPICS)
    assert "partitions 8, replication.factor 1, cleanup.policy delete, retention.ms 604800000 (7 d), " in out
    assert topics("check")[0] == 0
    set_configs(kafka_bootstrap, f"{namespace}.requests", retention_ms="1000", cleanup_policy="compact,delete")
    set_configs(kafka_bootstrap, f"{namespace}.registry", cleanup_policy="delete", max_message_bytes="5000")
    set_configs(kafka_bootstrap, f"{namespace}.dead-letters", segment_ms="7200000")
    code, out, _ = topics("plan")
    assert code == 0
    assert "cleanup.policy compact,delete -> delete" in out
    assert "retention.ms 1000 -> 604800000 (7 d)" in out
    assert "cleanup.policy delete -> compact" in out
    assert "max.message.bytes 5000 -> 1049600" in out
    # A setting that nothing is declared about stays an administrator's.
    assert f"= as declared  {namespace}.dead-letters" in out
    assert topics("check")[0] == 1
    code, out, _ = topics("apply")
    assert code == 0
    assert out.endswith("all topics are as declared\n")


def test_replicas_that_the_cluster_has_not_are_told(topics, namespace):
    assert topics("apply")[0] == 0
    code, out, _ = topics("apply", "--topic-replication=3", "--topic-min-insync-replicas=2")
    assert code == 1
    assert "replication.factor 1 -> 3: replicas are moved by the cluster's administrator" in out
    assert "min.insync.replicas 1 -> 2: there are only 1 replicas, and every append fails" in out
    code, out, err = topics("apply", "--topic-namespace", f"{namespace}.other", "--topic-replication=3")
    assert code == 2
    assert "ask for a replication that the number of running brokers allows" in err


def test_EVT_16_partitions_that_somebody_added_are_refused(topics, kafka_bootstrap, namespace):
    assert topics("apply")[0] == 0
    administer(kafka_bootstrap, lambda admin: admin.create_partitions({f"{namespace}.kv-events": NewPartitions(12)}))
    code, out, err = topics("apply", "--topic-retention", "requests=1h")
    assert code == 2
    assert f"! refused      {namespace}.kv-events" in out
    assert f"nothing was changed: {namespace}.kv-events: 12 partitions, declared 8: " in err
    assert "order of its records" in err
    assert "delete the topic and run dynamo-es topics apply" in err
    assert topics("check", "--topic-retention", "requests=1h")[0] == 1
    code, _, err = topics("create")
    assert code == 2
    assert f"topic '{namespace}.kv-events' has 12 partitions, the configuration says 8" in err


async def test_a_running_log_learns_new_settings_and_flags_new_partitions(kafka_bootstrap, namespace, caplog):
    clock = ManualClock()
    log = KafkaLog.from_url(f"kafka://{kafka_bootstrap}", clock, {})
    await log.start()
    topic = f"{namespace}.t"
    await log.create_topics([TopicConfig(topic, 2, replication=1, max_record_bytes=50_000)])
    await log.append(topic, Entry(b"v", b"abc"))
    admin = AIOKafkaAdminClient(bootstrap_servers=kafka_bootstrap)
    await admin.start()
    await admin._client.send(1, SetTopicConfigsRequest(topic, {"max.message.bytes": "100000"}))
    await admin.create_partitions({topic: NewPartitions(6)})
    await admin.close()
    large = Entry(b"v" * 80_000, b"abc")
    with pytest.raises(RecordTooLarge):
        await log.append(topic, large)
    clock.advance(SETTINGS_S + 1)
    caplog.set_level(logging.WARNING)
    assert (await log.append(topic, large)).partition < 2
    assert f"appends keep to the old partitions: topic '{topic}' has 6 partitions" in caplog.text
    await log.close()
