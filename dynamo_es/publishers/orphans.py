"""Stores that wait for their parent. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from dynamo_es.publishers.engine_events import EngineHash, Stored
from schemas.kv_events import Tier


@dataclass(slots=True, eq=False)
class _Orphan:
    event: Stored
    gone: set[EngineHash] = field(default_factory=set)


class OrphanRoom:
    """Waiting stores by parent; at most ``max_blocks`` blocks, then those that waited longest are forgotten."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._by_parent: OrderedDict[EngineHash, list[_Orphan]] = OrderedDict()
        self._by_hash: dict[EngineHash, list[_Orphan]] = {}
        self.blocks = 0

    def add(self, event: Stored) -> int:
        """Let a store wait for ``event.parent``. Returns how many blocks were forgotten for it."""
        assert event.parent is not None
        orphan = _Orphan(event)
        self._by_parent.setdefault(event.parent, []).append(orphan)
        for name in event.block_hashes:
            self._by_hash.setdefault(name, []).append(orphan)
        self.blocks += len(event.block_hashes)
        dropped = 0
        while self.blocks > self._max_blocks:
            _, oldest = self._by_parent.popitem(last=False)
            for forgotten in oldest:
                dropped += len(forgotten.event.block_hashes)
                self._unlist(forgotten)
        return dropped

    def remove(self, name: EngineHash, tier: Tier) -> bool:
        """The engine evicted a waiting block. Returns False if none of that name waits in that tier."""
        for orphan in self._by_hash.get(name, ()):
            if orphan.event.tier == tier and name not in orphan.gone:
                orphan.gone.add(name)
                if len(orphan.gone) == len(orphan.event.block_hashes):
                    self._withdraw(orphan)
                return True
        return False

    def take(self, parents: Iterable[EngineHash]) -> list[tuple[Stored, set[EngineHash]]]:
        """The stores that waited for any of ``parents``, each with the blocks that are gone again by now."""
        if not self._by_parent:
            return []
        taken = []
        for parent in parents:
            for orphan in self._by_parent.pop(parent, ()):
                self._unlist(orphan)
                taken.append((orphan.event, orphan.gone))
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._by_parent.clear()
        self._by_hash = {}
        self.blocks = 0

    def _withdraw(self, orphan: _Orphan) -> None:
        parent = orphan.event.parent
        assert parent is not None
        waiting = self._by_parent[parent]
        waiting.remove(orphan)
        if not waiting:
            del self._by_parent[parent]
        self._unlist(orphan)

    def _unlist(self, orphan: _Orphan) -> None:
        self.blocks -= len(orphan.event.block_hashes)
        for name in orphan.event.block_hashes:
            others = self._by_hash[name]
            others.remove(orphan)
            if not others:
                del self._by_hash[name]
