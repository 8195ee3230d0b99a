from __future__ import annotations

import logging

import pytest
from aiokafka import errors as kafka

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.errors import ConfigError
from dynamo_es.log.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge, UnknownTopic
from dynamo_es.log.kafka import KafkaLog
from dynamo_es.log.kafka_config import OPTIONS, KafkaSettings, client_arguments, parse_kafka_url
from dynamo_es.log.kafka_errors import map_kafka_error
from dynamo_es.log.kafka_logging import REPEAT_S, RepeatFilter

SASL = "security_protocol=SASL_SSL&sasl_mechanism=SCRAM-SHA-512"
SECRETS = {"DYN_ES_KAFKA_SASL_USERNAME": "alice", "DYN_ES_KAFKA_SASL_PASSWORD": "hunter2"}


def test_servers_and_options_are_read():
    settings = parse_kafka_url("kafka://a:1,b,[::1]:3?linger_ms=5&request_timeout_ms=1500&client_id=x%20y", {})
    assert settings == KafkaSettings(
        ("a:1", "b:9092", "[::1]:3"), linger_ms=5, request_timeout_ms=1500, client_id="x y"
    )
    assert settings.bootstrap == "a:1,b:9092,[::1]:3"


def test_the_url_comes_back_without_defaults():
    url = "kafka://a:1,b:2?client_id=x%20y&linger_ms=5"
    settings = parse_kafka_url(f"{url}&request_timeout_ms=10000", {})
    assert settings.url == url
    assert parse_kafka_url(settings.url, {}) == settings


def test_secrets_are_in_no_url_message_or_repr():
    url = f"kafka://a:1?{SASL}&sasl_plain_username=alice&sasl_plain_password=hunter2"
    log = KafkaLog.from_url(url, SystemClock(), {})
    assert log.url == f"kafka://a:1?{SASL}"
    settings = parse_kafka_url(url, {})
    assert "hunter2" not in repr(settings)
    assert "alice" not in repr(settings)
    assert client_arguments(settings)["sasl_plain_password"] == "hunter2"
    for wrong in (
        "kafka://alice:hunter2@a:1",
        f"{url}&sasl_plain_password=hunter2",
        f"{url}&nonsense=1",
        "kafka://a:1?sasl_plain_username=alice&sasl_plain_password=hunter2",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_kafka_url(wrong, SECRETS)
        assert "hunter2" not in str(caught.value)


def test_credentials_come_from_the_environment():
    settings = parse_kafka_url(f"kafka://a:1?{SASL}", SECRETS)
    assert (settings.sasl_plain_username, settings.sasl_plain_password) == ("alice", "hunter2")
    with pytest.raises(ConfigError, match="needs DYN_ES_KAFKA_SASL_PASSWORD in the environment"):
        parse_kafka_url(f"kafka://a:1?{SASL}", {"DYN_ES_KAFKA_SASL_USERNAME": "alice"})
    # They may be meant for another cluster.
    assert parse_kafka_url("kafka://a:1", SECRETS).sasl_plain_password is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://a:1?acks=0", f"unknown option 'acks'.*accepted: {', '.join(OPTIONS)}"),
        ("kafka://a:1?linger_ms=5&linger_ms=6", "'linger_ms' is given twice"),
        ("kafka://a:1?linger_ms=fast", "expected a number of milliseconds"),
        ("kafka://a:1?request_timeout_ms=0", "expected a number of milliseconds"),
        ("kafka://a:1?client_id=", "'client_id' .* is empty"),
        ("kafka://a:1?security_protocol=TLS", "accepted: PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        (f"kafka://a:1?{SASL[:-11]}GSSAPI", "accepted: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ("kafka://a:1?sasl_mechanism=PLAIN", "add security_protocol=SASL_SSL"),
        ("kafka://a:1?ssl_cafile=/ca.pem", "add security_protocol=SSL"),
        ("kafka://a:1?security_protocol=SSL&ssl_keyfile=/k.pem", "needs ssl_certfile"),
        ("kafka://a:x", "'a:x' is not host:port"),
        ("kafka://a:70000", "'a:70000' is not host:port"),
        ("kafka://", "'.*' is not host:port"),
        ("kafka://a:1,,b:2", "is not host:port"),
        ("kafka://a:1/topic", "with a path"),
        ("http://a:1", "scheme 'http'"),
    ],
)
def test_what_is_wrong_and_what_is_accepted_is_said(url, message):
    with pytest.raises(ConfigError, match=message):
        parse_kafka_url(url, SECRETS)


def test_a_missing_certificate_is_named(tmp_path):
    missing = tmp_path / "ca.pem"
    settings = parse_kafka_url(f"kafka://a:1?security_protocol=SSL&ssl_cafile={missing}", {})
    with pytest.raises(ConfigError, match=f"cannot use the TLS files {missing}"):
        client_arguments(settings)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (kafka.UnknownTopicOrPartitionError(), UnknownTopic, "'t' does not exist"),
        (kafka.MessageSizeTooLargeError(), RecordTooLarge, "record of 9 bytes for 't' exceeds the limit of 5"),
        (kafka.ProducerClosed(), LogClosed, "closed"),
        (kafka.NotLeaderForPartitionError(), LogUnavailable, "cannot append: .*NotLeader"),
        (kafka.KafkaConnectionError("gone"), LogUnavailable, "gone"),
        (kafka.NotEnoughReplicasError(), LogUnavailable, "in-sync replicas"),
        (kafka.OutOfOrderSequenceNumber(), LogUnavailable, "out of order"),
        (kafka.KafkaError("Unexpected error during batch delivery"), LogUnavailable, "batch delivery"),
        (kafka.TopicAuthorizationFailedError("t"), LogError, "grant the principal DESCRIBE, READ and WRITE"),
        (kafka.ClusterAuthorizationFailedError(), LogError, "grant the principal CREATE"),
        (kafka.SaslAuthenticationFailed("no"), LogError, "check DYN_ES_KAFKA_SASL_USERNAME"),
        (kafka.InvalidTimestampError(), LogError, "check the machine's clock"),
        (kafka.UnsupportedVersionError(), LogError, "Kafka 2.4 or later"),
        (kafka.InvalidRequiredAcksError(), LogError, "cannot append"),
    ],
)
def test_errors_of_the_client_become_ours(error, kind, message):
    mapped = map_kafka_error(error, "append", topic="t", size=9, limit=5)
    assert type(mapped) is kind
    assert mapped.retriable is issubclass(kind, LogUnavailable)
    with pytest.raises(kind, match=message):
        raise mapped


def test_a_repeated_message_of_aiokafka_is_logged_once_in_a_while(caplog):
    clock = ManualClock()
    repeat_filter = RepeatFilter(clock)
    repeat_filter.install()
    logger = logging.getLogger("aiokafka.consumer.fetcher")
    try:
        for node in range(5):
            logger.error("Failed fetch messages from %s", node)
        logger.error("another")
        clock.advance(REPEAT_S)
        logger.error("Failed fetch messages from %s", 5)
    finally:
        repeat_filter.remove()
    logger.error("Failed fetch messages from %s", 6)
    assert [record.getMessage() for record in caplog.records] == [
        "Failed fetch messages from 0",
        "another",
        "Failed fetch messages from 5",
        "Failed fetch messages from 6",
    ]
