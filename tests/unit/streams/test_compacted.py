"""Reading a partition of a compacted topic: newest records, refusals, bounds."""

from __future__ import annotations

import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from schemas.codec import TopicCodec
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotManifest, key_kv_manifest
from streams.compacted import CompactedTopic
from tests.support.snapshots import KeptLetters

NS = "ns"
TOPIC = KV_SNAPSHOTS.qualified(NS)
CODEC = TopicCodec(KV_SNAPSHOTS)


def manifest(next_offset: int, partition: int = 0) -> Entry:
    value = KvSnapshotManifest(1, partition, next_offset, "t", 1, "test", [])
    return Entry(CODEC.encode(value), key_kv_manifest(partition, 0), CODEC.headers, None, 0)


@pytest.fixture
async def log():
    log = MemoryLog("test", ManualClock(), random.Random(1))
    await log.start()
    await log.create_topics(topic_configs(NS, None))
    yield log
    await log.close()


async def test_the_newest_record_of_a_key_counts_and_a_tombstone_ends_it(log):
    letters = KeptLetters()
    topic = CompactedTopic(KV_SNAPSHOTS, log, NS, letters)
    await log.append_all(TOPIC, [manifest(1), manifest(2), manifest(7, partition=1)])
    found = await topic.read(0)
    assert {key: value.next_offset for key, value in found.items()} == {b"manifest/0/0": 2, b"manifest/1/0": 7}
    assert list(await topic.read(0, b"manifest/1/")) == [b"manifest/1/0"]
    await log.append(TOPIC, Entry(None, b"manifest/0/0", (), None, 0))
    assert list(await topic.read(0)) == [b"manifest/1/0"]
    assert not letters.kept


async def test_EVT_02_what_does_not_decode_hides_its_key_and_is_a_dead_letter_once(log):
    """So does a record without its key, as a careless mirror leaves it."""
    letters = KeptLetters()
    topic = CompactedTopic(KV_SNAPSHOTS, log, NS, letters)
    await log.append_all(
        TOPIC, [manifest(1), Entry(b"\xc1", b"manifest/0/0", (), None, 0), manifest(3)._replace(key=None)]
    )
    for _ in range(3):
        assert await topic.read(0) == {}
    assert [(letter.offset, letter.reason) for letter in letters.kept] == [(1, "undecodable"), (2, "missing_identity")]
    assert {(letter.topic, letter.reader) for letter in letters.kept} == {(TOPIC, "kv-snapshots")}
    await log.append(TOPIC, Entry(b"\xc1", b"x", (), None, 0))
    await topic.read(0)
    assert [letter.offset for letter in letters.kept] == [1, 2, 3]


async def test_what_exceeds_the_bound_is_left_out_and_told(log, caplog):
    letters = KeptLetters()
    size = len(manifest(1).value)
    topic = CompactedTopic(KV_SNAPSHOTS, log, NS, letters, max_held_bytes=3 * size)
    # One key after the other fits, however often it is written.
    await log.append_all(TOPIC, [manifest(number % 100) for number in range(50)])
    assert len(await topic.read(0)) == 1
    assert not caplog.records
    await log.append_all(TOPIC, [manifest(1, partition) for partition in range(1, 6)])
    assert len(await topic.read(0)) == 3
    assert f"{TOPIC}[0] has more than {3 * size} bytes: 3 records are left out" in caplog.text
