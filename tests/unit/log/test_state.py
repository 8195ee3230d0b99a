from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, TopicConfig
from dynamo_es.log.buffered import BackoffPolicy, BufferedAppender
from dynamo_es.log.errors import LogClosed, LogReplaced, LogUnavailable, RecordTooLarge, UnknownTopic
from dynamo_es.log.memory import MemoryLog
from dynamo_es.log.state import SLOW_APPEND_S, AppendWatch, LogCondition, LogState

OK = LogState(LogCondition.OK)


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def watch(clock):
    return AppendWatch(clock)


def fail(watch, topic, error):
    with pytest.raises(type(error)), watch.appending(topic):
        raise error


def work(watch, topic):
    with watch.appending(topic):
        pass


def test_a_failed_append_is_told_until_one_works(watch):
    assert watch.state() == OK
    fail(watch, "registry", LogUnavailable("read-only file system"))
    assert watch.state() == LogState(LogCondition.DEGRADED, "append to registry: read-only file system")
    assert not watch.state().ok
    work(watch, "registry")
    assert watch.state() == OK


def test_another_topic_that_works_hides_nothing(watch):
    fail(watch, "gone", UnknownTopic("gone"))
    work(watch, "registry")
    assert "gone" in watch.state().reason


@pytest.mark.parametrize("error", [RecordTooLarge("t", 2, 1), LogClosed("closed")])
def test_what_says_nothing_against_the_log_is_not_held_against_it(watch, error):
    fail(watch, "t", error)
    assert watch.state() == OK


def test_an_append_that_is_given_up_says_nothing(watch):
    with pytest.raises(asyncio.CancelledError), watch.appending("t"):
        raise asyncio.CancelledError
    assert watch.state() == OK


def test_an_append_that_hangs_is_told_before_it_fails(watch, clock):
    with watch.appending("t"):
        clock.advance(SLOW_APPEND_S / 2)
        with watch.appending("u"):
            assert watch.state() == OK
        clock.advance(SLOW_APPEND_S)
        assert watch.state() == LogState(LogCondition.DEGRADED, "an append to t is not done after 8 s")
    assert watch.state() == OK


def test_another_log_in_place_is_told_first_and_at_once(clock):
    told = []
    watch = AppendWatch(clock, told.append)
    fail(watch, "a", LogUnavailable("x"))
    error = LogReplaced("the log /dir", "new", "old")
    fail(watch, "b", error)
    assert told == [error]
    assert watch.state() == LogState(LogCondition.REPLACED, str(error))


async def test_a_buffer_tells_what_its_appends_do_and_what_it_drops(clock):
    log = MemoryLog("m", clock)
    await log.start()
    await log.create_topics([TopicConfig("t", 1)])
    fast = BackoffPolicy(initial_s=0.001, maximum_s=0.002)
    buffer = BufferedAppender(log, clock, random.Random(1), max_records=1, backoff=fast)
    real, log.append_all = log.append_all, refuse
    buffer.start()
    assert buffer.offer("t", Entry(b"v"))
    async with asyncio.timeout(60):
        while buffer.state().ok:
            await asyncio.sleep(0.001)
    assert buffer.state() == LogState(LogCondition.DEGRADED, "append to t: away")
    assert not buffer.offer("t", Entry(b"v"))
    log.append_all = real
    assert await buffer.flush(10)
    assert buffer.state().state is LogCondition.DEGRADED
    assert "1 events were dropped" in buffer.state().reason
    clock.advance(60)
    assert buffer.state() == OK
    await buffer.close(1)
    await log.close()


async def refuse(topic, entries):
    raise LogUnavailable("away")
