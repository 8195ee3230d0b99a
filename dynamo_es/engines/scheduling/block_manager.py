"""The KV blocks of one rank (spec/services h.6). Pure.

Blocks in use are counted by reference. A block that is full and computed is cached under its sequence hash; when
nobody uses it any more it stays, as long as no one else needs the room, and goes in the order in which it was left. A
request leaves its blocks from the end, so the tail of a prompt goes before its beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from dynamo_es.publishers.event_builder import EventBuilder
from schemas.kv_events import KvEvent


class Content(Protocol):
    """What a request has in its blocks."""

    @property
    def lora_name(self) -> str | None:
        """Its adapter."""

    @property
    def cache_salt(self) -> str | None:
        """What keeps its blocks apart from those of others."""

    def block_tokens(self, index: int) -> Sequence[int]:
        """The tokens of its block ``index``."""


class BlockListener(Protocol):
    """Hears of what is cached, in order, with its tokens: what an engine's own events tell. Must not block."""

    def stored(self, sequence_hash: int, parent: int | None, content: Content, index: int) -> None:
        """Block ``index`` of ``content`` is cached, the first of its kind; ``parent``: what it continues."""

    def removed(self, sequence_hash: int) -> None:
        """The last block of its kind made room."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class BlockManager:
    """Blocks are numbered; a request's table is the list of its blocks' numbers, in the order of its tokens.

    ``listener``: hears of every change too, beside the events that are drained.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.listener: BlockListener | None = None
        self.used = 0
        self._next = 0
        self._empty: list[int] = []
        # A plain dict searches for its first key from the start each time; this one does not.
        self._unused_cached: OrderedDict[int, None] = OrderedDict()
        self._references: list[int] = []
        # For each block: sequence hash, tokens hash, parent's sequence hash; None while it is not cached.
        self._identity: list[tuple[int, int, int | None] | None] = []
        self._first: dict[int, int] = {}
        self._further: dict[int, list[int]] = {}
        # Of cached blocks that were computed with an adapter: its name, by sequence hash.
        self._adapters: dict[int, str] = {}
        self._events = EventBuilder()

    @property
    def available(self) -> int:
        """Blocks that can be taken: empty ones, and cached ones that nobody uses."""
        return self.num_blocks - self.used

    @property
    def cached(self) -> int:
        """Distinct blocks that a prompt could reuse."""
        return len(self._first)

    def match(self, sequence_hashes: Sequence[int], limit: int) -> int:
        """How many of the first ``limit`` blocks of a prompt are cached, from its start."""
        first = self._first
        for index in range(min(limit, len(sequence_hashes))):
            if sequence_hashes[index] not in first:
                return index
        return min(limit, len(sequence_hashes))

    def fits(self, sequence_hashes: Sequence[int], matched: int, total: int, kept_free: int = 0) -> bool:
        """Whether a request of ``total`` blocks fits, reusing ``matched``: reusing an unused block takes room too.

        ``kept_free``: blocks that are for others.
        """
        references, first = self._references, self._first
        unused = sum(1 for index in range(matched) if not references[first[sequence_hashes[index]]])
        return total - matched + unused + kept_free <= self.available

    def reuse(self, table: list[int], sequence_hashes: Sequence[int], matched: int) -> None:
        """Put the first ``matched`` cached blocks into ``table``."""
        for index in range(matched):
            block = self._first[sequence_hashes[index]]
            if not self._references[block]:
                del self._unused_cached[block]
                self.used += 1
            self._references[block] += 1
            table.append(block)

    def allocate(self, table: list[int], count: int) -> bool:
        """Put ``count`` fresh blocks into ``table``, evicting cached ones if need be; all or none."""
        if count > self.num_blocks - self.used:
            return False
        for _ in range(count):
            if self._empty:
                block = self._empty.pop()
            elif self._next < self.num_blocks:
                block = self._next
                self._next += 1
                self._references.append(0)
                self._identity.append(None)
            else:
                block = self._evict()
            self._references[block] = 1
            self.used += 1
            table.append(block)
        return True

    def cache(
        self,
        block: int,
        sequence_hash: int,
        tokens_hash: int,
        parent: int | None,
        content: tuple[Content, int] | None = None,
    ) -> None:
        """``block`` is full and computed. Announced if it is the first of its kind.

        ``content``: what is in it, and the block's place there.
        """
        self._identity[block] = (sequence_hash, tokens_hash, parent)
        if sequence_hash in self._first:
            self._further.setdefault(sequence_hash, []).append(block)
            return
        self._first[sequence_hash] = block
        self._events.stored("device", parent, (sequence_hash,), (tokens_hash,))
        if content is None:
            return
        adapter = content[0].lora_name
        if adapter is not None:
            self._adapters[sequence_hash] = adapter
        if self.listener is not None:
            self.listener.stored(sequence_hash, parent, *content)

    def share(self, table: list[int], index: int, sequence_hash: int) -> bool:
        """Use the cached block of this kind in place of the one in ``table``, which is then empty; False: none is."""
        cached = self._first.get(sequence_hash)
        if cached is None:
            return False
        own = table[index]
        if cached != own:
            if not self._references[cached]:
                del self._unused_cached[cached]
                self.used += 1
            self._references[cached] += 1
            table[index] = cached
            self.release([own])
        return True

    def release(self, table: list[int]) -> None:
        """Leave all blocks of ``table``, last one first, and empty it."""
        references = self._references
        while table:
            block = table.pop()
            references[block] -= 1
            if references[block]:
                continue
            self.used -= 1
            if self._identity[block] is None:
                self._empty.append(block)
            else:
                self._unused_cached[block] = None

    def clear(self) -> bool:
        """Forget what is cached; False, and nothing happens, while a request uses blocks."""
        if self.used:
            return False
        self._next = 0
        self._empty, self._references, self._identity = [], [], []
        self._unused_cached = OrderedDict()
        self._first, self._further, self._adapters = {}, {}, {}
        self._events.cleared()
        if self.listener is not None:
            self.listener.cleared()
        return True

    def forget_adapter(self, lora_name: str) -> int:
        """Cache nothing any more that was computed with an adapter; how many distinct blocks that were.

        No request may use one of them.
        """
        found = [sequence_hash for sequence_hash, name in self._adapters.items() if name == lora_name]
        for sequence_hash in found:
            for block in (self._first[sequence_hash], *self._further.pop(sequence_hash, ())):
                assert not self._references[block]
                del self._unused_cached[block]
                self._identity[block] = None
                self._empty.append(block)
            self._drop(sequence_hash)
        return len(found)

    def drain_events(self) -> list[KvEvent]:
        """What was stored, removed and cleared since the last call."""
        return self._events.drain() if self._events else []

    def state(self) -> Iterator[KvEvent]:
        """Everything that is cached, as stored events."""
        builder = EventBuilder()
        for block in self._first.values():
            identity = self._identity[block]
            assert identity is not None
            sequence_hash, tokens_hash, parent = identity
            builder.stored("device", parent, (sequence_hash,), (tokens_hash,))
        yield from builder.drain()

    def _evict(self) -> int:
        block, _ = self._unused_cached.popitem(last=False)
        identity = self._identity[block]
        assert identity is not None
        self._identity[block] = None
        sequence_hash = identity[0]
        copies = self._further.get(sequence_hash)
        if copies is None:
            self._drop(sequence_hash)
            return block
        if self._first[sequence_hash] == block:
            self._first[sequence_hash] = copies.pop()
        else:
            copies.remove(block)
        if not copies:
            del self._further[sequence_hash]
        return block

    def _drop(self, sequence_hash: int) -> None:
        """The last block of a kind is cached no more."""
        del self._first[sequence_hash]
        self._adapters.pop(sequence_hash, None)
        self._events.removed("device", (sequence_hash,))
        if self.listener is not None:
            self.listener.removed(sequence_hash)
