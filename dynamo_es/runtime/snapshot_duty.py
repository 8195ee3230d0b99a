"""Which process writes which snapshots: one that routes anyway, unless stream processors are there to do it."""

from __future__ import annotations

from collections.abc import Collection

import xxhash

from dynamo_es.runtime.core import RuntimeCore
from schemas.kv_events import KV_EVENTS
from streams.kv_index_state import KvIndexState
from streams.registry import RegistryState
from streams.runner import FoldRunner
from streams.snapshot_writer import SnapshotWriter

_ROUTING = ("frontend", "router")


def partitions_of(registry: RegistryState, owner_id: int, partitions: int) -> set[int]:
    """Partitions of ``kv-events`` that the process writes now: each goes to one of those that route, by rendezvous.

    None while a stream processor holds a lease: its consumer group shares them. A process that the others do not see
    yet (or still see) makes two write one partition, which costs work and does no harm.
    """
    leases = registry.leases.values()
    if any(lease.owner == "streams" for lease in leases):
        return set()
    candidates = {lease.owner_id for lease in leases if lease.owner in _ROUTING}
    if owner_id not in candidates:
        return set()
    return {
        partition
        for partition in range(partitions)
        if owner_id == max(candidates, key=lambda candidate: (_weight(partition, candidate), candidate))
    }


def _weight(partition: int, candidate: int) -> int:
    return xxhash.xxh3_64_intdigest(f"{partition}/{candidate}".encode())


def build_snapshot_writer(core: RuntimeCore, index: FoldRunner[KvIndexState]) -> SnapshotWriter:
    """The snapshot writer of a process that routes; not started. It trims an embedded log, as its janitor does."""

    def owned() -> Collection[int]:
        return partitions_of(core.registry.state, core.instance_id, KV_EVENTS.partitions)

    return SnapshotWriter(
        core.log,
        index,
        core.settings.log.namespace,
        owned=owned,
        name=f"{core.settings.role}/{core.instance_id:x}",
        clock=core.clock,
        rng=core.rng,
        interval_s=core.settings.state.snapshot_interval_s,
        trims=core.log.url.startswith("embedded:"),
    )
