from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dynamo_es.log.base import Bounds, Record, TopicPartition
from dynamo_es.log.errors import LogClosed, LogReplaced, LogUnavailable, OffsetOutOfRange
from dynamo_es.publishers.topic_tail import TopicTail
from schemas.codec import TopicCodec
from schemas.embedding_cache import EMBEDDING_CACHE, EmbeddingCacheDelta

TOPIC = EMBEDDING_CACHE.qualified("n")
PLACE = TopicPartition(TOPIC, 0)
CODEC = TopicCodec(EMBEDDING_CACHE)


def record(seq: int) -> Record:
    value = CODEC.encode(EmbeddingCacheDelta(1, 7, 1, seq, [], []))
    return Record(TOPIC, 0, seq, 0, b"7", value, CODEC.headers)


class ScriptedLog:
    """A log whose readers do, one poll after the other, what the script says."""

    def __init__(self, *script: Any) -> None:
        self.script = list(script)
        self.opened: list[Mapping[TopicPartition, int]] = []
        self.closed = 0
        self.end = 5

    async def bounds(self, topic: str) -> Mapping[int, Bounds]:
        assert topic == TOPIC
        return {0: Bounds(0, self.end)}

    def reader(self, positions: Mapping[TopicPartition, int]) -> ScriptedLog:
        self.opened.append(dict(positions))
        return self

    async def poll(
        self, *, max_records: int = 10_000, timeout_s: float | None = None
    ) -> Mapping[TopicPartition, Sequence[Record]]:
        step = self.script.pop(0) if self.script else LogClosed("the end")
        if isinstance(step, Exception):
            raise step
        return {PLACE: step}

    async def close(self) -> None:
        self.closed += 1


async def follow(log: ScriptedLog) -> list[int]:
    found: list[int] = []
    tail = TopicTail(log, EMBEDDING_CACHE, "n", lambda value: found.append(value.seq), retry_s=0.0)  # type: ignore[arg-type]
    await tail.open()
    async with asyncio.timeout(60):
        await tail.run()
    return found


async def test_only_what_comes_after_the_start_is_read() -> None:
    log = ScriptedLog([record(5), record(6)], [record(7)])
    assert await follow(log) == [5, 6, 7]
    assert log.opened == [{PLACE: 5}]
    assert log.closed == 1


async def test_what_cannot_be_decoded_is_passed_over() -> None:
    broken = Record(TOPIC, 0, 6, 0, b"7", b"\xff", CODEC.headers)
    deleted = Record(TOPIC, 0, 7, 0, b"7", None)
    assert await follow(ScriptedLog([record(5), broken, deleted, record(8)])) == [5, 8]


async def test_a_log_that_is_away_keeps_the_position() -> None:
    log = ScriptedLog([record(5)], LogUnavailable("away"), LogUnavailable("away"), [record(6)])
    assert await follow(log) == [5, 6]
    assert len(log.opened) == 1


@pytest.mark.parametrize("error", [LogReplaced("another one", "b", "a"), OffsetOutOfRange(TOPIC, 0, 6, 9, 9)])
async def test_a_position_that_means_nothing_is_given_up(error: Exception) -> None:
    log = ScriptedLog([record(5)], error, [record(9)])
    assert await follow(log) == [5, 9]
    assert len(log.opened) == 2
    assert log.closed == 2
