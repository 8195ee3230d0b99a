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
    """

    instance_id: int
    partitions: frozenset[int]
    kind: IndexKind
    leaving: bool = False

    def runtime_data(self) -> dict[str, str]:
        """As an instance's ``runtime_data``; ``owner_of`` reads it."""
        return {
            "partitions": ",".join(map(str, sorted(self.partitions))),
            "kind": self.kind,
            "leaving": "yes" if self.leaving else "no",
        }


def owner_of(instance: Instance) -> IndexOwner:
    """What an instance of ``INDEX_ENDPOINT`` says. Another process's word: what makes no sense counts as not said."""
    data = instance.runtime_data
    numbers = data.get("partitions", "").split(",", KV_EVENTS.partitions)
    partitions = {int(text) for text in numbers if text.isdecimal() and text.isascii() and len(text) < 10}
    kind = data.get("kind", "")
    return IndexOwner(
        instance.instance_id,
        frozenset(partition for partition in partitions if partition < KV_EVENTS.partitions),
        kind if kind in _KINDS else "given",  # type: ignore[arg-type]
        data.get("leaving") == "yes",
    )


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


def is_taken_over(registry: RegistryState, instance_id: int, partition: int) -> bool:
    """Whether somebody else answers for the partition, and stays."""
    return any(
        partition in owner.partitions and not owner.leaving and owner.instance_id != instance_id
        for owner in owners_in(registry)
    )


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
