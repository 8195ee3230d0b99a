"""The radix tree against a model of it where its rules are simple, and rules that hold always."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_es.router.radix_model import BlockMismatch, RadixModel, Worker

Chain = tuple[int, ...]
TOKENS = st.lists(st.integers(0, 2), max_size=6)
WORKERS = st.sampled_from([(1, 0), (1, 1), (2, 0)])


def block_of(chain: Chain) -> int:
    """An engine's name for the last block of a chain: one for each chain, on every worker."""
    number = 1
    for token in chain:
        number = number * 4 + token
    return 1_000_000 + number


class ChainSets:
    """What workers hold, as sets of chains closed under prefixes: all that the tree must be able to tell."""

    def __init__(self) -> None:
        self.chains: dict[Worker, set[Chain]] = {}

    def of(self, worker: Worker) -> set[Chain]:
        return self.chains.setdefault(worker, set())

    def find(self, tokens: list[int]) -> dict[Worker, int]:
        counts = {
            worker: next((length for length in range(len(tokens), 0, -1) if tuple(tokens[:length]) in chains), 0)
            for worker, chains in self.chains.items()
        }
        return {worker: count for worker, count in counts.items() if count}


def store(tree: RadixModel, worker: Worker, parent: Chain, tokens: list[int]) -> None:
    chains = [parent + tuple(tokens[: place + 1]) for place in range(len(tokens))]
    tree.store(worker, block_of(parent) if parent else None, [block_of(chain) for chain in chains], tokens)


def change(tree: RadixModel, sets: ChainSets, data: st.DataObject) -> None:
    """One event that fits: blocks are removed from the ends of chains only."""
    worker = data.draw(WORKERS, label="worker")
    held = sets.of(worker)
    kind = data.draw(st.sampled_from(("store", "store", "store", "remove", "clear", "clear_ranks")), label="kind")
    if kind == "store":
        parent = data.draw(st.sampled_from([(), *sorted(held)]), label="parent")
        tokens = data.draw(TOKENS, label="tokens")
        store(tree, worker, parent, tokens)
        held.update(parent + tuple(tokens[: place + 1]) for place in range(len(tokens)))
    elif kind == "remove" and held:
        leaves = sorted(chain for chain in held if not any((*chain, token) in held for token in range(3)))
        leaf = data.draw(st.sampled_from(leaves), label="leaf")
        tree.remove(worker, [block_of(leaf)])
        held.remove(leaf)
    elif kind == "clear":
        tree.clear(worker)
        held.clear()
    elif kind == "clear_ranks":
        tree.clear_ranks(worker[0])
        for other in sets.chains:
            if other[0] == worker[0]:
                sets.of(other).clear()


@given(data=st.data(), dead_node_limit=st.sampled_from((1, 65_536)))
def test_find_is_the_longest_prefix_that_a_worker_holds(data: st.DataObject, dead_node_limit: int) -> None:
    tree, sets = RadixModel(dead_node_limit), ChainSets()
    for _ in range(data.draw(st.integers(1, 15), label="events")):
        change(tree, sets, data)
        query = data.draw(TOKENS, label="query")
        assert tree.find(query) == sets.find(query)
    for chain in {chain for chains in sets.chains.values() for chain in chains}:
        assert tree.find([*chain, 0]) == sets.find([*chain, 0])


@given(data=st.data())
def test_a_dump_rebuilds_the_tree(data: st.DataObject) -> None:
    tree, sets = RadixModel(), ChainSets()
    for _ in range(data.draw(st.integers(1, 15), label="events")):
        change(tree, sets, data)
    copy = RadixModel()
    for dumped in tree.dump():
        copy.store(dumped.worker, dumped.parent, list(dumped.block_hashes), list(dumped.tokens_hashes))
    for chain in {chain for chains in sets.chains.values() for chain in chains}:
        assert copy.find([*chain, 0]) == sets.find([*chain, 0])


BLOCKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=5)
CALLS: dict[str, Callable[[RadixModel, st.DataObject], Any]] = {
    "store": lambda tree, data: tree.store(
        data.draw(WORKERS),
        data.draw(st.none() | st.integers(0, 9)),
        *map(list, zip(*blocks, strict=True) if (blocks := data.draw(BLOCKS)) else ([], [])),
    ),
    "remove": lambda tree, data: tree.remove(data.draw(WORKERS), data.draw(st.lists(st.integers(0, 9), max_size=4))),
    "clear": lambda tree, data: tree.clear(data.draw(WORKERS)),
}


@given(data=st.data(), calls=st.lists(st.sampled_from(("store", "store", "store", "remove", "clear")), max_size=20))
def test_rules_that_hold_whatever_engines_send(data: st.DataObject, calls: list[str]) -> None:
    """Block hashes that repeat, that differ among workers, parents that are wrong: no error but the documented one."""
    tree = RadixModel()
    for call in calls:
        with contextlib.suppress(BlockMismatch):
            CALLS[call](tree, data)
        query = data.draw(st.lists(st.integers(0, 2), max_size=8))
        scores = tree.find(query)
        assert all(1 <= count <= len(query) for count in scores.values())
        for length in range(len(query)):
            cut = {worker: min(count, length) for worker, count in scores.items() if length}
            assert tree.find(query[:length]) == cut
        early = tree.find(query, early_exit=True)
        assert early.keys() <= scores.keys()
        assert all(count <= scores[worker] for worker, count in early.items())
        assert all(len(dumped.block_hashes) == len(dumped.tokens_hashes) > 0 for dumped in tree.dump())


def test_an_event_that_does_not_fit_changes_nothing() -> None:
    tree = RadixModel()
    store(tree, (1, 0), (), [0, 1])
    with pytest.raises(BlockMismatch, match="Failed to find parent block"):
        tree.store((2, 0), block_of((0,)), [7], [7])
    with pytest.raises(BlockMismatch, match="Invalid block sequence"):
        tree.store((1, 0), block_of((0,)), [5, block_of((0,))], [1, 2])
    assert tree.find([0, 1, 7]) == {(1, 0): 2}


def test_known_blocks_are_removed_beside_unknown_ones() -> None:
    tree = RadixModel()
    store(tree, (1, 0), (), [0, 1, 2])
    with pytest.raises(BlockMismatch, match="Failed to find block"):
        tree.remove((1, 0), [5, block_of((0, 1, 2)), 6, block_of((0, 1))])
    assert tree.find([0, 1, 2]) == {(1, 0): 1}


def test_a_block_removed_in_the_middle_comes_back_with_what_is_below_it() -> None:
    """As in Dynamo: while another worker holds the node above, what is below stays registered."""
    tree = RadixModel()
    for worker in ((1, 0), (2, 0)):
        store(tree, worker, (), [0, 1])
        store(tree, worker, (0,), [2])
    tree.remove((1, 0), [block_of((0,))])
    assert tree.find([0, 1]) == {(2, 0): 2}
    store(tree, (1, 0), (), [0])
    assert tree.find([0, 1]) == {(1, 0): 2, (2, 0): 2}


Step = tuple[str, int, int | None, list[tuple[int, int]]]


@pytest.mark.parametrize(
    ("steps", "fits"),
    [
        # Removing a block drops what follows as far as the worker covers it, not to the end of the edge.
        ([("store", 1, None, [(0, 16), (1, 18)]), ("store", 2, None, [(0, 18)]), ("store", 2, None, [(0, 16)]),
          ("remove", 2, None, [(0, 16)]), ("remove", 2, None, [(0, 18)])], True),
        # What has been dropped may be named later in the same event, known by name to the worker or not ...
        ([("store", 3, None, [(0, 1), (0, 2)]), ("remove", 3, None, [(0, 1)]), ("store", 3, None, [(0, 1), (0, 4)]),
          ("remove", 3, None, [(0, 1), (0, 2)])], True),
        # ... also if it was only forgotten, because the worker does not cover it.
        ([("store", 1, None, [(0, 3)]), ("store", 1, 3, [(0, 6)]), ("clear", 1, None, []),
          ("store", 1, None, [(0, 6)]), ("remove", 1, None, [(0, 6), (0, 6)])], True),
        ([("store", 1, None, [(0, 3)]), ("remove", 1, None, [(0, 3)]), ("remove", 1, None, [(0, 3)])], False),
        # A block hash that stands in both parts of a split edge belongs to the lower one, and does not come back.
        ([("store", 3, None, [(0, 10), (1, 10)]), ("store", 3, None, [(0, 10), (0, 12)]), ("store", 3, 10, [])], False),
        ([("store", 2, None, [(0, 102)]), ("store", 2, 102, [(0, 100), (0, 104), (0, 100)]),
          ("store", 2, 104, [(0, 108)]), ("store", 2, None, [(0, 100)]), ("remove", 2, None, [(0, 100)])], False),
    ],
)  # fmt: skip
def test_last_event_fits_or_not_as_in_dynamo(steps: list[Step], fits: bool) -> None:
    """Block hashes that engines use twice: recorded from ai-dynamo-runtime 1.5.1."""
    tree = RadixModel()

    def play(step: Step) -> None:
        kind, worker, parent, pairs = step
        tokens, blocks = [token for token, _ in pairs], [block for _, block in pairs]
        if kind == "store":
            tree.store((worker, 0), parent, blocks, tokens)
        elif kind == "remove":
            tree.remove((worker, 0), blocks)
        else:
            tree.clear((worker, 0))

    for step in steps[:-1]:
        play(step)
    with contextlib.nullcontext() if fits else pytest.raises(BlockMismatch):
        play(steps[-1])


def test_nodes_that_everybody_left_do_not_pile_up() -> None:
    tree = RadixModel(dead_node_limit=10)
    store(tree, (2, 0), (), [0, 1, 2])
    store(tree, (2, 0), (0, 1), [1])
    for number in range(1000):
        tree.store((1, 0), None, [number + 100], [number + 100])
        tree.store((1, 0), number + 100, [number + 5000], [7])
        tree.remove((1, 0), [number + 100, number + 5000])
    assert len(tree._root.children) <= 11
    assert tree.find([0, 1, 2]) == {(2, 0): 3}
    assert tree.find([0, 1, 1]) == {(2, 0): 3}


def test_a_forgotten_worker_whose_block_hashes_repeated_does_no_harm() -> None:
    """One name for several blocks of an edge: Dynamo's tree answers no call any more after these."""
    tree = RadixModel()
    tree.store((1, 0), None, [100, 100, 102], [0, 0, 1])
    tree.store((1, 0), 100, [103], [1])
    tree.store((1, 0), 102, [100], [0])
    tree.clear((1, 0))
    tree.store((2, 0), None, [100, 121], [0, 1])
    assert tree.find([0, 1])[2, 0] == 2
