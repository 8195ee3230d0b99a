from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid

import pytest

from dynamo_es.log.base import Entry, TopicConfig, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from tests.contract.log_suite import DEADLINE_S, from_start, read
from tests.kafka.broker import free_port

pytestmark = [pytest.mark.kafka, pytest.mark.crash]

RECOVERY_S = 60.0


async def make_topic(log, partitions=1):
    name = f"outage.{uuid.uuid4().hex}"
    await log.create_topics([TopicConfig(name, partitions, replication=1)])
    return name


class Writer:
    """Appends numbers until told to stop, again and again until each is acknowledged."""

    def __init__(self, log, topic, name):
        self.acknowledged = {}
        self.failures = 0
        self.longest_s = 0.0
        self.stopping = False
        self.task = asyncio.create_task(self._run(log, topic, name))

    async def _run(self, log, topic, name):
        number = 0
        while not self.stopping:
            value = b"%s/%d" % (name, number)
            begun = time.monotonic()
            try:
                position = await log.append(topic, Entry(value, name))
            except LogUnavailable:
                self.failures += 1
                await asyncio.sleep(0.05)
            else:
                self.acknowledged[position] = value
                number += 1
            finally:
                self.longest_s = max(self.longest_s, time.monotonic() - begun)

    async def progress(self):
        """Wait until more is acknowledged."""
        count = len(self.acknowledged)
        deadline = time.monotonic() + RECOVERY_S
        while len(self.acknowledged) < count + 20:
            assert not self.task.done() or self.task.result()
            assert time.monotonic() < deadline, "appends go on in time"
            await asyncio.sleep(0.01)


class Follower:
    """Reads everything, again from its positions after every outage."""

    def __init__(self, log, topic, partitions):
        self.records = {}
        self.failures = 0
        self.repeated = 0
        self.reader = log.reader(from_start(topic, partitions))
        self.task = asyncio.create_task(self._run())

    async def _run(self):
        while True:
            try:
                batch = await self.reader.poll()
            except LogUnavailable:
                self.failures += 1
                await asyncio.sleep(0.05)
                continue
            for position, records in batch.items():
                for record in records:
                    self.repeated += (position, record.offset) in self.records
                    self.records[position, record.offset] = record.value

    async def sees(self, acknowledged):
        deadline = time.monotonic() + RECOVERY_S
        wanted = {(TopicPartition(p.topic, p.partition), p.offset) for p in acknowledged}
        while not wanted <= self.records.keys():
            assert not self.task.done() or self.task.result()
            assert time.monotonic() < deadline, "everything acknowledged is read in time"
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("away_s", [0.0, 8.0], ids=["short", "long"])
async def test_everything_acknowledged_outlives_a_killed_broker(own_broker, open_kafka, away_s):
    """``long`` is longer than the time that one append may take, ``short`` is not."""
    options = "?request_timeout_ms=3000" if away_s else ""
    log = await open_kafka(own_broker.bootstrap, options)
    topic = await make_topic(log, 3)
    writers = [Writer(log, topic, b"w%d" % number) for number in range(6)]
    follower = Follower(log, topic, 3)
    for _ in range(1 if away_s else 2):
        await asyncio.gather(*(writer.progress() for writer in writers))
        own_broker.kill()
        if away_s:
            deadline = time.monotonic() + away_s
            while time.monotonic() < deadline or not (follower.failures and all(w.failures for w in writers)):
                assert time.monotonic() < deadline + RECOVERY_S, "the outage is noticed"
                await asyncio.sleep(0.05)
        own_broker.spawn()
        await asyncio.to_thread(own_broker.wait_ready)
        await asyncio.gather(*(writer.progress() for writer in writers))
    for writer in writers:
        writer.stopping = True
        await asyncio.wait_for(writer.task, RECOVERY_S)
    acknowledged = {position: value for writer in writers for position, value in writer.acknowledged.items()}
    assert len(acknowledged) == sum(len(writer.acknowledged) for writer in writers)
    await follower.sees(acknowledged)
    follower.task.cancel()
    assert follower.repeated == 0
    for position, value in acknowledged.items():
        assert follower.records[TopicPartition(position.topic, position.partition), position.offset] == value
    # Who reads it all afterwards sees what the one saw who lived through it.
    fresh = await read(log.reader(from_start(topic, 3)), len(follower.records))
    assert {(TopicPartition(r.topic, r.partition), r.offset): r.value for r in fresh} == follower.records
    limit_s = 3.0 if away_s else 10.0
    assert max(writer.longest_s for writer in writers) < limit_s + 6.0, "no append hangs"


async def test_a_silent_broker_becomes_log_unavailable(own_broker, open_kafka):
    """A machine that hangs answers nothing, and closes no connection either."""
    log = await open_kafka(own_broker.bootstrap, "?request_timeout_ms=2000&connect_timeout_ms=2000")
    topic = await make_topic(log)
    reader = log.reader(from_start(topic, 1))
    await log.append(topic, Entry(b"before"))
    await read(reader, 1)
    os.kill(own_broker.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(LogUnavailable, match="no acknowledgement within 2 s"):
            await log.append(topic, Entry(b"during"))
        with pytest.raises(LogUnavailable, match="no answer within 2 s"):
            await asyncio.wait_for(reader.poll(), DEADLINE_S)
        for _ in range(3):
            with pytest.raises(LogUnavailable):
                await log.append(topic, Entry(b"during"))
            with pytest.raises(LogUnavailable):
                await asyncio.wait_for(reader.poll(timeout_s=1.0), DEADLINE_S)
        assert time.monotonic() - begun < 30
        assert reader.positions() == {TopicPartition(topic, 0): 1}
    finally:
        os.kill(own_broker.pid, signal.SIGCONT)
    deadline = time.monotonic() + RECOVERY_S
    while True:
        try:
            position = await log.append(topic, Entry(b"after"))
            break
        except LogUnavailable:
            assert time.monotonic() < deadline
    records = await read(reader, position.offset)
    assert [record.offset for record in records] == list(range(1, position.offset + 1))
    assert records[-1].value == b"after"
    assert {record.value for record in records[:-1]} <= {b"during"}


async def test_close_ends_in_time_while_the_broker_is_away(own_broker, open_kafka):
    log = await open_kafka(own_broker.bootstrap, "?request_timeout_ms=2000&connect_timeout_ms=2000")
    topic = await make_topic(log)
    reader = log.reader(from_start(topic, 1))
    await log.append(topic, Entry(b"v"))
    await read(reader, 1)
    own_broker.kill()
    waiting = asyncio.create_task(reader.poll())
    appending = asyncio.create_task(log.append(topic, Entry(b"w")))
    abandoned = asyncio.create_task(log.append(topic, Entry(b"x")))
    await asyncio.sleep(0.1)
    abandoned.cancel()
    begun = time.monotonic()
    await log.close()
    assert time.monotonic() - begun < 15
    outcomes = await asyncio.gather(waiting, appending, abandoned, return_exceptions=True)
    assert all(isinstance(outcome, Exception | asyncio.CancelledError) for outcome in outcomes)


async def test_no_broker_is_told_quickly_with_what_to_do(open_kafka):
    servers = f"127.0.0.1:{free_port()}"
    begun = time.monotonic()
    with pytest.raises(LogUnavailable, match=rf"no Kafka broker answers at {servers}.*check that the cluster runs"):
        await open_kafka(servers)
    assert time.monotonic() - begun < 5


async def test_one_address_of_several_is_enough(kafka_bootstrap, open_kafka):
    dead = f"127.0.0.1:{free_port()}"
    log = await open_kafka(f"{dead},{kafka_bootstrap}")
    topic = await make_topic(log)
    await log.append(topic, Entry(b"v"))
    assert len(await read(log.reader(from_start(topic, 1)), 1)) == 1
