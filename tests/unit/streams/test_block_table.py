"""The packed table against a dict of ints, which is what it means."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streams.block_table import MAX_COLUMN, PAGE, BlockTable, bits_of, int_of, words_of


class Model:
    """A dict from block to bit set, changed one by one."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}

    def apply(self, changes: list[tuple[int, int, bool]]) -> tuple[dict[int, int], int, int]:
        growth: dict[int, int] = {}
        noops = [0, 0]
        for block, slot, stores in changes:
            if not block:
                continue
            mask = self.masks.get(block, 0)
            if bool(mask >> slot & 1) == stores:
                noops[stores] += 1
                continue
            self.masks[block] = mask ^ 1 << slot
            growth[slot] = growth.get(slot, 0) + (1 if stores else -1)
        return {slot: count for slot, count in growth.items() if count}, noops[1], noops[0]


def apply(table: BlockTable, changes: list[tuple[int, int, bool]]) -> tuple[dict[int, int], int, int]:
    blocks, slots, stores = zip(*changes, strict=True) if changes else ((), (), ())
    done = table.apply(np.array(blocks, np.uint64), np.array(slots, np.int64), np.array(stores, bool))
    growth: dict[int, int] = {}
    for slot, count in zip(done.slots.tolist(), done.growth.tolist(), strict=True):
        growth[slot] = growth.get(slot, 0) + count
    return {slot: count for slot, count in growth.items() if count}, done.stored_noop, done.removed_noop


def check(table: BlockTable, model: Model, blocks: list[int]) -> None:
    found = [int_of(row) for row in table.masks(np.array(blocks, np.uint64))]
    assert found == [model.masks.get(block, 0) for block in blocks]


BLOCK = st.one_of(st.integers(0, 12), st.integers(0, 2**64 - 1))
CHANGE = st.tuples(BLOCK, st.sampled_from([0, 1, 5, 63, 64, 130]), st.booleans())


@given(st.integers(0, 2**64 - 1), st.lists(st.lists(CHANGE, max_size=40), max_size=12))
@settings(deadline=None, max_examples=200)
def test_every_batch_does_what_its_changes_do_one_by_one(mix, batches):
    table, model = BlockTable(mix), Model()
    for batch in batches:
        assert apply(table, batch) == model.apply(batch)
        check(table, model, [block for changes in batches for block, _, _ in changes])
    for slot in (0, 1, 5, 63, 64, 130, 900):
        held = sorted(block for block, mask in model.masks.items() if mask >> slot & 1)
        assert sorted(table.blocks_of(slot).tolist()) == held
    assert table.live() == sum(1 for mask in model.masks.values() if mask)


@pytest.mark.parametrize("seed", range(4))
def test_it_grows_and_keeps_everything_under_churn(seed):
    rng = random.Random(seed)
    table, model = BlockTable(rng.getrandbits(64)), Model()
    universe = [rng.getrandbits(64) for _ in range(20_000)]
    for _ in range(30):
        batch = [(rng.choice(universe), rng.randrange(70), rng.random() < 0.7) for _ in range(2_000)]
        assert apply(table, batch) == model.apply(batch)
    check(table, model, universe)
    assert table.live() == sum(1 for mask in model.masks.values() if mask)


def test_SCALE_01_blocks_that_come_and_go_do_not_make_it_grow():
    """Its bound is what the workers' caches hold, not how many prompts were ever seen."""
    rng = random.Random(1)
    table = BlockTable(rng.getrandbits(64))
    held = [rng.getrandbits(64) for _ in range(5_000)]
    apply(table, [(block, 3, True) for block in held])
    rows, size = table.rows, table.nbytes
    for _ in range(100):
        fresh = [rng.getrandbits(64) for _ in range(1_000)]
        gone, held = held[:1_000], held[1_000:] + fresh
        apply(table, [(block, 3, False) for block in gone] + [(block, 3, True) for block in fresh])
    assert table.rows <= 4 * rows
    assert table.nbytes <= 4 * size
    assert sorted(table.blocks_of(3).tolist()) == sorted(held)


def test_one_block_in_many_slots_in_one_column_takes_one_row():
    table = BlockTable()
    apply(table, [(77, slot, True) for slot in range(3_000)])
    assert table.rows == PAGE
    (mask,) = table.masks(np.array([77], np.uint64))
    assert int_of(mask) == (1 << 3_000) - 1


def test_a_full_column_into_an_empty_table():
    rng = random.Random(2)
    blocks = [rng.getrandbits(64) for _ in range(MAX_COLUMN)]
    table = BlockTable()
    assert apply(table, [(block, 0, True) for block in blocks])[0] == {0: MAX_COLUMN}
    assert (table.find(np.array(blocks, np.uint64)) >= 0).all()


@pytest.mark.parametrize("shift", range(0, 53, 4))
def test_blocks_with_a_common_part_are_spread(shift):
    """A table of structured hashes is about as large, and a look about as long, as one of random hashes."""
    table = BlockTable()
    blocks = [number << shift for number in range(1, 2_000)]
    apply(table, [(block, 0, True) for block in blocks])
    assert table.live() == len(blocks)
    assert table.rows <= 16 * PAGE
    homes, _ = table._home(np.array(blocks, np.uint64))
    assert len(set(homes.tolist())) > len(blocks) // 3


def test_sweeping_clears_the_dead_slots_and_no_other():
    rng = random.Random(3)
    table = BlockTable()
    blocks = [rng.getrandbits(64) for _ in range(100_000)]
    for start in range(0, len(blocks), 20_000):
        apply(table, [(block, 2 + block % 2 * 68, True) for block in blocks[start : start + 20_000]])
    position = 0
    while position < table.rows:
        position = table.sweep(1 << 70, position)
    assert not len(table.blocks_of(70))
    assert sorted(table.blocks_of(2).tolist()) == sorted(block for block in blocks if not block % 2)


def test_words_and_ints_are_each_other():
    for bits in (0, 1, 1 << 63, 1 << 64, (1 << 130) - 1):
        assert int_of(words_of(bits, 3)) == bits
        assert sum(1 << number for number in bits_of(bits)) == bits
    assert int_of(words_of(1 << 64, 1)) == 0


@pytest.mark.parametrize("slots", [3, 200])
def test_one_key_is_found_as_in_a_column(slots: int) -> None:
    rng = random.Random(slots)
    table = BlockTable(rng.getrandbits(64))
    known = np.array([rng.getrandbits(64) for _ in range(6 * PAGE)], np.uint64)
    for start in range(0, len(known), 4096):
        some = known[start : start + 4096]
        table.apply(some, np.array([rng.randrange(slots) for _ in some], np.int64), np.ones(len(some), np.bool_))
    asked = np.concatenate((known[::7], np.array([0, *(rng.getrandbits(64) for _ in range(3000))], np.uint64)))
    assert [table.mask_of(key) for key in asked.tolist()] == [int_of(mask) for mask in table.masks(asked)]
