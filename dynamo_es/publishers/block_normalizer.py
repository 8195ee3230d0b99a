"""From an engine's own block hashes to sequence hashes, and counting of copies. Pure.

One normalizer serves one source: a model's worker and rank. It knows for each of the engine's hashes what block it
names, so that readers need no such map, and publishes only what changes: a block that is stored twice must be removed
twice before it is gone from its tier, tiers are counted apart, and removing what is not there does nothing.

A store whose parent is unknown cannot be named (its sequence hash commits to the prefix). It waits, published nowhere,
until the parent is stored, and then joins its chain: so a decode worker that got a prefix by KV transfer is right as
soon as the prefix is announced. A removal reaches waiting blocks too.

After lost events (``distrust``) nothing is known to be cached any more, but what the engine's hashes mean still is.
A device-tier store under such a hash proves that the whole chain above it is cached, as an engine holds a request's
blocks while it computes the next one; the chain is announced again. Without that, a shared system prompt that never
leaves the cache would never match again after one lost message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from dynamo_es.publishers.engine_events import Cleared, EngineEvent, EngineHash, MmHashes, Removed, Stored
from dynamo_es.publishers.event_builder import EventBuilder
from dynamo_es.publishers.orphans import OrphanRoom
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks, mm_pad_value
from schemas.kv_events import TIERS, KvEvent, Tier

DEFAULT_MAX_BLOCKS = 1_000_000
DEFAULT_MAX_WAITING_BLOCKS = 65_536
_TIER_SHIFT: dict[Tier, int] = {tier: 16 * number for number, tier in enumerate(TIERS)}
_MAX_COPIES = 0xFFFF


@dataclass(slots=True)
class NormalizerCounters:
    """Since the start. Blocks unless the name says events.

    Attributes:
        orphan_events, orphan_blocks: Stores whose parent was unknown when they came.
        adopted_blocks: Orphans whose parent came later.
        dropped_orphans: Orphans that were forgotten because too many waited.
        duplicate_blocks: Stores of blocks that were already in the tier.
        noop_removals: Removals of what was not in the tier.
        copy_removals: Removals after which a copy was left.
        refused_blocks: Stores beyond ``max_blocks``.
        size_mismatch_events: Stores with another block size than the source's.
        short_blocks: Announced without enough tokens to be hashed.
        self_referencing_events: Stores that name a hash twice, or their own parent; ignored.
        redefined_blocks: Hashes that the engine used again for other tokens.
        ambiguous_events: Stores under a block whose cache salt is not certain; ignored.
        revived_blocks: Announced again after a loss, because a store proved them.
    """

    orphan_events: int = 0
    orphan_blocks: int = 0
    adopted_blocks: int = 0
    dropped_orphans: int = 0
    duplicate_blocks: int = 0
    noop_removals: int = 0
    copy_removals: int = 0
    refused_blocks: int = 0
    size_mismatch_events: int = 0
    short_blocks: int = 0
    self_referencing_events: int = 0
    redefined_blocks: int = 0
    ambiguous_events: int = 0
    revived_blocks: int = 0


class _Block(msgspec.Struct, gc=False):
    """What an engine hash names. ``copies`` has 16 bits a tier; ``salt_known`` False: stored under several salts."""

    sequence_hash: int
    tokens_hash: int
    parent: EngineHash | None
    parent_sequence: int | None
    salt: str | None
    salt_known: bool = True
    copies: int = 0


class BlockNormalizer:
    """State of one source. ``max_blocks`` bounds the hashes it knows: beyond it stores are refused and counted, which
    costs matches, never correctness. About 250 bytes a block.
    """

    def __init__(
        self,
        block_size: int,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        max_waiting_blocks: int = DEFAULT_MAX_WAITING_BLOCKS,
        mm_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """``mm_token_ids``: placeholder tokens that a multimodal object's pad value replaces before hashing; empty:
        the objects' hashes enter the block's hash instead (spec/router-core C.5)."""
        self._block_size = block_size
        self._max_blocks = max_blocks
        self._mm_token_ids = mm_token_ids
        self._known: dict[EngineHash, _Block] = {}
        self._suspects: dict[EngineHash, _Block] = {}
        self._orphans = OrphanRoom(max_waiting_blocks)
        # Copies of each sequence hash: two engine hashes may name the same tokens.
        self._held: dict[Tier, dict[int, int]] = {tier: {} for tier in TIERS}
        self.counters = NormalizerCounters()

    @property
    def known_blocks(self) -> int:
        """Engine hashes that are cached in some tier."""
        return len(self._known)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that wait for their parent."""
        return self._orphans.blocks

    def apply(self, event: EngineEvent, out: EventBuilder) -> None:
        """Take an event and add to ``out`` what it changes."""
        if isinstance(event, Stored):
            self._store(event, out)
        elif isinstance(event, Removed):
            self._remove(event, out)
        else:
            assert isinstance(event, Cleared)
            self.forget()
            out.cleared()

    def forget(self) -> None:
        """Start from an empty cache and with new hashes: the engine cleared its cache or restarted."""
        self._known = {}
        self._suspects = {}
        self._orphans.clear()
        self._held = {tier: {} for tier in TIERS}

    def distrust(self) -> None:
        """Events were lost: start from an empty cache, but remember what the hashes mean (at most ``max_blocks``)."""
        self._suspects.update(self._known)
        if len(self._suspects) > self._max_blocks:
            self._suspects = self._known
        self._known = {}
        self._orphans.clear()
        self._held = {tier: {} for tier in TIERS}

    def state(self) -> Iterator[KvEvent]:
        """Everything that is cached, as stored events. A block may come before its parent if that was stored anew."""
        for tier in TIERS:
            if not self._held[tier]:
                continue
            shift = _TIER_SHIFT[tier]
            builder = EventBuilder()
            for block in self._known.values():
                if (block.copies >> shift) & _MAX_COPIES:
                    builder.stored(tier, block.parent_sequence, (block.sequence_hash,), (block.tokens_hash,))
            yield from builder.drain()

    def _store(self, event: Stored, out: EventBuilder) -> None:
        todo = [event]
        evicted_while_waiting: list[Removed] = []
        while todo:
            current = todo.pop()
            if not self._check(current):
                continue
            if not current.tokens:
                self._store_announced(current, out)
            elif not self._store_chain(current, out):
                continue
            for orphan, gone in self._orphans.take(current.block_hashes):
                self.counters.adopted_blocks += len(orphan.block_hashes)
                todo.append(orphan)
                if gone:
                    evicted_while_waiting.append(Removed(orphan.tier, list(gone)))
        # Only now: what hangs under an evicted block is named through it.
        for removal in evicted_while_waiting:
            self._remove(removal, out)

    def _check(self, event: Stored) -> bool:
        hashes = event.block_hashes
        if event.tokens and event.block_size != self._block_size:
            self.counters.size_mismatch_events += 1
            return False
        if len(set(hashes)) != len(hashes) or event.parent in hashes:
            self.counters.self_referencing_events += 1
            return False
        return True

    def _store_announced(self, event: Stored, out: EventBuilder) -> None:
        """Blocks without tokens: a copy, in another tier, of blocks that the engine announced before."""
        for name in event.block_hashes:
            block = self._known.get(name) or self._suspects.get(name)
            if block is None:
                self.counters.short_blocks += 1
            elif self._add_copy(name, block, event.tier):
                out.stored(event.tier, block.parent_sequence, (block.sequence_hash,), (block.tokens_hash,))

    def _store_chain(self, event: Stored, out: EventBuilder) -> bool:
        """False if the chain hangs in the air."""
        parent_sequence, salt = None, event.cache_salt
        if event.parent is not None:
            parent = self._known.get(event.parent) or self._revive(event.parent, event.tier, out)
            if parent is None:
                self.counters.orphan_events += 1
                self.counters.orphan_blocks += len(event.block_hashes)
                self.counters.dropped_orphans += self._orphans.add(event)
                return False
            parent_sequence = parent.sequence_hash
            if salt is None:
                if not parent.salt_known:
                    self.counters.ambiguous_events += 1
                    return False
                salt = parent.salt
        tokens_hashes = hash_stored(event, self._block_size, salt, self._mm_token_ids)
        count = min(len(event.block_hashes), len(tokens_hashes))
        self.counters.short_blocks += len(event.block_hashes) - count
        del tokens_hashes[count:]
        sequence_hashes = compute_sequence_hashes(tokens_hashes, parent_sequence)
        self._place(event, parent_sequence, salt, sequence_hashes, tokens_hashes, out)
        return True

    def _place(
        self,
        event: Stored,
        parent_sequence: int | None,
        salt: str | None,
        sequence_hashes: list[int],
        tokens_hashes: list[int],
        out: EventBuilder,
    ) -> None:
        tier, parent = event.tier, event.parent
        begin, begin_parent = 0, parent_sequence
        placed = 0
        for name, sequence, tokens in zip(event.block_hashes, sequence_hashes, tokens_hashes, strict=False):
            block = self._known.get(name)
            if block is None:
                if len(self._known) >= self._max_blocks:
                    self.counters.refused_blocks += len(sequence_hashes) - placed
                    break
                block = _Block(sequence, tokens, parent, parent_sequence, salt)
            elif block.sequence_hash != sequence:
                out.stored(tier, begin_parent, sequence_hashes[begin:placed], tokens_hashes[begin:placed])
                self._redefine(block, _Block(sequence, tokens, parent, parent_sequence, salt), out)
                begin, begin_parent = placed, parent_sequence
            if not self._add_copy(name, block, tier):
                out.stored(tier, begin_parent, sequence_hashes[begin:placed], tokens_hashes[begin:placed])
                begin, begin_parent = placed + 1, sequence
            parent, parent_sequence = name, sequence
            placed += 1
        out.stored(tier, begin_parent, sequence_hashes[begin:placed], tokens_hashes[begin:placed])

    def _add_copy(self, name: EngineHash, block: _Block, tier: Tier) -> bool:
        """Count one more copy; True if the block was not in the tier before."""
        shift = _TIER_SHIFT[tier]
        if name not in self._known:
            if len(self._known) >= self._max_blocks:
                self.counters.refused_blocks += 1
                return False
            block.copies = 0
            self._known[name] = block
            if self._suspects:
                self._suspects.pop(name, None)
        if (block.copies >> shift) & _MAX_COPIES == _MAX_COPIES:
            return False
        block.copies += 1 << shift
        held = self._held[tier]
        copies = held.get(block.sequence_hash, 0)
        held[block.sequence_hash] = copies + 1
        if copies:
            self.counters.duplicate_blocks += 1
        return not copies

    def _redefine(self, block: _Block, new: _Block, out: EventBuilder) -> None:
        """The engine uses a hash for other tokens: what it named before is not to be matched any more."""
        self.counters.redefined_blocks += 1
        for tier, shift in _TIER_SHIFT.items():
            copies = (block.copies >> shift) & _MAX_COPIES
            if not copies:
                continue
            if self._drop_copies(tier, block.sequence_hash, copies):
                out.removed(tier, (block.sequence_hash,))
            held = self._held[tier]
            if new.sequence_hash not in held:
                out.stored(tier, new.parent_sequence, (new.sequence_hash,), (new.tokens_hash,))
            held[new.sequence_hash] = held.get(new.sequence_hash, 0) + copies
        block.salt_known = block.salt_known and block.salt == new.salt
        block.sequence_hash, block.tokens_hash = new.sequence_hash, new.tokens_hash
        block.parent, block.parent_sequence, block.salt = new.parent, new.parent_sequence, new.salt

    def _remove(self, event: Removed, out: EventBuilder) -> None:
        tier, shift = event.tier, _TIER_SHIFT[event.tier]
        gone = []
        for name in event.block_hashes:
            block = self._known.get(name)
            if block is None or not (block.copies >> shift) & _MAX_COPIES:
                if block is not None or not self._orphans.remove(name, tier):
                    self.counters.noop_removals += 1
                if tier == "device":
                    self._suspects.pop(name, None)
                continue
            block.copies -= 1 << shift
            if not block.copies:
                del self._known[name]
            if self._drop_copies(tier, block.sequence_hash, 1):
                gone.append(block.sequence_hash)
            else:
                self.counters.copy_removals += 1
        out.removed(tier, gone)

    def _drop_copies(self, tier: Tier, sequence_hash: int, copies: int) -> bool:
        """True if none is left."""
        held = self._held[tier]
        left = held[sequence_hash] - copies
        if left > 0:
            held[sequence_hash] = left
            return False
        del held[sequence_hash]
        return True

    def _revive(self, name: EngineHash, tier: Tier, out: EventBuilder) -> _Block | None:
        """What ``name`` meant before the loss; a device-tier store under it proves it and its ancestors."""
        found = self._suspects.get(name)
        if found is None or tier != "device":
            return found
        chain: list[tuple[EngineHash, _Block]] = []
        ancestor: EngineHash | None = name
        while ancestor is not None and (block := self._suspects.get(ancestor)) is not None:
            chain.append((ancestor, block))
            ancestor = block.parent
        for ancestor_name, block in reversed(chain):
            self.counters.revived_blocks += 1
            if self._add_copy(ancestor_name, block, tier):
                out.stored(tier, block.parent_sequence, (block.sequence_hash,), (block.tokens_hash,))
        return found


def hash_stored(
    event: Stored, block_size: int, salt: str | None, mm_token_ids: frozenset[int] = frozenset()
) -> list[int]:
    """Tokens hashes of an event's complete blocks, under the cache salt that holds for it (spec/router-core C.5)."""
    tokens, mm_hashes = event.tokens, event.mm_hashes
    if mm_token_ids and any(mm_hashes):
        tokens, mm_hashes = _pad_objects(tokens, block_size, mm_hashes, mm_token_ids), ()
    seed = block_seed(event.lora_name, salt)
    return hash_blocks(tokens, block_size, seed, is_eagle=event.is_eagle, mm_hashes=mm_hashes)


def _pad_objects(tokens: array[int], block_size: int, mm_hashes: MmHashes, placeholders: frozenset[int]) -> array[int]:
    """Replace each run of placeholder tokens in a block by the pad value of its object: run k has object k."""
    padded = array("I", tokens)
    for index, objects in enumerate(mm_hashes):
        if not objects:
            continue
        start = index * block_size
        for position, run in _placeholder_runs(tokens[start : start + block_size], placeholders):
            padded[start + position] = mm_pad_value(objects[min(run, len(objects) - 1)])
    return padded


def _placeholder_runs(tokens: Sequence[int], placeholders: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Position of every placeholder, and the number of the run that it belongs to."""
    run, previous = -1, None
    for position, token in enumerate(tokens):
        if token in placeholders:
            if token != previous:
                run += 1
            yield position, run
        previous = token
