"""What the selection service is asked (spec: router-core E.1, E.4–E.9). Pure: dicts in, checked values out.

Unknown members are ignored. Every function raises ValueError, with Dynamo's text, for what cannot be read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo_es.router.config import override_settings
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.router.selection_arguments import (
    Reader,
    optional,
    read_boolean,
    read_list,
    read_map,
    read_real,
    read_request,
    read_single,
    read_struct,
    read_text,
    read_u32,
    read_u64,
    read_variant,
)
from dynamo_es.router.selection_contents import (
    Content,
    Taker,
    take_boolean,
    take_mm_infos,
    take_mm_routing,
    take_optional,
    take_signed_hashes,
    take_size,
    take_text,
    take_tokens,
)

DEFAULT = "default"


@dataclass(frozen=True, slots=True, order=True)
class PartitionKey:
    """Workers of one model in one routing group are chosen among each other."""

    model_name: str = DEFAULT
    routing_group: str = DEFAULT

    def __str__(self) -> str:
        return f"model={self.model_name} routing_group={self.routing_group}"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker as its owner described it; None: not said. Names are those of the request (spec: router-core E.1)."""

    worker_id: int
    partition: PartitionKey
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: Mapping[int, str] = field(default_factory=dict)
    replay_endpoint: str | None = None
    block_size: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    max_num_batched_tokens: int | None = None
    total_kv_blocks: int | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: frozenset[str] = frozenset()
    topology_domains: Mapping[str, str] = field(default_factory=dict)
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None

    @property
    def ranks(self) -> range:
        """Its data-parallel ranks."""
        start = self.data_parallel_start_rank or 0
        size = 1 if self.data_parallel_size is None else self.data_parallel_size
        return range(start, start + size)


@dataclass(frozen=True, slots=True)
class PromptFields:
    """A prompt as it was given: tokens, or what they hash to. Hashes are u64."""

    token_ids: Sequence[int] | None = None
    mm_hashes: Sequence[Sequence[int]] = ()
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None
    block_hashes: Sequence[int] | None = None
    sequence_hashes: Sequence[int] | None = None
    isl_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class PromptQuery:
    """A question about a prompt in a partition, under these settings."""

    partition: PartitionKey
    prompt: PromptFields
    settings: KvRouterSettings


@dataclass(frozen=True, slots=True)
class SelectRequest:
    """A request for a worker. ``routing`` says what is wanted of it; its tokens are in ``query``."""

    query: PromptQuery
    selection_id: str | None
    routing: RoutingRequest

    def named(self, selection_id: str) -> SelectRequest:
        """The same under another id."""
        return replace(self, selection_id=selection_id, routing=replace(self.routing, request_id=selection_id))


@dataclass(frozen=True, slots=True)
class ReservationRequest:
    """A booking: of what ``selection_id`` selected, or, with a ``worker_id``, of a prompt on that worker."""

    query: PromptQuery
    selection_id: str
    worker_id: int | None
    dp_rank: int
    effective_prefill_tokens: int | None
    track_prefill_tokens: bool | None
    expected_output_tokens: int | None


def parse_worker(value: Any) -> WorkerSpec:
    """A worker's description."""
    found = _read_worker(value)
    return WorkerSpec(partition=_partition(found), **_without(found, _PARTITION))


def parse_patch(value: Any) -> dict[str, Any]:
    """Attributes of a ``WorkerSpec`` to replace; what is None is left as it is."""
    return {name: found for name, found in _read_patch(value).items() if found is not None}


def parse_query(value: Any, settings: KvRouterSettings) -> PromptQuery:
    """A question about a prompt; ``settings`` hold where it does not override them."""
    found, others = read_request(value, _query_members(settings))
    return _query(found, others, settings)


def parse_select(value: Any, settings: KvRouterSettings) -> SelectRequest:
    """A request for a worker."""
    found, others = read_request(value, {**_query_members(settings), **_SELECT})
    selection_id = found.get("selection_id")
    pinned = found.get("pinned_worker") or {}
    allowed = found.get("allowed_worker_ids")
    routing = RoutingRequest(
        request_id=selection_id or "",
        token_ids=(),
        worker_id=pinned.get("worker_id"),
        dp_rank=pinned.get("dp_rank"),
        allowed_worker_ids=None if allowed is None else frozenset(allowed),
        constraints=found.get("routing_constraints", RoutingConstraints()),
        priority_jump=found.get("priority_jump") or 0.0,
        strict_priority=found.get("strict_priority") or 0,
        expected_output_tokens=found.get("expected_output_tokens"),
    )
    return SelectRequest(_query(found, others, settings), selection_id, routing)


def parse_reservation(value: Any, settings: KvRouterSettings) -> ReservationRequest:
    """A booking."""
    found, others = read_request(value, {**_query_members(settings), **_RESERVATION}, required=("selection_id",))
    return ReservationRequest(
        query=_query(found, others, settings),
        selection_id=found["selection_id"],
        worker_id=found.get("worker_id"),
        dp_rank=found.get("dp_rank") or 0,
        effective_prefill_tokens=found.get("effective_prefill_tokens"),
        track_prefill_tokens=found.get("track_prefill_tokens"),
        expected_output_tokens=found.get("expected_output_tokens"),
    )


def _query(found: Mapping[str, Any], others: Mapping[str, Content], settings: KvRouterSettings) -> PromptQuery:
    return PromptQuery(_partition(found), _take_prompt(others), found.get("router_config_override") or settings)


def _partition(found: Mapping[str, Any]) -> PartitionKey:
    return PartitionKey(**{name: found[name] for name in _PARTITION if name in found})


def _take_prompt(others: Mapping[str, Content]) -> PromptFields:
    taken = {name: _PROMPT[name](content) for name, content in others.items() if name in _PROMPT}
    token_ids = taken.get("token_ids")
    mm_hashes = taken.get("block_mm_infos") or ()
    routing_tokens, routing_hashes = taken.get("mm_routing_info") or ((), ())
    if len(routing_tokens):
        token_ids, mm_hashes = routing_tokens, routing_hashes
    rest = _without(taken, ("token_ids", "block_mm_infos", "mm_routing_info"))
    return PromptFields(token_ids=token_ids, mm_hashes=mm_hashes, **rest)


def _query_members(settings: KvRouterSettings) -> dict[str, Reader[Any]]:
    return {
        **_PARTITION,
        "router_config_override": optional(lambda value: override_settings(settings, _read_override(value))),
    }


def _read_constraints(value: Any) -> RoutingConstraints:
    found = _read_taints(value)
    return RoutingConstraints(set(found.get("required_taints", ())), found.get("preferred_taints", {}))


def _read_set(value: Any) -> frozenset[str]:
    return frozenset(read_list(read_text)(value))


def _without(found: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name not in names}


_PARTITION: Mapping[str, Reader[Any]] = {"model_name": read_text, "routing_group": read_text}
_WORKER: Mapping[str, Reader[Any]] = {
    "endpoint": optional(read_text),
    "kv_events_endpoint": optional(read_text),
    "replay_endpoint": optional(read_text),
    "block_size": optional(read_u32),
    "data_parallel_start_rank": optional(read_u32),
    "data_parallel_size": optional(read_u32),
    "max_num_batched_tokens": optional(read_u64),
    "total_kv_blocks": optional(read_u64),
    "stable_routing_id": optional(read_text),
    "is_eagle": optional(read_boolean),
    "kv_transfer_domain": optional(read_text),
    "kv_transfer_enforcement": optional(read_variant("required", "preferred")),
    "kv_transfer_preferred_weight": optional(read_single),
}
_SETS: Mapping[str, Reader[Any]] = {
    "kv_events_endpoints": read_map(read_u32, read_text),
    "taints": _read_set,
    "topology_domains": read_map(read_text, read_text),
}
_read_worker = read_struct({"worker_id": read_u64, **_PARTITION, **_WORKER, **_SETS}, required=("worker_id",))
_read_patch = read_struct({**_WORKER, **{name: optional(reader) for name, reader in _SETS.items()}})
_PIN: Mapping[str, Reader[Any]] = {"worker_id": read_u64, "dp_rank": read_u32}
_SELECT: Mapping[str, Reader[Any]] = {
    "selection_id": optional(read_text),
    "session_id": optional(read_text),
    "affinity_target": optional(read_struct({**_PIN, "dp_rank": optional(read_u32)}, required=("worker_id",))),
    "expected_output_tokens": optional(read_u32),
    "priority_jump": optional(read_real),
    "strict_priority": optional(read_u32),
    "pinned_worker": optional(read_struct(_PIN, required=tuple(_PIN))),
    "allowed_worker_ids": optional(read_list(read_u64)),
    "routing_constraints": _read_constraints,
}
_RESERVATION: Mapping[str, Reader[Any]] = {
    "selection_id": read_text,
    "worker_id": optional(read_u64),
    "dp_rank": optional(read_u32),
    "effective_prefill_tokens": optional(read_u64),
    "track_prefill_tokens": optional(read_boolean),
    "expected_output_tokens": optional(read_u32),
}
_PROMPT: Mapping[str, Taker[Any]] = {
    "token_ids": take_optional(take_tokens),
    "block_mm_infos": take_optional(take_mm_infos),
    "mm_routing_info": take_optional(take_mm_routing),
    "lora_name": take_optional(take_text),
    "cache_salt": take_optional(take_text),
    "is_eagle": take_optional(take_boolean),
    "block_hashes": take_optional(take_signed_hashes),
    "sequence_hashes": take_optional(take_signed_hashes),
    "isl_tokens": take_optional(take_size),
}
_read_taints = read_struct(
    {"required_taints": read_list(read_text), "preferred_taints": read_map(read_text, read_real)}
)
_read_override = read_struct(
    {
        "overlap_score_credit": optional(read_real),
        "prefill_load_scale": optional(read_real),
        "overlap_score_weight": optional(read_real),
        "router_temperature": optional(read_real),
        "assume_kv_reuse": optional(read_boolean),
        "track_prefill_tokens": optional(read_boolean),
        "shared_cache_multiplier": optional(read_real),
    }
)
