"""The configuration tree. Every option of dynamo-es is here, with its default, unit, variable and help text."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_es.config.frontend_options import ROUTER_MODES as ROUTER_MODES  # noqa: PLC0414 - part of the tree
from dynamo_es.config.frontend_options import FrontendConfig as FrontendConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.frontend_options import HttpPathsConfig as HttpPathsConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.indexer_options import IndexerConfig as IndexerConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.log_filter import check_log_filter
from dynamo_es.config.mock_options import MockConfig as MockConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.options import option
from dynamo_es.config.router_options import RouterConfig as RouterConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.streams_options import StreamsConfig as StreamsConfig  # noqa: PLC0414 - part of the tree
from dynamo_es.config.text_checks import (
    check_endpoint,
    check_host,
    check_log_url,
    check_name,
    check_path,
    check_topic_namespace,
)
from dynamo_es.config.topic_retention import check_topic_retention
from dynamo_es.frontend.parsers.names import REASONING_PARSER_NAMES, TOOL_PARSER_NAMES

# Bounds that no sensible value comes near, so that a slip of the keyboard is told at the start.
_GIB = 1024**3
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Which log, and how appends are buffered."""

    url: str = option(
        "embedded:///var/lib/dynamo-es/log", flag="--log", env="DYN_ES_LOG", check=check_log_url,
        help="Event log: embedded:///dir (one machine) or kafka://host:port[,host:port]; memory:// is for Python "
        "programs only, since no other process sees it.",
    )  # fmt: skip
    namespace: str = option(
        "dynamo", flag="--topic-namespace", env="DYN_ES_TOPIC_NAMESPACE", check=check_topic_namespace,
        help="Prefix of all topic names.",
    )  # fmt: skip
    buffer_records: int = option(
        100_000, flag="--log-buffer-records", env="DYN_ES_LOG_BUFFER_RECORDS", unit="records",
        minimum=1, maximum=100_000_000,
        help="Appends that may wait while the log is slow or away; what does not fit is dropped, counted and logged.",
    )  # fmt: skip
    buffer_bytes: int = option(
        64 * 1024 * 1024, flag="--log-buffer-bytes", env="DYN_ES_LOG_BUFFER_BYTES", unit="bytes",
        minimum=65_536, maximum=1024 * _GIB,
        help="The same bound in bytes.",
    )  # fmt: skip
    linger_ms: float = option(
        2.0, flag="--log-linger-ms", env="DYN_ES_LOG_LINGER_MS", unit="ms", minimum=0, maximum=1000,
        help="How long an event waits for others to be appended with it.",
    )  # fmt: skip
    retention_interval_s: float = option(
        300.0, flag="--log-retention-interval", env="DYN_ES_LOG_RETENTION_INTERVAL", unit="s",
        minimum=0.05, maximum=_DAY_S,
        help="How often a process drops old records from an embedded log (Kafka's brokers do it themselves).",
    )  # fmt: skip
    replication: int | None = option(
        None, flag="--topic-replication", env="DYN_ES_TOPIC_REPLICATION", unit="replicas", minimum=1, maximum=32_767,
        help="Replication factor of topics that are created (Kafka); unset: the broker's default.",
    )  # fmt: skip
    min_insync_replicas: int | None = option(
        None, flag="--topic-min-insync-replicas", env="DYN_ES_TOPIC_MIN_INSYNC_REPLICAS", unit="replicas",
        minimum=1, maximum=32_767,
        help="Replicas that must have a record before its append counts (Kafka's min.insync.replicas); unset: the "
        "broker's default, or what a topic has.",
    )  # fmt: skip
    retention: str | None = option(
        None, flag="--topic-retention", env="DYN_ES_TOPIC_RETENTION", check=check_topic_retention,
        help="Ages of single topics instead of the declared ones, in min, h or d: requests=24h,dead-letters=forever; "
        "for topics that are made, and for topics apply.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Where folded state is kept, and how often."""

    state_dir: str | None = option(
        None, flag="--state-dir", env="DYN_ES_STATE_DIR", check=check_path,
        help="Folder of this process's state store; unset: state is folded from the log at each start.",
    )  # fmt: skip
    flush_interval_s: float = option(
        5.0, flag="--state-flush-interval", env="DYN_ES_STATE_FLUSH_INTERVAL", unit="s", minimum=0.05, maximum=3600,
        help="Longest time between two commits of state and positions.",
    )  # fmt: skip
    snapshot_interval_s: float = option(
        60.0, flag="--snapshot-interval", env="DYN_ES_SNAPSHOT_INTERVAL", unit="s", minimum=0.05, maximum=_DAY_S,
        help="How often the state of the KV index is written to the log, so that a start reads the newest snapshot and "
        "what came after it, and so that an embedded log can drop old events.",
    )  # fmt: skip
    catch_up_timeout_s: float = option(
        60.0, flag="--catch-up-timeout", env="DYN_ES_CATCH_UP_TIMEOUT", unit="s", minimum=0, maximum=_DAY_S,
        help="How long a start waits for the views to reach the end of the log before it serves with what it has.",
    )  # fmt: skip
    stall_timeout_s: float = option(
        30.0, flag="--stall-timeout", env="DYN_ES_STALL_TIMEOUT", unit="s", minimum=0, maximum=_DAY_S,
        help="A view that folds nothing for this long although the log has more makes the process not ready; 0: never. "
        "A log that is away is no such case, nor one without new records.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """Request plane and leases."""

    host: str = option(
        "127.0.0.1", flag="--request-plane-host", env="DYN_TCP_RPC_HOST", check=check_host,
        help="Address on which this process takes requests from others.",
    )  # fmt: skip
    advertise_host: str | None = option(
        None, flag="--request-plane-advertise-host", env="DYN_ES_ADVERTISE_HOST", check=check_host,
        help="Address that it registers for others to reach it; unset: --request-plane-host, or the host name if that "
        "is a wildcard.",
    )  # fmt: skip
    port: int = option(
        0, flag="--request-plane-port", env="DYN_TCP_RPC_PORT", minimum=0, maximum=65_535,
        help="Its port; 0 takes a free one.",
    )  # fmt: skip
    lease_ttl_s: float = option(
        10.0, flag="--lease-ttl", env="DYN_ES_LEASE_TTL", unit="s", minimum=0.5, maximum=3600,
        help="A process that did not renew its lease for this long is gone.",
    )  # fmt: skip
    heartbeat_s: float = option(
        2.5, flag="--heartbeat", env="DYN_ES_HEARTBEAT", unit="s", minimum=0.1, maximum=1200,
        help="Time between renewals; must be under a third of the lease.",
    )  # fmt: skip
    drain_timeout_s: float = option(
        30.0, flag="--drain-timeout", env="DYN_ES_DRAIN_TIMEOUT", unit="s", minimum=0, maximum=_DAY_S,
        help="How long open streams may take to finish at shutdown before they are cut.",
    )  # fmt: skip
    connect_timeout_s: float = option(
        5.0, flag="--connect-timeout", env="DYN_ES_CONNECT_TIMEOUT", unit="s", minimum=0.1, maximum=3600,
        help="How long a connection to an instance may take.",
    )  # fmt: skip
    inhibited_s: float = option(
        5.0, flag="--inhibited-duration", env="DYN_RUNTIME_INHIBITED_DURATION_SECS", unit="s",
        minimum=0, maximum=_DAY_S,
        help="How long an instance takes no requests after its connection failed.",
    )  # fmt: skip
    stream_timeout_s: float | None = option(
        None, flag="--backend-stream-timeout", env="DYN_HTTP_BACKEND_STREAM_TIMEOUT_SECS", unit="s",
        minimum=0, maximum=_DAY_S,
        help="An instance that sends nothing of a stream for this long has failed it; 0 or unset: silence is waited "
        "out.",
    )  # fmt: skip
    first_item_timeout_s: float | None = option(
        None, flag="--backend-ttft-timeout", env="DYN_HTTP_BACKEND_TTFT_STREAM_TIMEOUT_SECS", unit="s",
        minimum=0, maximum=_DAY_S,
        help="The same until a stream's first item; 0 or unset: as --backend-stream-timeout.",
    )  # fmt: skip
    stream_window: int = option(
        256, flag="--stream-window", env="DYN_ES_STREAM_WINDOW", unit="items", minimum=1, maximum=1_000_000,
        help="Items of one stream that may be under way before its producer waits for its consumer.",
    )  # fmt: skip
    max_streams: int = option(
        16_384, flag="--max-streams", env="DYN_ES_MAX_STREAMS", unit="streams", minimum=1, maximum=10_000_000,
        help="Streams that one process serves at a time; the next one is refused as overloaded.",
    )  # fmt: skip
    max_message_bytes: int = option(
        64 * 1024 * 1024, flag="--max-message-bytes", env="DYN_ES_MAX_MESSAGE_BYTES", unit="bytes",
        minimum=65_536, maximum=2 * _GIB,
        help="Largest message that the request plane takes.",
    )  # fmt: skip
    curve_key_file: str | None = option(
        None, flag="--curve-key-file", env="DYN_ES_CURVE_KEY_FILE", check=check_path,
        help="CURVE key pair of the fleet (a .key_secret file of zmq.auth.create_certificates): encrypts the request "
        "plane and admits only holders of the same pair.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SystemConfig:
    """The system status server of a process that has no HTTP of its own (workers, stream processors)."""

    port: int = option(
        -1, flag="--system-port", env="DYN_SYSTEM_PORT", minimum=-1, maximum=65_535,
        help="Port of /health, /live, /metrics and /engine; 0 takes a free one, -1 serves none.",
    )  # fmt: skip
    host: str = option(
        "0.0.0.0", flag="--system-host", env="DYN_SYSTEM_HOST", check=check_host,  # noqa: S104
        help="Address that it listens on.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """A worker process, whatever its engine."""

    endpoint: str | None = option(
        None, flag="--endpoint", env="DYN_ENDPOINT", check=check_endpoint,
        help="Endpoint that it serves: namespace.component.endpoint; unset: dynamo.backend.generate, or "
        "dynamo.prefill.generate of a prefill worker.",
    )  # fmt: skip
    model_path: str = option(
        "builtin:bytes", flag="--model-path", env="DYN_MODEL_PATH", check=check_path, aliases=("--model",),
        help="Hugging Face model directory, or builtin:bytes for the byte-level tokenizer that needs no files. The "
        "Transformers engine and attached servers also take a GGUF file, an installed package that brings one, and a "
        "name on the hub.",
    )  # fmt: skip
    model_name: str | None = option(
        None, flag="--model-name", env="DYN_MODEL_NAME", check=check_name,
        help="Name by which requests ask for it; unset: the directory's.",
    )  # fmt: skip
    tool_call_parser: str | None = option(
        None, flag="--dyn-tool-call-parser", env="DYN_TOOL_CALL_PARSER", choices=TOOL_PARSER_NAMES,
        help="Format in which the model writes tool calls; unset: they stay text.",
    )  # fmt: skip
    reasoning_parser: str | None = option(
        None, flag="--dyn-reasoning-parser", env="DYN_REASONING_PARSER", choices=REASONING_PARSER_NAMES,
        help="Format in which the model writes its thoughts; unset: they stay text.",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    """What a process says on standard error."""

    level: str = option(
        "info", flag="--log-level", env="DYN_LOG", check=check_log_filter,
        help="Least severe messages that are shown (off, error, warning, info, debug), and others for some targets: "
        "info,dynamo_es.router=debug.",
    )  # fmt: skip
    jsonl: bool = option(
        False, flag="--log-jsonl", env="DYN_LOGGING_JSONL",
        help="Messages as lines of JSON: time, level, target, message, pid.",
    )  # fmt: skip
