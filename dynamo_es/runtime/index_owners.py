"""Who answers for which partitions of ``kv-events``: what answering processes register, and what follows from it. Pure.

An answering process serves ``INDEX_ENDPOINT`` and registers with its instance which partitions it answers for. Three
kinds do so: indexers that share the partitions among each other, indexers that were given theirs by hand, and routers
that answer from a whole view (``serve_indexer``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import xxhash

from schemas.kv_events import KV_EVENTS
from schemas.registry import Instance
from streams.registry import RegistryState

INDEX_ENDPOINT = "dynamo.indexer.match"
INDEX_PATH = ("dynamo", "indexer", "match")
IndexKind = Literal["shared", "given", "view"]
_KINDS: tuple[str, ...] = get_args(IndexKind)


@dataclass(frozen=True, slots=True)
class IndexOwner:
    """What an answering process registered.

    Attributes:
        partitions: For which it answers.
        kind: ``shared``: its partitions follow from who else is there; ``given``: they were given by hand; ``view``:
            it is a router that has a whole view anyway.
        leaving: It ends as soon as others answer for its partitions.
        yielding: Of its partitions, those that it is to give up as soon as another one answers for them.
        revision: Rises with each registration of the process, so that it knows its own newest one.
    """

    instance_id: int
    partitions: frozenset[int]
    kind: IndexKind
    leaving: bool = False
    yielding: frozenset[int] = frozenset()
    revision: int = 0

    def keeps(self, partition: int) -> bool:
        """Whether it answers for the partition, and means to go on."""
        return partition in self.partitions and partition not in self.yielding and not self.leaving

    def runtime_data(self) -> dict[str, str]:
        """As an instance's ``runtime_data``; ``owner_of`` reads it."""
        return {
            "partitions": ",".join(map(str, sorted(self.partitions))),
            "yielding": ",".join(map(str, sorted(self.yielding))),
            "revision": str(self.revision),
            "kind": self.kind,
            "leaving": "yes" if self.leaving else "no",
        }


def owner_of(instance: Instance) -> IndexOwner:
    """What an instance of ``INDEX_ENDPOINT`` says. Another process's word: what makes no sense counts as not said."""
    data = instance.runtime_data
    kind, revision = data.get("kind", ""), data.get("revision", "")
    return IndexOwner(
        instance.instance_id,
        _read_partitions(data.get("partitions", "")),
        kind if kind in _KINDS else "given",  # type: ignore[arg-type]
        data.get("leaving") == "yes",
        _read_partitions(data.get("yielding", "")),
        int(revision) if _is_number(revision) else 0,
    )


def _read_partitions(text: str) -> frozenset[int]:
    numbers = {int(part) for part in text.split(",", KV_EVENTS.partitions) if _is_number(part)}
    return frozenset(number for number in numbers if number < KV_EVENTS.partitions)


def _is_number(text: str) -> bool:
    return text.isdecimal() and text.isascii() and len(text) < 10


def owners_in(registry: RegistryState) -> list[IndexOwner]:
    """All answering processes that take questions."""
    return [owner_of(instance) for instance in registry.instances_of(*INDEX_PATH) if instance.state == "serving"]


def weight(partition: int, candidate: int) -> int:
    """How much a candidate is meant for a partition: rendezvous (highest random weight) hashing."""
    return xxhash.xxh3_64_intdigest(f"{partition}/{candidate}".encode())


def shares(partitions: int, candidates: Collection[int]) -> Mapping[int, set[int]]:
    """Every partition to one candidate: by rendezvous, but nobody gets more than his part, rounded up.

    Plain rendezvous gives some of a few candidates twice the partitions of others, and an index takes memory. The
    pairs are taken by falling weight, so when somebody comes or goes few partitions move beside his own.
    """
    found: dict[int, set[int]] = {candidate: set() for candidate in candidates}
    if not found:
        return found
    room = -(-partitions // len(found))
    pairs = (
        (weight(partition, candidate), candidate, partition) for partition in range(partitions) for candidate in found
    )
    left = set(range(partitions))
    for _, candidate, partition in sorted(pairs, reverse=True):
        if partition in left and len(found[candidate]) < room:
            found[candidate].add(partition)
            left.discard(partition)
    return found


def share_of(registry: RegistryState, instance_id: int, partitions: int = KV_EVENTS.partitions) -> set[int]:
    """Partitions that an indexer which shares is to follow now, among all that share and do not leave."""
    sharing = {owner.instance_id for owner in owners_in(registry) if owner.kind == "shared" and not owner.leaving}
    return shares(partitions, sharing).get(instance_id, set())


def is_taken_over(registry: RegistryState, said: IndexOwner, partition: int) -> bool:
    """Whether a process that registered ``said`` last may take its word back for a partition that it yields.

    Somebody else must answer for the partition and keep it; and the process must know so from a view of the registry
    that has ``said``. Of two that yield to each other the registry's order lets one know that the other one yields,
    too: without that, both might take their word back at once.
    """
    owners = owners_in(registry)
    if said.keeps(partition) or said not in owners:
        return False
    return any(owner.keeps(partition) for owner in owners if owner.instance_id != said.instance_id)


def plan_questions(owners: Iterable[IndexOwner], asker: int) -> Mapping[int, Sequence[int]]:
    """Whom to ask for which partitions: each partition once, of as few processes as a greedy choice finds.

    Indexers come before routers with a whole view, whose time is their requests'. Where several are as good, ``asker``
    (any number of its own) decides, so that not all routers ask the same one.
    """
    known = list(owners)
    left = set[int]().union(*(owner.partitions for owner in known))
    plan: dict[int, Sequence[int]] = {}
    while left:
        best = max(
            known,
            key=lambda owner: (
                bool(owner.partitions & left),
                owner.kind != "view",
                len(owner.partitions & left),
                not owner.leaving,
                weight(asker, owner.instance_id),
            ),
        )
        plan[best.instance_id] = sorted(best.partitions & left)
        left -= best.partitions
    return plan
