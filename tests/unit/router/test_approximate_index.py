from __future__ import annotations

import random

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.approximate_index import LruIndex, TtlIndex
from dynamo_es.router.hashing import hash_prompt

W1, W2 = WorkerRank(1, 0), WorkerRank(2, 0)
A = hash_prompt(list(range(16)), 4)
B = hash_prompt([*range(8), *range(100, 108)], 4)


def test_blocks_live_for_their_time_after_the_last_touch():
    index = TtlIndex(1.5)
    index.note(W1, *A, now=0.0)
    assert index.match(A[1], 1.4) == {W1: 4}
    index.note(W1, *A, now=0.9)
    assert index.match(A[1], 1.8) == {W1: 4}
    assert index.match(A[1], 2.4) == {}
    assert len(index) == 0


def test_a_shared_prefix_is_renewed_by_either_prompt():
    index = TtlIndex(1.0)
    index.note(W1, *A, now=0.0)
    index.note(W1, *B, now=0.5)
    assert index.match(A[1], 1.2) == {W1: 2}
    assert index.match(B[1], 1.2) == {W1: 4}


def test_each_rank_counts_as_far_as_it_holds_without_a_hole():
    index = TtlIndex(10.0)
    index.note(W1, *A, now=0.0)
    index.note(W2, A[0][:2], A[1][:2], now=0.0)
    assert index.match(A[1], 1.0) == {W1: 4, W2: 2}
    assert index.match(B[1], 1.0) == {W1: 2, W2: 2}
    assert index.match([5, *A[1]], 1.0) == {}
    assert index.match([], 1.0) == {}


def test_the_oldest_go_when_there_are_too_many():
    index = TtlIndex(1000.0, max_entries=8)
    index.note(W1, *A, now=0.0)
    index.note(W1, *B, now=1.0)
    index.note(W2, *A, now=2.0)
    assert len(index) <= 8
    assert index.match(A[1], 3.0)[W2] == 4


def test_a_prompt_without_a_complete_block_leaves_nothing():
    index = TtlIndex(1.0)
    index.note(W1, [], [], now=0.0)
    assert len(index) == 0


def test_a_dump_can_be_stored_again():
    index = TtlIndex(10.0)
    index.note(W1, *A, now=0.0)
    index.note(W2, *B, now=0.0)
    dumped = list(index.dump(1.0))
    again = TtlIndex(10.0)
    known: dict[tuple[WorkerRank, int], list[tuple[int, int]]] = {}
    for rank, parent, blocks, tokens in dumped:
        before = known[rank, parent] if parent is not None else []
        chain = before + list(zip(tokens, blocks, strict=True))
        again.note(rank, [pair[0] for pair in chain], [pair[1] for pair in chain], now=0.0)
        for end in range(len(before), len(chain)):
            known[rank, chain[end][1]] = chain[: end + 1]
    assert again.match(A[1], 1.0) == {W1: 4, W2: 2}
    assert again.match(B[1], 1.0) == {W1: 2, W2: 4}
    assert list(index.dump(11.0)) == []


def test_lru_forgets_the_ends_of_old_prompts_first():
    index = LruIndex(lambda rank: 5)
    index.note(W1, *A, now=0.0)
    index.note(W1, *B, now=0.0)
    assert index.match(B[1], 0.0) == {W1: 4}
    assert index.match(A[1], 0.0) == {W1: 3}
    index.note(W1, *A, now=0.0)
    assert index.match(A[1], 0.0) == {W1: 4}
    assert index.match(B[1], 0.0) == {W1: 3}


def test_lru_keeps_nothing_of_a_worker_whose_room_is_unknown():
    index = LruIndex({W1: None, W2: 2}.get)
    index.note(W1, *A, now=0.0)
    index.note(W2, *A, now=0.0)
    assert index.match(A[1], 0.0) == {W2: 2}
    assert len(index) == 2


def test_lru_is_bounded_over_all_ranks():
    rng = random.Random(1)
    index = LruIndex(lambda rank: 1000, max_entries=50)
    for number in range(40):
        tokens = [rng.randrange(1000) for _ in range(40)]
        index.note(WorkerRank(number % 7, 0), *hash_prompt(tokens, 4), now=0.0)
        assert len(index) <= 50
