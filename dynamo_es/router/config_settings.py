"""The values that the KV router runs by, and their checks (of Dynamo's ``KvRouterConfig``; spec: router-core F.1)."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, fields, replace
from decimal import Decimal

import blake3

from dynamo_es.errors import ConfigError
from dynamo_es.router.cost import CostWeights
from dynamo_es.router.policy_config import PolicyConfig

_AT_LEAST_ZERO = "must be greater than or equal to 0"
_FRACTION = "must be between 0 and 1"
_MAX_F64 = sys.float_info.max
_MAX_F64_DIGITS = format(Decimal(repr(_MAX_F64)), "f")  # the shortest digits, then zeros
_PUBLIC_TRACKING, _KEYED_TRACKING = "public-xxh3-v1", "keyed-xxh3-v1"
# In the order in which Dynamo checks them.
_WORDS = (
    ("router_tracking_hash", (_PUBLIC_TRACKING, _KEYED_TRACKING),
     "router_tracking_hash must be public-xxh3-v1 or keyed-xxh3-v1, got {}"),
    ("router_prefill_load_model", ("none", "aic"), "unknown prefill load model: {}, expected 'none' or 'aic'"),
    ("router_approximate_cache_policy", ("ttl", "lru"),
     "unknown approximate cache policy {}, expected 'ttl' or 'lru'"),
    ("router_queue_policy", ("fcfs", "lcfs", "wspt"), "unknown queue policy: {}, expected 'fcfs', 'lcfs', or 'wspt'"),
    ("shared_cache_type", ("none", "hicache"), "unknown shared_cache_type: {}, expected 'none' or 'hicache'"),
    ("conditional_disagg_policy", ("isl_bounding", "prefill_load", "isl_or_load"),
     "unknown conditional_disagg_policy: {}, expected 'isl_bounding', 'prefill_load', or 'isl_or_load'"),
)  # fmt: skip
_LIMITS = (
    ("overlap_score_credit_decay", math.inf, _AT_LEAST_ZERO),
    ("prefill_load_scale", math.inf, _AT_LEAST_ZERO),
    ("decode_active_request_weight", _MAX_F64, f"must be between 0 and {_MAX_F64_DIGITS}"),
    ("host_cache_hit_weight", 1.0, _FRACTION),
    ("disk_cache_hit_weight", 1.0, _FRACTION),
    ("router_temperature", math.inf, _AT_LEAST_ZERO),
    ("router_ttl_secs", math.inf, _AT_LEAST_ZERO),
    ("router_queue_threshold", math.inf, _AT_LEAST_ZERO),
    ("shared_cache_multiplier", 1.0, _FRACTION),
    ("router_predicted_ttl_secs", math.inf, _AT_LEAST_ZERO),
    ("conditional_disagg_eff_isl_ratio_threshold", 1.0, _FRACTION),
    ("conditional_disagg_prefill_busy_threshold", math.inf, _AT_LEAST_ZERO),
    ("conditional_disagg_decode_busy_threshold", math.inf, _AT_LEAST_ZERO),
)
_LOAD_POLICIES = {"prefill_load": "PrefillLoad", "isl_or_load": "IslOrLoad"}


@dataclass(frozen=True, slots=True)
class KvRouterSettings:
    """The values of a ``KvRouterConfig`` (which says what each means), immutable; checked by ``check_settings``.

    Attributes:
        policy: What the file ``router_policy_config`` says; None as long as it is not read.
    """

    overlap_score_credit: float = 1.0
    overlap_score_credit_decay: float = 0.0
    prefill_load_scale: float = 1.0
    decode_active_request_weight: float = 0.0
    host_cache_hit_weight: float = 0.75
    disk_cache_hit_weight: float = 0.25
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_replica_sync: bool = False
    router_track_active_blocks: bool = True
    router_track_output_blocks: bool = False
    router_assume_kv_reuse: bool = True
    router_track_prefill_tokens: bool = True
    router_prefill_load_model: str = "none"
    router_ttl_secs: float = 120.0
    router_approximate_cache_policy: str = "ttl"
    router_queue_threshold: float | None = None
    router_event_threads: int = 4
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    shared_cache_multiplier: float = 0.0
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    conditional_disagg_enabled: bool = False
    conditional_disagg_policy: str = "isl_bounding"
    conditional_disagg_eff_isl_threshold: int = 2048
    conditional_disagg_eff_isl_ratio_threshold: float = 0.7
    conditional_disagg_prefill_busy_threshold: float | None = None
    conditional_disagg_decode_busy_threshold: float | None = None
    router_policy_config: str | None = None
    router_prefill_policy: str | None = None
    router_decode_policy: str | None = None
    router_tracking_hash: str = _PUBLIC_TRACKING
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None
    policy: PolicyConfig | None = None

    def digest(self) -> str:
        """Short hash of all values: two decisions with the same digest were made under the same configuration.

        The policy counts with what it says, not with the path of its file.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        del values["router_policy_config"]
        return blake3.blake3(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest(8)

    def weights(self) -> CostWeights:
        """The part that the cost needs."""
        return CostWeights(
            overlap_score_credit=self.overlap_score_credit,
            overlap_score_credit_decay=self.overlap_score_credit_decay,
            prefill_load_scale=self.prefill_load_scale,
            host_cache_hit_weight=self.host_cache_hit_weight,
            disk_cache_hit_weight=self.disk_cache_hit_weight,
            decode_active_request_weight=self.decode_active_request_weight,
            router_temperature=self.router_temperature,
            track_prefill_tokens=self.router_track_prefill_tokens,
        )


def check_settings(settings: KvRouterSettings) -> KvRouterSettings:
    """Returns ``settings`` if they are good. Raises ValueError with Dynamo's text."""
    for name, known, text in _WORDS:
        word = getattr(settings, name)
        if word not in known:
            raise ValueError(text.format(f'"{word}"'))
    credit = settings.overlap_score_credit
    if not math.isfinite(credit) or credit < 0:
        raise ValueError("overlap_score_credit must be a finite, non-negative number")
    for name, limit, text in _LIMITS:
        value = getattr(settings, name)
        if value is not None and not 0 <= value <= limit:
            raise ValueError(f"{name} {text}")
    if settings.router_event_threads < 1:
        raise ValueError("router_event_threads must be at least 1")
    _check_tracking(settings)
    _check_combinations(settings)
    return settings


def with_legacy_weight(settings: KvRouterSettings, weight: float | None) -> KvRouterSettings:
    """``settings`` with the deprecated ``overlap_score_weight``; it wins over what it stands for. None: unchanged."""
    if weight is None:
        return settings
    credit = 0.0 if weight == 0 else settings.overlap_score_credit
    return replace(settings, prefill_load_scale=weight, overlap_score_credit=credit)


def check_shared_cache(settings: KvRouterSettings) -> None:
    """Refuse ``hicache`` where a router is built; the configuration object takes the word, as Dynamo's does.

    How a router asks HiCache's store was never recorded, and a guess would score blocks that are not there.
    """
    if settings.shared_cache_type != "none":
        raise ConfigError(
            f"shared_cache_type={settings.shared_cache_type} is not available: what that store holds is not in the "
            "log, so a router cannot score it; use 'none' - host, disk and external tiers that workers report in "
            "their KV events earn credit without it"
        )


def _check_tracking(settings: KvRouterSettings) -> None:
    key_file, key_id = settings.router_tracking_key_file, settings.router_tracking_key_id
    if settings.router_tracking_hash == _KEYED_TRACKING:
        if key_file is None:
            raise ValueError("keyed-xxh3-v1 requires router_tracking_key_file")
        if not key_id or key_id != key_id.strip():
            raise ValueError("keyed-xxh3-v1 requires a nonempty router_tracking_key_id")
    elif key_file is not None or key_id is not None:
        raise ValueError("router tracking key options require router_tracking_hash=keyed-xxh3-v1")


def _check_combinations(settings: KvRouterSettings) -> None:
    if settings.router_track_output_blocks and not settings.router_track_active_blocks:
        raise ValueError("router_track_output_blocks requires router_track_active_blocks=true")
    if settings.router_prefill_load_model != "none" and not settings.router_track_prefill_tokens:
        raise ValueError("router_prefill_load_model requires router_track_prefill_tokens=true")
    if settings.use_remote_indexer and settings.serve_indexer:
        raise ValueError("use_remote_indexer and serve_indexer are mutually exclusive")
    if settings.serve_indexer and settings.overlap_score_credit <= 0:
        raise ValueError("serve_indexer requires overlap_score_credit > 0")
    if settings.router_predicted_ttl_secs is not None and not settings.use_kv_events:
        raise ValueError("router_predicted_ttl_secs requires use_kv_events=true")
    if settings.router_approximate_cache_policy == "lru" and settings.use_kv_events:
        raise ValueError(
            "router_approximate_cache_policy=lru requires use_kv_events=false; the local side indexer is TTL-only"
        )
    policy = _LOAD_POLICIES.get(settings.conditional_disagg_policy)
    thresholds = (settings.conditional_disagg_prefill_busy_threshold, settings.router_queue_threshold)
    if settings.conditional_disagg_enabled and policy is not None and thresholds == (None, None):
        raise ValueError(
            f"conditional_disagg policy={policy} needs prefill_busy_threshold, but neither "
            '--router-conditional-disagg-config {"prefill_busy_threshold": ...} nor --router-queue-threshold is set'
        )
