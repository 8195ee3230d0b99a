"""An index over engines' own block hashes, with storage tiers (spec: router-core B, C.8, D.2). Pure.

Device memory is a radix tree. Each lower tier is, per worker, a set of links: behind this block hash, a block with that
tokens hash is known as such. A prompt is followed from where the worker's device blocks end: in host memory first, then
on disk, then in external storage, each going on where the one before ended, without a hole.

This is the index of services that serve engines directly, without the log. The router's own index names blocks by
sequence hashes instead and needs neither tree nor links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from dynamo_es.router.radix_model import BlockMismatch, DumpedBlocks, RadixModel, Worker
from schemas.kv_events import TIERS, Tier

_DEVICE: Tier = "device"


class _Links:
    """One lower tier of one worker. A block has one place, and a place one block: who came first stays."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int | None, int], int] = {}
        self._places: dict[int, tuple[int | None, int]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def store(self, parent: int | None, blocks: Sequence[int], tokens: Sequence[int]) -> None:
        for block, tokens_hash in zip(blocks, tokens, strict=True):
            place = (parent, tokens_hash)
            if block not in self._places and place not in self._by_place:
                self._by_place[place] = block
                self._places[block] = place
            parent = block

    def remove(self, block: int) -> bool:
        place = self._places.pop(block, None)
        if place is None:
            return False
        del self._by_place[place]
        return True

    def follow(self, parent: int | None, tokens: Sequence[int], start: int) -> tuple[int, int | None]:
        """How far the chain goes from ``start`` on, and the name of its last block."""
        end = start
        while end < len(tokens) and (block := self._by_place.get((parent, tokens[end]))) is not None:
            parent = block
            end += 1
        return end - start, parent

    def dump(self, worker: Worker) -> Iterator[DumpedBlocks]:
        for block, (parent, tokens_hash) in self._places.items():
            yield DumpedBlocks(worker, parent, [block], [tokens_hash])


class EngineIndex:
    """Blocks of all workers of one model. Not thread-safe. Hashes are unsigned 64-bit."""

    def __init__(self) -> None:
        self._device = RadixModel()
        self._lower: dict[Tier, dict[Worker, _Links]] = {tier: {} for tier in TIERS[1:]}

    def store(
        self, worker: Worker, tier: Tier, parent: int | None, blocks: Sequence[int], tokens: Sequence[int]
    ) -> None:
        """The worker now holds these blocks in ``tier``, below its block ``parent`` or at the start.

        ``blocks``: its block hashes. ``tokens``: tokens hashes of the same blocks.

        Raises:
            BlockMismatch: It does not hold ``parent`` in device memory (lower tiers do not ask), or ``parent`` is one
                of the blocks. Nothing has changed.
        """
        if tier == _DEVICE:
            self._device.store(worker, parent, blocks, tokens)
        elif blocks:
            self._lower[tier].setdefault(worker, _Links()).store(parent, blocks, tokens)

    def remove(self, worker: Worker, tier: Tier, blocks: Sequence[int]) -> None:
        """The worker no longer holds these blocks in ``tier``.

        Raises:
            BlockMismatch: It did not hold one of them. The others are removed.
        """
        if tier == _DEVICE:
            self._device.remove(worker, blocks)
            return
        links = self._lower[tier].get(worker)
        found = [links is not None and links.remove(block) for block in blocks]
        if links is not None and not links:
            del self._lower[tier][worker]
        if not all(found):
            raise BlockMismatch("Failed to find block")

    def clear(self, worker: Worker) -> None:
        """Forget all tiers of this worker rank; an unknown one is fine."""
        self._device.clear(worker)
        for tier in self._lower.values():
            tier.pop(worker, None)

    def clear_ranks(self, worker_id: int) -> None:
        """Forget all ranks of a worker; an unknown one is fine."""
        self._device.clear_ranks(worker_id)
        for tier in self._lower.values():
            for worker in [worker for worker in tier if worker[0] == worker_id]:
                del tier[worker]

    def match(self, tokens: Sequence[int]) -> dict[WorkerRank, TierOverlap]:
        """What each worker rank holds of a prompt; ranks that hold nothing are absent.

        ``tokens``: tokens hashes of its complete blocks. What is in external storage counts as on disk.
        """
        device = self._device.find(tokens)
        lower = set().union(*self._lower.values())
        if not lower:
            return {WorkerRank(*worker): TierOverlap(depth, 0, 0) for worker, depth in device.items()}
        names = self._device.names(tokens)
        found: dict[WorkerRank, TierOverlap] = {}
        for worker in device.keys() | lower:
            depth = device.get(worker, 0)
            last = names[depth - 1] if depth else None
            extensions = []
            end = depth
            for tier in self._lower.values():
                links = tier.get(worker)
                count, last = links.follow(last, tokens, end) if links is not None else (0, last)
                extensions.append(count)
                end += count
            if end:
                found[WorkerRank(*worker)] = TierOverlap(depth, extensions[0], extensions[1] + extensions[2])
        return found

    def dump(self) -> Iterator[tuple[Tier, DumpedBlocks]]:
        """All that is held, in an order in which it can be stored again."""
        for blocks in self._device.dump():
            yield _DEVICE, blocks
        for tier, workers in self._lower.items():
            for worker, links in workers.items():
                for blocks in links.dump(worker):
                    yield tier, blocks
