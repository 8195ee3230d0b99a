"""What workers probably hold, from where requests were sent (spec: router-core D.9). Pure: time is passed in.

Without KV events a router assumes that a worker still has the blocks of the prompts that it was given lately. How long
that is says the policy: ``TtlIndex`` forgets a block a fixed time after the last decision that touched it, ``LruIndex``
when the worker has been given more blocks than it has room for. With events a ``TtlIndex`` of a short life bridges the
time until the events of a request come.

A sequence hash commits to its prefix, so what is held is a dict from hash to the ranks that hold it; no tree.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.radix_model import DumpedBlocks, RadixModel

# Entries (a block at a rank) that are remembered; beyond it the oldest are forgotten early. About 300 bytes each.
MAX_ENTRIES = 2_000_000


class ApproximateIndex(Protocol):
    """Learns from decisions. Belongs to one thread; times are seconds of any one clock that does not run backwards."""

    def note(self, rank: WorkerRank, tokens_hashes: Sequence[int], sequence_hashes: Sequence[int], now: float) -> None:
        """A prompt with these complete blocks was sent to ``rank``: it will hold them."""

    def match(self, sequence_hashes: Sequence[int], now: float) -> dict[WorkerRank, int]:
        """How many leading blocks each rank holds; ranks without any are absent."""

    def dump(self, now: float) -> Iterator[DumpedBlocks]:
        """All that is held, as chains that can be stored again in this order."""


class _Holders:
    """Who holds which block, with a value for each entry."""

    def __init__(self) -> None:
        self.entries = 0
        self._ranks: dict[int, dict[WorkerRank, float]] = {}
        self._chains: dict[int, tuple[int | None, int]] = {}

    def put(self, rank: WorkerRank, parent: int | None, tokens: int, block: int, value: float) -> None:
        ranks = self._ranks.get(block)
        if ranks is None:
            ranks = self._ranks[block] = {}
            self._chains[block] = (parent, tokens)
        if rank not in ranks:
            self.entries += 1
        ranks[rank] = value

    def get(self, rank: WorkerRank, block: int) -> float | None:
        ranks = self._ranks.get(block)
        return None if ranks is None else ranks.get(rank)

    def drop(self, rank: WorkerRank, block: int) -> None:
        ranks = self._ranks[block]
        del ranks[rank]
        self.entries -= 1
        if not ranks:
            del self._ranks[block]
            del self._chains[block]

    def match(self, sequence_hashes: Sequence[int]) -> dict[WorkerRank, int]:
        depths: dict[WorkerRank, int] = {}
        active: list[WorkerRank] = []
        depth = 0
        for block in sequence_hashes:
            ranks = self._ranks.get(block)
            if ranks is None:
                break
            if not depth:
                active = list(ranks)
            elif any(rank not in ranks for rank in active):
                depths.update((rank, depth) for rank in active if rank not in ranks)
                active = [rank for rank in active if rank in ranks]
                if not active:
                    break
            depth += 1
        depths.update(dict.fromkeys(active, depth))
        return depths

    def dump(self) -> Iterator[DumpedBlocks]:
        # A block is noted after its parent and never outlives it, so this is an order in which it can be stored.
        model = RadixModel()
        for block, (parent, tokens) in self._chains.items():
            for rank in self._ranks[block]:
                model.store(rank, parent, [block], [tokens])
        return model.dump()


class TtlIndex:
    """An ``ApproximateIndex`` that forgets by age."""

    def __init__(self, ttl_s: float, max_entries: int = MAX_ENTRIES) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._holders = _Holders()
        # The decisions whose time runs out next stand in front.
        self._decisions: deque[tuple[float, WorkerRank, Sequence[int]]] = deque()

    def __len__(self) -> int:
        return self._holders.entries

    def note(self, rank: WorkerRank, tokens_hashes: Sequence[int], sequence_hashes: Sequence[int], now: float) -> None:
        self._expire(now)
        if not sequence_hashes:
            return
        until = now + self._ttl_s
        parent: int | None = None
        for block, tokens in zip(sequence_hashes, tokens_hashes, strict=True):
            self._holders.put(rank, parent, tokens, block, until)
            parent = block
        self._decisions.append((until, rank, sequence_hashes))
        while self._holders.entries > self._max_entries:
            self._forget_oldest()

    def match(self, sequence_hashes: Sequence[int], now: float) -> dict[WorkerRank, int]:
        self._expire(now)
        return self._holders.match(sequence_hashes)

    def dump(self, now: float) -> Iterator[DumpedBlocks]:
        self._expire(now)
        return self._holders.dump()

    def _expire(self, now: float) -> None:
        while self._decisions and self._decisions[0][0] <= now:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        until, rank, sequence_hashes = self._decisions.popleft()
        for block in sequence_hashes:
            held_until = self._holders.get(rank, block)
            # A later decision may have renewed it.
            if held_until is not None and held_until <= until:
                self._holders.drop(rank, block)


class LruIndex:
    """An ``ApproximateIndex`` that forgets, at each rank, what was not used longest once the rank's cache is full.

    ``capacity`` gives a rank's blocks; of a rank that does not say nothing is remembered.
    """

    def __init__(self, capacity: Callable[[WorkerRank], int | None], max_entries: int = MAX_ENTRIES) -> None:
        self._capacity = capacity
        self._max_entries = max_entries
        self._holders = _Holders()
        self._used: dict[WorkerRank, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return self._holders.entries

    def note(self, rank: WorkerRank, tokens_hashes: Sequence[int], sequence_hashes: Sequence[int], now: float) -> None:
        capacity = min(self._capacity(rank) or 0, self._max_entries)
        if not capacity:
            return
        used = self._used.setdefault(rank, OrderedDict())
        parent: int | None = None
        for block, tokens in zip(sequence_hashes, tokens_hashes, strict=True):
            self._holders.put(rank, parent, tokens, block, 0.0)
            parent = block
        # The end of a prompt goes before its beginning, without which it is worth nothing.
        for block in reversed(sequence_hashes):
            used[block] = None
            used.move_to_end(block)
        while len(used) > capacity:
            self._forget_oldest(rank, used)
        while self._holders.entries > self._max_entries:
            largest = max(self._used, key=lambda other: len(self._used[other]))
            self._forget_oldest(largest, self._used[largest])

    def match(self, sequence_hashes: Sequence[int], now: float) -> dict[WorkerRank, int]:
        return self._holders.match(sequence_hashes)

    def dump(self, now: float) -> Iterator[DumpedBlocks]:
        return self._holders.dump()

    def _forget_oldest(self, rank: WorkerRank, used: OrderedDict[int, None]) -> None:
        block, _ = used.popitem(last=False)
        self._holders.drop(rank, block)
