"""The fold of ``registry``: leases, endpoint instances and model cards that are valid now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import blake3

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, Put, StateRows
from schemas.codec import TopicCodec
from schemas.registry import REGISTRY, Instance, Lease, LeaseEnded, ModelCard, RegistryValue, ResyncAsked, key_lease
from schemas.topic import TopicSpec
from streams.fold import RecordRejected

FAMILY = "registry"


@dataclass(slots=True)
class RegistryCounters:
    """For metrics, not part of the state's meaning."""

    void_endings: int = 0
    ended_lease_writes: int = 0


class RegistryState:
    """Who is there. Read it, never write it.

    Attributes:
        leases: Valid leases by id.
        ended: Endings that are still on record; a lease never comes back.
        instances, models: By record key; what names an ended lease is not here.
        resyncs: Questions to sources of KV events that are open, by record key.
        revision: Rises when instances or models change, for watchers; renewals of leases do not count.
    """

    def __init__(self) -> None:
        self.leases: dict[int, Lease] = {}
        self.ended: dict[int, LeaseEnded] = {}
        self.instances: dict[bytes, Instance] = {}
        self.models: dict[bytes, ModelCard] = {}
        self.resyncs: dict[bytes, ResyncAsked] = {}
        self.revision = 0
        self.counters = RegistryCounters()
        self.raw: dict[bytes, bytes] = {}
        self.dirty: dict[bytes, bytes | None] = {}

    def instances_of(self, namespace: str, component: str, endpoint: str) -> Iterator[Instance]:
        """Instances that serve an endpoint, draining ones included."""
        for instance in self.instances.values():
            if instance.endpoint == endpoint and instance.component == component and instance.namespace == namespace:
                yield instance

    def keys_of_lease(self, lease_id: int) -> list[bytes]:
        """Keys of everything that hangs on a lease."""
        return [
            key for rows in (self.instances, self.models) for key, value in rows.items() if value.lease_id == lease_id
        ]


class RegistryFold:
    """A ``Fold[RegistryState]``. Rows are the records themselves: key to value."""

    name = "registry"
    version = 1
    horizon_ms: int | None = None
    topics: Sequence[TopicSpec] = (REGISTRY,)
    families: Sequence[str] = (FAMILY,)

    def new_state(self) -> RegistryState:
        return RegistryState()

    def apply(self, state: RegistryState, record: Record, value: Any) -> None:
        if record.key is None:
            raise RecordRejected("a registry record needs a key")
        _apply_value(state, record.key, value, record.value)

    def changes(self, state: RegistryState) -> list[Change]:
        changes: list[Change] = [
            Delete(FAMILY, key) if data is None else Put(FAMILY, key, data) for key, data in state.dirty.items()
        ]
        state.dirty = {}
        return changes

    def mark_all(self, state: RegistryState) -> Iterator[None]:
        state.dirty = dict(state.raw)
        return iter(())

    def load(self, rows: StateRows) -> RegistryState:
        state = RegistryState()
        codec = TopicCodec(REGISTRY)
        found = [(key, codec.decode(data), data) for key, data in rows.scan(FAMILY)]
        # Endings first, so that no row of an ended lease is taken for valid.
        found.sort(key=lambda row: not isinstance(row[1], LeaseEnded))
        for key, value, data in found:
            _apply_value(state, key, value, data)
        state.dirty = {}
        return state

    def adopt(self, previous: RegistryState, state: RegistryState) -> None:
        state.counters = previous.counters
        state.revision = previous.revision + 1

    def digest(self, state: RegistryState) -> str:
        hasher = blake3.blake3()
        for key, data in sorted(state.raw.items()):
            hasher.update(len(key).to_bytes(4, "big") + key + len(data).to_bytes(4, "big") + data)
        return hasher.hexdigest()

    def housekeep(self, state: RegistryState) -> bool:
        return False

    def compaction(self, state: RegistryState) -> Callable[[StateRows], list[Change]] | None:
        return None


def _apply_value(state: RegistryState, key: bytes, value: RegistryValue | None, data: bytes | None) -> None:
    if value is None:
        _delete(state, key)
    elif isinstance(value, Lease):
        if value.lease_id in state.ended:
            state.counters.ended_lease_writes += 1
            return
        state.leases[value.lease_id] = value
        _keep(state, key, data)
    elif isinstance(value, LeaseEnded):
        _end_lease(state, key, value, data)
    elif isinstance(value, ResyncAsked):
        state.resyncs[key] = value
        _keep(state, key, data)
    elif value.lease_id in state.ended:
        state.counters.ended_lease_writes += 1
    else:
        if isinstance(value, Instance):
            state.instances[key] = value
        else:
            state.models[key] = value
        _keep(state, key, data)
        state.revision += 1


def _end_lease(state: RegistryState, key: bytes, ending: LeaseEnded, data: bytes | None) -> None:
    lease = state.leases.get(ending.lease_id)
    if ending.lease_id in state.ended:
        return
    if ending.reason == "expired" and lease is not None and lease.renewal > ending.renewal:
        state.counters.void_endings += 1
        return
    _delete(state, key_lease(ending.lease_id))
    state.ended[ending.lease_id] = ending
    for orphan in state.keys_of_lease(ending.lease_id):
        _delete(state, orphan)
    _keep(state, key, data)


def _keep(state: RegistryState, key: bytes, data: bytes | None) -> None:
    assert data is not None
    state.raw[key] = data
    state.dirty[key] = data


def _delete(state: RegistryState, key: bytes) -> None:
    data = state.raw.pop(key, None)
    if data is None:
        return
    state.instances.pop(key, None)
    state.models.pop(key, None)
    state.resyncs.pop(key, None)
    kind, _, rest = key.partition(b"/")
    if kind == b"lease":
        state.leases.pop(int(rest, 16), None)
    elif kind == b"lease-end":
        state.ended.pop(int(rest, 16), None)
    state.dirty[key] = None
    state.revision += 1
