"""State that is folded from Kafka: what a crash leaves behind, and a process that stood still."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid

import pytest
from aiokafka import AIOKafkaProducer

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, Position, TopicConfig
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.rocks import RocksStore
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.runner import FoldRunner
from tests.contract.log_suite import from_start, read_to_end
from tests.support.snapshots import KeptLetters

pytestmark = pytest.mark.kafka

DEADLINE_S = 60.0


async def test_EVT_12_rows_that_a_crash_leaves_hold_committed_records_only(open_kafka, kafka_bootstrap, tmp_path):
    """40 batches are committed, 10 are of a transaction that is aborted; then the process is gone."""
    namespace = f"state-{uuid.uuid4().hex[:8]}"
    topic = KV_EVENTS.qualified(namespace)
    log = await open_kafka(kafka_bootstrap)
    await log.create_topics(topic_configs(namespace, 1, [KV_EVENTS]))
    codec = TopicCodec(KV_EVENTS)

    def runner_on(folder):
        return FoldRunner(
            KvIndexFold(), log, RocksStore(folder, KvIndexFold.families), namespace,
            clock=SystemClock(), dead_letters=KeptLetters(), flush_interval_s=0.05,
        )  # fmt: skip

    first = runner_on(tmp_path / "first")
    await first.start()
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, transactional_id=uuid.uuid4().hex)
    await producer.start()
    for numbers, commits in ((range(40), True), (range(40, 50), False)):
        await producer.begin_transaction()
        for seq in numbers:
            column = pack_u64([seq + 1])
            value = KvEvents(1, "m", 1, 0, 5, seq, 16, seq == 0, [BlocksStored("device", None, column, column)])
            await producer.send_and_wait(
                topic, codec.encode(value), key=key_kv_events("m", 1, 0), headers=list(codec.headers)
            )
        await (producer.commit_transaction() if commits else producer.abort_transaction())
    await producer.stop()
    await first.wait_caught_up(DEADLINE_S)
    await first.commit()
    # A copy of the folder is what is left when the process is killed now.
    shutil.copytree(tmp_path / "first", tmp_path / "left")
    second = runner_on(tmp_path / "left")
    await second.start()
    await second.wait_caught_up(DEADLINE_S)
    truth, _ = await refold(KvIndexFold(), log, namespace)
    (source,) = truth.sources.values()
    assert (source.next_seq, source.exact) == (40, True)
    for runner in (first, second):
        assert runner.fold.digest(runner.state) == KvIndexFold().digest(truth)
    # It went on from the committed position, which is behind the transactions' marks.
    assert second.counters.records == 0
    assert second.positions() == first.positions()
    for runner in (first, second):
        await runner.stop()
        runner._store.close()


async def test_EVT_10_a_process_that_stood_still_goes_on_and_loses_nothing(open_kafka, kafka_bootstrap):
    """It stands still for longer than an append may take, in the middle of one: the producer is replaced, no more."""
    log = await open_kafka(kafka_bootstrap, "?request_timeout_ms=500")
    topic = f"still.{uuid.uuid4().hex}"
    await log.create_topics([TopicConfig(topic, 1, replication=1)])
    acknowledged: dict[Position, bytes] = {}
    repeated = 0
    for number in range(30):
        value = b"%d" % number
        async with asyncio.timeout(DEADLINE_S):
            while True:
                under_way = asyncio.create_task(log.append(topic, Entry(value, b"k")))
                await asyncio.sleep(0)
                if number % 10 == 5 and not repeated:
                    time.sleep(0.8)  # noqa: ASYNC251 - as a process does that is swapped out or debugged
                try:
                    acknowledged[await under_way] = value
                    break
                except LogUnavailable:
                    repeated += 1
                    await asyncio.sleep(0.05)
    assert len(acknowledged) == 30
    records = await read_to_end(log, log.reader(from_start(topic, 1)), topic)
    by_offset = {record.offset: record.value for record in records}
    assert all(by_offset[position.offset] == value for position, value in acknowledged.items())
    assert len(records) <= 30 + repeated
