from __future__ import annotations

import asyncio
import logging
import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, TopicConfig, TopicPartition
from dynamo_es.log.buffered import _MISSING_ATTEMPTS, BackoffPolicy, BufferedAppender
from dynamo_es.log.errors import LogFull, LogUnavailable, UnknownTopic
from dynamo_es.log.memory import MemoryLog

FAST = BackoffPolicy(initial_s=0.001, maximum_s=0.002)


class MoodyLog(MemoryLog):
    """A memory log that raises what it is told to, and may append half of a batch before."""

    def __init__(self, clock):
        super().__init__("moody", clock)
        self.error = None
        self.half = False
        self.calls = 0
        self.called = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def append_all(self, topic, entries):
        self.calls += 1
        self.called.set()
        await self.gate.wait()
        if self.error is not None:
            if self.half:
                await super().append_all(topic, entries[: len(entries) // 2])
            raise self.error
        return await super().append_all(topic, entries)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
async def log(clock):
    log = MoodyLog(clock)
    await log.start()
    await log.create_topics([TopicConfig("a", 1), TopicConfig("b", 1), TopicConfig("small", 1, max_record_bytes=100)])
    yield log
    await log.close()


def appender(log, clock, **settings):
    return BufferedAppender(log, clock, random.Random(1), backoff=FAST, **settings)


async def values(log, topic):
    batch = await log.reader({TopicPartition(topic, 0): 0}).poll(timeout_s=0)
    return [record.value for record in batch.get(TopicPartition(topic, 0), ())]


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_offers_are_appended_in_order(log, clock):
    appended = []
    buffer = appender(log, clock, on_appended=lambda topic, positions: appended.append((topic, len(positions))))
    buffer.start()
    for number in range(2_500):
        assert buffer.offer("ab"[number % 2], Entry(b"%d" % number, b"k"))
    assert await buffer.flush(10)
    assert await values(log, "a") == [b"%d" % number for number in range(0, 2_500, 2)]
    assert await values(log, "b") == [b"%d" % number for number in range(1, 2_500, 2)]
    assert sum(count for _, count in appended) == 2_500
    assert buffer.stats().appended == 2_500
    assert log.calls < 20
    assert await buffer.close(1) == 0


async def test_time_is_that_of_the_offer(log, clock):
    buffer = appender(log, clock)
    offered_at = clock.now_ms()
    buffer.offer("a", Entry(b"v"))
    buffer.offer("a", Entry(b"v", timestamp_ms=7))
    clock.advance(60)
    buffer.start()
    assert await buffer.flush(10)
    batch = await log.reader({TopicPartition("a", 0): 0}).poll(timeout_s=0)
    assert [record.timestamp_ms for record in batch[TopicPartition("a", 0)]] == [offered_at, 7]
    await buffer.close(1)


async def test_it_keeps_what_it_has_while_the_log_is_away(log, clock):
    buffer = appender(log, clock)
    buffer.start()
    log.error = LogUnavailable("broker away")
    for number in range(10):
        buffer.offer("a", Entry(b"%d" % number))
    await until(lambda: log.calls >= 3)
    clock.advance(12)
    stats = buffer.stats()
    assert (stats.records, stats.appended, stats.dropped_full) == (10, 0, 0)
    assert stats.oldest_age_s == 12
    assert stats.last_error == "broker away"
    assert not await buffer.flush(0.01)
    log.error = None
    assert await buffer.flush(10)
    assert await values(log, "a") == [b"%d" % number for number in range(10)]
    stats = buffer.stats()
    assert (stats.records, stats.buffered_bytes, stats.oldest_age_s, stats.last_error) == (0, 0, 0.0, None)
    await buffer.close(1)


async def test_a_full_disk_is_waited_out_as_well(log, clock):
    buffer = appender(log, clock)
    buffer.start()
    log.error = LogFull("no space")
    buffer.offer("a", Entry(b"v"))
    await until(lambda: log.calls >= 2)
    log.error = None
    assert await buffer.flush(10)
    assert await values(log, "a") == [b"v"]
    await buffer.close(1)


async def test_an_attempt_that_failed_half_way_loses_nothing(log, clock):
    buffer = appender(log, clock)
    buffer.start()
    log.error, log.half = LogUnavailable("broker away"), True
    for number in range(4):
        buffer.offer("a", Entry(b"%d" % number))
    await until(lambda: log.calls >= 2)
    log.error = None
    assert await buffer.flush(10)
    assert (await values(log, "a"))[-4:] == [b"0", b"1", b"2", b"3"]
    await buffer.close(1)


@pytest.mark.parametrize(
    "bounds",
    [{"max_records": 3}, {"max_bytes": 3 * (256 + 11)}],
    ids=["records", "bytes"],
)
async def test_when_full_the_new_entry_is_dropped_and_reported(log, clock, caplog, bounds):
    lost = []
    buffer = appender(log, clock, on_loss=lambda topic, key: lost.append((topic, key)), **bounds)
    for number in range(3):
        assert buffer.offer("a", Entry(b"%010d" % number, b"k"))
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            assert not buffer.offer("b", Entry(b"%010d" % 9, b"x"))
    assert lost == [("b", b"x")] * 100
    assert len(caplog.records) == 1
    assert buffer.stats().dropped_full == 100
    clock.advance(6)
    with caplog.at_level(logging.WARNING):
        buffer.offer("b", Entry(b"%010d" % 9, b"x"))
    assert len(caplog.records) == 2
    buffer.start()
    assert await buffer.flush(10)
    assert await values(log, "a") == [b"%010d" % number for number in range(3)]
    assert buffer.offer("b", Entry(b"again"))
    await buffer.close(10)
    assert await values(log, "b") == [b"again"]


async def test_what_is_under_way_counts_as_buffered(log, clock):
    buffer = appender(log, clock, max_records=2)
    log.gate.clear()
    buffer.start()
    buffer.offer("a", Entry(b"1"))
    await asyncio.wait_for(log.called.wait(), 10)
    assert buffer.offer("a", Entry(b"2"))
    assert not buffer.offer("a", Entry(b"3"))
    log.gate.set()
    assert await buffer.flush(10)
    assert buffer.offer("a", Entry(b"4"))
    await buffer.close(10)
    assert await values(log, "a") == [b"1", b"2", b"4"]


async def test_EVT_18_a_topic_that_a_broker_does_not_know_for_a_moment_is_waited_for(log, clock):
    """One that has just started may answer so; an event that is given up for it would be lost."""
    lost = []
    buffer = appender(log, clock, on_loss=lambda topic, key: lost.append((topic, key)))
    buffer.start()
    log.error = UnknownTopic("a")
    for number in range(3):
        buffer.offer("a", Entry(b"%d" % number, b"k"))
    await until(lambda: log.calls == 2)
    log.error = None
    assert await buffer.flush(10)
    assert (await values(log, "a"), lost, log.calls) == ([b"0", b"1", b"2"], [], 3)
    await buffer.close(1)


async def test_EVT_18_a_topic_that_stays_away_costs_its_own_entries_and_holds_nobody_up_for_long(log, clock):
    lost = []
    buffer = appender(log, clock, on_loss=lambda topic, key: lost.append((topic, key)))
    buffer.start()
    for _ in range(2):
        buffer.offer("gone", Entry(b"v", b"g"))
        buffer.offer("a", Entry(b"v"))
        assert await buffer.flush(10)
    # Waited for once only: the second entry was tried once.
    assert (lost, log.calls) == ([("gone", b"g")] * 2, _MISSING_ATTEMPTS + 1 + 2)
    await log.create_topics([TopicConfig("gone", 1)])
    buffer.offer("gone", Entry(b"w"))
    assert await buffer.flush(10)
    assert await values(log, "gone") == [b"w"]
    assert buffer.stats().dropped_refused == 2
    await buffer.close(1)


async def test_a_refused_entry_costs_itself_only(log, clock):
    lost = []
    buffer = appender(log, clock, on_loss=lambda topic, key: lost.append((topic, key)))
    for number in range(20):
        value = b"x" * 500 if number in (3, 11) else b"%d" % number
        buffer.offer("small", Entry(value, b"k%d" % number))
    buffer.offer("missing", Entry(b"v", b"m"))
    buffer.offer("a", Entry(b"v"))
    buffer.start()
    assert await buffer.flush(10)
    assert await values(log, "small") == [b"%d" % number for number in range(20) if number not in (3, 11)]
    assert await values(log, "a") == [b"v"]
    assert lost == [("small", b"k3"), ("small", b"k11"), ("missing", b"m")]
    assert buffer.stats().dropped_refused == 3
    await buffer.close(1)


async def test_close_drains_and_reports_what_was_left(log, clock):
    lost = []
    buffer = appender(log, clock, on_loss=lambda topic, key: lost.append(key))
    buffer.start()
    buffer.offer("a", Entry(b"1", b"k1"))
    assert await buffer.flush(10)
    log.error = LogUnavailable("broker away")
    buffer.offer("a", Entry(b"2", b"k2"))
    buffer.offer("a", Entry(b"3", b"k3"))
    assert await buffer.close(0.02) == 2
    assert lost == [b"k2", b"k3"]
    assert not buffer.offer("a", Entry(b"4", b"k4"))
    assert lost[-1] == b"k4"
    assert await buffer.close(0.02) == 0


async def test_a_log_that_closes_under_it_does_not_spin(log, clock):
    buffer = appender(log, clock)
    buffer.start()
    await log.close()
    buffer.offer("a", Entry(b"v"))
    await asyncio.wait_for(log.called.wait(), 10)
    assert not await buffer.flush(0.02)
    assert log.calls == 1
    assert await buffer.close(0) == 1


def test_backoff_grows_to_its_maximum_with_jitter():
    policy = BackoffPolicy(initial_s=0.1, maximum_s=1.0)
    rng = random.Random(3)
    for attempt, longest in ((0, 0.1), (1, 0.2), (3, 0.8), (4, 1.0), (5_000, 1.0)):
        waits = {policy.wait_s(attempt, rng) for _ in range(50)}
        assert all(longest / 2 <= wait <= longest for wait in waits)
        assert len(waits) > 40
