"""Merging of block changes into few ``kv-events`` events, in order (spec/services c.4). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from schemas.columns import pack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent, Tier

# A stored event that grew by merging is closed at this many blocks; one that arrives longer stays whole.
MERGED_STORED_BLOCKS = 128


class EventBuilder:
    """Collects changes; adjacent ones of a kind become one event.

    Stores merge while the chain goes on in the same tier, removals while the tier is the same; a clear is a barrier.
    """

    def __init__(self) -> None:
        self._events: list[KvEvent] = []
        self._tier: Tier | None = None
        self._storing = False
        self._parent: int | None = None
        self._sequences: list[int] = []
        self._tokens: list[int] = []
        self.blocks = 0

    def stored(
        self, tier: Tier, parent: int | None, sequence_hashes: Sequence[int], tokens_hashes: Sequence[int]
    ) -> None:
        """Blocks of one chain are now in ``tier``; ``parent`` is the sequence hash before the first one."""
        if not sequence_hashes:
            return
        open_run = self._sequences
        if not (self._storing and self._tier == tier and open_run and parent is not None and parent == open_run[-1]):
            self._close()
            self._tier, self._storing, self._parent = tier, True, parent
        self._sequences += sequence_hashes
        self._tokens += tokens_hashes
        self.blocks += len(sequence_hashes)
        if len(self._sequences) >= MERGED_STORED_BLOCKS:
            self._close()

    def removed(self, tier: Tier, sequence_hashes: Sequence[int]) -> None:
        """Blocks are no longer in ``tier``."""
        if not sequence_hashes:
            return
        if self._storing or self._tier != tier:
            self._close()
            self._tier, self._storing = tier, False
        self._sequences += sequence_hashes
        self.blocks += len(sequence_hashes)

    def cleared(self) -> None:
        """The cache is empty; nothing before it needs to be told any more."""
        self.discard()
        self._events.append(AllBlocksCleared())

    def discard(self) -> None:
        """Forget what was collected."""
        self._events = []
        self._sequences, self._tokens = [], []
        self._tier = None
        self._storing = False
        self.blocks = 0

    def drain(self) -> list[KvEvent]:
        """The events so far; the builder is empty afterwards."""
        self._close()
        events, self._events = self._events, []
        self.blocks = 0
        return events

    def __bool__(self) -> bool:
        return bool(self._events or self._sequences)

    def _close(self) -> None:
        if self._sequences:
            assert self._tier is not None
            column = pack_u64(self._sequences)
            if self._storing:
                self._events.append(BlocksStored(self._tier, self._parent, column, pack_u64(self._tokens)))
            else:
                self._events.append(BlocksRemoved(self._tier, column))
        self._sequences, self._tokens = [], []
        self._tier = None
        self._storing = False
