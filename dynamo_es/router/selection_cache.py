"""Selections that may still be booked by their id alone (spec: router-core E.5, E.7). Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.replica_events import ReplicatedBooking
from dynamo_es.router.selection_requests import PartitionKey

_HASH_BYTES = 8
CacheKey = tuple[PartitionKey, str]


@dataclass(frozen=True, slots=True)
class CachedSelection:
    """What to book, and where."""

    rank: WorkerRank
    booking: ReplicatedBooking
    lora_name: str | None = None

    @property
    def size(self) -> int:
        """Bytes that count against the bound: those that grow with the prompt."""
        return _HASH_BYTES * len(self.booking.hashes)


class SelectionCache:
    """Newest selection by partition and id. The oldest go first when one of the bounds is passed."""

    def __init__(self, config: SelectionCacheConfig) -> None:
        self._config = config
        self._entries: OrderedDict[CacheKey, tuple[float, int, CachedSelection]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: CacheKey, selection: CachedSelection, now: float) -> None:
        """Remember a selection; ``now``: seconds of a clock that does not run backwards."""
        self.discard(key)
        size = selection.size + len(key[1])
        self._entries[key] = (now, size, selection)
        self._bytes += size
        self._expire(now)
        while len(self._entries) > self._config.max_entries or self._bytes > self._config.max_bytes:
            self.discard(next(iter(self._entries)))

    def peek(self, key: CacheKey, now: float) -> CachedSelection | None:
        """The selection, which stays; None if there is none (any more)."""
        self._expire(now)
        found = self._entries.get(key)
        return found[2] if found is not None else None

    def discard(self, key: CacheKey) -> None:
        """Forget a selection, if it is there."""
        found = self._entries.pop(key, None)
        if found is not None:
            self._bytes -= found[1]

    def _expire(self, now: float) -> None:
        while self._entries:
            key, (since, _, _) = next(iter(self._entries.items()))
            if now - since <= self._config.ttl_secs:
                return
            self.discard(key)
