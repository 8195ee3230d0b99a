"""The Faust application: a consumer group whose workers share the partitions of the heavy folds.

    dynamo-es streams --log kafka://host:9092 --state-dir DIR
    faust -A streams.faust_app worker          # the same, options from the environment

Faust shares out partitions, delivers records and keeps the group's offsets. It repeats records at a rebalance and its
tables do not keep state and offset together, so state is not Faust's: agents hand whole records to a
``PartitionProcessor``, which is exact whatever is delivered (see there).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import faust
from prometheus_client import CollectorRegistry

from dynamo_es.clock import Clock
from dynamo_es.errors import ConfigError
from dynamo_es.log.base import EventLog, TopicPartition
from dynamo_es.log.kafka import KafkaLog
from dynamo_es.log.kafka_config import OAUTHBEARER, SCHEME, KafkaSettings, parse_kafka_url
from dynamo_es.log.kafka_credentials import client_arguments
from streams.faust_agents import hand_on
from streams.faust_transport import PromptTransport
from streams.pool_upkeep import ConsumerStalled
from streams.stream_worker import FOLDS, StreamsSettings, StreamWorker, heartbeat_s

# Records that wait for an agent; beyond it Faust stops fetching the partition. They may have 1 MB each.
BUFFER_RECORDS = 1024
COMMIT_INTERVAL_S = 3.0
REBALANCE_TIMEOUT_S = 30.0
REQUEST_TIMEOUT_S = 60.0


class StreamsApp(faust.App):
    """The application with the worker that its agents feed."""

    worker: StreamWorker

    async def on_first_start(self) -> None:
        """Faust would make folders for its tables here; this application has none."""

    async def on_start(self) -> None:
        await self.worker.start()
        await super().on_start()

    async def on_stop(self) -> None:
        await super().on_stop()
        # Before the consumer leaves the group: until then no other worker takes the partitions.
        await self.worker.close()


def build_app(
    settings: StreamsSettings,
    *,
    clock: Clock,
    rng: random.Random,
    registry: CollectorRegistry,
    environment: Mapping[str, str],
    open_log: Callable[[], EventLog] | None = None,
) -> StreamsApp:
    """The application, not started. Starting opens everything, stopping hands it over.

    ``registry`` gets the metrics. ``environment`` has the secrets of the log's URL. ``open_log``: instead of the log
    that the settings name. Raises ``ConfigError`` as ``kafka_settings``.
    """
    kafka = kafka_settings(settings, environment)
    app = StreamsApp(settings.group, **_faust_options(settings, kafka))
    app.transport = PromptTransport(app.conf.broker_consumer, app)
    app.worker = StreamWorker(
        settings,
        open_log=open_log or (lambda: KafkaLog.from_url(settings.log.url, clock, environment)),
        clock=clock,
        rng=rng,
        registry=registry,
        on_stalled=lambda error: _crash(app, error),
    )
    _connect_group(app)
    for spec in FOLDS:
        topic = app.topic(spec.qualified(settings.log.namespace), key_serializer="raw", value_serializer="raw")
        app.agent(topic, name=f"fold-{spec.name}")(partial(hand_on, lambda: app.worker.pool))
    return app


def kafka_settings(settings: StreamsSettings, environment: Mapping[str, str]) -> KafkaSettings:
    """The cluster that the log's URL names. Raises ``ConfigError``: it is no Kafka, or the URL is wrong."""
    url = settings.log.url
    if not url.startswith(f"{SCHEME}:"):
        raise ConfigError(
            f"the stream processors share partitions over a Kafka consumer group, and {url.partition(':')[0]!r} is no "
            "Kafka: use --log kafka://host:port[,host:port] (on one machine, frontends fold the log themselves)"
        )
    return parse_kafka_url(url, environment)


def _connect_group(app: StreamsApp) -> None:
    """What the group tells goes to the pool."""

    async def on_assigned(sender: Any, /, *told: Any, **_: Any) -> None:
        app.worker.pool.assign([TopicPartition(*place) for place in told[0]])

    async def on_revoked(sender: Any, /, *told: Any, **_: Any) -> None:
        await app.worker.pool.suspend()

    app.on_partitions_assigned.connect(on_assigned)
    app.on_partitions_revoked.connect(on_revoked)


def _crash(app: StreamsApp, error: ConsumerStalled) -> None:
    app.add_future(app.crash(error))


def _faust_options(settings: StreamsSettings, kafka: KafkaSettings) -> dict[str, Any]:
    streams = settings.streams
    return {
        "broker": ";".join(f"{SCHEME}://{server}" for server in kafka.servers),
        "broker_credentials": _credentials(kafka),
        "broker_client_id": kafka.client_id,
        "broker_session_timeout": streams.session_timeout_s,
        "broker_heartbeat_interval": heartbeat_s(streams),
        "broker_rebalance_timeout": max(REBALANCE_TIMEOUT_S, 2 * streams.session_timeout_s),
        # Faust refuses one that is shorter than the session timeout.
        "broker_request_timeout": max(REQUEST_TIMEOUT_S, streams.session_timeout_s),
        "broker_commit_interval": COMMIT_INTERVAL_S,
        # Processors read the past themselves, and faster: a group without offsets begins at the end.
        "consumer_auto_offset_reset": "latest",
        "stream_buffer_maxsize": BUFFER_RECORDS,
        # What is unfinished at a rebalance is read again; waiting for it would hold up the group.
        "stream_wait_empty": False,
        # One or more makes Faust use its own assignor, which leaves partitions where they are. It has no tables to
        # replicate here.
        "table_standby_replicas": 1,
        "store": "memory://",
        "topic_allow_declare": False,
        "topic_disable_leader": True,
        "web_enabled": False,
        "worker_redirect_stdouts": False,
        "autodiscover": False,
        # Faust reads its settings from the environment as well; unprefixed, NODE_HOSTNAME is one of them.
        "env_prefix": "DYN_ES_FAUST_",
    }


def _credentials(kafka: KafkaSettings) -> faust.types.auth.CredentialsT | None:
    arguments = client_arguments(kafka)
    context = arguments.get("ssl_context")
    if not kafka.security_protocol.startswith("SASL_"):
        return None if context is None else faust.SSLCredentials(context)
    if kafka.sasl_mechanism == OAUTHBEARER:
        return faust.OAuthCredentials(oauth_cb=arguments["sasl_oauth_token_provider"], ssl_context=context)
    return faust.SASLCredentials(
        username=arguments["sasl_plain_username"],
        password=arguments["sasl_plain_password"],
        ssl_context=context,
        mechanism=kafka.sasl_mechanism,
    )


def _app_from_environment() -> StreamsApp:
    """For ``faust -A streams.faust_app``: every option from its variable."""
    import os

    from prometheus_client import REGISTRY

    from dynamo_es.clock import SystemClock
    from dynamo_es.config.options import load
    from dynamo_es.config.tree import LogConfig, StateConfig, StreamsConfig, SystemConfig

    env = os.environ
    settings = StreamsSettings(
        load(LogConfig, None, env), load(StateConfig, None, env), load(StreamsConfig, None, env),
        load(SystemConfig, None, env),
    )  # fmt: skip
    return build_app(settings, clock=SystemClock(), rng=random.SystemRandom(), registry=REGISTRY, environment=env)


def __getattr__(name: str) -> Any:
    """``app``, made when it is asked for first: importing this module opens, reads and makes nothing."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = globals()["app"] = _app_from_environment()
    return app
