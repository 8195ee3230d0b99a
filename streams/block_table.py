"""A packed hash table from block hash to a bit set of slots, changed and queried by whole columns.

Extendible hashing (Fagin, Nievergelt, Pippenger, Strong: "Extendible hashing — a fast access method for dynamic
files", 1979) over pages of 4,096 rows in flat arrays: a page that is full is split in two, so growing never stops the
event loop for a whole table, and no space is held for a table half its size. Within a page, triangular probing.

Why not a dict: sixteen entries of a dict cost about 8 µs (ints made, hashed and stored one by one, each a cache
miss that waits for the one before), which is the whole time that folding 100,000 events a second leaves. Columns
are changed by array operations here, whose cache misses overlap, and a row takes 16 bytes instead of about 100.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

PAGE = 4096
_OFFSET_MASK = np.uint64(PAGE - 1)
_OFFSET_SHIFT = np.uint64(30)
# Rows of a page that may be taken before it is split or cleaned: with more, probing gets long. From page to page it
# is lower by up to the spread, or all pages of a table, filled evenly, would be split in the same few milliseconds.
_PAGE_LIMIT = 2560
_LIMIT_SPREAD = 1280
# Pages that are added at once, at most: memory is zeroed and mapped a few milliseconds' worth at a time.
_MAX_ADDED = 64
_MAX_DEPTH = 30
_SEQ_BITS = 15
_SLOT_BITS = 20
# One change: its sort key has the number of the operation in 15 bits, its slot in 20, its row in 29.
MAX_COLUMN = 1 << _SEQ_BITS
MAX_SLOTS = 1 << _SLOT_BITS
_BUCKET_BITS = 18
_BUCKET_SHIFT = np.uint64(64 - _BUCKET_BITS)
_FOLD = np.uint64(32)
_FOLD_AGAIN = np.uint64(22)
_ONE = np.uint64(1)
_FEW = 1024
_PROBES: I64 = np.cumsum(np.arange(8))[:, None]
_NONE: I64 = np.zeros(0, np.int64)
_SWEEP_ROWS = 64 * PAGE
DEFAULT_MIX = 0x9E3779B97F4A7C15


class Applied(NamedTuple):
    """What a column of changes did: how many more blocks a slot holds (one may come twice); changes that were none."""

    slots: I64
    growth: I64
    stored_noop: int
    removed_noop: int


class BlockTable:
    """Rows of (block hash, bit set of slots). Hash 0 marks a free row: a block of that hash is never kept or found.

    Not safe for several threads. ``mix`` is an odd u64 that rows are placed by: one that clients cannot know keeps
    them from making prompts that all fall into one page.
    """

    def __init__(self, mix: int = DEFAULT_MIX) -> None:
        self._mix = np.uint64(mix | 1)
        self._words = 1
        self._depth = 0
        self._directory: I64 = np.zeros(1, np.int64)
        self._page_depth = [0]
        self._page_prefix = [0]
        self._used: I64 = np.zeros(1, np.int64)
        self._limits = _limits(1)
        self._keys: U64 = np.zeros(PAGE, np.uint64)
        self._masks: U64 = np.zeros(PAGE, np.uint64)
        self._buckets: npt.NDArray[np.int32] = np.zeros(1 << _BUCKET_BITS, np.int32)

    @property
    def rows(self) -> int:
        """Rows in all pages, free or not."""
        return len(self._page_depth) * PAGE

    @property
    def nbytes(self) -> int:
        """Memory of the table in bytes."""
        return self._keys.nbytes + self._masks.nbytes + self._directory.nbytes + self._used.nbytes

    @property
    def used(self) -> int:
        """Rows that are taken; some of them hold no bit any more and are free at the next split. Cheap."""
        return int(self._used.sum())

    def live(self) -> int:
        """Rows that some slot's bit is in. Walks the table."""
        return int(np.count_nonzero(self._masks.reshape(-1, self._words).any(axis=1)))

    def apply(self, keys: U64, slots: I64, stores: Bools) -> Applied:
        """Store (True) or remove (False) block ``keys[i]`` for slot ``slots[i]``, in that order.

        All three have the same length, at most ``MAX_COLUMN``; slots are under ``MAX_SLOTS``.
        """
        if not keys.all():
            kept = keys != 0
            keys, slots, stores = keys[kept], slots[kept], stores[kept]
        if not len(keys):
            return Applied(_NONE, _NONE, 0, 0)
        self._widen(int(slots.max()) // 64 + 1)
        shared = self._shared(keys)
        if not shared.any():
            return self._change(keys, slots, stores)
        alone = ~shared
        return _add(
            self._change(keys[alone], slots[alone], stores[alone]),
            self._change_in_order(keys[shared], slots[shared], stores[shared]),
        )

    def find(self, keys: U64) -> I64:
        """Row of each key, -1 where there is none."""
        rows, offsets = self._home(keys)
        # Hash 0 would meet a free row, whose key is 0 as well.
        zero = keys == 0
        found = self._find_few(keys, rows, offsets) if len(keys) <= _FEW else self._find_many(keys, rows, offsets)
        if zero.any():
            found[zero] = -1
        return found

    def _find_few(self, keys: U64, rows: I64, offsets: I64) -> I64:
        """Looks at eight rows of each key at once: for few keys, calls cost more than cache misses."""
        probe = ((offsets + _PROBES) & (PAGE - 1)) + (rows - offsets)
        found = self._keys[probe]
        # A key has one row at most, so whatever hit there is among the eight is the one.
        result: I64 = np.where(found == keys, probe, -1).max(axis=0)
        left = np.flatnonzero((result < 0) & found.all(axis=0))
        if len(left):
            self._look_on(keys, result, left, probe[-1, left], len(_PROBES) - 1)
        return result

    def _find_many(self, keys: U64, rows: I64, offsets: I64) -> I64:
        found = self._keys[rows]
        result = np.where(found == keys, rows, -1)
        left = np.flatnonzero((result < 0) & (found != 0))
        if len(left):
            self._look_on(keys, result, left, rows[left], 0)
        return result

    def _look_on(self, keys: U64, result: I64, left: I64, probe: I64, step: int) -> None:
        """Go on for the keys numbered ``left``, whose last look was at ``probe``, the ``step``-th of their places."""
        while len(left):
            step += 1
            probe = (probe & ~(PAGE - 1)) | ((probe + step) & (PAGE - 1))
            found = self._keys[probe]
            hits = found == keys[left]
            result[left[hits]] = probe[hits]
            on = np.flatnonzero(~hits & (found != 0))
            left, probe = left[on], probe[on]

    def masks(self, keys: U64) -> U64:
        """Bit sets of the keys, zero for an unknown one. Shape: (keys, words of 64 slots)."""
        rows = self.find(keys)
        masks = self._masks.reshape(-1, self._words)[rows]
        masks[rows < 0] = 0
        return masks

    def mask_of(self, key: int) -> int:
        """Bit set of one key, zero for an unknown one: for a handful of keys cheaper than ``masks``."""
        hashed = ((key ^ (key >> 32)) * int(self._mix)) & 0xFFFFFFFFFFFFFFFF
        hashed ^= hashed >> 22
        page = int(self._directory[hashed >> (64 - self._depth)]) if self._depth else 0
        offset, step, keys = (hashed >> 30) & (PAGE - 1), 0, self._keys
        # A page is never full. Hash 0 is not kept: it would find a free row.
        while key and (found := keys.item(page * PAGE + offset)):
            if found == key:
                row = page * PAGE + offset
                if self._words == 1:
                    return self._masks.item(row)
                return int_of(self._masks[row * self._words : (row + 1) * self._words])
            step += 1
            offset = (offset + step) & (PAGE - 1)
        return 0

    @property
    def words(self) -> int:
        """64-bit words of a bit set."""
        return self._words

    def blocks_of(self, slot: int) -> U64:
        """Hashes of all blocks of a slot, in no order. Walks the table."""
        word, bit = slot >> 6, np.uint64(1 << (slot & 63))
        if word >= self._words:
            return np.zeros(0, np.uint64)
        return self._keys[np.flatnonzero(self._masks.reshape(-1, self._words)[:, word] & bit)]

    def blocks_of_any(self, slots: int) -> U64:
        """Hashes of all blocks that some slot of a bit set has, each once, in no order. Walks the table."""
        held = self._masks.reshape(-1, self._words) & words_of(slots, self._words)
        return self._keys[np.flatnonzero(held.any(axis=1))]

    def blocks_at(self, start: int, end: int, word: int) -> list[tuple[int, U64]]:
        """The slots of one word of the bit sets of rows ``start`` to ``end``, each with its blocks there.

        Whoever goes from the first row to ``rows``, in whole pages, misses no block that is held all the while, and may
        find one twice: rows move to later pages only.
        """
        # No view is handed out: the table may grow before it is looked at.
        held = self._masks.reshape(-1, self._words)[start:end, word]
        keys = self._keys[start:end]
        slots = bits_of(int(np.bitwise_or.reduce(held)))
        return [(64 * word + bit, keys[np.flatnonzero(held & np.uint64(1 << bit))]) for bit in slots]

    def sweep(self, dead: int, start: int) -> int:
        """Clear the bits of ``dead`` in some rows from row ``start`` on; the row to go on at (``rows`` at the end)."""
        end = min(start + _SWEEP_ROWS, self.rows)
        for word in range(self._words):
            keep = np.uint64(~(dead >> (64 * word)) & 0xFFFFFFFFFFFFFFFF)
            self._masks[start * self._words + word : end * self._words : self._words] &= keep
        return end

    def _hash(self, keys: U64) -> U64:
        """Spreads keys whatever they have in common: a product's low bits see only low bits, so both are folded."""
        hashed = (keys ^ (keys >> _FOLD)) * self._mix
        return hashed ^ (hashed >> _FOLD_AGAIN)

    def _home(self, keys: U64) -> tuple[I64, I64]:
        """First row to look at, and its offset in the page."""
        hashed = self._hash(keys)
        offsets: I64 = ((hashed >> _OFFSET_SHIFT) & _OFFSET_MASK).view(np.int64)
        return (self._pages_of(hashed) * PAGE) | offsets, offsets

    def _pages_of(self, hashed: U64) -> I64:
        if not self._depth:
            return np.zeros(len(hashed), np.int64)
        pages: I64 = self._directory[(hashed >> np.uint64(64 - self._depth)).view(np.int64)]
        return pages

    def _shared(self, keys: U64) -> Bools:
        """Which keys may come more than once: all that do, and a few others."""
        buckets = (self._hash(keys) >> _BUCKET_SHIFT).view(np.int64)
        numbers = np.arange(len(keys), dtype=np.int32)
        # What an earlier call left in a bucket does not matter: each bucket that is read was written just before.
        self._buckets[buckets] = numbers
        last = self._buckets[buckets]
        shared: Bools = last != numbers
        shared[last[shared]] = True
        return shared

    def _change(self, keys: U64, slots: I64, stores: Bools) -> Applied:
        """Operations on keys that differ from each other."""
        if stores.all():
            rows = self._insert(keys, distinct=True)
        else:
            rows = np.empty(len(keys), np.int64)
            rows[stores] = self._insert(keys[stores], distinct=True)
            rows[~stores] = self.find(keys[~stores])
        known = rows >= 0
        unknown = len(rows) - int(np.count_nonzero(known))
        if unknown:
            rows, slots, stores = rows[known], slots[known], stores[known]
        cells = rows * self._words + (slots >> 6) if self._words > 1 else rows
        bits = np.left_shift(_ONE, (slots & 63).view(np.uint64))
        masks = self._masks[cells]
        held = (masks & bits) != 0
        changed = held != stores
        self._masks[cells] = np.where(changed, masks ^ bits, masks)
        return _summary(slots, stores, changed, unknown)

    def _change_in_order(self, keys: U64, slots: I64, stores: Bools) -> Applied:
        """Operations of which several may be on one key, even by one slot; the last one on a (key, slot) decides."""
        rows = np.empty(len(keys), np.int64)
        rows[stores] = self._insert(keys[stores], distinct=False)
        rows[~stores] = self.find(keys[~stores])
        known = rows >= 0
        unknown = len(rows) - int(np.count_nonzero(known))
        rows, slots, stores = rows[known], slots[known], stores[known]
        if not len(rows):
            return Applied(_NONE, _NONE, 0, unknown)
        order = (rows << (_SEQ_BITS + _SLOT_BITS)) | (slots << _SEQ_BITS) | np.arange(len(rows))
        order.sort()
        slots = (order >> _SEQ_BITS) & (MAX_SLOTS - 1)
        stores = stores[order & (MAX_COLUMN - 1)]
        cells = (order >> (_SEQ_BITS + _SLOT_BITS)) * self._words + (slots >> 6)
        bits = np.left_shift(_ONE, (slots & 63).view(np.uint64))
        first = _starts(order >> _SEQ_BITS)
        held = (self._masks[cells] & bits) != 0
        before = np.where(first, held, np.concatenate((stores[:1], stores[:-1])))
        last = np.concatenate((first[1:], [True]))
        self._set_bits(cells[last], bits[last], stores[last])
        return _summary(slots, stores, before != stores, unknown)

    def _set_bits(self, cells: I64, bits: U64, stores: Bools) -> None:
        """``cells`` are sorted; each of several bits of one cell differs from the others."""
        add = np.where(stores, bits, np.uint64(0))
        heads = np.flatnonzero(_starts(cells))
        cells = cells[heads]
        clear = np.bitwise_or.reduceat(bits ^ add, heads)
        self._masks[cells] = (self._masks[cells] | np.bitwise_or.reduceat(add, heads)) & ~clear

    def _insert(self, keys: U64, *, distinct: bool) -> I64:
        """Rows of the keys, taken where there was none. ``distinct``: no key comes twice."""
        self._make_room(keys)
        rows, claimed = self._claim(keys)
        if len(claimed):
            # A key that comes twice has claimed its one row twice.
            claimed = claimed if distinct else sorted_distinct(claimed)
            self._used += np.bincount(claimed // PAGE, minlength=len(self._used))
        return rows

    def _claim(self, keys: U64) -> tuple[I64, I64]:
        """Rows of the keys, and those that were free. The pages have room."""
        rows, offsets = self._home(keys)
        result = rows.copy()
        table = self._keys
        left, wanted, probe = np.arange(len(keys)), keys, rows
        claims: list[I64] = []
        step = 0
        while True:
            found = table[probe]
            free = np.flatnonzero(found == 0)
            if len(free):
                # Of several keys that want one row the last gets it; the others look on.
                places, takers = probe[free], wanted[free]
                table[places] = takers
                found[free] = now = table[places]
                claims.append(places[now == takers])
            missed = np.flatnonzero(found != wanted)
            if step:
                result[left] = probe
            left = left[missed]
            if not len(left):
                break
            step += 1
            wanted, offsets = wanted[missed], (offsets[missed] + step) & (PAGE - 1)
            probe = (probe[missed] & ~(PAGE - 1)) | offsets
        return result, np.concatenate(claims) if claims else np.zeros(0, np.int64)

    def _make_room(self, keys: U64) -> None:
        hashed = self._hash(keys)
        full = self._overfull(hashed)
        if not full.size:
            return
        # Only keys that are not there yet take rows, each of them one; and only those of the full pages matter.
        keys = keys[np.isin(self._pages_of(hashed), full)]
        hashed = self._hash(sorted_distinct(keys[self.find(keys) < 0]))
        while (full := self._overfull(hashed)).size:
            self._split(full)

    def _overfull(self, hashed: U64) -> I64:
        pages = len(self._page_depth)
        incoming = np.bincount(self._pages_of(hashed), minlength=pages)
        return np.flatnonzero(self._used[:pages] + incoming > self._limits[:pages])

    def _split(self, full: I64) -> None:
        """Split the pages, or clean those that are full of dead rows; live rows are placed anew."""
        pages = self.rows // PAGE
        keys = self._keys[: self.rows].reshape(pages, PAGE)
        masks = self._masks[: self.rows * self._words].reshape(pages, PAGE, self._words)
        moved_keys, moved_masks = keys[full], masks[full]
        alive = moved_masks.any(axis=2) if self._words > 1 else moved_masks[:, :, 0] != 0
        keys[full] = 0
        masks[full] = 0
        del keys, masks
        for page, live in zip(full.tolist(), np.count_nonzero(alive, axis=1).tolist(), strict=True):
            # A page that is full of dead rows is cleaned of them, and not split.
            if live == self._used[page] or live > self._limits[page] // 2:
                # In four: a block is then moved about once in three that come; in two, it would be two to one.
                for half in (page, self._split_page(page)):
                    self._split_page(half)
            self._used[page] = 0
        placed, _ = self._claim(moved_keys[alive])
        self._masks.reshape(-1, self._words)[placed] = moved_masks[alive]
        self._used += np.bincount(placed // PAGE, minlength=len(self._used))

    def _split_page(self, page: int) -> int:
        """Give half of the page's part of the directory to a new page, which is returned. Rows are not moved here."""
        depth = self._page_depth[page]
        if depth == self._depth:
            if depth == _MAX_DEPTH:
                raise OverflowError(f"thousands of block hashes fall into one of 2^{_MAX_DEPTH} pages")
            self._directory = np.repeat(self._directory, 2)
            self._depth += 1
        new = self._add_page()
        prefix = 2 * self._page_prefix[page] + 1
        self._page_depth[page] = self._page_depth[new] = depth + 1
        self._page_prefix[page], self._page_prefix[new] = prefix - 1, prefix
        span = 1 << (self._depth - depth - 1)
        self._directory[prefix * span : (prefix + 1) * span] = new
        return new

    def _add_page(self) -> int:
        page = len(self._page_depth)
        self._page_depth.append(0)
        self._page_prefix.append(0)
        if page >= len(self._used):
            pages = page + 1 + min(page // 8, _MAX_ADDED)
            # In place where the allocator can: a large block is remapped, not copied. No view of them is kept.
            self._keys.resize(pages * PAGE, refcheck=False)
            self._masks.resize(pages * PAGE * self._words, refcheck=False)
            self._used.resize(pages, refcheck=False)
            self._limits = _limits(pages)
        return page

    def _widen(self, words: int) -> None:
        """Make bit sets of at least ``words`` words; rare, and copies the masks."""
        if words <= self._words:
            return
        words = max(words, self._words + self._words // 2)
        masks = np.zeros(len(self._keys) * words, np.uint64)
        masks.reshape(-1, words)[:, : self._words] = self._masks.reshape(-1, self._words)
        self._masks, self._words = masks, words


def _summary(slots: I64, stores: Bools, changed: Bools, unknown: int) -> Applied:
    stored_noop = np.count_nonzero(stores) - np.count_nonzero(changed & stores)
    removed_noop = len(changed) - np.count_nonzero(changed) - stored_noop
    growth = np.bincount(slots, weights=np.where(changed, np.where(stores, 1.0, -1.0), 0.0)).astype(np.int64)
    grown = np.flatnonzero(growth)
    return Applied(grown, growth[grown], int(stored_noop), int(removed_noop) + unknown)


def _add(one: Applied, other: Applied) -> Applied:
    slots = np.concatenate((one.slots, other.slots))
    growth = np.concatenate((one.growth, other.growth))
    return Applied(slots, growth, one.stored_noop + other.stored_noop, one.removed_noop + other.removed_noop)


def _limits(pages: int) -> I64:
    return _PAGE_LIMIT - np.arange(pages) * 797 % _LIMIT_SPREAD


def _starts(values: I64) -> Bools:
    """Where a new value begins in a sorted array, which is not empty."""
    starts = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=starts[1:])
    return starts


def sorted_distinct(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sorted distinct values. ``np.unique`` hashes, and takes several times as long for what comes in here."""
    values = np.sort(values)
    return values[_starts(values)] if len(values) else values


def int_of(words: U64) -> int:
    """One bit set (a row of words, lowest first) as an int."""
    return int.from_bytes(words.astype("<u8", copy=False).tobytes(), "little")


def words_of(bits: int, words: int) -> U64:
    """The lowest ``64 * words`` bits of an int as words."""
    return np.frombuffer((bits & ((1 << (64 * words)) - 1)).to_bytes(8 * words, "little"), "<u8")


def bits_of(mask: int) -> Iterator[int]:
    """Numbers of the set bits, rising."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
