"""What a policy configuration must fulfil (Dynamo's rules, order and words; spec: router-core F.4). Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import NoReturn

from dynamo_es.router.policy_config import PolicyClass, PolicyConfig, PolicyProfile, WorkerSelection
from dynamo_es.router.policy_config_nodes import quoted

_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_BUILT_IN = "default"


class PolicyRefusal(ValueError):
    """A policy document that can be read contradicts itself; the text says where."""


def refuse_rule(what: str) -> NoReturn:
    """Raise ``PolicyRefusal``."""
    raise PolicyRefusal(what)


def check_policy_config(config: PolicyConfig) -> None:
    """Raises ``PolicyRefusal``."""
    selection = config.worker_selection
    if config.root is None and not config.models and selection is None and not config.router:
        refuse_rule("router policy config must define a root profile, at least one model profile, or worker_selection")
    if config.root is not None:
        _check_profile("root", config.root)
    for model, profile in config.models.items():
        if not model:
            refuse_rule("model profile name must not be empty")
        _check_profile(f"model {quoted(model)}", profile)
    if selection is not None:
        _check_selection(selection)


def _check_profile(where: str, profile: PolicyProfile) -> None:
    _check_name(where, "policy family name", profile.default_policy_family)
    if not profile.classes:
        refuse_rule(f"{where} policy_classes must not be empty")
    _check_buckets(where, profile)
    buckets = [bucket.bucket for bucket in profile.buckets]
    seen: set[str] = set()
    cells: dict[tuple[str, str], PolicyClass] = {}
    for item in profile.classes:
        _check_name(where, "policy class name", item.name)
        if item.name in seen:
            refuse_rule(f"{where} contains duplicate policy class {quoted(item.name)}")
        seen.add(item.name)
        _check_class(where, item, buckets)
        if item.policy_family is not None and item.cache_bucket is not None:
            cell = (item.policy_family, item.cache_bucket)
            if cell in cells:
                refuse_rule(
                    f"{where} contains duplicate policy classes for family {quoted(cell[0])} and bucket "
                    f"{quoted(cell[1])}"
                )
            cells[cell] = item
    _check_families(where, profile, cells)


def _check_buckets(where: str, profile: PolicyProfile) -> None:
    if not profile.buckets:
        refuse_rule(f"{where} uncached_isl_buckets must not be empty")
    if profile.buckets[0].min_tokens != 0:
        refuse_rule(f"{where} uncached_isl_buckets must start at min_tokens 0")
    names: set[str] = set()
    last = -1
    for bucket in profile.buckets:
        _check_name(where, "cache bucket name", bucket.bucket)
        if bucket.min_tokens <= last:
            refuse_rule(f"{where} uncached_isl_buckets min_tokens must be strictly increasing")
        if bucket.bucket in names:
            refuse_rule(f"{where} contains duplicate cache bucket {quoted(bucket.bucket)}")
        names.add(bucket.bucket)
        last = bucket.min_tokens


def _check_class(where: str, item: PolicyClass, buckets: Collection[str]) -> None:
    me = f"{where} policy class {quoted(item.name)}"
    if (item.policy_family is None) != (item.cache_bucket is None):
        refuse_rule(f"{me} must specify both policy_family and cache_bucket or neither for an explicit class")
    if item.policy_family is not None:
        _check_name(where, "policy family name", item.policy_family)
    if item.cache_bucket is not None and item.cache_bucket not in buckets:
        refuse_rule(f"{me} references unknown cache bucket {quoted(item.cache_bucket)}")
    if item.quantum < 1:
        refuse_rule(f"{me} quantum must be greater than zero")
    if item.queue_policy not in ("fcfs", "wspt"):
        refuse_rule(f"{me} queue_policy must be fcfs or wspt")
    fraction = item.prefill_busy_threshold_frac
    if fraction is not None and not (math.isfinite(fraction) and fraction >= 0):
        refuse_rule(f"{me} prefill_busy_threshold_frac must be finite and non-negative")


def _check_families(where: str, profile: PolicyProfile, cells: Mapping[tuple[str, str], PolicyClass]) -> None:
    families = dict.fromkeys(family for family, _ in cells)
    for item in profile.classes:
        if item.is_explicit and item.name in families:
            refuse_rule(f"{where} explicit policy class {quoted(item.name)} collides with a policy family")
    default = profile.default_policy_family
    if default not in families:
        refuse_rule(f"{where} default_policy_family {quoted(default)} does not name a configured family")
    for family in families:
        for bucket in profile.buckets:
            if (family, bucket.bucket) not in cells:
                refuse_rule(
                    f"{where} is missing a policy class for family {quoted(family)} and bucket {quoted(bucket.bucket)}"
                )


def _check_selection(selection: WorkerSelection) -> None:
    stages = {
        "aggregated": selection.aggregated,
        "prefill": selection.prefill,
        "decode": selection.decode,
        "encode": selection.encode,
    }
    if not selection.instances and not any(name is not None for name in stages.values()):
        refuse_rule("worker_selection must define an instance or an aggregated, prefill, decode, or encode selection")
    names: set[str] = set()
    for instance in selection.instances:
        _check_name("worker_selection", "instance name", instance.name)
        if instance.name == _BUILT_IN:
            refuse_rule("worker_selection instance name 'default' is reserved for Dynamo's built-in selector")
        _check_name("worker_selection", "policy type name", instance.type)
        if not isinstance(instance.parameters, Mapping):
            refuse_rule(f"worker_selection instance {quoted(instance.name)} parameters must be a YAML mapping")
        if instance.name in names:
            refuse_rule(f"worker_selection contains duplicate instance {quoted(instance.name)}")
        names.add(instance.name)
    for stage, name in stages.items():
        if name is not None and name != _BUILT_IN and name not in names:
            refuse_rule(f"worker_selection {stage} {quoted(name)} does not name a configured instance")


def _check_name(where: str, kind: str, name: str) -> None:
    if not _NAME.fullmatch(name):
        refuse_rule(f"{where} {kind} {quoted(name)} must match [A-Za-z0-9_.-]+")
