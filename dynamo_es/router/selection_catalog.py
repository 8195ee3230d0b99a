"""The workers that the selection service knows of, whether it can use them or not (spec: router-core E.1–E.3). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dynamo_es.router.selection_requests import PartitionKey, WorkerSpec

Lifecycle = Literal["incomplete", "schedulable", "draining", "unschedulable"]
# Workers that are remembered, gone ones included; beyond it the oldest gone one is forgotten.
MAX_WORKERS = 100_000
MAX_RANKS_OF_WORKER = 1024
_MAX_PORT = 2**16 - 1
_PORT_DIGITS = 6


@dataclass(slots=True)
class CatalogEntry:
    """A worker, and why it is not used if it is not."""

    spec: WorkerSpec
    lifecycle: Lifecycle
    reasons: list[str]

    def record(self) -> dict[str, Any]:
        """It as callers see it."""
        spec = self.spec
        record: dict[str, Any] = {
            "worker_id": spec.worker_id,
            "model_name": spec.partition.model_name,
            "routing_group": spec.partition.routing_group,
            "lifecycle": self.lifecycle,
            "endpoint": spec.endpoint,
            "kv_events_endpoint": spec.kv_events_endpoint,
        }
        if spec.kv_events_endpoints:
            record["kv_events_endpoints"] = dict(spec.kv_events_endpoints)
        record |= {
            "replay_endpoint": spec.replay_endpoint,
            "block_size": spec.block_size,
            "data_parallel_start_rank": spec.data_parallel_start_rank,
            "data_parallel_size": spec.data_parallel_size,
            "max_num_batched_tokens": spec.max_num_batched_tokens,
            "total_kv_blocks": spec.total_kv_blocks,
            "stable_routing_id": spec.stable_routing_id,
            "is_eagle": spec.is_eagle,
            "taints": sorted(spec.taints),
            "topology_domains": dict(spec.topology_domains),
            "kv_transfer_domain": spec.kv_transfer_domain,
            "kv_transfer_enforcement": spec.kv_transfer_enforcement,
            "kv_transfer_preferred_weight": spec.kv_transfer_preferred_weight,
        }
        if self.reasons:
            record["not_schedulable_reasons"] = list(self.reasons)
        return record


class WorkerCatalog:
    """Entries by worker id; ids are unique over all partitions."""

    def __init__(self) -> None:
        self._entries: dict[int, CatalogEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, worker_id: int) -> CatalogEntry | None:
        """The entry of a worker that was seen once."""
        return self._entries.get(worker_id)

    def has_room(self) -> bool:
        """Whether one more worker can be remembered; forgets one that is gone if need be."""
        if len(self._entries) < MAX_WORKERS:
            return True
        gone = next((number for number, known in self._entries.items() if known.lifecycle == "unschedulable"), None)
        if gone is not None:
            del self._entries[gone]
        return gone is not None

    def put(self, entry: CatalogEntry) -> None:
        """Add or replace a worker's entry."""
        self._entries.pop(entry.spec.worker_id, None)
        self._entries[entry.spec.worker_id] = entry

    def schedulable(self, partition: PartitionKey | None = None) -> Iterator[CatalogEntry]:
        """Workers that can be used, of one partition or of all."""
        for entry in self._entries.values():
            if entry.lifecycle == "schedulable" and partition in (None, entry.spec.partition):
                yield entry

    def has_schedulable(self, partition: PartitionKey | None = None) -> bool:
        """Whether there is any."""
        return next(self.schedulable(partition), None) is not None

    def records(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Records in the order of partition and id, of these only."""
        found = [
            entry
            for entry in self._entries.values()
            if model_name in (None, entry.spec.partition.model_name)
            and routing_group in (None, entry.spec.partition.routing_group)
        ]
        found.sort(key=lambda entry: (entry.spec.partition, entry.spec.worker_id))
        return [entry.record() for entry in found]


def missing_parts(spec: WorkerSpec, *, uses_events: bool, queues: bool) -> list[str]:
    """What keeps a worker from being used that can be seen in its description alone."""
    reasons = []
    if not spec.endpoint:
        reasons.append("endpoint is required")
    if not spec.block_size:
        reasons.append("block_size must be greater than 0")
    if spec.data_parallel_size == 0:
        reasons.append("data_parallel_size must be greater than 0")
    elif len(spec.ranks) > MAX_RANKS_OF_WORKER:
        reasons.append(f"data_parallel_size must be at most {MAX_RANKS_OF_WORKER}")
        return reasons
    if queues and spec.max_num_batched_tokens is None:
        reasons.append("max_num_batched_tokens is required while queueing is enabled")
    if uses_events:
        known = event_endpoints(spec)
        reasons.extend(
            f"kv_events endpoint is required for dp_rank {rank}" for rank in spec.ranks if not known.get(rank)
        )
    return reasons


def event_endpoints(spec: WorkerSpec) -> dict[int, str]:
    """Where each rank publishes its KV events. The single endpoint serves a worker of one rank only."""
    if spec.kv_events_endpoints:
        return dict(spec.kv_events_endpoints)
    if len(spec.ranks) == 1 and spec.kv_events_endpoint is not None:
        return {spec.ranks[0]: spec.kv_events_endpoint}
    return {}


def event_endpoint_problem(spec: WorkerSpec) -> str | None:
    """Why a worker's events cannot be listened to; None if they can."""
    for rank, url in sorted(event_endpoints(spec).items()):
        if rank not in spec.ranks:
            continue
        for kind, endpoint in (("kv_events", url), ("replay", spec.replay_endpoint)):
            problem = None if endpoint is None else zmq_endpoint_problem(endpoint)
            if problem is not None:
                return f"invalid {kind} endpoint for worker {spec.worker_id} dp_rank {rank}: {problem}"
    return None


def zmq_endpoint_problem(url: str) -> str | None:
    """Why ``url`` is no ZMQ endpoint to connect to; None if it is one."""
    problem = _endpoint_problem(url)
    return None if problem is None else f"invalid ZMQ endpoint `{url}`: {problem}"


def _endpoint_problem(url: str) -> str | None:
    scheme, separator, address = url.partition("://")
    if not separator:
        return "missing scheme"
    if scheme not in ("ipc", "inproc", "tcp"):
        return f"unsupported scheme `{scheme}`"
    if not address:
        return "missing address"
    return _tcp_problem(address) if scheme == "tcp" else None


def _tcp_problem(address: str) -> str | None:
    host, separator, port = address.rpartition(":")
    if separator and host.startswith("["):
        problem = None if host.endswith("]") else "missing closing `]`"
    elif not separator or ":" in host:
        problem = "missing TCP port"
    else:
        problem = None if host else "missing TCP host"
    if problem is None and (reason := _port_problem(port)):
        problem = f"invalid TCP port: {reason}"
    return problem


def _port_problem(text: str) -> str | None:
    if not text:
        return "cannot parse integer from empty string"
    digits = text.removeprefix("+")
    known = re.match("[0-9]*", digits)
    assert known is not None
    # More digits than these are too many in any case.
    if int(known.group().lstrip("0")[:_PORT_DIGITS] or "0") > _MAX_PORT:
        return "number too large to fit in target type"
    return None if digits and known.end() == len(digits) else "invalid digit found in string"
