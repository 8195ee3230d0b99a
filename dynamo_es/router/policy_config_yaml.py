"""From the text of a policy document to a ``PolicyConfig`` (spec: router-core D.12, F.4). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import yaml

from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.policy_config import (
    CacheBucket,
    PolicyClass,
    PolicyConfig,
    PolicyProfile,
    WorkerSelection,
    WorkerSelectorInstance,
)
from dynamo_es.router.policy_config_nodes import Entry, NodeReader, Reader, compose_document, nullable
from dynamo_es.router.policy_config_rules import check_policy_config, refuse_rule

# Settings that describe the fleet rather than a policy; policies have their own place in the document.
_ROUTER_SETTINGS = (
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "use_kv_events",
    "router_replica_sync",
    "router_track_active_blocks",
    "router_track_output_blocks",
    "router_assume_kv_reuse",
    "router_track_prefill_tokens",
    "router_tracking_hash",
    "router_tracking_key_file",
    "router_tracking_key_id",
    "router_prefill_load_model",
    "router_ttl_secs",
    "router_approximate_cache_policy",
    "router_event_threads",
    "use_remote_indexer",
    "serve_indexer",
    "shared_cache_type",
    "router_predicted_ttl_secs",
)
_QUEUE_POLICIES = ("fcfs", "lcfs", "wspt")
_STAGES = ("aggregated", "prefill", "decode", "encode")


class _Parts(NamedTuple):
    """The parts of a profile, each None where the document does not have it."""

    family: str | None
    classes: tuple[PolicyClass, ...] | None
    buckets: tuple[CacheBucket, ...] | None


def parse_policy_config(text: str) -> PolicyConfig:
    """The configuration that ``text`` describes.

    Raises:
        DocumentRefusal: It has another shape; says where.
        PolicyRefusal: It contradicts itself.
    """
    node = compose_document(text)
    values = {} if node is None else NodeReader().fields(node, "", "RawRouterPolicyConfig", _ROOT)
    parts = _parts(values)
    if None in parts and parts != _Parts(None, None, None):
        refuse_rule(
            "root profile must specify default_policy_family, uncached_isl_buckets, and policy_classes "
            "when any root profile field is present"
        )
    models = values.get("models") or {}
    config = PolicyConfig(
        root=_profile(parts),
        models=dict(sorted(models.items())),
        worker_selection=values.get("worker_selection"),
        router=values.get("router") or {},
    )
    check_policy_config(config)
    return config


def _parts(values: Mapping[str, Any]) -> _Parts:
    return _Parts(values.get("default_policy_family"), values.get("policy_classes"), values.get("uncached_isl_buckets"))


def _profile(parts: _Parts) -> PolicyProfile | None:
    family, classes, buckets = parts
    if family is None or classes is None or buckets is None:
        return None
    return PolicyProfile(family, buckets, classes)


def _read_class(reader: NodeReader, node: yaml.Node, path: str) -> PolicyClass:
    values = reader.fields(node, path, "RawPolicyClassConfig", _CLASS)
    return PolicyClass(**{"policy_family": None, "cache_bucket": None, **values})


def _read_classes(reader: NodeReader, node: yaml.Node, path: str) -> tuple[PolicyClass, ...]:
    return tuple(reader.sequence(node, path, _read_class))


def _read_bucket(reader: NodeReader, node: yaml.Node, path: str) -> CacheBucket:
    return CacheBucket(**reader.fields(node, path, "RawUncachedIslBucket", _BUCKET))


def _read_buckets(reader: NodeReader, node: yaml.Node, path: str) -> tuple[CacheBucket, ...]:
    return tuple(reader.sequence(node, path, _read_bucket))


def _read_profile(reader: NodeReader, node: yaml.Node, path: str) -> PolicyProfile | None:
    return _profile(_parts(reader.fields(node, path, "RawPolicyProfile", _PROFILE)))


def _read_models(reader: NodeReader, node: yaml.Node, path: str) -> dict[str, Any]:
    return reader.mapping(node, path, _read_profile)


def _read_instance(reader: NodeReader, node: yaml.Node, path: str) -> WorkerSelectorInstance:
    return WorkerSelectorInstance(**reader.fields(node, path, "RawWorkerSelectionInstance", _INSTANCE))


def _read_instances(reader: NodeReader, node: yaml.Node, path: str) -> tuple[WorkerSelectorInstance, ...]:
    return tuple(reader.sequence(node, path, _read_instance))


def _read_selection(reader: NodeReader, node: yaml.Node, path: str) -> WorkerSelection:
    return WorkerSelection(**reader.fields(node, path, "RawWorkerSelectionConfig", _SELECTION))


def _read_router(reader: NodeReader, node: yaml.Node, path: str) -> dict[str, Any]:
    types = {field.name: str(field.type) for field in fields(KvRouterSettings)}

    def read_setting(reader: NodeReader, node: yaml.Node, path: str) -> Any:
        name = path.removeprefix("router.")
        if name not in _ROUTER_SETTINGS:
            refuse_rule(f"unknown router setting: {name}")
        return _SETTING_READERS[types[name]](reader, node, path)

    return reader.mapping(node, path, read_setting)


def _read_queue_policy(reader: NodeReader, node: yaml.Node, path: str) -> str:
    return reader.word(node, path, _QUEUE_POLICIES)


_TEXT: Reader = NodeReader.text
_UNSIGNED: Reader = NodeReader.unsigned
_SETTING_READERS: Mapping[str, Reader] = {
    "bool": NodeReader.boolean,
    "float": NodeReader.real,
    "float | None": nullable(NodeReader.real),
    "int": _UNSIGNED,
    "str": _TEXT,
    "str | None": nullable(_TEXT),
}
_CLASS = {
    "name": Entry(_TEXT, required=True),
    "policy_family": Entry(nullable(_TEXT)),
    "cache_bucket": Entry(nullable(_TEXT)),
    "queue_policy": Entry(_read_queue_policy),
    "quantum": Entry(_UNSIGNED, required=True),
    "prefill_busy_threshold": Entry(nullable(_UNSIGNED)),
    "prefill_busy_threshold_frac": Entry(nullable(NodeReader.real)),
    "request_queue_limit_per_worker": Entry(nullable(_UNSIGNED)),
    "raw_isl_token_queue_limit_per_worker": Entry(nullable(_UNSIGNED)),
    "cached_token_queue_limit_per_worker": Entry(nullable(_UNSIGNED)),
}
_BUCKET = {"min_tokens": Entry(_UNSIGNED, required=True), "bucket": Entry(_TEXT, required=True)}
_PROFILE = {
    "default_policy_family": Entry(_TEXT, required=True),
    "policy_classes": Entry(_read_classes, required=True),
    "uncached_isl_buckets": Entry(_read_buckets, required=True),
}
_INSTANCE = {
    "name": Entry(_TEXT, required=True),
    "type": Entry(_TEXT, required=True),
    "parameters": Entry(NodeReader.plain),
}
_SELECTION = {**{stage: Entry(nullable(_TEXT)) for stage in _STAGES}, "instances": Entry(_read_instances)}
_ROOT = {
    "default_policy_family": Entry(nullable(_TEXT)),
    "policy_classes": Entry(nullable(_read_classes)),
    "uncached_isl_buckets": Entry(nullable(_read_buckets)),
    "models": Entry(_read_models),
    "worker_selection": Entry(nullable(_read_selection)),
    "router": Entry(nullable(_read_router)),
}
