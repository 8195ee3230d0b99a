from __future__ import annotations

import logging

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.admin import SaslAuthenticateRequest, SaslAuthenticateRequest_v1

from dynamo_es.clock import ManualClock
from dynamo_es.config.text_checks import without_secrets
from dynamo_es.errors import ConfigError
from dynamo_es.log.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge, UnknownTopic
from dynamo_es.log.kafka_clients import KafkaClients
from dynamo_es.log.kafka_config import OPTIONS, KafkaSettings, parse_kafka_url
from dynamo_es.log.kafka_credentials import client_arguments
from dynamo_es.log.kafka_errors import map_kafka_error
from dynamo_es.log.kafka_logging import REPEAT_S, RepeatFilter
from dynamo_es.log.kafka_tokens import EndpointTokens, FileTokens

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
    url = f"kafka://a:1?{SASL}"
    settings = parse_kafka_url(url, SECRETS)
    assert settings.url == url
    for shown in (repr(settings), str(settings), f"{KafkaClients(settings).__dict__}"):
        assert "hunter2" not in shown
        assert "alice" not in shown
    assert client_arguments(settings)["sasl_plain_password"] == "hunter2"
    for wrong in (
        "kafka://alice:hunter2@a:1",
        f"{url}&sasl_plain_password=hunter2",
        f"{url}&ssl_key_password=hunter2",
        f"{url}&sasl_oauth_client_secret=hunter2",
        f"{url}&nonsense=1",
        "kafka://a:1?sasl_plain_username=alice&sasl_plain_password=hunter2",
        "kafka://a:1?security_protocol=SASL_SSL&sasl_mechanism=OAUTHBEARER&sasl_oauth_client_id=c"
        "&sasl_oauth_token_url=https://u:hunter2@idp/token",
    ):
        with pytest.raises(ConfigError) as caught:
            parse_kafka_url(wrong, SECRETS)
        assert "hunter2" not in str(caught.value)
        assert "hunter2" not in without_secrets(wrong)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ("sasl_plain_password", "DYN_ES_KAFKA_SASL_PASSWORD in the environment, or the option sasl_password_file"),
        ("ssl_key_password", "DYN_ES_KAFKA_SSL_KEY_PASSWORD in the environment, or the option ssl_key_password_file"),
        ("sasl_oauth_client_secret", "DYN_ES_KAFKA_OAUTH_CLIENT_SECRET in the environment, or the option sasl_oauth_"),
    ],
)
def test_a_secret_in_a_url_is_refused_with_the_place_where_it_belongs(option, instead):
    with pytest.raises(ConfigError, match=f"{option} does not belong into a kafka:// URL.*use {instead}"):
        parse_kafka_url(f"kafka://a:1?{SASL}&{option}=x", SECRETS)


def test_credentials_come_from_the_environment():
    settings = parse_kafka_url(f"kafka://a:1?{SASL}", SECRETS)
    assert (settings.sasl_plain_username, settings.sasl_plain_password) == ("alice", "hunter2")
    with pytest.raises(ConfigError, match="needs DYN_ES_KAFKA_SASL_PASSWORD in the environment"):
        parse_kafka_url(f"kafka://a:1?{SASL}", {"DYN_ES_KAFKA_SASL_USERNAME": "alice"})
    with pytest.raises(ConfigError, match="needs DYN_ES_KAFKA_SASL_USERNAME in the environment"):
        parse_kafka_url(f"kafka://a:1?{SASL}", {"DYN_ES_KAFKA_SASL_PASSWORD": "x"})
    # They may be meant for another cluster.
    assert parse_kafka_url("kafka://a:1", SECRETS).sasl_plain_password is None


def test_a_password_file_is_read_anew_for_each_client(tmp_path):
    path = tmp_path / "password"
    path.write_text("first\n")
    settings = parse_kafka_url(f"kafka://a:1?{SASL}&sasl_plain_username=bob&sasl_password_file={path}", SECRETS)
    assert client_arguments(settings)["sasl_plain_password"] == "first"
    assert client_arguments(settings)["sasl_plain_username"] == "bob"
    path.write_text("second")
    assert client_arguments(settings)["sasl_plain_password"] == "second"
    for content in (b"", b"\n", b"two\nlines", b"\xff\xfe", b"x" * 70_000):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=str(path)) as caught:
            client_arguments(settings)
        assert "xxx" not in str(caught.value)
    path.unlink()
    with pytest.raises(ConfigError, match=f"cannot read the secret in {path}: No such file"):
        client_arguments(settings)


async def test_a_secret_that_is_being_renewed_is_waited_for(tmp_path):
    path = tmp_path / "password"
    settings = parse_kafka_url(f"kafka://127.0.0.1:1?{SASL}&sasl_password_file={path}", SECRETS)
    clients = KafkaClients(settings)
    with pytest.raises(ConfigError):
        await clients.client()
    path.write_text("x")
    with pytest.raises(LogUnavailable, match="no Kafka broker answers"):
        await clients.client()
    path.unlink()
    with pytest.raises(LogUnavailable, match=f"cannot connect .*cannot read the secret in {path}"):
        await clients.client()


OAUTH = "security_protocol=SASL_SSL&sasl_mechanism=OAUTHBEARER"
IDP = "https://idp.example/token"
CLIENT = {"DYN_ES_KAFKA_OAUTH_CLIENT_SECRET": "s3cret", "DYN_ES_KAFKA_OAUTH_ALLOWED_URLS": f"https://x/y, {IDP}"}


def test_bearer_tokens_come_from_a_file_or_an_endpoint():
    from_file = parse_kafka_url(f"kafka://a:1?{OAUTH}&sasl_oauth_token_file=/run/token", {})
    assert isinstance(client_arguments(from_file)["sasl_oauth_token_provider"], FileTokens)
    settings = parse_kafka_url(f"kafka://a:1?{OAUTH}&sasl_oauth_token_url={IDP}&sasl_oauth_client_id=c", CLIENT)
    assert isinstance(client_arguments(settings)["sasl_oauth_token_provider"], EndpointTokens)
    assert "s3cret" not in repr(settings)
    assert settings.url == f"kafka://a:1?{OAUTH}&sasl_oauth_token_url={IDP}&sasl_oauth_client_id=c"
    assert parse_kafka_url(settings.url, CLIENT) == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs one of the options sasl_oauth_token_file and sasl_oauth_token_url"),
        (f"sasl_oauth_token_file=/t&sasl_oauth_token_url={IDP}", "needs one of the options"),
        ("sasl_oauth_token_file=/t&sasl_oauth_scope=x", "'?sasl_oauth_scope.*needs sasl_oauth_token_url"),
        (f"sasl_oauth_token_url={IDP}", "needs sasl_oauth_client_id as well"),
        ("sasl_oauth_token_url=https://idp.example/other", "is not among DYN_ES_KAFKA_OAUTH_ALLOWED_URLS"),
        ("sasl_oauth_token_url=https://idp.example/token/", "is not among DYN_ES_KAFKA_OAUTH_ALLOWED_URLS"),
        ("sasl_oauth_token_url=http://idp.example/token", "a secret is sent there, so it must be https"),
        ("sasl_oauth_token_url=ftp://127.0.0.1/token", "must be https"),
        ("sasl_oauth_token_url=https://[::1/token", "not a URL"),
        ("sasl_oauth_token_url=https://h:99999/token", "not a URL"),
    ],
)
def test_what_is_wrong_with_bearer_tokens_is_said(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_kafka_url(f"kafka://a:1?{OAUTH}&{options}".rstrip("&"), CLIENT)


def test_an_endpoint_needs_a_secret_and_an_allowed_url():
    url = f"kafka://a:1?{OAUTH}&sasl_oauth_token_url={IDP}&sasl_oauth_client_id=c"
    with pytest.raises(ConfigError, match="needs DYN_ES_KAFKA_OAUTH_CLIENT_SECRET in the environment"):
        parse_kafka_url(url, {"DYN_ES_KAFKA_OAUTH_ALLOWED_URLS": IDP})
    with pytest.raises(ConfigError, match="is not among DYN_ES_KAFKA_OAUTH_ALLOWED_URLS"):
        parse_kafka_url(url, {"DYN_ES_KAFKA_OAUTH_CLIENT_SECRET": "x"})


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("kafka://a:1?acks=0", f"unknown option 'acks'.*accepted: {', '.join(OPTIONS)}"),
        ("kafka://a:1?linger_ms=5&linger_ms=6", "'linger_ms' is given twice"),
        ("kafka://a:1?linger_ms=fast", "expected a number of milliseconds"),
        ("kafka://a:1?request_timeout_ms=0", "expected a number of milliseconds"),
        ("kafka://a:1?client_id=", "'client_id' .* is empty"),
        ("kafka://a:1?security_protocol=TLS", "accepted: PLAINTEXT, SSL, SASL_PLAINTEXT, SASL_SSL"),
        ("kafka://a:1?sasl_mechanism=GSSAPI", "accepted: PLAIN, SCRAM-SHA-256, SCRAM-SHA-512, OAUTHBEARER"),
        (f"kafka://a:1?{SASL}&sasl_oauth_scope=x", "option sasl_oauth_scope .* needs sasl_mechanism=OAUTHBEARER"),
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
        # EVT-10: a time-out of the broker and a newer instance look the same; a new producer goes on in either case.
        (kafka.InvalidProducerEpoch(), LogUnavailable, "cannot append"),
        (kafka.ProducerFenced(), LogUnavailable, "cannot append"),
        (kafka.KafkaError("Unexpected error during batch delivery"), LogUnavailable, "batch delivery"),
        (kafka.TopicAuthorizationFailedError("t"), LogError, r"what its role needs .*Kafka security"),
        (kafka.ClusterAuthorizationFailedError(), LogError, "what its role needs .*dynamo-es topics apply"),
        (kafka.SaslAuthenticationFailed("no"), LogError, "check the user and password"),
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


def test_a_login_is_in_no_message_at_any_level(caplog):
    repeat_filter = RepeatFilter(ManualClock())
    repeat_filter.install()
    caplog.set_level(logging.DEBUG, "aiokafka.conn")
    request = SaslAuthenticateRequest(b"\0alice\0hunter2").build(SaslAuthenticateRequest_v1)
    assert b"hunter2" in request.encode()
    try:
        logging.getLogger("aiokafka.conn").debug("Request to %s:%d %d: %s", "a", 1, 2, request)
    finally:
        repeat_filter.remove()
    assert caplog.messages == ["Request to a:1 2: (login)"]
