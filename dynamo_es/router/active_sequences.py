"""Booked load: what routers have sent to each worker and not yet got back (spec: router-core D.1–D.3).

Prompt blocks are counted once a worker, however many of its requests share them. This is load that routers booked;
what workers measure of themselves is kept apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from schemas.columns import unpack_u64
from streams.requests import Booking, BookingKey


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what a request is sent to."""

    worker_id: int
    dp_rank: int


class BookedLoad(msgspec.Struct, frozen=True, gc=False):
    """Of one rank: prompt tokens not computed yet, distinct blocks, requests."""

    prefill_tokens: int
    blocks: int
    requests: int


NO_LOAD = BookedLoad(0, 0, 0)


@dataclass(slots=True)
class _Entry:
    rank: WorkerRank
    hashes: Sequence[int]
    prefill_tokens: int


@dataclass(slots=True)
class _RankLoad:
    blocks: dict[int, int] = field(default_factory=dict)
    prefill_tokens: int = 0
    requests: int = 0


class ActiveSequences:
    """Bookings by rank. Every booking is released once; whatever comes late or twice changes nothing.

    Not safe for several threads.
    """

    def __init__(self) -> None:
        self._entries: dict[BookingKey, _Entry] = {}
        self._ranks: dict[WorkerRank, _RankLoad] = {}
        self.late = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: BookingKey) -> bool:
        return key in self._entries

    def rank_of(self, key: BookingKey) -> WorkerRank | None:
        """Where a booking is."""
        entry = self._entries.get(key)
        return entry.rank if entry is not None else None

    def book(self, key: BookingKey, rank: WorkerRank, hashes: Sequence[int], prefill_tokens: int) -> bool:
        """Add a booking; False (and no change) if the key is booked already.

        ``hashes``: sequence hashes of the prompt's complete blocks.
        """
        if key in self._entries:
            return False
        load = self._ranks.get(rank)
        if load is None:
            load = self._ranks[rank] = _RankLoad()
        blocks = load.blocks
        for block in hashes:
            blocks[block] = blocks.get(block, 0) + 1
        load.prefill_tokens += prefill_tokens
        load.requests += 1
        self._entries[key] = _Entry(rank, hashes, prefill_tokens)
        return True

    def complete_prefill(self, key: BookingKey) -> bool:
        """Its prompt is computed; False if that was known or the booking is over."""
        entry = self._entries.get(key)
        if entry is None:
            self.late += 1
            return False
        if not entry.prefill_tokens:
            return False
        self._ranks[entry.rank].prefill_tokens -= entry.prefill_tokens
        entry.prefill_tokens = 0
        return True

    def release(self, key: BookingKey) -> bool:
        """Take a booking away; False if it is over already."""
        entry = self._entries.pop(key, None)
        if entry is None:
            self.late += 1
            return False
        load = self._ranks[entry.rank]
        blocks = load.blocks
        for block in entry.hashes:
            left = blocks[block] - 1
            if left:
                blocks[block] = left
            else:
                del blocks[block]
        load.prefill_tokens -= entry.prefill_tokens
        load.requests -= 1
        if not load.requests:
            del self._ranks[entry.rank]
        return True

    def load(self, rank: WorkerRank) -> BookedLoad:
        """Load of a rank now."""
        load = self._ranks.get(rank)
        if load is None:
            return NO_LOAD
        return BookedLoad(load.prefill_tokens, len(load.blocks), load.requests)

    def new_blocks(self, rank: WorkerRank, hashes: Sequence[int]) -> int:
        """Blocks that the prompt would add: all but its longest prefix that is active on the rank."""
        load = self._ranks.get(rank)
        if load is None:
            return len(hashes)
        blocks = load.blocks
        for shared, block in enumerate(hashes):
            if block not in blocks:
                return len(hashes) - shared
        return 0


class OtherRouters:
    """A ``BookingObserver`` that mirrors what other routers booked; this router's own bookings are there already."""

    def __init__(self, sequences: ActiveSequences, own_router_id: int) -> None:
        self._sequences = sequences
        self._own = own_router_id
        self._mirrored: set[BookingKey] = set()

    def booked(self, booking: Booking) -> None:
        if booking.router_id == self._own:
            return
        rank = WorkerRank(booking.worker_id, booking.dp_rank)
        if self._sequences.book(booking.key, rank, unpack_u64(booking.sequence_hashes), booking.prefill_tokens):
            self._mirrored.add(booking.key)

    def prefill_completed(self, booking: Booking) -> None:
        if booking.key in self._mirrored:
            self._sequences.complete_prefill(booking.key)

    def released(self, booking: Booking) -> None:
        if booking.key in self._mirrored:
            self._mirrored.discard(booking.key)
            self._sequences.release(booking.key)

    def replaced(self, bookings: Iterable[Booking]) -> None:
        for key in self._mirrored:
            self._sequences.release(key)
        self._mirrored = set()
        for booking in bookings:
            self.booked(booking)
