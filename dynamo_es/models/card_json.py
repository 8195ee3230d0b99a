"""Model cards as Dynamo's JSON (spec/services d.4). Pure.

The registry keeps what routing reads in fields of ``ModelCard`` and the rest of Dynamo's card in ``details``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from dynamo_es.errors import ConfigError
from dynamo_es.models.runtime_config import ModelRuntimeConfig
from dynamo_es.router.config import KvRouterConfig, KvRouterSettings
from dynamo_es.router.config_routing import LoadThresholdConfig, RouterConfig
from dynamo_es.router.modes import RouterMode
from schemas.registry import ModelCard

FILE_SIZES = "file_sizes"
CUSTOM_TEMPLATE = "custom_template"
TEMPLATE_TEXT = "text"

_MODE_WORDS = {
    RouterMode.RoundRobin: "round_robin",
    RouterMode.Random: "random",
    RouterMode.PowerOfTwoChoices: "power_of_two_choices",
    RouterMode.KV: "k_v",
    RouterMode.Direct: "direct",
    RouterMode.LeastLoaded: "least_loaded",
    RouterMode.DeviceAwareWeighted: "device_aware_weighted",
}
_MODES = {word: mode for mode, word in _MODE_WORDS.items()}
# Files on the disk of who registered it, and what is no setting here.
_KV_LEFT_OUT = (
    "router_policy_config", "router_tracking_key_file", "router_tracking_key_id", "router_tracking_hash",
    "skip_initial_worker_wait",
)  # fmt: skip
# Members of Dynamo's ``kv_router_config`` that are there whatever their value; others only if it is not the default.
_KV_MEMBERS = (
    "overlap_score_credit", "overlap_score_credit_decay", "prefill_load_scale", "host_cache_hit_weight",
    "disk_cache_hit_weight", "router_temperature", "use_kv_events", "router_replica_sync",
    "router_track_active_blocks", "router_track_output_blocks", "router_assume_kv_reuse",
    "router_track_prefill_tokens", "router_prefill_load_model", "router_ttl_secs", "router_queue_threshold",
    "router_policy_config", "router_event_threads", "skip_initial_worker_wait", "router_queue_policy",
    "use_remote_indexer", "serve_indexer", "shared_cache_multiplier", "shared_cache_type",
    "router_predicted_ttl_secs",
)  # fmt: skip


def slug(name: str) -> str:
    """Lower case, without leading slashes; what is not ``a-z``, ``0-9``, ``_`` or ``-`` becomes ``_``."""
    kept = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_-")
    return "".join(char if char in kept else "_" for char in name.lower().lstrip("/"))


def write_card(card: ModelCard) -> str:
    """The card as JSON text."""
    return msgspec.json.encode(card_body(card)).decode()


def card_body(card: ModelCard) -> dict[str, Any]:
    """The card as Dynamo's JSON object, its members in Dynamo's order."""
    details = card.details
    body: dict[str, Any] = {"display_name": card.display_name, "slug": slug(card.display_name)}
    if card.source_path:
        body["source_path"] = card.source_path
    body.update(_files(card))
    body["context_length"] = card.context_length
    body["kv_cache_block_size"] = card.kv_cache_block_size
    body["migration_limit"] = card.migration_limit
    body["model_type"] = card.model_type
    body["model_input"] = card.model_input
    body["worker_type"] = card.worker_type
    body["needs"] = card.needs
    if card.aliases:
        body["aliases"] = card.aliases
    if card.user_data is not None:
        body["user_data"] = card.user_data
    if card.lora_name is not None:
        body["lora"] = {"name": card.lora_name, **details.get("lora", {})}
    body["runtime_config"] = {**ModelRuntimeConfig().card_body(), **card.runtime_config}
    if "tensor_model_config" in details:
        body["tensor_model_config"] = details["tensor_model_config"]
    body["media_decoder"] = details.get("media_decoder")
    body["media_fetcher"] = details.get("media_fetcher")
    if "router_config" in details:
        body["router_config"] = details["router_config"]
    return body


def custom_template(card: ModelCard) -> str | None:
    """Text of the chat template that the worker was registered with; None: the model's own counts."""
    text = card.details.get(CUSTOM_TEMPLATE, {}).get(TEMPLATE_TEXT)
    return text if isinstance(text, str) else None


def router_config_body(config: RouterConfig) -> dict[str, Any]:
    """``router_config`` of a card."""
    return {
        "router_mode": _MODE_WORDS[config.router_mode],
        "kv_router_config": _kv_body(config.kv_router_config.settings),
        "load_threshold_config": _threshold_body(config.load_thresholds),
        "enforce_disagg": False,
        "session_affinity_ttl_secs": config.session_affinity_ttl_secs,
        "session_affinity_mode": config.session_affinity_mode,
    }


def router_config_of(card: ModelCard) -> RouterConfig | None:
    """The ``router_config`` of a card; None: it has none. Files that it names are not read.

    Raises:
        ConfigError: It cannot be understood.
    """
    body = card.details.get("router_config")
    if body is None:
        return None
    try:
        given = {name: value for name, value in body.get("kv_router_config", {}).items() if name not in _KV_LEFT_OUT}
        return RouterConfig(
            _MODES[body["router_mode"]],
            KvRouterConfig(**given),
            session_affinity_ttl_secs=body.get("session_affinity_ttl_secs"),
            session_affinity_mode=body.get("session_affinity_mode", "hard"),
            **(body.get("load_threshold_config") or {}),
        )
    except KeyError as error:
        raise ConfigError(f"no member, or no value, {error}") from error
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _kv_body(settings: KvRouterSettings) -> dict[str, Any]:
    # Always so in Dynamo's card; no setting here.
    body: dict[str, Any] = {"skip_initial_worker_wait": False}
    defaults = KvRouterSettings()
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        if name in _KV_MEMBERS or (name != "policy" and value != getattr(defaults, name)):
            body[name] = value
    return body


def _threshold_body(thresholds: LoadThresholdConfig) -> dict[str, Any]:
    names = (
        "active_decode_blocks_threshold", "active_prefill_tokens_threshold", "active_prefill_tokens_threshold_frac",
    )  # fmt: skip
    return {name: value for name in names if (value := getattr(thresholds, name)) is not None}


def _files(card: ModelCard) -> dict[str, Any]:
    sizes: Mapping[str, int] = card.details.get(FILE_SIZES, {})

    def file(name: str) -> dict[str, Any] | None:
        if name not in card.checksums:
            return None
        found: dict[str, Any] = {"path": str(PurePath(card.source_path) / name), "checksum": card.checksums[name]}
        return {**found, "size": sizes[name]} if name in sizes else found

    def wrapped(kind: str, name: str) -> dict[str, Any] | None:
        found = file(name)
        return None if found is None else {kind: found}

    parts: dict[str, Any] = {
        "model_info": wrapped("hf_config_json", "config.json"),
        "tokenizer": wrapped("hf_tokenizer_json", "tokenizer.json"),
    }
    if not card.checksums:
        return parts
    custom = {name: item for name, item in card.details.get(CUSTOM_TEMPLATE, {}).items() if name != TEMPLATE_TEXT}
    template = custom or file("chat_template.jinja")
    optional = {
        "prompt_formatter": wrapped("hf_tokenizer_config_json", "tokenizer_config.json"),
        "chat_template_file": template and {"hf_chat_template": {"is_custom": bool(custom), "file": template}},
        "gen_config": wrapped("hf_generation_config_json", "generation_config.json"),
        "architectural_max_context_length": card.details.get("architectural_max_context_length"),
    }
    return parts | {name: part for name, part in optional.items() if part is not None}
