"""The public ``RadixTree``: arguments, results, threads. What it finds: see the recorded scripts and the model."""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_es.llm import OverlapScores, RadixTree

CLEARED = b'{"event_id":1,"data":"cleared"}'


def stored(blocks: list[int], parent: int | None = None, dp_rank: int = 0) -> bytes:
    """Blocks whose tokens hash is their block hash."""
    items = [{"block_hash": block, "tokens_hash": block} for block in blocks]
    data = {"stored": {"parent_hash": parent, "blocks": items}}
    return json.dumps({"event_id": 0, "data": data, "dp_rank": dp_rank}).encode()


def removed(blocks: list[int]) -> bytes:
    return json.dumps({"event_id": 0, "data": {"removed": {"block_hashes": blocks}}}).encode()


@pytest.mark.parametrize(
    ("method", "arguments", "kind", "text"),
    [
        ("find_matches", ("ab",), TypeError, "argument 'sequence': Can't extract `str` to `Vec`"),
        ("find_matches", ({1},), TypeError, "argument 'sequence': 'set' object cannot be converted to 'Sequence'"),
        ("find_matches", ({1: 2},), TypeError, "argument 'sequence': 'dict' object cannot be converted to 'Sequence'"),
        ("find_matches", (5, 1), TypeError, "argument 'sequence': 'int' object cannot be converted to 'Sequence'"),
        ("find_matches", ([1.0],), TypeError,
         "argument 'sequence': 'float' object cannot be interpreted as an integer"),
        ("find_matches", ([1, -1, 1.0],), OverflowError, "can't convert negative int to unsigned"),
        ("find_matches", ([2**64],), OverflowError, "int too big to convert"),
        ("find_matches", ([1], 1), TypeError, "argument 'early_exit': 'int' object cannot be converted to 'PyBool'"),
        ("find_matches", ([1], None), TypeError,
         "argument 'early_exit': 'NoneType' object cannot be converted to 'PyBool'"),
        ("apply_event", ("x", 5), TypeError, "argument 'worker_id': 'str' object cannot be interpreted as an integer"),
        ("apply_event", (-1, b"x"), OverflowError, "can't convert negative int to unsigned"),
        ("apply_event", (2**64, CLEARED), OverflowError, "int too big to convert"),
        ("apply_event", (1, CLEARED.decode()), TypeError,
         "argument 'kv_cache_event_bytes': 'str' object cannot be converted to 'PyBytes'"),
        ("apply_event", (1, bytearray(CLEARED)), TypeError,
         "argument 'kv_cache_event_bytes': 'bytearray' object cannot be converted to 'PyBytes'"),
        ("remove_worker", (1.5,), TypeError,
         "argument 'worker_id': 'float' object cannot be interpreted as an integer"),
        ("clear_all_blocks", (-1,), OverflowError, "can't convert negative int to unsigned"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused_in_the_words_of_dynamo(
    method: str, arguments: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as caught:
        getattr(RadixTree(), method)(*arguments)
    assert type(caught.value) is kind
    assert str(caught.value) == text


@pytest.mark.parametrize("sequence", [[], (1, 2), range(3), b"ab", bytearray(b"ab"), [True], [2**64 - 1]])
def test_every_sequence_of_hashes_can_be_asked_for(sequence: Any) -> None:
    assert RadixTree().find_matches(sequence=sequence, early_exit=True).scores == {}


def test_scores_are_by_worker_and_rank_and_cannot_be_changed() -> None:
    tree = RadixTree()
    tree.apply_event(worker_id=2**64 - 1, kv_cache_event_bytes=stored([1, 2], dp_rank=2**32 - 1))
    overlap = tree.find_matches([1, 2, 3])
    assert isinstance(overlap, OverlapScores)
    overlap.scores.clear()
    assert overlap.scores == {(2**64 - 1, 2**32 - 1): 2}
    assert overlap.frequencies == []
    with pytest.raises(AttributeError):
        overlap.scores = {}  # type: ignore[misc]
    tree.remove_worker(2**64 - 1)
    assert overlap.scores == {(2**64 - 1, 2**32 - 1): 2}


def test_scores_are_not_made_by_hand() -> None:
    with pytest.raises(TypeError, match="No constructor defined for OverlapScores"):
        OverlapScores()
    with pytest.raises(TypeError, match="cannot pickle 'OverlapScores' object"):
        copy.copy(RadixTree().find_matches([]))


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads change as often as they can, so that what is not locked shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_may_share_a_tree() -> None:
    """Each thread is a worker that grows, cuts and clears its copy of one chain, which all split and extend."""
    tree = RadixTree()
    rounds, threads, length = 40, 4, 24
    chain = list(range(1000, 1000 + length))
    failures: list[BaseException] = []
    start = threading.Barrier(threads + 1)

    def work(worker: int) -> None:
        try:
            start.wait()
            for turn in range(rounds):
                at = 1 + (worker * 7 + turn) % (length - 2)
                tree.apply_event(worker, stored(chain[:at]))
                tree.apply_event(worker, stored([*chain[at:], worker], parent=chain[at - 1]))
                tree.apply_event(worker, stored([worker * 10 + turn % 10], parent=chain[at]))
                assert tree.find_matches([*chain, worker]).scores[worker, 0] == length + 1
                tree.apply_event(worker, removed([worker]))
                assert tree.find_matches([*chain, worker]).scores[worker, 0] == length
                if turn < rounds - 1:
                    tree.apply_event(worker, CLEARED)
                    assert (worker, 0) not in tree.find_matches(chain).scores
        except BaseException as error:
            failures.append(error)

    def watch() -> None:
        try:
            start.wait()
            for _ in range(rounds):
                # Every dump is of one moment: it can be replayed.
                replica = RadixTree()
                for text in tree.dump_tree_as_events():
                    item = json.loads(text)
                    replica.apply_event(item["worker_id"], json.dumps(item["event"]).encode())
        except BaseException as error:
            failures.append(error)

    running = [threading.Thread(target=work, args=(worker,)) for worker in range(1, threads + 1)]
    running.append(threading.Thread(target=watch))
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert not any(thread.is_alive() for thread in running)
    assert failures == []
    assert tree.find_matches(chain).scores == {(worker, 0): length for worker in range(1, threads + 1)}
