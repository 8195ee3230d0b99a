"""Booked load: what routers have sent to each worker and not yet got back (spec: router-core D.1–D.3).

Prompt blocks are counted once a worker, however many of its requests share them. A sequence hash commits to its whole
prefix, so a dict from hash to the number of requests through that block is a prefix trie: how many blocks of a prompt
are active is found by halving, and the part of a prompt that is a request's own is its tail of blocks with one user.

A block weighs 1. Once a request's output is known to end soon its own blocks may be made to weigh less
(``add_output_block`` with a fraction); a weight sticks to its block until somebody gives it another one. Weights are
kept as integers of 2^-60, so a load does not depend on the order of what led to it.

Prompt tokens count in full until they are computed, or, given a clock, fall with time (``prefill_backlog``).

This is load that routers booked; what workers measure of themselves is kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.router.prefill_backlog import Prefill, PrefillBacklog
from schemas.columns import unpack_u64
from streams.requests import Booking, BookingKey

_UNIT_BITS = 60
_UNIT = 1 << _UNIT_BITS
_HALF_UNIT = _UNIT >> 1


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker: what a request is sent to."""

    worker_id: int
    dp_rank: int


class BookedLoad(msgspec.Struct, frozen=True, gc=False):
    """Of one rank: prompt tokens not computed yet, weight of the active blocks (rounded), requests."""

    prefill_tokens: int
    blocks: int
    requests: int


NO_LOAD = BookedLoad(0, 0, 0)


@dataclass(slots=True)
class _Entry:
    rank: WorkerRank
    hashes: Sequence[int]
    prefill_tokens: int
    booked_at: float
    output_blocks: int = 0
    output_units: int = 0


@dataclass(slots=True)
class _RankLoad:
    """``blocks``: users of each prompt block. ``light``: units of the blocks that do not weigh 1. ``extra_units``: what
    outputs weigh, plus (less) what ``light`` differs from 1 each. ``backlog``: None if prompts count in full."""

    blocks: dict[int, int] = field(default_factory=dict)
    light: dict[int, int] = field(default_factory=dict)
    extra_units: int = 0
    prefill_tokens: int = 0
    requests: int = 0
    backlog: PrefillBacklog[BookingKey] | None = None


class ActiveSequences:
    """Bookings by rank. Every booking is released once; whatever comes late or twice changes nothing.

    Not safe for several threads.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        """``now``: seconds of a monotonic clock, for prompts that fall with time; None: they count in full."""
        self._now = now
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

    def book(
        self,
        key: BookingKey,
        rank: WorkerRank,
        hashes: Sequence[int],
        prefill_tokens: int,
        at: float = 0.0,
        prefill_s: float | None = None,
    ) -> bool:
        """Add a booking; False (and no change) if the key is booked already.

        ``hashes``: sequence hashes of the prompt's complete blocks, or none if blocks are not tracked. ``at``: seconds
        of the clock that ``release_older`` is asked with, and of ``now``. ``prefill_s``: how long the rank computes the
        prompt, if somebody knows.
        """
        if key in self._entries:
            return False
        load = self._ranks.get(rank)
        if load is None:
            load = self._ranks[rank] = _RankLoad(backlog=None if self._now is None else PrefillBacklog())
        blocks = load.blocks
        for block in hashes:
            blocks[block] = blocks.get(block, 0) + 1
        load.prefill_tokens += prefill_tokens
        if load.backlog is not None and prefill_tokens:
            load.backlog.add(key, Prefill(prefill_tokens, prefill_s, at))
        load.requests += 1
        self._entries[key] = _Entry(rank, hashes, prefill_tokens, at)
        return True

    def complete_prefill(self, key: BookingKey) -> bool:
        """Its prompt is computed; False if that was known or the booking is over."""
        entry = self._entries.get(key)
        if entry is None:
            self.late += 1
            return False
        if not entry.prefill_tokens:
            return False
        load = self._ranks[entry.rank]
        load.prefill_tokens -= entry.prefill_tokens
        entry.prefill_tokens = 0
        self._forget_prefill(load, key)
        return True

    def add_output_block(self, key: BookingKey, decay_fraction: float | None = None) -> bool:
        """It generated one more block; False if the booking is over.

        With ``decay_fraction`` (0 to 1) all its output blocks, and the tail of its prompt that no other request uses,
        weigh that fraction from now on.
        """
        entry = self._entries.get(key)
        if entry is None:
            self.late += 1
            return False
        load = self._ranks[entry.rank]
        entry.output_blocks += 1
        if decay_fraction is None:
            entry.output_units += _UNIT
            load.extra_units += _UNIT
            return True
        units = round(decay_fraction * _UNIT)
        load.extra_units -= entry.output_units
        entry.output_units = units * entry.output_blocks
        load.extra_units += entry.output_units
        self._weigh_own_tail(load, entry.hashes, units)
        return True

    def release(self, key: BookingKey) -> bool:
        """Take a booking away; False if it is over already."""
        entry = self._entries.pop(key, None)
        if entry is None:
            self.late += 1
            return False
        load = self._ranks[entry.rank]
        load.requests -= 1
        if not load.requests:
            del self._ranks[entry.rank]
            return True
        blocks, light = load.blocks, load.light
        for block in entry.hashes:
            left = blocks[block] - 1
            if left:
                blocks[block] = left
            else:
                del blocks[block]
                if light:
                    load.extra_units -= light.pop(block, _UNIT) - _UNIT
        load.extra_units -= entry.output_units
        load.prefill_tokens -= entry.prefill_tokens
        self._forget_prefill(load, key)
        return True

    def release_older(self, than: float) -> list[BookingKey]:
        """Take away what was booked before ``than``; its keys. Walks all bookings."""
        return self._release_all([key for key, entry in self._entries.items() if entry.booked_at < than])

    def release_worker(self, worker_id: int) -> list[BookingKey]:
        """Take away what is booked on any rank of a worker that is gone; its keys. Walks all bookings."""
        return self._release_all([key for key, entry in self._entries.items() if entry.rank.worker_id == worker_id])

    def load(self, rank: WorkerRank) -> BookedLoad:
        """Load of a rank now."""
        load = self._ranks.get(rank)
        if load is None:
            return NO_LOAD
        blocks = len(load.blocks)
        if load.extra_units:
            blocks += (load.extra_units + _HALF_UNIT) >> _UNIT_BITS
        tokens = load.prefill_tokens if load.backlog is None else self._tokens_left(load.backlog)
        return BookedLoad(tokens, blocks, load.requests)

    def prefill_tokens(self, rank: WorkerRank) -> int:
        """Prompt tokens booked on a rank and not computed yet."""
        load = self._ranks.get(rank)
        if load is None:
            return 0
        return load.prefill_tokens if load.backlog is None else self._tokens_left(load.backlog)

    def new_blocks(self, rank: WorkerRank, hashes: Sequence[int]) -> int:
        """Blocks that the prompt would add: all but its longest prefix that is active on the rank."""
        count = len(hashes)
        load = self._ranks.get(rank)
        if load is None or not count:
            return count
        blocks = load.blocks
        if hashes[0] not in blocks:
            return count
        if hashes[-1] in blocks:
            return 0
        # With a block all blocks before it are active, as whole prompts are booked: halve the range.
        low, high = 1, count - 1
        while low < high:
            middle = (low + high) >> 1
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return count - low

    def _tokens_left(self, backlog: PrefillBacklog[BookingKey]) -> int:
        return backlog.tokens_at(self._now()) if self._now is not None else backlog.tokens

    def _forget_prefill(self, load: _RankLoad, key: BookingKey) -> None:
        if load.backlog is not None and self._now is not None:
            load.backlog.remove(key, self._now())

    def _weigh_own_tail(self, load: _RankLoad, hashes: Sequence[int], units: int) -> None:
        blocks, light = load.blocks, load.light
        for block in reversed(hashes):
            if blocks[block] != 1:
                return
            load.extra_units += units - light.get(block, _UNIT)
            if units == _UNIT:
                light.pop(block, None)
            else:
                light[block] = units

    def _release_all(self, keys: list[BookingKey]) -> list[BookingKey]:
        for key in keys:
            self.release(key)
        return keys


class OtherRouters:
    """A ``BookingObserver`` that mirrors what other routers booked; this router's own bookings are there already."""

    def __init__(
        self,
        sequences: ActiveSequences,
        own_router_id: int,
        tracks_blocks: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """``tracks_blocks`` False: only prompt tokens and requests count, as for this router's own bookings. ``clock``:
        that of ``sequences``, if it has one; a booking counts from when it was made, not from when it is heard of.
        """
        self._clock = clock
        self._sequences = sequences
        self._own = own_router_id
        self._tracks_blocks = tracks_blocks
        self._mirrored: set[BookingKey] = set()

    def booked(self, booking: Booking) -> None:
        if booking.router_id == self._own:
            return
        rank = WorkerRank(booking.worker_id, booking.dp_rank)
        hashes = unpack_u64(booking.sequence_hashes) if self._tracks_blocks else ()
        at, prefill_s = 0.0, None
        if self._clock is not None:
            age_s = max(self._clock.now_ms() - booking.routed_at_ms, 0) / 1000
            at = self._clock.monotonic() - age_s
            prefill_s = booking.expected_prefill_ms / 1000 if booking.expected_prefill_ms >= 0 else None
        if self._sequences.book(booking.key, rank, hashes, booking.prefill_tokens, at, prefill_s):
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
