from __future__ import annotations

import pytest

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.radix_model import BlockMismatch

W1, W2 = WorkerRank(1, 0), WorkerRank(2, 0)
# Tokens hashes of a prompt.
PROMPT = [11, 12, 13, 14]


def test_each_tier_goes_on_where_the_one_before_ended():
    index = EngineIndex()
    index.store(W1, "device", None, [1], [11])
    index.store(W1, "host_pinned", 1, [2], [12])
    index.store(W1, "disk", 2, [3], [13])
    index.store(W1, "external", 3, [4], [14])
    assert index.match(PROMPT) == {W1: (1, 1, 2)}
    index.remove(W1, "host_pinned", [2])
    assert index.match(PROMPT) == {W1: (1, 0, 0)}
    index.clear(W1)
    assert index.match(PROMPT) == {}


def test_tiers_are_asked_in_their_order_only():
    index = EngineIndex()
    index.store(W1, "device", None, [1], [11])
    index.store(W1, "disk", 1, [2], [12])
    index.store(W1, "host_pinned", 2, [3], [13])
    assert index.match(PROMPT) == {W1: (1, 0, 1)}
    index.store(W1, "host_pinned", 1, [2], [12])
    assert index.match(PROMPT) == {W1: (1, 2, 0)}


def test_a_worker_without_device_blocks_starts_at_the_root():
    index = EngineIndex()
    index.store(W1, "host_pinned", 1, [2], [12])
    assert index.match(PROMPT) == {}
    index.store(W2, "host_pinned", None, [7, 8], [11, 12])
    assert index.match(PROMPT) == {W2: (0, 2, 0)}
    index.store(W1, "device", None, [1], [11])
    assert index.match(PROMPT) == {W1: (1, 1, 0), W2: (0, 2, 0)}


def test_lower_tiers_take_over_when_device_blocks_go():
    index = EngineIndex()
    index.store(W1, "device", None, [1, 2, 3], [11, 12, 13])
    index.store(W1, "host_pinned", None, [1, 2, 3, 4], PROMPT)
    assert index.match(PROMPT) == {W1: (3, 1, 0)}
    index.remove(W1, "device", [3, 2])
    assert index.match(PROMPT) == {W1: (1, 3, 0)}
    index.remove(W1, "device", [1])
    assert index.match(PROMPT) == {W1: (0, 4, 0)}


def test_in_a_lower_tier_who_came_first_stays():
    index = EngineIndex()
    index.store(W1, "disk", None, [1], [11])
    index.store(W1, "disk", None, [5], [11])
    index.store(W1, "disk", 1, [2], [12])
    index.store(W1, "disk", 9, [2], [12])
    assert index.match(PROMPT) == {W1: (0, 0, 2)}
    with pytest.raises(BlockMismatch, match="Failed to find block"):
        index.remove(W1, "disk", [5, 2])
    assert index.match(PROMPT) == {W1: (0, 0, 1)}


def test_a_worker_that_has_other_names_is_followed_by_those_of_the_tree():
    index = EngineIndex()
    index.store(W1, "device", None, [1], [11])
    index.store(W2, "device", None, [5], [11])
    index.store(W2, "host_pinned", 5, [6], [12])
    assert index.match(PROMPT)[W2] == (1, 0, 0)
    index.store(W2, "host_pinned", 1, [7], [12])
    assert index.match(PROMPT)[W2] == (1, 1, 0)


def test_removing_a_worker_takes_all_ranks_and_tiers():
    index = EngineIndex()
    for rank in (WorkerRank(1, 0), WorkerRank(1, 1), W2):
        index.store(rank, "device", None, [1], [11])
        index.store(rank, "disk", 1, [2], [12])
    index.clear_ranks(1)
    assert index.match(PROMPT) == {W2: (1, 0, 1)}


def test_a_dump_can_be_stored_again():
    index = EngineIndex()
    index.store(W1, "device", None, [1, 2], [11, 12])
    index.store(W1, "host_pinned", 2, [3, 4], [13, 14])
    index.store(W2, "external", None, [9], [11])
    again = EngineIndex()
    for tier, (worker, parent, blocks, tokens) in index.dump():
        again.store(worker, tier, parent, blocks, tokens)
    assert again.match(PROMPT) == index.match(PROMPT) == {W1: (2, 2, 0), W2: (0, 0, 1)}
