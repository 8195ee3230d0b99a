"""Options of the HTTP frontend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import (
    check_header_prefix,
    check_host,
    check_http_path,
    check_metrics_prefix,
    check_namespace,
    check_path,
)

ROUTER_MODES = ("round-robin", "random", "power-of-two", "kv", "direct", "least-loaded", "device-aware-weighted")
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class FrontendConfig:
    """The HTTP frontend."""

    http_host: str = option(
        "0.0.0.0", flag="--http-host", env="DYN_HTTP_HOST", check=check_host,  # noqa: S104
        help="Listen address.",
    )  # fmt: skip
    http_port: int = option(
        8000, flag="--http-port", env="DYN_HTTP_PORT", minimum=0, maximum=65_535,
        help="Listen port; 0 takes a free one.",
    )  # fmt: skip
    router_mode: str = option(
        "round-robin", flag="--router-mode", env="DYN_ROUTER_MODE", choices=ROUTER_MODES,
        help="How a worker is chosen.",
    )  # fmt: skip
    kv_cache_block_size: int | None = option(
        None, flag="--kv-cache-block-size", env="DYN_KV_CACHE_BLOCK_SIZE", unit="tokens",
        minimum=0, maximum=2**32 - 1,
        help="Block size for KV routing; 0 or unset: that of the model card.",
    )  # fmt: skip
    namespace: str | None = option(
        None, flag="--namespace", env="DYN_NAMESPACE", check=check_namespace,
        help="Serve only workers of this namespace.",
    )  # fmt: skip
    namespace_prefix: str | None = option(
        None, flag="--namespace-prefix", env="DYN_NAMESPACE_PREFIX", check=check_namespace,
        help="Serve only workers of namespaces that begin so; wins over --namespace.",
    )  # fmt: skip
    router_min_initial_workers: int = option(
        0, flag="--router-min-initial-workers", env="DYN_ROUTER_MIN_INITIAL_WORKERS", unit="workers",
        minimum=0, maximum=1_000_000,
        help="A model is not ready before it has had so many workers at a time.",
    )  # fmt: skip
    model_path: str | None = option(
        None, flag="--model-path", env="DYN_MODEL_PATH", check=check_path,
        help="Local model directory to use instead of the path that workers registered.",
    )  # fmt: skip
    tokenizer: str | None = option(
        None, flag="--tokenizer", env="DYN_TOKENIZER", choices=("default", "fastokens"), planned=("basetenkenizer",),
        help="Who tokenizes: the tokenizers library (default), or fastokens, which needs the extra of that name and "
        "must agree with the library on samples. Unset: what each model's card says.",
    )  # fmt: skip
    tokenizer_fallback: bool = option(
        True, flag="--tokenizer-fallback", env="DYN_TOKENIZER_FALLBACK",
        help="The default tokenizer takes the models that the chosen one cannot; otherwise they are not served.",
    )  # fmt: skip
    tokenizer_cache_mb: int = option(
        64, flag="--tokenizer-cache-mb", env="DYN_ES_TOKENIZER_CACHE_MB", unit="MiB", minimum=0, maximum=65_536,
        help="Bound of each model's cache of tokenized text between special tokens; 0: no cache.",
    )  # fmt: skip
    preprocess_threads: int = option(
        2, flag="--preprocess-threads", env="DYN_ES_PREPROCESS_THREADS", unit="threads", minimum=1, maximum=1024,
        help="Threads that render and tokenize requests of 2 KiB and more (and decode those of 16 KiB and more).",
    )  # fmt: skip
    preprocess_queue: int = option(
        1024, flag="--preprocess-queue", env="DYN_ES_PREPROCESS_QUEUE", unit="requests", minimum=0, maximum=10_000_000,
        help="Requests that may wait for such a thread; the next one gets the status of --overload-status-code and "
        "the code preprocess_queue_full.",
    )  # fmt: skip
    body_limit_mb: int = option(
        45, flag="--http-body-limit-mb", env="DYN_HTTP_BODY_LIMIT_MB", unit="MiB", minimum=1, maximum=16_384,
        help="Largest request body.",
    )  # fmt: skip
    header_limit_kb: int = option(
        64, flag="--http-header-limit-kb", env="DYN_ES_HTTP_HEADER_LIMIT_KB", unit="KiB", minimum=1, maximum=16_384,
        help="Largest head of a request (its first line and headers); above, it gets 431.",
    )  # fmt: skip
    receive_timeout_s: float = option(
        60.0, flag="--http-receive-timeout", env="DYN_ES_HTTP_RECEIVE_TIMEOUT", unit="s", minimum=0.05, maximum=_DAY_S,
        help="How long a client may take to send the head of a request, and be silent amid its body; then its "
        "connection is closed, or the request gets 408.",
    )  # fmt: skip
    send_timeout_s: float = option(
        300.0, flag="--http-send-timeout", env="DYN_ES_HTTP_SEND_TIMEOUT", unit="s", minimum=0.05, maximum=_DAY_S,
        help="How long a client may leave untaken what was written to it (some 50 KB); then its connection is cut, and "
        "its request ends.",
    )  # fmt: skip
    api_keys_for_probes: bool = option(
        False, flag="--api-keys-for-probes", env="DYN_ES_API_KEYS_FOR_PROBES",
        help="With --api-keys-file: /health, /live and /metrics need a key, too.",
    )  # fmt: skip
    secrets_check_interval_s: float = option(
        5.0, flag="--secrets-check-interval", env="DYN_ES_SECRETS_CHECK_INTERVAL", unit="s",
        minimum=0.05, maximum=_DAY_S,
        help="How often the files of certificates and API keys are looked at for a change; SIGHUP does it at once.",
    )  # fmt: skip
    max_concurrent_requests: int = option(
        8192, flag="--max-concurrent-requests", env="DYN_ES_MAX_CONCURRENT_REQUESTS", unit="requests",
        minimum=1, maximum=10_000_000,
        help="Inference requests in progress at a time; the next one gets 503.",
    )  # fmt: skip
    graceful_shutdown_timeout_s: float = option(
        30.0, flag="--http-graceful-shutdown-timeout", env="DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS", unit="s",
        minimum=0, maximum=_DAY_S,
        help="How long running streams may take to finish after SIGTERM.",
    )  # fmt: skip
    request_timeout_s: float | None = option(
        None, flag="--request-timeout", env="DYN_ES_REQUEST_TIMEOUT", unit="s", minimum=0.01, maximum=_DAY_S,
        help="How long one request may take from its last byte to the end of its answer; then it gets 504, or an error "
        "in its stream, and its worker is told to stop. Unset: as long as it takes.",
    )  # fmt: skip
    sse_keep_alive_ms: int | None = option(
        None, flag="--sse-keep-alive-interval-ms", env="DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS", unit="ms",
        minimum=1, maximum=86_400_000,
        help="Send a comment on streams that are silent for this long; unset: never.",
    )  # fmt: skip
    metrics_prefix: str = option(
        "dynamo_frontend", flag="--metrics-prefix", env="DYN_METRICS_PREFIX", check=check_metrics_prefix,
        help="Prefix of the frontend's metrics.",
    )  # fmt: skip
    enable_anthropic_api: bool = option(
        False, flag="--enable-anthropic-api", env="DYN_ENABLE_ANTHROPIC_API",
        help="Serve Anthropic's Messages API, too.",
    )  # fmt: skip
    strip_anthropic_preamble: bool = option(
        True, flag="--strip-anthropic-preamble", env="DYN_STRIP_ANTHROPIC_PREAMBLE",
        help="Drop the billing preamble that agents put before their system prompt, so that prompts stay alike.",
    )  # fmt: skip
    reasoning_field_name: str = option(
        "reasoning_content", flag="--reasoning-field-name", env="DYN_REASONING_FIELD_NAME",
        choices=("reasoning_content", "reasoning"),
        help="Member of a chat message that holds the model's thoughts.",
    )  # fmt: skip
    enable_streaming_tool_dispatch: bool = option(
        False, flag="--enable-streaming-tool-dispatch", env="DYN_ENABLE_STREAMING_TOOL_DISPATCH",
        help="Tell every tool call of a stream in an event tool_call_dispatch, too.",
    )  # fmt: skip
    enable_streaming_reasoning_dispatch: bool = option(
        False, flag="--enable-streaming-reasoning-dispatch", env="DYN_ENABLE_STREAMING_REASONING_DISPATCH",
        help="Tell the thoughts of a stream as a whole in an event reasoning_dispatch, too, when they end.",
    )  # fmt: skip
    exclude_tools_when_tool_choice_none: bool = option(
        True, flag="--exclude-tools-when-tool-choice-none", env="DYN_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
        help="Leave tools out of the prompt of requests that may not call any (tool_choice none).",
    )  # fmt: skip
    metadata_header: str = option(
        "x-dynamo-meta-", flag="--metadata-header", env="DYN_METADATA_HEADER", check=check_header_prefix,
        help="Beginning of the request headers that are passed on as the request's metadata.",
    )  # fmt: skip
    listen_backlog: int = option(
        2048, flag="--http-listen-backlog", env="DYN_HTTP_LISTEN_BACKLOG", unit="connections",
        minimum=1, maximum=65_535,
        help="Connections that may wait to be accepted.",
    )  # fmt: skip
    disable_admin_api: bool = option(
        False, flag="--disable-admin-api", env="DYN_DISABLE_FRONTEND_ADMIN_API",
        help="Do not serve /busy_threshold.",
    )  # fmt: skip
    disable_nvext: bool = option(
        False, flag="--disable-nvext", env="DYN_DISABLE_FRONTEND_NVEXT",
        help="Ignore what requests say under nvext, but for cache_salt.",
    )  # fmt: skip
    force_include_usage: bool = option(
        False, flag="--force-include-usage", env="DYN_ENABLE_FORCE_INCLUDE_USAGE",
        help="End every stream with its token counts, asked for or not.",
    )  # fmt: skip
    ignore_unsupported_fields: bool = option(
        False, flag="--ignore-unsupported-fields", env="DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS",
        help="Drop request fields that are not known, instead of refusing the request.",
    )  # fmt: skip
    pre_commit_error_peek_ms: int = option(
        0, flag="--pre-commit-error-peek-ms", env="DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS", unit="ms",
        minimum=0, maximum=86_400_000,
        help="How long a stream's status waits for the first output, so that an early error gets a status of its own.",
    )  # fmt: skip
    overload_status_code: int = option(
        529, flag="--overload-status-code", env="DYN_HTTP_OVERLOAD_STATUS_CODE", minimum=400, maximum=599,
        help="HTTP status of a request that no worker has room for.",
    )  # fmt: skip
    migration_limit: int = option(
        0, flag="--migration-limit", env="DYN_MIGRATION_LIMIT", minimum=0, maximum=2**32 - 1,
        help="How often a request goes on at another worker when the one that had it fails; 0: what its workers' cards "
        "say, which is never unless they say so.",
    )  # fmt: skip
    migration_max_seq_len: int | None = option(
        None, flag="--migration-max-seq-len", env="DYN_MIGRATION_MAX_SEQ_LEN", unit="tokens",
        minimum=1, maximum=2**32 - 1,
        help="Requests with more tokens than this, prompt and output, do not go on elsewhere; unset: any length does.",
    )  # fmt: skip
    active_decode_blocks_threshold: float | None = option(
        None, flag="--active-decode-blocks-threshold", env="DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD", minimum=0, maximum=1,
        help="A worker is busy while more than this fraction of its KV blocks is in use; unset: never for that.",
    )  # fmt: skip
    active_prefill_tokens_threshold: int | None = option(
        None, flag="--active-prefill-tokens-threshold", env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD", unit="tokens",
        minimum=0, maximum=2**63 - 1,
        help="A worker is busy while more prompt tokens than this wait there; unset: never for that.",
    )  # fmt: skip
    active_prefill_tokens_threshold_frac: float | None = option(
        None, flag="--active-prefill-tokens-threshold-frac", env="DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
        minimum=0, maximum=1_000_000,
        help="The same as a multiple of what it computes in one pass; unset: never for that.",
    )  # fmt: skip


def _path(default: str, name: str, variable: str, what: str) -> Any:
    return option(
        default,
        flag=f"--http-{name}-path",
        env=f"DYN_HTTP_SVC_{variable}_PATH",
        check=check_http_path,
        help=f"Path of {what}.",
    )


@dataclass(frozen=True, slots=True)
class HttpPathsConfig:
    """Paths of the frontend's routes; routes below them follow (``…/{model}/ready``, ``…/input_tokens``)."""

    chat: str = _path("/v1/chat/completions", "chat", "CHAT", "chat completions")
    completions: str = _path("/v1/completions", "completions", "CMP", "text completions")
    embeddings: str = _path("/v1/embeddings", "embeddings", "EMB", "embeddings")
    responses: str = _path("/v1/responses", "responses", "RESPONSES", "OpenAI's responses")
    anthropic: str = _path("/v1/messages", "anthropic", "ANTHROPIC", "Anthropic's messages")
    classify: str = _path("/v1/classify", "classify", "CLASSIFY", "classification")
    pooling: str = _path("/v1/pooling", "pooling", "POOLING", "pooler output")
    rerank: str = _path("/v1/rerank", "rerank", "RERANK", "reranking")
    models: str = _path("/v1/models", "models", "MODELS", "the list of models")
    health: str = _path("/health", "health", "HEALTH", "health")
    live: str = _path("/live", "live", "LIVE", "liveness")
    metrics: str = _path("/metrics", "metrics", "METRICS", "metrics")
