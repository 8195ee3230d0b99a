"""Configuration of the KV router (Dynamo's ``KvRouterConfig``; spec: router-core F.1)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import blake3

from dynamo_es.router.cost import CostWeights

_QUEUE_POLICIES = ("fcfs", "lcfs", "wspt")
_AT_LEAST_ZERO = ("overlap_score_credit_decay", "prefill_load_scale", "router_temperature", "router_ttl_secs")
_OPTIONAL_AT_LEAST_ZERO = ("router_queue_threshold", "router_predicted_ttl_secs")
_FRACTIONS = ("host_cache_hit_weight", "disk_cache_hit_weight", "shared_cache_multiplier")
_MAX_F64_DIGITS = f"{int(1.7976931348623157e308):d}"
_OVERRIDES = (
    "overlap_score_credit", "prefill_load_scale", "overlap_score_weight", "router_temperature", "assume_kv_reuse",
    "track_prefill_tokens", "shared_cache_multiplier",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KvRouterSettings:
    """The values of a ``KvRouterConfig``, immutable; checked by ``check_settings``."""

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
    router_queue_threshold: float | None = None
    router_event_threads: int = 4
    router_queue_policy: str = "fcfs"
    use_remote_indexer: bool = False
    serve_indexer: bool = False
    shared_cache_multiplier: float = 0.0
    shared_cache_type: str = "none"
    router_predicted_ttl_secs: float | None = None
    router_policy_config: str | None = None
    router_tracking_hash: str = "public-xxh3-v1"
    router_tracking_key_file: str | None = None
    router_tracking_key_id: str | None = None

    def digest(self) -> str:
        """Short hash of all values: two decisions with the same digest were made under the same configuration."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return blake3.blake3(json.dumps(values, sort_keys=True).encode()).hexdigest(8)

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
    credit = settings.overlap_score_credit
    if not math.isfinite(credit) or credit < 0:
        raise ValueError("overlap_score_credit must be a finite, non-negative number")
    for name in (*_AT_LEAST_ZERO, *_OPTIONAL_AT_LEAST_ZERO):
        value = getattr(settings, name)
        if value is not None and not value >= 0:
            raise ValueError(f"{name} must be greater than or equal to 0")
    for name in _FRACTIONS:
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} must be between 0 and 1")
    weight = settings.decode_active_request_weight
    if not math.isfinite(weight) or weight < 0:
        raise ValueError(f"decode_active_request_weight must be between 0 and {_MAX_F64_DIGITS}")
    if settings.router_event_threads < 1:
        raise ValueError("router_event_threads must be at least 1")
    _check_words(settings)
    _check_combinations(settings)
    return settings


def _check_words(settings: KvRouterSettings) -> None:
    policy = settings.router_queue_policy
    if policy not in _QUEUE_POLICIES:
        raise ValueError(f"unknown queue policy: \"{policy}\", expected 'fcfs', 'lcfs', or 'wspt'")
    model = settings.router_prefill_load_model
    if model not in ("none", "aic"):
        raise ValueError(f"unknown prefill load model: \"{model}\", expected 'none' or 'aic'")
    kind = settings.shared_cache_type
    if kind not in ("none", "hicache"):
        raise ValueError(f"unknown shared_cache_type: \"{kind}\", expected 'none' or 'hicache'")
    tracking = settings.router_tracking_hash
    if tracking not in ("public-xxh3-v1", "keyed-xxh3-v1"):
        raise ValueError(f'router_tracking_hash must be public-xxh3-v1 or keyed-xxh3-v1, got "{tracking}"')


def _check_combinations(settings: KvRouterSettings) -> None:
    if settings.router_prefill_load_model != "none" and not settings.router_track_prefill_tokens:
        raise ValueError("router_prefill_load_model requires router_track_prefill_tokens=true")
    if settings.router_track_output_blocks and not settings.router_track_active_blocks:
        raise ValueError("router_track_output_blocks requires router_track_active_blocks=true")
    if settings.router_predicted_ttl_secs is not None and not settings.use_kv_events:
        raise ValueError("router_predicted_ttl_secs requires use_kv_events=true")
    if settings.use_remote_indexer and settings.serve_indexer:
        raise ValueError("use_remote_indexer and serve_indexer are mutually exclusive")
    if settings.serve_indexer and settings.overlap_score_credit <= 0:
        raise ValueError("serve_indexer requires overlap_score_credit > 0")
    key_id = settings.router_tracking_key_id
    if settings.router_tracking_hash == "keyed-xxh3-v1":
        if settings.router_tracking_key_file is None:
            raise ValueError("keyed-xxh3-v1 requires router_tracking_key_file")
        if not key_id or key_id != key_id.strip():
            raise ValueError("keyed-xxh3-v1 requires a nonempty router_tracking_key_id")
    elif settings.router_tracking_key_file is not None or key_id is not None:
        raise ValueError("router tracking key options require router_tracking_hash=keyed-xxh3-v1")


class KvRouterConfig:
    """Values for the KV router. Weights can be read and set; everything else is fixed at construction.

    ``overlap_score_weight`` is Dynamo's deprecated alias of ``prefill_load_scale``; 0 also sets the credit to 0.
    All failures are ValueError.
    """

    def __init__(
        self,
        overlap_score_weight: float | None = None,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        router_temperature: float = 0.0,
        use_kv_events: bool = True,
        *,
        router_tracking_key_file: str | os.PathLike[str] | None = None,
        **values: Any,
    ) -> None:
        known = {field.name for field in fields(KvRouterSettings)}
        for name in values:
            if name not in known:
                raise TypeError(f"KvRouterConfig.__new__() got an unexpected keyword argument '{name}'")
        if router_tracking_key_file is not None:
            values["router_tracking_key_file"] = os.fspath(router_tracking_key_file)
        settings = KvRouterSettings(
            host_cache_hit_weight=host_cache_hit_weight,
            disk_cache_hit_weight=disk_cache_hit_weight,
            router_temperature=router_temperature,
            use_kv_events=use_kv_events,
            **values,
        )
        self._settings = check_settings(_with_legacy_weight(settings, overlap_score_weight))

    @classmethod
    def from_json(cls, config_json: str) -> KvRouterConfig:
        """Read a JSON object of these values. Raises ValueError."""
        try:
            values = json.loads(config_json)
            if values == []:
                values = {}
            if not isinstance(values, dict):
                raise ValueError("expected a JSON object")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Failed to parse KvRouterConfig JSON: {error}") from error

    @property
    def settings(self) -> KvRouterSettings:
        """All values."""
        return self._settings

    @property
    def overlap_score_credit(self) -> float:
        """Credit for a block in device memory."""
        return self._settings.overlap_score_credit

    @overlap_score_credit.setter
    def overlap_score_credit(self, value: float) -> None:
        self._settings = check_settings(replace(self._settings, overlap_score_credit=value))

    @property
    def overlap_score_credit_decay(self) -> float:
        """How fast the credit falls with the worker's booked prefill."""
        return self._settings.overlap_score_credit_decay

    @overlap_score_credit_decay.setter
    def overlap_score_credit_decay(self, value: float) -> None:
        self._settings = check_settings(replace(self._settings, overlap_score_credit_decay=value))

    @property
    def prefill_load_scale(self) -> float:
        """Weight of prompt work against decode work."""
        return self._settings.prefill_load_scale

    @prefill_load_scale.setter
    def prefill_load_scale(self, value: float) -> None:
        self._settings = check_settings(replace(self._settings, prefill_load_scale=value))

    @property
    def overlap_score_weight(self) -> float:
        """Deprecated alias of ``prefill_load_scale``."""
        return self._settings.prefill_load_scale

    @overlap_score_weight.setter
    def overlap_score_weight(self, value: float) -> None:
        self._settings = check_settings(_with_legacy_weight(self._settings, value))

    @property
    def decode_active_request_weight(self) -> float:
        """Blocks that each booked request costs."""
        return self._settings.decode_active_request_weight

    @decode_active_request_weight.setter
    def decode_active_request_weight(self, value: float) -> None:
        self._settings = check_settings(replace(self._settings, decode_active_request_weight=value))

    def copy(self) -> KvRouterConfig:
        """An equal, independent configuration."""
        return _config_of(self._settings)

    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
        decode_active_request_weight: float | None = None,
    ) -> KvRouterConfig:
        """A copy with other weights."""
        given: dict[str, Any] = {
            "overlap_score_credit": overlap_score_credit,
            "overlap_score_credit_decay": overlap_score_credit_decay,
            "prefill_load_scale": prefill_load_scale,
            "decode_active_request_weight": decode_active_request_weight,
        }
        changed = replace(self._settings, **{name: value for name, value in given.items() if value is not None})
        return _config_of(check_settings(_with_legacy_weight(changed, overlap_score_weight)))


def override_settings(settings: KvRouterSettings, override: Mapping[str, Any] | None) -> KvRouterSettings:
    """Settings for one request (spec: router-core D.8); keys that may not be overridden are ignored.

    Raises ValueError with Dynamo's text.
    """
    if not override:
        return settings
    values = {name: override[name] for name in _OVERRIDES if override.get(name) is not None}
    for short, name in (
        ("assume_kv_reuse", "router_assume_kv_reuse"), ("track_prefill_tokens", "router_track_prefill_tokens")
    ):  # fmt: skip
        if short in values:
            values[name] = values.pop(short)
    legacy = values.pop("overlap_score_weight", None)
    return check_settings(_with_legacy_weight(replace(settings, **values), legacy))


def _with_legacy_weight(settings: KvRouterSettings, weight: float | None) -> KvRouterSettings:
    if weight is None:
        return settings
    credit = 0.0 if weight == 0 else settings.overlap_score_credit
    return replace(settings, prefill_load_scale=weight, overlap_score_credit=credit)


def _config_of(settings: KvRouterSettings) -> KvRouterConfig:
    config = KvRouterConfig.__new__(KvRouterConfig)
    config._settings = settings
    return config
