"""A runner that is given some partitions of its topic: it folds, counts and stores nothing of the others."""

from __future__ import annotations

import itertools
import random

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.memory import MemoryLog
from dynamo_es.log.partitioning import partition_for
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, key_kv_events
from streams.kv_index import KvIndexFold
from streams.runner import FoldRunner
from tests.support.event_storm import EventStorm

TOPIC = KV_EVENTS.qualified("ns")


class NoLetters:
    def offer_dead_letter(self, letter):
        raise AssertionError(letter)


@pytest.fixture
async def log():
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    await log.create_topics(topic_configs("ns", None))
    yield log
    await log.close()


async def append(log: MemoryLog, storm, count: int) -> None:
    codec = TopicCodec(KV_EVENTS)
    for _, key, value in itertools.islice(storm, count):
        await log.append(TOPIC, Entry(codec.encode(value), key, codec.headers))


def make(log, store, partitions) -> FoldRunner:
    return FoldRunner(
        KvIndexFold(), log, store, "ns", clock=SystemClock(), dead_letters=NoLetters(), flush_interval_s=0.05,
        partitions=partitions,
    )  # fmt: skip


def agree(part: FoldRunner, whole: FoldRunner) -> None:
    """All that the part has is as in the whole."""
    for runner in (part, whole):
        runner.state.settle()
    for key, source in part.state.sources.items():
        other = whole.state.sources[key]
        assert (source.next_seq, source.exact, source.counts) == (other.next_seq, other.exact, other.counts)


async def test_a_part_of_a_topic_is_folded_and_goes_on_from_its_own_store(log):
    storm = iter(EventStorm(3, [KV_EVENTS]))
    await append(log, storm, 200)
    sources = {number: partition_for(key_kv_events("m", number, 0), KV_EVENTS.partitions) for number in range(6)}
    mine = {sources[0], sources[1]}
    store = MemoryStore()
    whole, part = make(log, MemoryStore(), None), make(log, store, mine)
    assert (whole.label, part.label) == ("kv-index", f"kv-index[{','.join(map(str, sorted(mine)))}]")
    for runner in (whole, part):
        await runner.start()
        await runner.wait_caught_up(10)
    places = {TopicPartition(TOPIC, partition) for partition in mine}
    assert part.positions().keys() == part.ends().keys() == places
    assert {key.worker_id for key in part.state.sources} == {
        number for number, partition in sources.items() if partition in mine and number < 6
    }
    agree(part, whole)
    folded = part.counters.records
    assert folded < whole.counters.records
    await part.stop()
    assert store.positions("kv-index").keys() == places
    await append(log, storm, 100)
    again = make(log, store, mine)
    await again.start()
    await again.wait_caught_up(10)
    await whole.wait_caught_up(10)
    assert await again.measure_lag() == 0
    assert 0 < again.counters.records < whole.counters.records - folded
    agree(again, whole)
    await again.stop()
    await whole.stop()
