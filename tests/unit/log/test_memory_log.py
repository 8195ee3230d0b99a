from __future__ import annotations

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import Bounds, Entry, TopicConfig, TopicPartition
from dynamo_es.log.memory import MemoryLog

P0 = TopicPartition("t", 0)


@pytest.fixture
async def log():
    log = MemoryLog("x", ManualClock(1_000))
    await log.start()
    await log.create_topics([TopicConfig("t", 2)])
    yield log
    await log.close()


async def test_time_comes_from_the_clock_or_the_entry(log):
    await log.append_all("t", [Entry(b"v", partition=0), Entry(b"v", partition=0, timestamp_ms=5)])
    batch = await log.reader({P0: 0}).poll(timeout_s=0)
    assert [record.timestamp_ms for record in batch[P0]] == [1_000, 5]


async def test_trim_is_exact(log):
    await log.append_all("t", [Entry(b"v", partition=0)] * 10)
    assert await log.trim(P0, 7) == 7
    assert await log.trim(P0, 3) == 7
    assert await log.trim(P0, 99) == 10
    assert (await log.bounds("t"))[0] == Bounds(10, 10)


@pytest.mark.parametrize(
    "entry",
    [
        Entry("text"),
        Entry(b"v", "key"),
        Entry(bytearray(b"v")),
        Entry(b"v", partition=2),
        Entry(b"v", partition=-1),
        Entry(b"v", timestamp_ms=-1),
    ],
)
async def test_a_wrong_entry_is_refused(log, entry):
    with pytest.raises(InvalidArgument):
        await log.append("t", entry)
    assert (await log.bounds("t"))[0] == Bounds(0, 0)


async def test_a_wrong_entry_takes_its_batch_with_it_and_appends_nothing(log):
    with pytest.raises(InvalidArgument):
        await log.append_all("t", [Entry(b"v", partition=0), Entry("text")])
    assert (await log.bounds("t"))[0] == Bounds(0, 0)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 250])
async def test_a_topic_name_follows_kafkas_rules(log, name):
    with pytest.raises(InvalidArgument, match="expected 1 to 249"):
        await log.create_topics([TopicConfig(name, 1)])


async def test_a_topic_needs_partitions(log):
    with pytest.raises(InvalidArgument, match="0 partitions"):
        await log.create_topics([TopicConfig("u", 0)])


async def test_a_busy_partition_does_not_hold_up_the_others(log):
    await log.append_all("t", [Entry(b"v", partition=0)] * 100)
    await log.append_all("t", [Entry(b"v", partition=1)] * 10)
    reader = log.reader({P0: 0, TopicPartition("t", 1): 0})
    first, second = await reader.poll(max_records=10), await reader.poll(max_records=10)
    assert set(first) | set(second) == {P0, TopicPartition("t", 1)}
