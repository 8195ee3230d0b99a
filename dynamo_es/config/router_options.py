"""The options of the router: Dynamo's flags and variables (spec: frontend 7, router-core E)."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from dynamo_es.config.options import option
from dynamo_es.config.text_checks import check_name, check_path

# Bounds that no sensible value comes near, so that a slip of the keyboard is told at the start.
_MAX_WEIGHT = 1_000_000_000
_MAX_TOKENS = 1_000_000_000
_YEAR_S = 31_536_000


def _check_object(text: str) -> None:
    try:
        msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise ValueError("expected a JSON object") from error


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the router weighs what it knows, when requests wait, and when workers get none.

    Fields that ``KvRouterSettings`` has too mean the same there.
    """

    overlap_score_credit: float = option(
        1.0, flag="--router-kv-overlap-score-credit", env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
        minimum=0, maximum=_MAX_WEIGHT,
        help="Credit for each cached block in device memory.",
    )  # fmt: skip
    overlap_score_credit_decay: float = option(
        0.0, flag="--router-kv-overlap-score-credit-decay", env="DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
        minimum=0, maximum=_MAX_WEIGHT,
        help="How fast that credit falls with the prefill work booked on the worker.",
    )  # fmt: skip
    overlap_score_weight: float | None = option(
        None, flag="--router-kv-overlap-score-weight", env="DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        minimum=0, maximum=_MAX_WEIGHT,
        help="Deprecated: as --router-prefill-load-scale, and wins over it; 0 also sets the credit to 0.",
    )  # fmt: skip
    prefill_load_scale: float = option(
        1.0, flag="--router-prefill-load-scale", env="DYN_ROUTER_PREFILL_LOAD_SCALE", minimum=0, maximum=_MAX_WEIGHT,
        help="Weight of prompt work against decode work.",
    )  # fmt: skip
    host_cache_hit_weight: float = option(
        0.75, flag="--router-host-cache-hit-weight", env="DYN_ROUTER_HOST_CACHE_HIT_WEIGHT", minimum=0, maximum=1,
        help="Credit for each cached block in host memory.",
    )  # fmt: skip
    disk_cache_hit_weight: float = option(
        0.25, flag="--router-disk-cache-hit-weight", env="DYN_ROUTER_DISK_CACHE_HIT_WEIGHT", minimum=0, maximum=1,
        help="Credit for each cached block on disk or outside of the machine.",
    )  # fmt: skip
    decode_active_request_weight: float = option(
        0.0, flag="--router-decode-active-request-weight", env="DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
        minimum=0, maximum=_MAX_WEIGHT,
        unit="blocks", help="Cost of each request that is active on the worker.",
    )  # fmt: skip
    router_temperature: float = option(
        0.0, flag="--router-temperature", env="DYN_ROUTER_TEMPERATURE", minimum=0, maximum=_MAX_WEIGHT,
        help="0 takes the cheapest worker; above, workers are drawn by softmax over their costs.",
    )  # fmt: skip
    use_kv_events: bool = option(
        True, flag="--router-kv-events", env="DYN_ROUTER_USE_KV_EVENTS",
        help="Use the workers' KV events; without them, assume that a worker has cached what was routed to it.",
    )  # fmt: skip
    router_ttl_secs: float = option(
        120.0, flag="--router-ttl-secs", env="DYN_ROUTER_TTL_SECS", unit="s", minimum=0, maximum=_YEAR_S,
        help="How long a routed prompt is assumed to be cached without KV events.",
    )  # fmt: skip
    router_approximate_cache_policy: str = option(
        "ttl", flag="--router-approximate-cache-policy", env="DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
        choices=("ttl", "lru"),
        help="What is forgotten without KV events: by age, or by the worker's capacity.",
    )  # fmt: skip
    router_predicted_ttl_secs: float | None = option(
        None, flag="--router-predicted-ttl-secs", env="DYN_ROUTER_PREDICTED_TTL_SECS", unit="s",
        minimum=0, maximum=_YEAR_S,
        help="Besides KV events, assume for so long that a routed prompt is cached; unset: do not.",
    )  # fmt: skip
    router_replica_sync: bool = option(
        False, flag="--router-replica-sync", env="DYN_ROUTER_REPLICA_SYNC",
        help="Tell other routers of bookings, and count theirs.",
    )  # fmt: skip
    router_track_active_blocks: bool = option(
        True, flag="--router-track-active-blocks", env="DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
        help="Count the blocks of requests that are active on a worker as its load.",
    )  # fmt: skip
    router_track_output_blocks: bool = option(
        False, flag="--router-track-output-blocks", env="DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
        help="Count the blocks of generated tokens too.",
    )  # fmt: skip
    router_assume_kv_reuse: bool = option(
        True, flag="--router-assume-kv-reuse", env="DYN_ROUTER_ASSUME_KV_REUSE",
        help="Requests of one worker share blocks with equal contents.",
    )  # fmt: skip
    router_track_prefill_tokens: bool = option(
        True, flag="--router-track-prefill-tokens", env="DYN_ROUTER_TRACK_PREFILL_TOKENS",
        help="Count the prompt tokens that a worker has still to compute as its load.",
    )  # fmt: skip
    router_prefill_load_model: str = option(
        "none", flag="--router-prefill-load-model", env="DYN_ROUTER_PREFILL_LOAD_MODEL", choices=("none", "aic"),
        help="Whether the prompts of a worker count less with time, by AIC's prediction; aic needs the extra of that "
        "name and --aic-backend, --aic-system and --aic-model-path.",
    )  # fmt: skip
    router_tracking_hash: str = option(
        "public-xxh3-v1", flag="--router-tracking-hash", env="DYN_ROUTER_TRACKING_HASH",
        choices=("public-xxh3-v1", "keyed-xxh3-v1"),
        help="How active blocks are identified: by their contents alone, or with a secret.",
    )  # fmt: skip
    router_tracking_key_file: str | None = option(
        None, flag="--router-tracking-key-file", env="DYN_ROUTER_TRACKING_KEY_FILE", check=check_path,
        help="File of exactly 32 bytes, the secret of keyed-xxh3-v1.",
    )  # fmt: skip
    router_tracking_key_id: str | None = option(
        None, flag="--router-tracking-key-id", env="DYN_ROUTER_TRACKING_KEY_ID", check=check_name,
        help="Name of that secret; another one with each change.",
    )  # fmt: skip
    router_queue_threshold: float | None = option(
        None, flag="--router-queue-threshold", env="DYN_ROUTER_QUEUE_THRESHOLD", minimum=0, maximum=_MAX_WEIGHT,
        help="Requests wait while every worker has more prompt tokens to compute than this multiple of its "
        "max_num_batched_tokens; unset: they never wait.",
    )  # fmt: skip
    router_queue_policy: str = option(
        "fcfs", flag="--router-queue-policy", env="DYN_ROUTER_QUEUE_POLICY", choices=("fcfs", "lcfs", "wspt"),
        help="Order of the queue: first come first served, last come first served, or the shortest prompt first.",
    )  # fmt: skip
    router_policy_config: str | None = option(
        None, flag="--router-policy-config", env="DYN_ROUTER_POLICY_CONFIG", check=check_path,
        help="YAML file of policy classes for the queue; its router section wins over other settings.",
    )  # fmt: skip
    router_prefill_policy: str | None = option(
        None, flag="--router-prefill-policy", env="DYN_ROUTER_PREFILL_POLICY", check=check_name,
        help="Worker selector for prefill workers; wins over worker_selection.prefill of the policy file.",
    )  # fmt: skip
    router_decode_policy: str | None = option(
        None, flag="--router-decode-policy", env="DYN_ROUTER_DECODE_POLICY", check=check_name,
        help="Worker selector for decode workers; wins over worker_selection.decode of the policy file.",
    )  # fmt: skip
    router_event_threads: int = option(
        4, flag="--router-event-threads", env="DYN_ROUTER_EVENT_THREADS", unit="threads", minimum=1, maximum=4096,
        help="Kept for Dynamo's configurations; the index here needs no threads.",
    )  # fmt: skip
    use_remote_indexer: bool = option(
        False, flag="--use-remote-indexer", env="DYN_USE_REMOTE_INDEXER",
        help="Keep no KV index, and ask the indexers and routers that have one (dynamo-es indexer, --serve-indexer).",
    )  # fmt: skip
    serve_indexer: bool = option(
        False, flag="--serve-indexer", env="DYN_SERVE_INDEXER",
        help="Answer routers with --use-remote-indexer from this process's KV index.",
    )  # fmt: skip
    remote_indexer_timeout_ms: float = option(
        20.0, flag="--remote-indexer-timeout-ms", env="DYN_ES_REMOTE_INDEXER_TIMEOUT_MS", unit="ms",
        minimum=0.1, maximum=10_000,
        help="How long a decision waits for indexers; workers of those that did not answer are weighed by load alone.",
    )  # fmt: skip
    shared_cache_type: str = option(
        "none", flag="--shared-cache-type", env="DYN_SHARED_CACHE_TYPE", choices=("none",),
        planned=("hicache",),
        help="Cache that workers share and a router asks. What HiCache's own store holds is not in the log, and how it "
        "is asked was never recorded; host, disk and external tiers that workers report earn credit without it.",
    )  # fmt: skip
    shared_cache_multiplier: float = option(
        0.0, flag="--shared-cache-multiplier", env="DYN_SHARED_CACHE_MULTIPLIER", minimum=0, maximum=1,
        help="Credit for each block in that cache.",
    )  # fmt: skip
    conditional_disagg_enabled: bool = option(
        False, flag="--router-conditional-disagg", env="DYN_ROUTER_CONDITIONAL_DISAGG",
        help="Let a decode worker compute the prompt itself where that is better.",
    )  # fmt: skip
    conditional_disagg_config: str | None = option(
        None, flag="--router-conditional-disagg-config", env="DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG", unit="JSON",
        check=_check_object,
        help="The five options below in one object: policy, eff_isl_threshold, eff_isl_ratio_threshold, "
        "prefill_busy_threshold, decode_busy_threshold; wins over them.",
    )  # fmt: skip
    conditional_disagg_policy: str = option(
        "isl_bounding", flag="--router-conditional-disagg-policy", env="DYN_ROUTER_CONDITIONAL_DISAGG_POLICY",
        choices=("isl_bounding", "prefill_load", "isl_or_load"),
        help="Who decides: the uncached length, the load of the prefill workers, or either.",
    )  # fmt: skip
    conditional_disagg_eff_isl_threshold: int = option(
        2048, flag="--router-conditional-disagg-eff-isl-threshold",
        env="DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_THRESHOLD", unit="tokens", minimum=0, maximum=_MAX_TOKENS,
        help="It does for fewer uncached prompt tokens than this.",
    )  # fmt: skip
    conditional_disagg_eff_isl_ratio_threshold: float = option(
        0.7, flag="--router-conditional-disagg-eff-isl-ratio-threshold",
        env="DYN_ROUTER_CONDITIONAL_DISAGG_EFF_ISL_RATIO_THRESHOLD", minimum=0, maximum=1,
        help="And for a smaller fraction of the prompt than this.",
    )  # fmt: skip
    conditional_disagg_prefill_busy_threshold: float | None = option(
        None, flag="--router-conditional-disagg-prefill-busy-threshold",
        env="DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD", minimum=0, maximum=_MAX_WEIGHT,
        help="Multiple of max_num_batched_tokens above which prefill workers are busy; unset: the queue's threshold.",
    )  # fmt: skip
    conditional_disagg_decode_busy_threshold: float | None = option(
        None, flag="--router-conditional-disagg-decode-busy-threshold",
        env="DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD", minimum=0, maximum=_MAX_WEIGHT,
        help="Fraction of its KV blocks above which a decode worker computes no prompts; unset: not asked.",
    )  # fmt: skip
    session_affinity_ttl_secs: int | None = option(
        None, flag="--router-session-affinity-ttl-secs", env="DYN_ROUTER_SESSION_AFFINITY_TTL_SECS", unit="s",
        minimum=1, maximum=_YEAR_S,
        help="How long an idle session keeps its worker; unset: sessions are not kept together.",
    )  # fmt: skip
    session_affinity_mode: str = option(
        "hard", flag="--router-session-affinity-mode", env="DYN_ROUTER_SESSION_AFFINITY_MODE",
        choices=("hard", "soft"),
        help="When that worker cannot take a request of the session: it fails, or the session moves.",
    )  # fmt: skip
