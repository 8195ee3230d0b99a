"""aiokafka's errors as ours: one table, used wherever the Kafka log touches the client."""

from __future__ import annotations

from aiokafka import errors as kafka

from dynamo_es.log.errors import LogClosed, LogError, LogUnavailable, RecordTooLarge, UnknownTopic

_TOO_LARGE = (kafka.MessageSizeTooLargeError, kafka.RecordListTooLargeError)
_NO_SUCH_TOPIC = (kafka.UnknownTopicOrPartitionError, kafka.InvalidTopicError)
_CLOSED = (kafka.ProducerClosed, kafka.ConsumerStoppedError)
# The producer or consumer object is spoilt, the cluster is not: a new one continues.
_SPOILT_CLIENT = (
    kafka.OutOfOrderSequenceNumber,
    kafka.UnknownProducerId,
    kafka.InvalidProducerEpoch,
    kafka.ProducerFenced,
    kafka.DuplicateSequenceNumber,
    kafka.CorruptRecordException,
)
AUTHENTICATION_ERRORS = (
    kafka.SaslAuthenticationFailed,
    kafka.AuthenticationFailedError,
    kafka.AuthenticationMethodNotSupported,
    kafka.UnsupportedSaslMechanismError,
    kafka.IllegalSaslStateError,
)

_REMEDIES: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    (
        AUTHENTICATION_ERRORS,
        "check the user and password (or token) that this process was given, and sasl_mechanism",
    ),
    (
        (kafka.TopicAuthorizationFailedError, kafka.ClusterAuthorizationFailedError),
        "grant the principal what its role needs (README.md, Kafka security); topics are made by an administrator: "
        "dynamo-es topics apply",
    ),
    ((kafka.InvalidReplicationFactorError,), "ask for a replication that the number of running brokers allows"),
    ((kafka.PolicyViolationError,), "the cluster's create-topic policy refuses it; ask for settings that it allows"),
    (
        (kafka.InvalidTimestampError,),
        "the record's time is outside of message.timestamp.before.max.ms / after.max.ms: check the machine's clock",
    ),
    (
        (kafka.UnsupportedVersionError, kafka.IncompatibleBrokerVersion, kafka.UnsupportedForMessageFormatError),
        "the brokers are too old; dynamo-es needs Kafka 2.4 or later",
    ),
)


def map_kafka_error(
    error: kafka.KafkaError, action: str, *, topic: str | None = None, size: int = 0, limit: int = 0
) -> LogError:
    """Our error for one of aiokafka's, for ``raise map_kafka_error(...) from error``.

    ``action`` continues the sentence "cannot ..." and names the servers, the topic or both. ``size`` and ``limit``
    are those of the record, where there is one.
    """
    if topic is not None and isinstance(error, _NO_SUCH_TOPIC):
        return UnknownTopic(topic)
    if topic is not None and isinstance(error, _TOO_LARGE):
        return RecordTooLarge(topic, size, limit)
    if isinstance(error, _CLOSED):
        return LogClosed(f"cannot {action}: the log was closed")
    reason = _reason(error)
    for kinds, remedy in _REMEDIES:
        if isinstance(error, kinds):
            return LogError(f"cannot {action}: {reason}; {remedy}")
    # aiokafka raises the root class itself when one of its tasks died; a new client continues.
    if error.retriable or isinstance(error, _SPOILT_CLIENT) or type(error) is kafka.KafkaError:
        return LogUnavailable(f"cannot {action}: {reason}")
    return LogError(f"cannot {action}: {reason}")


def raise_for_code(code: int, context: str) -> None:
    """Raise the ``KafkaError`` for an error code in a response; nothing for code 0."""
    kind = kafka.for_code(code)
    if kind is not kafka.NoError:
        raise kind(context)


def _reason(error: kafka.KafkaError) -> str:
    described = getattr(error, "description", None)
    if error.args and not isinstance(error.args[0], str):
        # aiokafka puts its connection object there.
        return f"{type(error).__name__}: {described or 'no more is known'}"
    text = str(error)
    return f"{text} ({described})" if described and not error.args else text
