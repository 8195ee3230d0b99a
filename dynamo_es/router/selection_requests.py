"""What the selection service is asked (spec: router-core E.1, E.4–E.9). Pure: dicts in, checked values out.

Unknown members are ignored. Every function raises ValueError, with Dynamo's text, for what cannot be read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dynamo_es.router.config import override_settings
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.constraints import RoutingConstraints
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.router.selection_arguments import (
    member,
    member_or,
    optional_member,
    read_boolean,
    read_list,
    read_map,
    read_mapping,
    read_real,
    read_text,
    read_u32,
    read_u64,
    take_boolean,
    take_mm_infos,
    take_signed_hashes,
    take_size,
    take_struct,
    take_text,
    take_tokens,
)

DEFAULT = "default"
_ENFORCEMENTS = ("required", "preferred")
_OVERRIDES: Mapping[str, Callable[[Any], Any]] = {
    "overlap_score_credit": read_real,
    "prefill_load_scale": read_real,
    "overlap_score_weight": read_real,
    "router_temperature": read_real,
    "assume_kv_reuse": read_boolean,
    "track_prefill_tokens": read_boolean,
    "shared_cache_multiplier": read_real,
}


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

    partition: PartitionKey
    selection_id: str
    worker_id: int | None
    dp_rank: int
    prompt: PromptFields
    effective_prefill_tokens: int | None
    track_prefill_tokens: bool | None


def parse_worker(value: Any) -> WorkerSpec:
    """A worker's description."""
    request = read_mapping(value)
    worker_id = member(request, "worker_id", read_u64)
    enforcement = optional_member(request, "kv_transfer_enforcement", read_text)
    if enforcement is not None and enforcement not in _ENFORCEMENTS:
        raise ValueError(f"unknown variant `{enforcement}`, expected `required` or `preferred`")
    return WorkerSpec(
        worker_id=worker_id,
        partition=_partition(request),
        endpoint=optional_member(request, "endpoint", read_text),
        kv_events_endpoint=optional_member(request, "kv_events_endpoint", read_text),
        kv_events_endpoints=optional_member(request, "kv_events_endpoints", read_map(read_u32, read_text)) or {},
        replay_endpoint=optional_member(request, "replay_endpoint", read_text),
        block_size=optional_member(request, "block_size", read_u32),
        data_parallel_start_rank=optional_member(request, "data_parallel_start_rank", read_u32),
        data_parallel_size=optional_member(request, "data_parallel_size", read_u32),
        max_num_batched_tokens=optional_member(request, "max_num_batched_tokens", read_u64),
        total_kv_blocks=optional_member(request, "total_kv_blocks", read_u64),
        stable_routing_id=optional_member(request, "stable_routing_id", read_text),
        is_eagle=optional_member(request, "is_eagle", read_boolean),
        taints=frozenset(optional_member(request, "taints", read_list(read_text)) or ()),
        topology_domains=optional_member(request, "topology_domains", read_map(read_text, read_text)) or {},
        kv_transfer_domain=optional_member(request, "kv_transfer_domain", read_text),
        kv_transfer_enforcement=enforcement,
        kv_transfer_preferred_weight=optional_member(request, "kv_transfer_preferred_weight", read_real),
    )


def parse_query(value: Any, settings: KvRouterSettings) -> PromptQuery:
    """A question about a prompt; ``settings`` hold where it does not override them."""
    return _query(read_mapping(value), settings)


def parse_select(value: Any, settings: KvRouterSettings) -> SelectRequest:
    """A request for a worker."""
    request = read_mapping(value)
    selection_id = optional_member(request, "selection_id", read_text)
    pinned = optional_member(request, "pinned_worker", _read_pin)
    routing = RoutingRequest(
        request_id=selection_id or "",
        token_ids=(),
        worker_id=pinned[0] if pinned is not None else None,
        dp_rank=pinned[1] if pinned is not None else None,
        allowed_worker_ids=_as_set(optional_member(request, "allowed_worker_ids", read_list(read_u64))),
        constraints=member_or(request, "routing_constraints", _read_constraints, RoutingConstraints()),
        priority_jump=optional_member(request, "priority_jump", read_real) or 0.0,
        strict_priority=optional_member(request, "strict_priority", read_u32) or 0,
        policy_class=optional_member(request, "policy_class", read_text),
        expected_output_tokens=optional_member(request, "expected_output_tokens", read_u32),
    )
    return SelectRequest(_query(request, settings), selection_id, routing)


def parse_reservation(value: Any) -> ReservationRequest:
    """A booking."""
    request = read_mapping(value)
    return ReservationRequest(
        partition=_partition(request),
        selection_id=member(request, "selection_id", read_text),
        worker_id=optional_member(request, "worker_id", read_u64),
        dp_rank=optional_member(request, "dp_rank", read_u32) or 0,
        prompt=_prompt(request),
        effective_prefill_tokens=optional_member(request, "effective_prefill_tokens", read_u64),
        track_prefill_tokens=optional_member(request, "track_prefill_tokens", read_boolean),
    )


def _query(request: Mapping[Any, Any], settings: KvRouterSettings) -> PromptQuery:
    override = optional_member(request, "router_config_override", _read_override)
    partition = _partition(request)
    prompt = _prompt(request)
    return PromptQuery(partition, prompt, override_settings(settings, override))


def _partition(request: Mapping[Any, Any]) -> PartitionKey:
    return PartitionKey(
        member_or(request, "model_name", read_text, DEFAULT), member_or(request, "routing_group", read_text, DEFAULT)
    )


def _prompt(request: Mapping[Any, Any]) -> PromptFields:
    token_ids = optional_member(request, "token_ids", take_tokens)
    mm_hashes = optional_member(request, "block_mm_infos", take_mm_infos) or ()
    mm_info = optional_member(request, "mm_routing_info", lambda value: take_struct(value, "MmRoutingInfoRequest"))
    if mm_info is not None:
        routing_tokens = member(mm_info, "routing_token_ids", take_tokens)
        no_hashes: list[list[int]] = []
        routing_hashes = member_or(mm_info, "block_mm_infos", take_mm_infos, no_hashes)
        if len(routing_tokens):
            token_ids, mm_hashes = routing_tokens, routing_hashes
    return PromptFields(
        token_ids=token_ids,
        mm_hashes=mm_hashes,
        lora_name=optional_member(request, "lora_name", take_text),
        cache_salt=optional_member(request, "cache_salt", take_text),
        is_eagle=optional_member(request, "is_eagle", take_boolean),
        block_hashes=optional_member(request, "block_hashes", take_signed_hashes),
        sequence_hashes=optional_member(request, "sequence_hashes", take_signed_hashes),
        isl_tokens=optional_member(request, "isl_tokens", take_size),
    )


def _read_pin(value: Any) -> tuple[int, int]:
    pin = read_mapping(value)
    return member(pin, "worker_id", read_u64), member(pin, "dp_rank", read_u32)


def _read_constraints(value: Any) -> RoutingConstraints:
    constraints = read_mapping(value)
    nothing: list[str] = []
    neutral: dict[Any, float] = {}
    required = member_or(constraints, "required_taints", read_list(read_text), nothing)
    preferred = member_or(constraints, "preferred_taints", read_map(read_text, read_real), neutral)
    return RoutingConstraints(set(required), preferred)


def _read_override(value: Any) -> dict[str, Any]:
    override = read_mapping(value)
    return {name: reader(override[name]) for name, reader in _OVERRIDES.items() if override.get(name) is not None}


def _as_set(values: list[int] | None) -> frozenset[int] | None:
    return None if values is None else frozenset(values)
