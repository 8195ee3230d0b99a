"""Poison on a real Kafka, by our appends and by a foreign producer, and its dead letters on the command line."""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections import Counter

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka import errors as kafka

from dynamo_es.cli.main import main
from dynamo_es.log.base import Entry
from dynamo_es.log.errors import RecordTooLarge
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.letter_box import LetterBox, LetterFilter
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.dead_letters import DEAD_LETTERS
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.topic import Cleanup
from streams.kv_index import KvIndexFold
from streams.registry import RegistryFold
from streams.requests import RequestsFold
from streams.worker_load import WorkerLoadFold
from tests.support.letters import folding
from tests.support.poison import poison

pytestmark = pytest.mark.kafka

KEY = key_kv_events("m", 1, 0)
TEN_MB = 10_000_000


def batch(seq, *blocks):
    column = pack_u64(blocks)
    value = KvEvents(1, "m", 1, 0, 5, seq, 4, seq == 0, [BlocksStored("device", None, column, column)])
    return TopicCodec(KV_EVENTS).encode(value)


@pytest.fixture
async def log(open_kafka, kafka_bootstrap):
    return await open_kafka(kafka_bootstrap)


@pytest.fixture
async def foreign(kafka_bootstrap):
    """Somebody else's producer, with a bound that lets anything through."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka_bootstrap, max_request_size=50_000_000)
    await producer.start()
    yield producer
    await producer.stop()


async def make_topics(log, *topics):
    namespace = f"poison-{uuid.uuid4().hex[:8]}"
    await log.create_topics(topic_configs(namespace, 1, topics))
    return namespace


async def test_poison_of_a_foreign_producer_is_listed_shown_and_retried(log, foreign, kafka_bootstrap, capsys, caplog):
    caplog.set_level(logging.CRITICAL)
    namespace = await make_topics(log, KV_EVENTS, DEAD_LETTERS)
    topic = KV_EVENTS.qualified(namespace)
    bad = poison(KV_EVENTS, 5, large=2)
    began = time.monotonic()
    async with folding(log, namespace, KvIndexFold()) as (runner,):
        await log.append(topic, Entry(batch(0, 1), KEY, TopicCodec(KV_EVENTS).headers))
        for item in bad:
            await foreign.send(topic, item.entry.value, item.entry.key, headers=list(item.entry.headers))
        # What a publisher of the next version would write: this one refuses it.
        position = await foreign.send_and_wait(topic, batch(1, 2), KEY, headers=[("schema", b"kv-events/2")])
        await foreign.flush()
        await runner.wait_caught_up(60)
        assert runner.counters.dead_letters == len(bad) + 1
        assert sum(runner.state.models["m"].tier_blocks) == 1
        with capsys.disabled():
            print(f"\n{len(bad) + 1} poison records refused in {time.monotonic() - began:.1f} s")
    box = LetterBox(log, namespace)
    await box.open()
    letters = [found async for found in box.newest(LetterFilter())]
    await box.close()
    assert len({(found.letter.partition, found.letter.offset) for found in letters}) == len(letters) == len(bad) + 1
    number = next(
        found.number
        for found in letters
        if (found.letter.partition, found.letter.offset) == (position.partition, position.offset)
    )

    async def run(*words):
        place = ("--log", f"kafka://{kafka_bootstrap}", "--topic-namespace", namespace)
        code = await asyncio.to_thread(main, ["dead-letters", *words, *place])
        return code, capsys.readouterr().out

    code, out = await run("list", "--reason", "unknown_version", "--max-letters", "1000")
    assert code == 0
    assert f"{topic}[{position.partition}]@{position.offset} by kv-index: header says 'kv-events/2'" in out
    shown = json.loads((await run("show", str(number)))[1])
    assert shown["value"]["seq"] == 1
    assert shown["retry"] == f"it decodes now: dynamo-es dead-letters retry {number}"
    code, out = await run("retry", str(number))
    assert code == 0
    assert out.endswith("1 appended, 0 not\n")
    async with folding(log, namespace, KvIndexFold()) as (runner,):
        await runner.wait_caught_up(60)
        assert sum(runner.state.models["m"].tier_blocks) == 2


async def test_poison_in_every_topic_that_is_folded_is_in_dead_letters_and_stops_nothing(log, foreign, caplog):
    """A thousand random byte strings, truncated records, wrong versions and records up to the bound, in each."""
    caplog.set_level(logging.CRITICAL)
    folds = [RegistryFold(), KvIndexFold(), WorkerLoadFold(), RequestsFold()]
    specs = [spec for fold in folds for spec in fold.topics]
    namespace = await make_topics(log, *specs, DEAD_LETTERS)
    bad = {spec.name: poison(spec, 6, large=1) for spec in specs}
    async with folding(log, namespace, *folds) as runners:
        for spec in specs:
            for item in bad[spec.name]:
                entry = item.entry
                # The broker itself refuses a record without a key in a compacted topic, and its whole batch.
                key = b"k" if entry.key is None and spec.cleanup is Cleanup.COMPACTION else entry.key
                await foreign.send(spec.qualified(namespace), entry.value, key, headers=list(entry.headers))
        await foreign.flush()
        await log.append(KV_EVENTS.qualified(namespace), Entry(batch(0, 1), KEY, TopicCodec(KV_EVENTS).headers))
        for runner in runners:
            await runner.wait_caught_up(60)
            assert runner.counters.dead_letters == sum(len(bad[spec.name]) for spec in runner.topics)
        assert sum(runners[1].state.models["m"].tier_blocks) == 1
    box = LetterBox(log, namespace)
    await box.open()
    letters = [found.letter async for found in box.newest(LetterFilter())]
    await box.close()
    assert Counter(letter.topic for letter in letters) == {
        spec.qualified(namespace): len(bad[spec.name]) for spec in specs
    }


async def test_ten_megabytes_are_refused_by_the_broker_in_every_topic(log, foreign):
    """``max.message.bytes`` of each topic: nothing of it is in the log, and what comes after it is."""
    namespace = await make_topics(log, *TOPICS)
    for spec in TOPICS:
        topic = spec.qualified(namespace)
        with pytest.raises(
            RecordTooLarge, match=f"record of 10000001 bytes for '{topic}' exceeds the limit of 1048576"
        ):
            await log.append(topic, Entry(bytes(TEN_MB), b"k"))
        with pytest.raises(kafka.MessageSizeTooLargeError):
            await foreign.send_and_wait(topic, bytes(TEN_MB), b"k")
        assert sum(limits.end for limits in (await log.bounds(topic)).values()) == 0
        assert (await log.append(topic, Entry(bytes(1_048_000), b"k"))).offset == 0
