from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynamo_es.errors import InvalidArgument
from dynamo_es.router import index_query
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from dynamo_es.router.index_query import (
    MAX_BLOCKS,
    QUERY_VERSION,
    BadAnswer,
    make_answer,
    make_query,
    read_answer,
    read_query,
)
from schemas.columns import pack_u64

W1, W2 = WorkerRank(2**64 - 1, 3), WorkerRank(7, 0)
ROWS = [(W1, TierOverlap(3, 2, 1)), (W2, TierOverlap(0, 0, 4))]


def through_the_wire(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


def changed(struct: Any, **fields: Any) -> Any:
    return through_the_wire(msgspec.structs.replace(struct, **fields))


QUERY = make_query("m", [2**64 - 1, 0, 5], 16, [0, 3], MAX_BLOCKS)
ANSWER = make_answer({3: 2**40, 0: 0}, ROWS)


def test_a_question_and_its_answer_travel():
    assert read_query(through_the_wire(QUERY)) == QUERY
    assert read_answer(through_the_wire(ANSWER), [0, 3], 6) == ({3: 2**40, 0: 0}, dict(ROWS))
    assert read_answer(through_the_wire(make_answer({}, [])), [0], 1) == ({}, {})


def test_fields_that_a_later_release_adds_are_passed_over():
    assert read_query([*through_the_wire(QUERY), "more"]) == QUERY
    assert read_answer([*through_the_wire(ANSWER), 1.5], [0, 3], 6)[1] == dict(ROWS)


def test_a_prompt_beyond_the_bound_is_asked_for_as_far_as_it():
    query = make_query("m", range(100), 16, [0], 10)
    assert query.sequence_hashes == pack_u64(range(10))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "Expected `array`"),
        ({"token_ids": [1]}, "Expected `array`"),
        ([], "at least length 5"),
        ([1, "m", 16, "text", []], "Expected `bytes`, got `str`"),
        (changed(QUERY, version=QUERY_VERSION + 1), "run routers and indexers of the same release"),
        (changed(QUERY, block_size=0), ">= 1"),
        (changed(QUERY, sequence_hashes=b"x" * 9), "not a multiple of 8"),
        (changed(QUERY, partitions=[-1]), ">= 0"),
        (changed(QUERY, sequence_hashes=bytes(8 * (MAX_BLOCKS + 1))), "at most 65536"),
        (changed(QUERY, partitions=list(range(5_000))), "at most 4096"),
        (changed(QUERY, model="m" * 2_000), "at most 1024"),
    ],
)
def test_a_question_that_is_wrong_is_refused_with_what_is_wrong(value, text):
    with pytest.raises(InvalidArgument, match=text):
        read_query(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "Expected `array`"),
        (changed(ANSWER, version=9), "of version 9"),
        (changed(ANSWER, partitions=[0, 3, 3]), "partitions without offsets"),
        (changed(ANSWER, partitions=[0, 4]), "not asked for"),
        (changed(ANSWER, next_offsets=[-1, 0]), ">= 0"),
        (changed(ANSWER, host=b""), "has 0 values"),
        (changed(ANSWER, disk=b"12"), "not a multiple of 8"),
        (changed(ANSWER, device=pack_u64([4, 0])), "an overlap of 7 blocks with a prompt of 6"),
        (changed(ANSWER, device=pack_u64([2**64 - 1, 0])), "an overlap of"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(value, text):
    with pytest.raises(BadAnswer, match=text):
        read_answer(value, [0, 3], 6)


def test_an_answer_names_the_sources_with_most_if_there_are_too_many(monkeypatch):
    rows = [(WorkerRank(number, 0), TierOverlap(number, 0, 0)) for number in range(10)]
    monkeypatch.setattr(index_query, "MAX_ROWS", 3)
    _, found = read_answer(through_the_wire(make_answer({0: 1}, rows)), [0], 9)
    assert sorted(rank.worker_id for rank in found) == [7, 8, 9]
    monkeypatch.setattr(index_query, "MAX_ROWS", 2)
    with pytest.raises(BadAnswer, match="too many rows"):
        read_answer(through_the_wire(make_answer({0: 1}, rows))[:3] + [pack_u64([0] * 3)] * 5, [0], 9)
