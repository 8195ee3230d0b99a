"""The options of the stream processors (``dynamo-es streams``, ``faust -A streams.faust_app worker``)."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_topic_namespace

_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class StreamsConfig:
    """A worker of the group that shares the heavy folds."""

    group: str = option(
        "streams", flag="--streams-group", env="DYN_ES_STREAMS_GROUP", check=check_topic_namespace,
        help="Workers of one group share the partitions; its name in Kafka begins with the topic namespace.",
    )  # fmt: skip
    session_timeout_s: float = option(
        10.0, flag="--streams-session-timeout", env="DYN_ES_STREAMS_SESSION_TIMEOUT", unit="s",
        minimum=6, maximum=1800,
        help="Partitions of a worker that is silent for so long go to others; the brokers' "
        "group.min.session.timeout.ms is 6 s. Heartbeats come three times as often.",
    )  # fmt: skip
    lock_timeout_s: float = option(
        60.0, flag="--streams-lock-timeout", env="DYN_ES_STREAMS_LOCK_TIMEOUT", unit="s", minimum=0, maximum=_DAY_S,
        help="How long a new owner of a partition waits for the one before to let go of the state in a shared "
        "--state-dir, before it leaves this partition alone for a while.",
    )  # fmt: skip
    publish_interval_s: float = option(
        10.0, flag="--streams-publish-interval", env="DYN_ES_STREAMS_PUBLISH_INTERVAL", unit="s",
        minimum=0.1, maximum=3600,
        help="How often windows that changed are written to topic aggregates.",
    )  # fmt: skip
    window_s: float = option(
        60.0, flag="--streams-window", env="DYN_ES_STREAMS_WINDOW", unit="s", minimum=1, maximum=_DAY_S,
        help="Length of the windows of time that load and anomalies are counted in.",
    )  # fmt: skip
    window_retention_s: float = option(
        21_600.0, flag="--streams-window-retention", env="DYN_ES_STREAMS_WINDOW_RETENTION", unit="s",
        minimum=60, maximum=365 * _DAY_S,
        help="How long windows are kept in topic aggregates; a request that is open for longer counts as unfinished.",
    )  # fmt: skip
