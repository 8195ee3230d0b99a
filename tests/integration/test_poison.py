"""Poison in every topic: what no reader understands goes to dead letters, and folds go on as if it were not there."""

from __future__ import annotations

import logging
import random
import time
import tracemalloc
from collections import Counter

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry
from dynamo_es.log.errors import RecordTooLarge
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.letter_box import LetterBox, LetterFilter
from dynamo_es.store.memory import MemoryStore
from schemas.catalog import TOPICS
from schemas.codec import SchemaError, TopicCodec
from schemas.dead_letters import DEAD_LETTERS, MAX_KEPT_BYTES, REASONS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.topic import Cleanup
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.registry import RegistryFold
from streams.requests import RequestsFold
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotWriter
from streams.worker_load import WorkerLoadFold
from tests.support.event_storm import EventStorm
from tests.support.letters import folding
from tests.support.poison import RANDOM_RECORDS, TRUNCATED_RECORDS, kinds, poison
from tests.support.snapshots import KeptLetters, snapshot_topic

NS = "ns"
FOLDS = (RegistryFold, KvIndexFold, WorkerLoadFold, RequestsFold)
FOLDED = [spec for fold in FOLDS for spec in fold().topics]
# A poll of the log holds at most 64 MiB of records, the buffer of letters as much again.
MEMORY_BYTES = 160 * 1024 * 1024
TEN_MB = 10_000_000


@pytest.fixture
async def log(tmp_path):
    log = open_log(f"embedded://{tmp_path}/log", SystemClock(), rng=random.Random(1))
    await log.start()
    await log.create_topics(topic_configs(NS, None))
    yield log
    await log.close()


async def spread(log, spec, good, bad):
    """Append good records of a topic in their order, with bad ones anywhere between."""
    entries = [*bad]
    rng = random.Random(2)
    for place, entry in zip(sorted(rng.randrange(len(bad) + 1) for _ in good), good, strict=True):
        entries.insert(place + len(entries) - len(bad), entry)
    await log.append_all(spec.qualified(NS), entries)


def storm(count):
    """Good records by topic."""
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    found = {spec.name: [] for spec in TOPICS}
    for spec, key, value in EventStorm(3):
        codec = codecs[spec.name]
        found[spec.name].append(Entry(None if value is None else codec.encode(value), key, codec.headers, 1_000))
        if sum(map(len, found.values())) == count:
            return found
    raise AssertionError("the storm ended")


async def test_all_of_it_is_in_dead_letters_and_every_fold_is_as_without_it(log, tmp_path, caplog):
    caplog.set_level(logging.CRITICAL)
    good = storm(2_000)
    clean = open_log(f"embedded://{tmp_path}/clean", SystemClock(), rng=random.Random(1))
    await clean.start()
    await clean.create_topics(topic_configs(NS, None))
    bad = {spec.name: poison(spec, 1) for spec in FOLDED}
    for spec in FOLDED:
        await spread(log, spec, good[spec.name], [item.entry for item in bad[spec.name]])
        await clean.append_all(spec.qualified(NS), good[spec.name])
    total = sum(map(len, bad.values()))
    counted = sum((kinds(found) for found in bad.values()), Counter())
    assert counted["random bytes"] == RANDOM_RECORDS * len(FOLDED)
    assert counted["truncated"] == TRUNCATED_RECORDS * len(FOLDED)

    began = time.monotonic()
    tracemalloc.start()
    try:
        async with folding(log, NS, *(fold() for fold in FOLDS)) as runners:
            for runner in runners:
                await runner.wait_caught_up(60)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    seconds = time.monotonic() - began
    for runner in runners:
        state, _ = await refold(type(runner.fold)(), clean, NS)
        assert runner.fold.digest(runner.state) == runner.fold.digest(state)
        assert runner.counters.dead_letters == sum(len(bad[spec.name]) for spec in runner.topics)
    await clean.close()
    assert peak < MEMORY_BYTES

    box = LetterBox(log, NS)
    await box.open()
    letters = [found.letter async for found in box.newest(LetterFilter())]
    await box.close()
    assert len(letters) == total
    assert len({(letter.topic, letter.partition, letter.offset) for letter in letters}) == total
    assert max(len(letter.value or b"") for letter in letters) == MAX_KEPT_BYTES
    assert {letter.reason for letter in letters} == {
        "undecodable", "unknown_version", "too_large", "missing_identity",
    }  # fmt: skip
    sizes = Counter(spec.name for spec in FOLDED for item in bad[spec.name] if item.kind == "close to the bound")
    assert sum(letter.reason == "too_large" for letter in letters) == sum(sizes.values()) // 2
    print(f"{total} poison records {dict(counted)} folded in {seconds:.1f} s, peak {peak >> 20} MiB traced")


async def test_a_record_above_the_bound_of_a_topic_never_gets_in(log):
    for spec in TOPICS:
        topic = spec.qualified(NS)
        for size in (1_048_576 + 1, TEN_MB):
            with pytest.raises(RecordTooLarge, match=f"record of {size} bytes for '{topic}' exceeds the limit"):
                await log.append(topic, Entry(bytes(size)))
        assert sum(limits.end for limits in (await log.bounds(topic)).values()) == 0
        position = await log.append(topic, Entry(bytes(1_048_576)))
        assert position.offset == 0


async def test_poison_between_snapshots_is_passed_over_and_in_dead_letters(log, caplog):
    """The topic of snapshots has no fold: whoever starts from it takes the newest snapshot that holds."""
    caplog.set_level(logging.CRITICAL)
    letters = KeptLetters()
    snapshots = snapshot_topic(log, NS, letters)
    events = [entry for entry in storm(2_000)[KV_EVENTS.name] if entry.value is not None]
    await log.append_all(KV_EVENTS.qualified(NS), events)
    async with folding(log, NS, KvIndexFold()) as (runner,):
        await runner.wait_caught_up(30)
        writer = SnapshotWriter(
            log, runner, NS, snapshots,
            owned=lambda: range(KV_EVENTS.partitions), name="test", clock=SystemClock(), rng=random.Random(1),
        )  # fmt: skip
        await writer.write_owned()
        bad = poison(KV_SNAPSHOTS, 1, large=1)
        for number in range(KV_SNAPSHOTS.partitions):
            await log.append_all(
                KV_SNAPSHOTS.qualified(NS), [item.entry._replace(partition=number) for item in bad[number::8]]
            )
        later = FoldRunner(
            KvIndexFold(), log, MemoryStore(), NS, clock=SystemClock(), dead_letters=letters,
            snapshots=SnapshotStart(log, NS, runner.fold.version, snapshots),
        )  # fmt: skip
        await later.start()
        await later.wait_caught_up(30)
        assert later.counters.records == 0
        assert later.fold.digest(later.state) == runner.fold.digest(runner.state)
        await writer.write_owned()
        await later.stop()
    # Once each, however often the topic is read; by their places, as whoever looks for them needs it.
    topic = KV_SNAPSHOTS.qualified(NS)
    assert len({(letter.partition, letter.offset) for letter in letters.kept}) == len(letters.kept) == len(bad)
    assert {(letter.topic, letter.reader) for letter in letters.kept} == {(topic, KV_SNAPSHOTS.name)}
    assert {letter.reason for letter in letters.kept} <= set(REASONS)


async def test_poison_among_dead_letters_hides_none_of_them(log):
    bad = poison(DEAD_LETTERS, 1, large=1)
    await log.append_all(DEAD_LETTERS.qualified(NS), [item.entry for item in bad])
    box = LetterBox(log, NS)
    await box.open()
    found = [found async for found in box.newest(LetterFilter())]
    await box.close()
    assert len(found) == len(bad)
    assert all(isinstance(item.letter, SchemaError) for item in found)


@pytest.mark.parametrize("spec", TOPICS, ids=lambda spec: spec.name)
def test_no_codec_takes_any_of_it(spec):
    codec = TopicCodec(spec)
    for item in poison(spec, 7, large=1):
        with pytest.raises(SchemaError):
            codec.decode(item.entry.value, item.entry.headers)


def test_compacted_topics_are_covered_as_well_as_those_kept_by_age():
    assert {spec.cleanup for spec in FOLDED} == set(Cleanup)
