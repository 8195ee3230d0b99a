"""Configuration of the KV router (Dynamo's ``KvRouterConfig``; spec: router-core D.8, F.1)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Self

from dynamo_es.router.config_arguments import (
    Reader,
    optional,
    to_boolean,
    to_path,
    to_real,
    to_text,
    to_u32,
    to_u64,
)
from dynamo_es.router.config_json import read_config_json
from dynamo_es.router.config_settings import KvRouterSettings, check_settings, with_legacy_weight
from dynamo_es.router.policy_config_file import with_policy

__all__ = ("KvRouterConfig", "KvRouterSettings", "check_settings", "override_settings")

_READERS_BY_TYPE: Mapping[str, Reader] = {
    "bool": to_boolean,
    "float": to_real,
    "str": to_text,
    "float | None": optional(to_real),
    "str | None": optional(to_text),
}
_READERS: Mapping[str, Reader] = {
    "overlap_score_weight": optional(to_real),
    "router_event_threads": to_u32,
    "conditional_disagg_eff_isl_threshold": to_u64,
    "router_tracking_key_file": optional(to_path),
    **{
        field.name: _READERS_BY_TYPE[str(field.type)]
        for field in fields(KvRouterSettings)
        if str(field.type) in _READERS_BY_TYPE and field.name != "router_tracking_key_file"
    },
}
# Names of a request's override, with the reader and the field of each.
_OVERRIDES: Mapping[str, tuple[Reader, str]] = {
    "overlap_score_credit": (to_real, "overlap_score_credit"),
    "prefill_load_scale": (to_real, "prefill_load_scale"),
    "router_temperature": (to_real, "router_temperature"),
    "assume_kv_reuse": (to_boolean, "router_assume_kv_reuse"),
    "track_prefill_tokens": (to_boolean, "router_track_prefill_tokens"),
    "shared_cache_multiplier": (to_real, "shared_cache_multiplier"),
}


class KvRouterConfig:
    """Values for the KV router. The five weights can be read and set; everything else is fixed at construction.

    Args:
        overlap_score_weight: Deprecated alias of ``prefill_load_scale`` and stronger than it; 0 also sets
            ``overlap_score_credit`` to 0. None (default): not given.
        host_cache_hit_weight: Credit for a cached block in host memory, as a fraction of a block; 0 to 1, default 0.75.
        disk_cache_hit_weight: The same on disk or outside of the machine; 0 to 1, default 0.25.
        router_temperature: 0 (default) takes the cheapest worker; above, workers are drawn by softmax over their costs,
            scaled to 0..1; at least 0, infinity draws evenly.
        use_kv_events: Learn from the workers' KV events what they have cached (default); False: assume what was routed.
        router_replica_sync: Tell other routers of bookings and hear of theirs; default False.
        router_track_active_blocks: Count the KV blocks of a worker's active requests as its load; default True.
        router_track_output_blocks: Count blocks of generated tokens too; default False, needs the former. With an
            expected output length, a request's own blocks count less the nearer its end is.
        router_assume_kv_reuse: Requests of one worker share blocks with equal contents; default True. False counts each
            request's blocks for itself.
        router_track_prefill_tokens: Count prompt tokens still to be computed as load; default True.
        router_prefill_load_model: ``none`` (default) counts a prompt in full until it is computed; ``aic`` lets the
            oldest prompt of a worker count less with time, by AIC's prediction.
        router_ttl_secs: Seconds for which a routed prompt is assumed to be cached without KV events; at least 0,
            default 120.
        router_approximate_cache_policy: What is forgotten without KV events: ``ttl`` (default) by age, ``lru`` by the
            worker's capacity; ``lru`` needs ``use_kv_events=False``.
        router_queue_threshold: Fraction of a worker's ``max_num_batched_tokens``; requests wait while every worker has
            more prompt tokens to compute than that. At least 0; None (default): no queue.
        router_event_threads: Threads of Dynamo's index, 1 to 2^32 - 1, default 4. Checked and kept; the index here
            is folded by the process that owns it.
        router_queue_policy: Order of the queue: ``fcfs`` (default) first come first served, ``lcfs`` last come first
            served, ``wspt`` weighted shortest processing time.
        use_remote_indexer: Keep no index, ask those of other processes; default False.
        serve_indexer: Answer for others from this process's index; default False, needs a credit above 0, excludes the
            former.
        shared_cache_multiplier: Credit for a block in a cache that workers share, as a fraction of a block; 0 to 1,
            default 0.
        shared_cache_type: ``none`` (default) or ``hicache``.
        router_predicted_ttl_secs: Besides KV events, assume for so many seconds that a routed prompt is cached; at
            least 0; None (default): do not.
        conditional_disagg_enabled: Let a decode worker compute the prompt itself where that is better; default False.
        conditional_disagg_policy: Who decides: ``isl_bounding`` (default) the uncached length, ``prefill_load`` the
            load of the prefill workers, ``isl_or_load`` either.
        conditional_disagg_eff_isl_threshold: Uncached prompt tokens up to which it does; default 2048.
        conditional_disagg_eff_isl_ratio_threshold: The same as a fraction of the prompt; 0 to 1, default 0.7.
        conditional_disagg_prefill_busy_threshold: Fraction of ``max_num_batched_tokens`` above which prefill workers
            are busy; at least 0; None (default): ``router_queue_threshold``, which load policies need then.
        conditional_disagg_decode_busy_threshold: The same for decode workers; None (default): never busy.
        overlap_score_credit: Credit for a cached block in device memory, in blocks; at least 0, finite, default 1.
        overlap_score_credit_decay: How fast that credit falls with the prefill blocks booked on the worker beyond the
            least booked one, per prompt length; at least 0, default 0.
        prefill_load_scale: Weight of prompt work against decode work; at least 0, default 1.
        decode_active_request_weight: Blocks that each active request of a worker costs; at least 0, finite, default 0.
        router_policy_config: Path of a YAML file of policy classes; read here, once. None (default): threshold and
            policy of the queue make one class. Its ``router`` section wins over the arguments.
        router_prefill_policy, router_decode_policy: Worker selector of that stage, by name; None (default): the file's.
        router_tracking_hash: How active blocks are identified: ``public-xxh3-v1`` (default), or ``keyed-xxh3-v1`` by a
            secret.
        router_tracking_key_file: File of exactly 32 bytes, only and always with the latter; not opened here.
        router_tracking_key_id: Names the key's epoch, only and always with the latter.

    Raises:
        TypeError, OverflowError: An argument is of the wrong type or out of range.
        ValueError: A value or a combination is refused; Dynamo's text. The policy file cannot be used.
    """

    __slots__ = ("_settings",)
    _settings: KvRouterSettings

    def __new__(
        cls,
        overlap_score_weight: float | None = None,
        host_cache_hit_weight: float = 0.75,
        disk_cache_hit_weight: float = 0.25,
        router_temperature: float = 0.0,
        use_kv_events: bool = True,
        *,
        router_replica_sync: bool = False,
        router_track_active_blocks: bool = True,
        router_track_output_blocks: bool = False,
        router_assume_kv_reuse: bool = True,
        router_track_prefill_tokens: bool = True,
        router_prefill_load_model: str = "none",
        router_ttl_secs: float = 120.0,
        router_approximate_cache_policy: str = "ttl",
        router_queue_threshold: float | None = None,
        router_event_threads: int = 4,
        router_queue_policy: str = "fcfs",
        use_remote_indexer: bool = False,
        serve_indexer: bool = False,
        shared_cache_multiplier: float = 0.0,
        shared_cache_type: str = "none",
        router_predicted_ttl_secs: float | None = None,
        conditional_disagg_enabled: bool = False,
        conditional_disagg_policy: str = "isl_bounding",
        conditional_disagg_eff_isl_threshold: int = 2048,
        conditional_disagg_eff_isl_ratio_threshold: float = 0.7,
        conditional_disagg_prefill_busy_threshold: float | None = None,
        conditional_disagg_decode_busy_threshold: float | None = None,
        overlap_score_credit: float = 1.0,
        overlap_score_credit_decay: float = 0.0,
        prefill_load_scale: float = 1.0,
        decode_active_request_weight: float = 0.0,
        router_policy_config: str | None = None,
        router_prefill_policy: str | None = None,
        router_decode_policy: str | None = None,
        router_tracking_hash: str = "public-xxh3-v1",
        router_tracking_key_file: str | os.PathLike[str] | None = None,
        router_tracking_key_id: str | None = None,
    ) -> Self:
        given = locals()  # every argument, in the order in which Dynamo converts them
        values = {name: _READERS[name](name, value) for name, value in given.items() if name != "cls"}
        return cls._of(_build(values))

    @classmethod
    def from_json(cls, config_json: str) -> Self:
        """Read a JSON object of these values; members are the constructor's arguments, without three of Dynamo's own.

        ``router_approximate_cache_policy``, ``router_prefill_policy`` and ``router_decode_policy`` are not members.
        Members that only concern transports that Dynamo once had are checked and ignored.

        Raises:
            ValueError: ``Failed to parse KvRouterConfig JSON: `` and what is wrong, with line and column in bytes.
        """
        text = to_text("config_json", config_json)
        try:
            return cls._of(_build(read_config_json(text)))
        except ValueError as error:
            raise ValueError(f"Failed to parse KvRouterConfig JSON: {error}") from error

    @property
    def settings(self) -> KvRouterSettings:
        """All values as they are now."""
        return self._settings

    @property
    def overlap_score_credit(self) -> float:
        """Credit for a cached block in device memory, in blocks."""
        return self._settings.overlap_score_credit

    @overlap_score_credit.setter
    def overlap_score_credit(self, value: float) -> None:
        self._set("overlap_score_credit", value)

    @property
    def overlap_score_credit_decay(self) -> float:
        """How fast the credit falls with the worker's booked prefill."""
        return self._settings.overlap_score_credit_decay

    @overlap_score_credit_decay.setter
    def overlap_score_credit_decay(self, value: float) -> None:
        self._set("overlap_score_credit_decay", value)

    @property
    def prefill_load_scale(self) -> float:
        """Weight of prompt work against decode work."""
        return self._settings.prefill_load_scale

    @prefill_load_scale.setter
    def prefill_load_scale(self, value: float) -> None:
        self._set("prefill_load_scale", value)

    @property
    def overlap_score_weight(self) -> float:
        """Deprecated alias of ``prefill_load_scale``; setting it to 0 also sets the credit to 0."""
        return self._settings.prefill_load_scale

    @overlap_score_weight.setter
    def overlap_score_weight(self, value: float) -> None:
        self._settings = check_settings(with_legacy_weight(self._settings, to_real("value", value)))

    @property
    def decode_active_request_weight(self) -> float:
        """Blocks that each active request of a worker costs."""
        return self._settings.decode_active_request_weight

    @decode_active_request_weight.setter
    def decode_active_request_weight(self, value: float) -> None:
        self._set("decode_active_request_weight", value)

    def copy(self) -> Self:
        """An equal, independent configuration."""
        return self._of(self._settings)

    def with_overrides(
        self,
        overlap_score_weight: float | None = None,
        *,
        overlap_score_credit: float | None = None,
        overlap_score_credit_decay: float | None = None,
        prefill_load_scale: float | None = None,
        decode_active_request_weight: float | None = None,
    ) -> Self:
        """A copy with other weights; None keeps one. Raises TypeError, ValueError as the constructor does."""
        given: Mapping[str, float | None] = {
            "overlap_score_weight": overlap_score_weight,
            "overlap_score_credit": overlap_score_credit,
            "overlap_score_credit_decay": overlap_score_credit_decay,
            "prefill_load_scale": prefill_load_scale,
            "decode_active_request_weight": decode_active_request_weight,
        }
        values: dict[str, Any] = {name: to_real(name, value) for name, value in given.items() if value is not None}
        legacy = values.pop("overlap_score_weight", None)
        return self._of(check_settings(with_legacy_weight(replace(self._settings, **values), legacy)))

    @classmethod
    def _of(cls, settings: KvRouterSettings) -> Self:
        config = object.__new__(cls)
        config._settings = settings
        return config

    def _set(self, name: str, value: Any) -> None:
        changed: dict[str, Any] = {name: to_real("value", value)}
        self._settings = check_settings(replace(self._settings, **changed))


def override_settings(settings: KvRouterSettings, override: Mapping[str, Any] | None) -> KvRouterSettings:
    """Settings for one request (spec: router-core D.8); keys that may not be overridden are ignored.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is refused; Dynamo's text.
    """
    if not override:
        return settings
    values = {
        field: read(name, override[name])
        for name, (read, field) in _OVERRIDES.items()
        if override.get(name) is not None
    }
    legacy = optional(to_real)("overlap_score_weight", override.get("overlap_score_weight"))
    return check_settings(with_legacy_weight(replace(settings, **values), legacy))


def _build(values: dict[str, Any]) -> KvRouterSettings:
    """Checked settings from arguments, with the policy file read."""
    legacy = values.pop("overlap_score_weight", None)
    return with_policy(check_settings(with_legacy_weight(KvRouterSettings(**values), legacy)))
