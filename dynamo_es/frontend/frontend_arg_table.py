"""The arguments of Dynamo's frontend, one a line (spec/frontend.md 7)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from dynamo_es.config.frontend_options import ROUTER_MODES

Kind = Literal["text", "int", "float", "threshold", "bool", "strict_bool", "list", "model_name", "model_path"]
TOKENIZERS = ("default", "fastokens", "basetenkenizer")


class Argument(NamedTuple):
    """One argument.

    Attributes:
        flags: The first one names it; a boolean also has ``--no-…``.
        env: Variable that is its default when it is set.
        default: Else this.
        kind: How text becomes its value; ``threshold``: a number, or ``None``.
        dest: Attribute of ``FrontendConfig``.
        choices: Of the flag; a variable may hold something else, as in Dynamo.
        deprecated: It is warned about.
    """

    flags: tuple[str, ...]
    env: str
    default: Any
    kind: Kind
    dest: str
    choices: tuple[str, ...] | None = None
    deprecated: bool = False


def _arg(
    flag: str,
    env: str,
    default: Any = None,
    kind: Kind = "text",
    *,
    dest: str | None = None,
    choices: tuple[str, ...] | None = None,
    also: tuple[str, ...] = (),
    deprecated: bool = False,
) -> Argument:
    name = dest if dest is not None else flag.removeprefix("--").replace("-", "_")
    return Argument((flag, *also), env, default, kind, name, choices, deprecated)


def _tls(plane: str, *names: str) -> list[Argument]:
    prefix = "NATS_TLS" if plane == "nats" else "DYN_TCP_TLS"
    return [_arg(f"--{plane}-tls-{name}-path", f"{prefix}_{name.replace('-', '_').upper()}_PATH") for name in names]


def _aic(name: str, kind: Kind = "text", default: Any = None) -> Argument:
    # Dynamo 1.6 calls AIC's model ``ais``; both names are taken.
    variable = name.replace("-", "_").upper()
    return _arg(f"--aic-{name}", f"DYN_AIC_{variable}", default, kind, also=(f"--ais-{name}",))


ARGUMENTS: tuple[Argument, ...] = (
    _arg("--interactive", "DYN_INTERACTIVE", False, "bool", also=("-i",)),
    _arg("--http-host", "DYN_HTTP_HOST", "0.0.0.0"),  # noqa: S104 - Dynamo's default
    _arg("--http-port", "DYN_HTTP_PORT", 8000, "int"),
    _arg("--tls-cert-path", "DYN_TLS_CERT_PATH"),
    _arg("--tls-key-path", "DYN_TLS_KEY_PATH"),
    _arg("--tls-client-ca-cert-path", "DYN_TLS_CLIENT_CA_CERT_PATH"),
    *_tls("tcp", "cert", "key", "ca-cert", "client-cert", "client-key", "client-ca-cert"),
    *_tls("nats", "ca-cert", "client-cert", "client-key"),
    _arg("--nats-tls-insecure", "NATS_TLS_INSECURE", False, "bool"),
    _arg("--namespace", "DYN_NAMESPACE"),
    _arg("--namespace-prefix", "DYN_NAMESPACE_PREFIX"),
    _arg("--kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE", None, "int"),
    _arg("--router-mode", "DYN_ROUTER_MODE", "round-robin", choices=ROUTER_MODES),
    _arg("--router-min-initial-workers", "DYN_ROUTER_MIN_INITIAL_WORKERS", 0, "int"),
    _arg("--router-session-affinity-ttl-secs", "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS", None, "int"),
    _arg("--router-session-affinity-mode", "DYN_ROUTER_SESSION_AFFINITY_MODE", "hard", choices=("hard", "soft")),
    _arg("--active-decode-blocks-threshold", "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", None, "threshold"),
    _arg("--active-prefill-tokens-threshold", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", None, "threshold"),
    _arg("--active-prefill-tokens-threshold-frac", "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC", None, "threshold"),
    _arg("--migration-limit", "DYN_MIGRATION_LIMIT", 0, "int"),
    _arg("--migration-max-seq-len", "DYN_MIGRATION_MAX_SEQ_LEN", None, "int"),
    _arg("--model-name", "DYN_MODEL_NAME", None, "model_name"),
    _arg("--model-path", "DYN_MODEL_PATH", None, "model_path"),
    _arg("--metrics-prefix", "DYN_METRICS_PREFIX"),
    _arg("--kserve-grpc-server", "DYN_KSERVE_GRPC_SERVER", False, "bool"),
    _arg("--grpc-metrics-port", "DYN_GRPC_METRICS_PORT", 8788, "int"),
    _arg("--dump-config-to", "DYN_DUMP_CONFIG_TO"),
    _arg(
        "--frontend-route-extension", "DYN_FRONTEND_ROUTE_EXTENSIONS", (), "list", dest="frontend_route_extensions"
    ),
    _arg("--discovery-backend", "DYN_DISCOVERY_BACKEND", "etcd", choices=("kubernetes", "etcd", "file", "mem")),
    _arg("--request-plane", "DYN_REQUEST_PLANE", "tcp", choices=("nats", "tcp")),
    _arg("--response-plane", "DYN_RESPONSE_PLANE", "tcp", choices=("tcp", "quic")),
    _arg("--event-plane", "DYN_EVENT_PLANE", None, choices=("nats", "zmq")),
    _arg("--enable-anthropic-api", "DYN_ENABLE_ANTHROPIC_API", False, "bool"),
    _arg("--strip-anthropic-preamble", "DYN_STRIP_ANTHROPIC_PREAMBLE", True, "bool"),
    _arg("--enable-streaming-tool-dispatch", "DYN_ENABLE_STREAMING_TOOL_DISPATCH", False, "bool"),
    _arg("--enable-streaming-reasoning-dispatch", "DYN_ENABLE_STREAMING_REASONING_DISPATCH", False, "bool"),
    _arg(
        "--reasoning-field-name", "DYN_REASONING_FIELD_NAME", "reasoning_content",
        choices=("reasoning_content", "reasoning"),
    ),
    _arg("--exclude-tools-when-tool-choice-none", "DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE", True, "bool"),
    _arg(
        "--dyn-chat-processor", "DYN_CHAT_PROCESSOR", "dynamo", dest="chat_processor",
        choices=("dynamo", "vllm", "sglang"),
    ),
    _arg("--dyn-preprocess-workers", "DYN_PREPROCESS_WORKERS", 0, "int", dest="preprocess_workers"),
    _arg("--dyn-debug-perf", "DYN_DEBUG_PERF", False, "bool", dest="debug_perf"),
    _arg("--tokenizer", "DYN_TOKENIZER", "default", dest="tokenizer_backend", choices=TOKENIZERS),
    _arg("--tokenizer-fallback", "DYN_TOKENIZER_FALLBACK", True, "strict_bool"),
    _arg("--trust-remote-code", "DYN_TRUST_REMOTE_CODE", False, "bool"),
    _arg("--serve-indexer", "DYN_SERVE_INDEXER", False, "bool"),
    _arg("--use-remote-indexer", "DYN_USE_REMOTE_INDEXER", False, "bool"),
    _arg(
        "--router-kv-events", "DYN_ROUTER_USE_KV_EVENTS", True, "bool", dest="use_kv_events", also=("--kv-events",)
    ),
    _arg("--router-ttl-secs", "DYN_ROUTER_TTL_SECS", 120.0, "float"),
    _arg(
        "--router-approximate-cache-policy", "DYN_ROUTER_APPROXIMATE_CACHE_POLICY", "ttl", choices=("ttl", "lru")
    ),
    _arg("--router-predicted-ttl-secs", "DYN_ROUTER_PREDICTED_TTL_SECS", None, "threshold"),
    _arg("--router-replica-sync", "DYN_ROUTER_REPLICA_SYNC", False, "bool"),
    _arg("--router-track-active-blocks", "DYN_ROUTER_TRACK_ACTIVE_BLOCKS", True, "bool"),
    _arg("--router-track-output-blocks", "DYN_ROUTER_TRACK_OUTPUT_BLOCKS", False, "bool"),
    _arg("--router-assume-kv-reuse", "DYN_ROUTER_ASSUME_KV_REUSE", True, "bool"),
    _arg("--router-track-prefill-tokens", "DYN_ROUTER_TRACK_PREFILL_TOKENS", True, "bool"),
    _arg("--router-host-cache-hit-weight", "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", 0.75, "float"),
    _arg("--router-disk-cache-hit-weight", "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", 0.25, "float"),
    _arg("--router-event-threads", "DYN_ROUTER_EVENT_THREADS", 4, "int"),
    _arg("--router-policy-config", "DYN_ROUTER_POLICY_CONFIG"),
    _arg("--router-conditional-disagg", "DYN_ROUTER_CONDITIONAL_DISAGG", False, "bool"),
    _arg("--router-conditional-disagg-config", "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG"),
    _arg(
        "--router-prefill-load-model", "DYN_ROUTER_PREFILL_LOAD_MODEL", "none", choices=("none", "ais", "aic")
    ),
    *(_aic(name) for name in ("backend", "system", "model-path", "backend-version")),
    _aic("tp-size", "int", 1),
    *(_aic(name, "int") for name in ("moe-tp-size", "moe-ep-size", "attention-dp-size", "nextn")),
    *(
        _aic(name)
        for name in ("nextn-accept-rates", "gemm-dtype", "moe-dtype", "fmha-dtype", "kv-cache-dtype", "comm-dtype")
    ),
    _arg("--shared-cache-type", "DYN_SHARED_CACHE_TYPE", "none"),
    _arg("--enable-session-prefix-index", "DYN_ENABLE_SESSION_PREFIX_INDEX", False, "bool"),
    _arg(
        "--router-tracking-hash", "DYN_ROUTER_TRACKING_HASH", "public-xxh3-v1",
        choices=("public-xxh3-v1", "keyed-xxh3-v1"),
    ),
    _arg("--router-tracking-key-file", "DYN_ROUTER_TRACKING_KEY_FILE"),
    _arg("--router-tracking-key-id", "DYN_ROUTER_TRACKING_KEY_ID"),
    _arg("--load-aware", "DYN_ROUTER_LOAD_AWARE", False, "bool", deprecated=True),
    _arg(
        "--router-kv-overlap-score-credit", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT", 1.0, "float", deprecated=True
    ),
    _arg(
        "--router-kv-overlap-score-credit-decay", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY", 0.0, "float",
        deprecated=True,
    ),
    _arg(
        "--router-kv-overlap-score-weight", "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", None, "threshold",
        also=("--kv-overlap-score-weight",), deprecated=True,
    ),
    _arg("--router-prefill-load-scale", "DYN_ROUTER_PREFILL_LOAD_SCALE", 1.0, "float", deprecated=True),
    _arg(
        "--router-decode-active-request-weight", "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT", 0.0, "float",
        deprecated=True,
    ),
    _arg("--router-temperature", "DYN_ROUTER_TEMPERATURE", 0.0, "float", deprecated=True),
    _arg("--router-queue-threshold", "DYN_ROUTER_QUEUE_THRESHOLD", None, "threshold", deprecated=True),
    _arg("--router-prefill-policy", "DYN_ROUTER_PREFILL_POLICY", deprecated=True),
    _arg("--router-decode-policy", "DYN_ROUTER_DECODE_POLICY", deprecated=True),
    _arg("--router-queue-policy", "DYN_ROUTER_QUEUE_POLICY", "fcfs", choices=("fcfs", "lcfs", "wspt"), deprecated=True),
    _arg("--shared-cache-multiplier", "DYN_SHARED_CACHE_MULTIPLIER", None, "threshold", deprecated=True),
    _arg("--admission-control", "DYN_ADMISSION_CONTROL", None, choices=("token-capacity", "none")),
    _arg("--enforce-disagg", "DYN_ENFORCE_DISAGG", False, "bool"),
)  # fmt: skip
