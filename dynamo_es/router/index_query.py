"""Question and answer of a remote KV index, as they travel over the request plane. Pure.

A question names some partitions of ``kv-events``; the answer says for which of them it holds, and how far they were.
Version 1. A later version may add fields at the end; whoever changes what a field means raises the version, and a
process that does not know it refuses. Sizes are bounded on both sides: what is beyond them is left out, which can only
make an overlap smaller.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from dynamo_es.errors import DynamoException, InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from schemas.columns import check_columns, pack_u64, unpack_u64
from schemas.numbers import Positive, Unsigned

QUERY_VERSION = 1
# Blocks of a prompt that are asked for: a million tokens in blocks of 16.
MAX_BLOCKS = 65_536
# Sources that an answer names; of more, those with the longest overlap.
MAX_ROWS = 16_384
MAX_PARTITIONS = 4_096
MAX_MODEL_CHARACTERS = 1_024


class BadAnswer(DynamoException):
    """An indexer's answer does not follow the contract."""


class IndexQuery(msgspec.Struct, array_like=True, gc=False):
    """What of a prompt is cached where?

    Attributes:
        version: ``QUERY_VERSION``.
        model: Name under which the model's KV events stand.
        block_size: Tokens a block.
        sequence_hashes: Packed u64 column over the prompt's complete blocks, at most ``MAX_BLOCKS``.
        partitions: Of ``kv-events``; sources of others are not asked for.
    """

    version: Unsigned
    model: str
    block_size: Positive
    sequence_hashes: bytes
    partitions: list[Unsigned]


class IndexAnswer(msgspec.Struct, array_like=True, gc=False):
    """Overlaps of the sources in some partitions. Columns are packed u64 and have one row a source.

    Attributes:
        version: ``QUERY_VERSION``.
        partitions: Which of those that were asked for the answer holds for. A source that has no row, but belongs to
            one of them, has nothing of the prompt.
        next_offsets: For each of them: the answer rests on all its records below this offset.
        worker_ids, dp_ranks: The sources.
        device, host, disk: Leading blocks in device memory; blocks by which host memory, then disk, extend them.
    """

    version: Unsigned
    partitions: list[Unsigned]
    next_offsets: list[Unsigned]
    worker_ids: bytes
    dp_ranks: bytes
    device: bytes
    host: bytes
    disk: bytes


def make_query(
    model: str, hashes: Sequence[int], block_size: int, partitions: Sequence[int], max_blocks: int
) -> IndexQuery:
    """The question for a prompt's sequence hashes, of which the first ``max_blocks`` are asked for."""
    asked = hashes if len(hashes) <= max_blocks else hashes[:max_blocks]
    return IndexQuery(QUERY_VERSION, model, block_size, pack_u64(asked), list(partitions))


def read_query(value: Any) -> IndexQuery:
    """A question from a decoded payload.

    Raises:
        InvalidArgument: It is malformed, too big, or of another version.
    """
    try:
        query = msgspec.convert(value, IndexQuery, builtin_types=(bytes,))
        check_columns((("sequence_hashes", query.sequence_hashes),))
    except (msgspec.ValidationError, ValueError) as error:
        raise InvalidArgument(f"index query: {error}") from error
    if query.version != QUERY_VERSION:
        raise InvalidArgument(
            f"index query of version {query.version}; this process knows {QUERY_VERSION}: run routers and indexers of "
            "the same release"
        )
    for what, size, most in (
        ("sequence_hashes", len(query.sequence_hashes) // 8, MAX_BLOCKS),
        ("partitions", len(query.partitions), MAX_PARTITIONS),
        ("model", len(query.model), MAX_MODEL_CHARACTERS),
    ):
        if size > most:
            raise InvalidArgument(f"index query: {what} has {size} entries, at most {most} are taken")
    return query


def make_answer(positions: Mapping[int, int], rows: Sequence[tuple[WorkerRank, TierOverlap]]) -> IndexAnswer:
    """The answer for partitions with their next offsets, and the sources that hold something."""
    if len(rows) > MAX_ROWS:
        rows = sorted(rows, key=lambda row: sum(row[1]), reverse=True)[:MAX_ROWS]
    return IndexAnswer(
        QUERY_VERSION,
        list(positions),
        list(positions.values()),
        *(pack_u64([rank[field] for rank, _ in rows]) for field in range(2)),
        *(pack_u64([overlap[tier] for _, overlap in rows]) for tier in range(3)),
    )


def read_answer(
    value: Any, asked: Collection[int], blocks: int
) -> tuple[dict[int, int], dict[WorkerRank, TierOverlap]]:
    """Next offset by partition, and what each source holds, from a decoded payload.

    ``asked``: the partitions that were asked for. ``blocks``: of the question.

    Raises:
        BadAnswer: It is malformed, of another version, or says what cannot be.
    """
    try:
        answer = msgspec.convert(value, IndexAnswer, builtin_types=(bytes,))
        columns = (answer.worker_ids, answer.dp_ranks, answer.device, answer.host, answer.disk)
        check_columns(tuple(zip(IndexAnswer.__struct_fields__[3:], columns, strict=True)))
    except (msgspec.ValidationError, ValueError) as error:
        raise BadAnswer(f"index answer: {error}") from error
    if answer.version != QUERY_VERSION:
        raise BadAnswer(f"index answer of version {answer.version}; this process knows {QUERY_VERSION}")
    if len(answer.worker_ids) > 8 * MAX_ROWS or len(answer.partitions) != len(answer.next_offsets):
        raise BadAnswer("index answer: too many rows, or partitions without offsets")
    if not set(answer.partitions) <= set(asked):
        raise BadAnswer("index answer: it holds for partitions that were not asked for")
    found: dict[WorkerRank, TierOverlap] = {}
    for worker_id, dp_rank, *depths in zip(*map(unpack_u64, columns), strict=True):
        if sum(depths) > blocks:
            raise BadAnswer(f"index answer: an overlap of {sum(depths)} blocks with a prompt of {blocks}")
        found[WorkerRank(worker_id, dp_rank)] = TierOverlap(*depths)
    return dict(zip(answer.partitions, answer.next_offsets, strict=True)), found
