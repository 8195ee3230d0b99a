"""Snapshots of the KV index: written from committed rows, checked, restored, and the log trimmed below them."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotChunk, KvSnapshotManifest
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from streams.snapshot_writer import SnapshotWriter
from streams.snapshots import manifests_in
from tests.support.event_storm import EventStorm
from tests.support.snapshots import KeptLetters, snapshot_topic

NS = "ns"
TOPIC = KV_EVENTS.qualified(NS)
SNAPSHOTS = KV_SNAPSHOTS.qualified(NS)
PARTITIONS = range(KV_EVENTS.partitions)
DAY_S = 86_400


class Fleet:
    """One log, a replica with a snapshot writer, and a storm of events."""

    def __init__(self, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.log = MemoryLog("test", self.clock, random.Random(seed))
        self.rng = random.Random(seed)
        self.storm = iter(EventStorm(seed))
        self.codec = TopicCodec(KV_EVENTS)
        self.runners: list[FoldRunner] = []
        self.letters = KeptLetters()
        self.snapshots = snapshot_topic(self.log, NS, self.letters)

    async def start(self) -> None:
        await self.log.start()
        await self.log.create_topics(topic_configs(NS, None))
        self.replica = await self.join()
        self.writer = SnapshotWriter(
            self.log, self.replica, NS, self.snapshots,
            owned=lambda: PARTITIONS, name="test", clock=self.clock, rng=self.rng, trims=True,
        )  # fmt: skip

    async def join(self, *, snapshots: bool = True, store: MemoryStore | None = None) -> FoldRunner:
        """A new replica without state, caught up."""
        fold = KvIndexFold()
        runner = FoldRunner(
            fold, self.log, store or MemoryStore(), NS, clock=self.clock, dead_letters=self.letters,
            snapshots=SnapshotStart(self.log, NS, fold.version, self.snapshots) if snapshots else None,
        )  # fmt: skip
        self.runners.append(runner)
        await runner.start()
        await runner.wait_caught_up(60)
        return runner

    async def events(self, count: int, *, wait: bool = True) -> None:
        left = count
        for topic, key, value in self.storm:
            if topic is KV_EVENTS:
                await self.log.append(TOPIC, Entry(self.codec.encode(value), key, self.codec.headers))
                left -= 1
                if not left:
                    break
        if wait:
            await self.replica.wait_caught_up(60)

    async def truth(self) -> str:
        state, _ = await refold(KvIndexFold(), self.log, NS)
        return KvIndexFold().digest(state)

    async def close(self) -> None:
        for runner in self.runners:
            await runner.stop()
        await self.log.close()


@pytest.fixture
async def fleet():
    fleet = Fleet()
    await fleet.start()
    yield fleet
    await fleet.close()


def digest(runner: FoldRunner) -> str:
    return runner.fold.digest(runner.state)


async def records_read(runner: FoldRunner) -> int:
    return runner.counters.records


@pytest.mark.parametrize("seed", range(5))
async def test_a_replica_from_snapshots_and_tail_equals_a_fold_from_the_start(seed):
    fleet = Fleet(seed)
    await fleet.start()
    rng = random.Random(seed)
    try:
        for _ in range(6):
            await fleet.events(rng.randrange(1, 300))
            await fleet.writer.write_owned()
            await fleet.events(rng.randrange(1, 60))
            joined = await fleet.join()
            assert digest(joined) == await fleet.truth() == digest(fleet.replica)
            assert joined.counters.records <= 60 * 6
    finally:
        await fleet.close()


async def test_a_joining_replica_reads_only_the_tail(fleet):
    await fleet.events(400)
    await fleet.writer.write_owned()
    await fleet.events(10)
    joined = await fleet.join()
    assert joined.counters.records == 10
    plain = await fleet.join(snapshots=False)
    assert plain.counters.records == 410
    assert digest(joined) == digest(plain)


@pytest.mark.parametrize("seed", range(2))
async def test_replicas_that_join_under_load_reach_the_others_digest(seed):
    """From snapshots that are being written, from stores of their own, and from the log's start; events never pause."""
    fleet = Fleet(seed)
    await fleet.start()
    loading = True

    async def load() -> None:
        while loading:
            await fleet.events(20, wait=False)
            await asyncio.sleep(0)

    async def snapshots() -> None:
        while loading:
            await fleet.writer.write_owned()
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(load()), asyncio.create_task(snapshots())]
    try:
        await fleet.events(300)
        kept = MemoryStore()
        for number in range(6):
            # ``join`` waits for what the log had when it began; the load goes on meanwhile.
            joined = await fleet.join(snapshots=number % 3 != 0, store=kept if number % 3 == 1 else None)
            if number == 1:
                await joined.stop()
                fleet.runners.remove(joined)
    finally:
        loading = False
        await asyncio.gather(*tasks)
    truth = await fleet.truth()
    for runner in fleet.runners:
        await runner.wait_caught_up(60)
        assert digest(runner) == truth
    assert len(fleet.runners) == 6
    assert min(runner.counters.records for runner in fleet.runners) < sum(
        limits.end for limits in (await fleet.log.bounds(TOPIC)).values()
    )
    await fleet.close()


async def test_EVT_17_the_order_of_a_snapshots_records_means_nothing(fleet):
    """As a mirror or a compaction may leave them: manifests first, chunks of two workers in any order."""
    await fleet.events(400)
    await fleet.writer.write_owned()
    records = []
    for partition in PARTITIONS:
        reader = fleet.log.reader({TopicPartition(SNAPSHOTS, partition): 0})
        for found in (await reader.poll(timeout_s=0)).values():
            records += [Entry(record.value, record.key, record.headers, None, partition) for record in found]
        await reader.close()
    assert len(records) > len(PARTITIONS)
    expected = digest(fleet.replica)
    for seed in range(3):
        random.Random(seed).shuffle(records)
        # The same records once more: the newest of each key are in this order now.
        await fleet.log.append_all(SNAPSHOTS, records)
        joined = await fleet.join()
        assert (joined.counters.records, digest(joined)) == (0, expected)


async def test_nothing_is_written_where_nothing_happened(fleet):
    await fleet.events(200)
    await fleet.writer.write_owned()
    ends = await fleet.log.bounds(SNAPSHOTS)
    await fleet.writer.write_owned()
    assert await fleet.log.bounds(SNAPSHOTS) == ends


async def test_a_source_that_did_not_change_keeps_its_chunks(fleet):
    await fleet.events(300)
    await fleet.writer.write_owned()
    chunks = fleet.writer.counters.chunks
    assert chunks
    await fleet.events(1)
    await fleet.writer.write_owned()
    assert fleet.writer.counters.chunks - chunks <= 1


async def spoil(fleet, partition: int, change) -> None:
    """Replace one chunk of the newest snapshot of a partition by what ``change`` makes of it."""
    records = await fleet.snapshots.read(partition)
    (_, manifest), *_ = manifests_in(records, partition)
    state = next(state for state in manifest.sources if state.chunks)
    key = next(
        key for key, record in records.items()
        if isinstance(record, KvSnapshotChunk) and record.snapshot_id == state.snapshot_id
        and (record.model, record.worker_id) == (state.model, state.worker_id)
    )  # fmt: skip
    codec = TopicCodec(KV_SNAPSHOTS)
    value = change(records[key])
    await fleet.log.append(
        SNAPSHOTS, Entry(None if value is None else codec.encode(value), key, codec.headers, None, partition)
    )


async def busy_partition(fleet) -> int:
    for partition in PARTITIONS:
        found = manifests_in(await fleet.snapshots.read(partition), partition)
        if found and any(state.chunks for state in found[0][1].sources):
            return partition
    raise AssertionError("no partition has blocks")


def wrong_column(chunk: KvSnapshotChunk) -> KvSnapshotChunk:
    part = chunk.tiers[0]
    column = bytes([part.sequence_hashes[0] ^ 1]) + part.sequence_hashes[1:]
    return msgspec.structs.replace(chunk, tiers=[msgspec.structs.replace(part, sequence_hashes=column)])


@pytest.mark.parametrize("change", [lambda chunk: None, wrong_column], ids=["missing", "checksum"])
async def test_a_torn_snapshot_is_refused_and_the_one_before_used(fleet, change, caplog):
    await fleet.events(300)
    await fleet.writer.write_owned()
    await fleet.events(300)
    await fleet.writer.write_owned()
    partition = await busy_partition(fleet)
    records = await fleet.snapshots.read(partition)
    (_, newest), (_, older) = manifests_in(records, partition)
    assert older.next_offset < newest.next_offset
    await spoil(fleet, partition, change)
    joined = await fleet.join()
    assert digest(joined) == await fleet.truth()
    assert "torn" in caplog.text
    end = (await fleet.log.bounds(TOPIC))[partition].end
    assert joined.counters.records == end - older.next_offset
    # The next one is written whole again.
    await fleet.events(50)
    await fleet.writer.write_owned()
    assert digest(await fleet.join()) == await fleet.truth()


async def test_a_snapshot_of_another_topic_or_from_beyond_the_end_is_refused(fleet, caplog):
    await fleet.events(100)
    await fleet.writer.write_owned()
    partition = await busy_partition(fleet)
    records = await fleet.snapshots.read(partition)
    codec = TopicCodec(KV_SNAPSHOTS)
    for key, record in records.items():
        if isinstance(record, KvSnapshotManifest):
            foreign = msgspec.structs.replace(record, topic_id="another")
            await fleet.log.append(SNAPSHOTS, Entry(codec.encode(foreign), key, codec.headers, None, partition))
    assert digest(await fleet.join()) == await fleet.truth()
    assert "foreign" in caplog.text
    for key, record in records.items():
        if isinstance(record, KvSnapshotManifest):
            beyond = msgspec.structs.replace(record, next_offset=record.next_offset + 10_000)
            await fleet.log.append(SNAPSHOTS, Entry(codec.encode(beyond), key, codec.headers, None, partition))
    assert digest(await fleet.join()) == await fleet.truth()


class FailingLog:
    """A log whose appends fail after some, as when a process is killed in the middle of a snapshot."""

    def __init__(self, log: MemoryLog, appends: int) -> None:
        self._log = log
        self._left = appends

    def __getattr__(self, name):
        return getattr(self._log, name)

    async def append(self, topic, entry):
        self._use()
        return await self._log.append(topic, entry)

    async def append_all(self, topic, entries):
        for entry in entries:
            await self.append(topic, entry)

    def _use(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise LogUnavailable("killed")


@pytest.mark.parametrize("appends", range(0, 8, 2))
async def test_a_snapshot_that_broke_off_leaves_the_one_before(fleet, appends):
    await fleet.events(300)
    await fleet.writer.write_owned()
    await fleet.events(300)
    broken = SnapshotWriter(
        FailingLog(fleet.log, appends), fleet.replica, NS, fleet.snapshots,
        owned=lambda: PARTITIONS, name="broken", clock=fleet.clock, rng=fleet.rng,
    )  # fmt: skip
    with pytest.raises(LogUnavailable):
        await broken.write_owned()
    joined = await fleet.join()
    assert digest(joined) == await fleet.truth()
    assert joined.counters.records <= 300
    await fleet.writer.write_owned()
    assert (await fleet.join()).counters.records == 0


async def test_SCALE_09_the_log_is_trimmed_below_a_snapshot_once_records_are_old(fleet):
    """Whoever keeps the index writes snapshots, whatever it routes by: events that nobody weighs do not pile up."""
    await fleet.events(200)
    await fleet.writer.write_owned()
    assert all(bounds.start == 0 for bounds in (await fleet.log.bounds(TOPIC)).values())
    fleet.clock.advance(8 * DAY_S)
    await fleet.events(40)
    truth = await fleet.truth()
    await fleet.writer.write_owned()
    bounds = await fleet.log.bounds(TOPIC)
    assert sum(limits.end - limits.start for limits in bounds.values()) == 40
    joined = await fleet.join()
    assert digest(joined) == truth == digest(fleet.replica)


async def test_without_a_snapshot_that_holds_nothing_is_trimmed(fleet, monkeypatch):
    await fleet.events(200)
    await fleet.writer.write_owned()
    fleet.clock.advance(8 * DAY_S)
    real = SnapshotWriter._newest_whole
    calls = []

    def torn_when_read_back(self, records, partition, topic_id, bounds):
        calls.append(partition)
        return real(self, records, partition, topic_id, bounds) if len(calls) % 2 else None

    monkeypatch.setattr(SnapshotWriter, "_newest_whole", torn_when_read_back)
    await fleet.writer.write(await busy_partition(fleet))
    assert all(bounds.start == 0 for bounds in (await fleet.log.bounds(TOPIC)).values())


async def test_a_reader_that_fell_out_of_retention_starts_from_the_snapshot(fleet):
    await fleet.events(200)
    slow = await fleet.join()
    await fleet.writer.write_owned()
    for partition, bounds in (await fleet.log.bounds(TOPIC)).items():
        slow._reader.seek(TopicPartition(TOPIC, partition), 0)
        await fleet.log.trim(TopicPartition(TOPIC, partition), bounds.end)
    await fleet.events(1)
    async with asyncio.timeout(60):
        while digest(slow) != digest(fleet.replica) or not slow.counters.rebuilds:
            await asyncio.sleep(0.01)


async def test_chunks_that_no_snapshot_needs_are_deleted(fleet):
    for _ in range(6):
        await fleet.events(200)
        await fleet.writer.write_owned()
    for partition in PARTITIONS:
        records = await fleet.snapshots.read(partition)
        needed = sum(state.chunks for _, manifest in manifests_in(records, partition) for state in manifest.sources)
        chunks = sum(isinstance(record, KvSnapshotChunk) for record in records.values())
        assert chunks <= needed


async def test_a_partition_that_another_writer_sees_to_is_left_to_it_until_it_stops(fleet):
    other = SnapshotWriter(
        fleet.log, fleet.replica, NS, fleet.snapshots,
        owned=lambda: PARTITIONS, name="other", clock=fleet.clock, rng=fleet.rng,
    )  # fmt: skip
    for _ in range(3):
        await fleet.events(50)
        await fleet.replica.commit()
        for partition in PARTITIONS:
            await other.write(partition)
        written = fleet.writer.counters.written
        await fleet.events(50)
        await fleet.writer.write_owned()
    assert other.counters.written
    # The first round cannot tell; after it, the other one is seen at work.
    assert fleet.writer.counters.written == written
    await fleet.events(200)
    await fleet.writer.write_owned()
    assert fleet.writer.counters.written > written
    assert (await fleet.join()).counters.records == 0
