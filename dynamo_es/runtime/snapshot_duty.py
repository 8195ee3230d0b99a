"""Which process writes which snapshots: one that has the index anyway.

Stream processors write all of them; the writers here see that from the snapshots and leave them to it.
"""

from __future__ import annotations

from collections.abc import Collection

from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.index_owners import owners_in, weight
from schemas.kv_events import KV_EVENTS
from streams.kv_index_state import KvIndexState
from streams.registry import RegistryState
from streams.runner import FoldRunner
from streams.snapshot_writer import SnapshotWriter

_ROUTING = ("frontend", "router")


def partitions_of(registry: RegistryState, owner_id: int, partitions: int) -> set[int]:
    """Partitions of ``kv-events`` that the process writes now: each goes, by rendezvous, to one of those that answer
    questions for it, and if nobody does, to one of those that route.

    A process that the others do not see yet (or still see) makes two write one partition, which costs work and does
    no harm.
    """
    routing = {lease.owner_id for lease in registry.leases.values() if lease.owner in _ROUTING}
    answering: dict[int, set[int]] = {partition: set() for partition in range(partitions)}
    for owner in owners_in(registry):
        for partition in owner.partitions & answering.keys():
            answering[partition].add(owner.instance_id)
    found = set()
    for partition, candidates in answering.items():
        able = candidates or routing
        if owner_id in able and owner_id == max(able, key=lambda other: (weight(partition, other), other)):
            found.add(partition)
    return found


def build_snapshot_writer(
    core: RuntimeCore, index: FoldRunner[KvIndexState], partitions: Collection[int] = range(KV_EVENTS.partitions)
) -> SnapshotWriter:
    """The snapshot writer of a process whose ``index`` has these partitions; not started.

    It trims an embedded log, as the process's janitor does.
    """

    def owned() -> Collection[int]:
        return partitions_of(core.registry.state, core.instance_id, KV_EVENTS.partitions).intersection(partitions)

    return SnapshotWriter(
        core.log,
        index,
        core.settings.log.namespace,
        core.kv_snapshots,
        owned=owned,
        name=f"{core.settings.role}/{core.instance_id:x}",
        clock=core.clock,
        rng=core.rng,
        interval_s=core.settings.state.snapshot_interval_s,
        trims=core.log.url.startswith("embedded:"),
        tasks=core.tasks,
    )
