from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.store.errors import StoreFull, StoreLocked
from dynamo_es.store.memory import MemoryStore
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from streams.kv_partition import KvPartitionFold
from streams.partition_processor import PartitionGivenUp, ProcessorStatus
from streams.rank_load import MeasuredLoadFold, PassLoadFold
from streams.request_load import RequestLoadFold
from streams.state_writer import StoreCondition, in_thread
from tests.support.partition_fleet import NAMESPACE, PartitionFleet

FOLDS = [KvPartitionFold, RequestLoadFold, PassLoadFold, MeasuredLoadFold]


@pytest.fixture
async def make_fleet():
    fleets = []

    async def make(fold, seed=1):
        fleet = PartitionFleet(fold, seed)
        await fleet.start()
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        await fleet.log.close()


def partition_with_records(fleet, bounds):
    return max(bounds, key=lambda number: bounds[number].end)


async def opened(processor):
    await processor.open()
    assert processor.status is ProcessorStatus.LIVE
    return processor


def careless(rng, records, start):
    """Deliveries as a consumer group may make them: from anywhere, with repetitions and holes, cut anyhow."""
    position = max(0, start - rng.randrange(12))
    while position < len(records):
        size = rng.randint(1, 9)
        batch = [record for record in records[position : position + size] if rng.random() > 0.04]
        if batch:
            yield batch
        position += size - (rng.randrange(4) if rng.random() < 0.2 else 0)
        if rng.random() < 0.05:
            position += rng.randrange(20)


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.name)
@pytest.mark.parametrize("seed", range(6))
async def test_state_and_windows_are_exact_whatever_is_delivered(make_fleet, fold, seed):
    """Repeated and missing deliveries, crashes before and after a commit, and stores that are lost."""
    fleet = await make_fleet(fold, seed)
    rng = random.Random(seed)
    await fleet.events(60)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    store, processor = MemoryStore(), None
    for _ in range(12):
        if processor is None:
            processor = await opened(fleet.processor(partition, store))
        await fleet.events(rng.randrange(5, 60), repeat=0.1)
        for batch in careless(rng, await fleet.records(partition), processor.position):
            covered = await processor.take(batch)
            assert covered
            assert processor.position > batch[-1].offset
            if rng.random() < 0.1:
                await processor.commit()
        fate = rng.random()
        if fate < 0.3:
            await processor.commit()
            await processor.publish()
        if fate < 0.15 and fold is KvPartitionFold:
            await fleet.snapshot_writer(processor).write(partition)
        if fate < 0.4:
            processor = None
        elif fate < 0.5:
            processor, store = None, MemoryStore()
    processor = processor or await opened(fleet.processor(partition, store))
    await processor.catch_up((await fleet.log.bounds(fleet.topic))[partition].end)
    await processor.commit()
    await processor.publish()
    expected = await fleet.true_windows(partition)
    windows = processor.fold.windows(processor.state)
    assert {windows.key(row): row for row in windows.rows(partition)} == expected
    assert await fleet.published(partition) == expected
    assert expected


async def test_the_index_of_a_partition_is_that_of_a_whole_fold(make_fleet):
    """All partitions together, each from its own snapshot, hold what one fold of the whole topic holds."""
    fleet = await make_fleet(KvPartitionFold, 3)
    await fleet.events(300)
    for partition in range(KV_EVENTS.partitions):
        first = await opened(fleet.processor(partition))
        await first.commit()
        await first.publish()
        await fleet.snapshot_writer(first).write(partition)
    await fleet.events(80)
    counts = {}
    for partition in range(KV_EVENTS.partitions):
        second = await opened(fleet.processor(partition))
        assert second.counters.read <= 80
        for key, source in second.state.index.sources.items():
            counts[key] = (source.incarnation, source.next_seq, source.exact, source.counts)
    _, truth = await fleet.truth()
    truth.index.settle()
    assert counts == {
        key: (source.incarnation, source.next_seq, source.exact, source.counts)
        for key, source in truth.index.sources.items()
    }


async def test_a_new_owner_without_state_starts_from_what_was_published(make_fleet, monkeypatch):
    """The log's beginning is gone; windows and open requests go on all the same."""
    monkeypatch.setattr("streams.request_load.MAX_ENDED", 5)
    fleet = await make_fleet(RequestLoadFold)
    await fleet.events(400)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    first = await opened(fleet.processor(partition))
    await first.commit()
    await first.publish()
    expected_before = await fleet.true_windows(partition)
    await fleet.events(100)
    expected = await fleet.true_windows(partition)
    replay_from = first.fold.replay_from(first.state, partition, first.position)
    assert 0 < replay_from < first.position, "some request is open, and not the first"
    await fleet.log.trim(TopicPartition(fleet.topic, partition), replay_from)
    second = await opened(fleet.processor(partition))
    await second.commit()
    await second.publish()
    assert await fleet.published(partition) == expected != expected_before


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.name)
async def test_windows_published_without_their_progress_count_once(make_fleet, monkeypatch, fold):
    """A crash between the two: windows are newer than what the progress says."""
    fleet = await make_fleet(fold)
    await fleet.events(100)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    first = await opened(fleet.processor(partition))
    await first.publish()
    await fleet.events(100)
    await first.catch_up((await fleet.log.bounds(fleet.topic))[partition].end)
    append = fleet.log.append

    async def crash(topic, entry):
        raise LogUnavailable("crash")

    monkeypatch.setattr(fleet.log, "append", crash)
    with pytest.raises(LogUnavailable):
        await first.publish()
    monkeypatch.setattr(fleet.log, "append", append)
    second = await opened(fleet.processor(partition))
    await second.publish()
    assert await fleet.published(partition) == await fleet.true_windows(partition)


async def test_windows_of_a_topic_that_was_made_anew_are_deleted(make_fleet):
    """EVT-08: positions and windows of the old topic mean nothing."""
    fleet = await make_fleet(PassLoadFold)
    await fleet.events(80)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    store = MemoryStore()
    first = await opened(fleet.processor(partition, store))
    await first.commit()
    await first.publish()
    old = await fleet.published(partition)
    assert old
    # The memory log has no deletion: the same by an identity that does not fit.
    store.commit(first.fold.name, [], {}, {f"topic_id:{fleet.topic}": "gone"})
    second = await opened(fleet.processor(partition, store))
    await second.commit()
    await second.publish()
    assert await fleet.published(partition) == await fleet.true_windows(partition)
    other = fleet.processor(partition)
    other.fold.version = 99
    await other.open()
    await other.commit()
    await other.publish()
    assert await fleet.published(partition) == await fleet.true_windows(partition)


async def test_a_state_beyond_the_log_is_dropped(make_fleet):
    """EVT-08"""
    fleet = await make_fleet(PassLoadFold)
    await fleet.events(30)
    store = MemoryStore()
    first = await opened(fleet.processor(0, store))
    await first.commit()
    store.commit(first.fold.name, [], {first.place: 500})
    second = await opened(fleet.processor(0, store))
    assert second.position == (await fleet.log.bounds(fleet.topic))[0].end


async def test_nothing_is_folded_while_suspended(make_fleet):
    """EVT-13: of a batch in hand at a rebalance, what is not folded yet is the next owner's."""
    fleet = await make_fleet(PassLoadFold)
    processor = await opened(fleet.processor(0))
    await fleet.events(200)
    records = await fleet.records(0)
    await processor.take(records[:2])
    processor.suspend()
    position = processor.position
    assert not await processor.take(records[2:])
    await processor.catch_up(len(records))
    assert processor.position == position
    processor.resume()
    assert await processor.take(records[4:])
    assert processor.position == len(records)


async def test_a_record_that_does_not_decode_is_counted_and_put_aside(make_fleet):
    fleet = await make_fleet(PassLoadFold)
    processor = await opened(fleet.processor(0))
    await fleet.log.append(fleet.topic, Entry(b"\xc1", b"k", (), None, 0))
    await fleet.log.append(fleet.topic, Entry(None, b"k", (), None, 0))
    await processor.take(await fleet.records(0))
    assert [letter.reason for letter in fleet.letters.kept] == ["undecodable", "rejected"]
    assert processor.counters.refused == 2
    await processor.publish()
    published = await fleet.published(0)
    assert sorted((row.reason, row.records) for row in published.values()) == [("rejected", 1), ("undecodable", 1)]


async def test_a_fold_that_raises_does_not_stop_the_partition(make_fleet, caplog):
    class Faulty(PassLoadFold):
        def apply(self, state, record, value):
            if record.offset == 1:
                raise ZeroDivisionError
            super().apply(state, record, value)

    fleet = await make_fleet(Faulty)
    await fleet.events(100)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    processor = await opened(fleet.processor(partition))
    assert processor.position == (await fleet.log.bounds(fleet.topic))[partition].end
    assert [letter.detail for letter in fleet.letters.kept] == ["ZeroDivisionError: "]
    assert f"{fleet.topic}[{partition}]@1" in caplog.text


class Refusing(MemoryStore):
    refuses = False

    def commit(self, *arguments, **settings):
        if self.refuses:
            raise StoreFull(self.path, "no space")
        super().commit(*arguments, **settings)


async def test_a_failed_commit_loses_nothing(make_fleet):
    fleet = await make_fleet(RequestLoadFold)
    await fleet.events(50)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    store = Refusing()
    store.refuses = True
    processor = await opened(fleet.processor(partition, store))
    await processor.commit()
    assert processor.counters.failed_commits == 1
    await fleet.events(50)
    await processor.catch_up((await fleet.log.bounds(fleet.topic))[partition].end)
    store.refuses = False
    await processor.commit()
    again = await opened(fleet.processor(partition, store))
    assert again.counters.read == 0
    assert again.fold.digest(again.state) == processor.fold.digest(processor.state)


@pytest.mark.parametrize("make_fold", FOLDS)
async def test_a_store_that_refuses_for_long_delays_neither_the_windows_nor_what_comes(make_fleet, make_fold):
    fleet = await make_fleet(make_fold)
    await fleet.events(50)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    store = Refusing()
    processor = await opened(fleet.processor(partition, store, max_unwritten_bytes=1_000))
    await processor.commit()
    written = processor.position
    store.refuses = True
    while processor.store_condition is not StoreCondition.BEHIND:
        await fleet.events(50)
        await processor.catch_up((await fleet.log.bounds(fleet.topic))[partition].end)
        await processor.commit(patient=True)
    assert processor.counters.let_go == 1
    await processor.publish()
    assert store.positions(processor.fold.name) == {processor.place: written}
    after_a_kill = await opened(fleet.processor(partition, store))
    assert after_a_kill.fold.digest(after_a_kill.state) == processor.fold.digest(processor.state)
    store.refuses = False
    await processor.commit()
    assert store.positions(processor.fold.name) == {processor.place: processor.position}
    again = await opened(fleet.processor(partition, store))
    assert again.counters.read == 0
    assert again.fold.digest(again.state) == processor.fold.digest(processor.state)


async def test_a_log_that_is_away_delays_the_missing_records(make_fleet, monkeypatch):
    fleet = await make_fleet(PassLoadFold)
    processor = await opened(fleet.processor(0))
    await fleet.events(100)
    records = await fleet.records(0)
    reader = fleet.log.reader

    def away(positions):
        raise LogUnavailable("gone")

    monkeypatch.setattr(fleet.log, "reader", away)
    assert not await processor.take(records[2:])
    assert processor.position == 0
    monkeypatch.setattr(fleet.log, "reader", reader)
    assert await processor.take(records[-1:])
    assert processor.position == len(records)


async def test_a_position_that_fell_out_of_retention_voids_the_state(make_fleet):
    fleet = await make_fleet(RequestLoadFold)
    await fleet.events(100)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    processor = await opened(fleet.processor(partition))
    await processor.commit()
    await processor.publish()
    await fleet.events(100)
    end = (await fleet.log.bounds(fleet.topic))[partition].end
    await fleet.log.trim(processor.place, end - 3)
    await processor.catch_up(end)
    assert processor.status is ProcessorStatus.VOID
    assert not await processor.take((await fleet.records(partition, end - 3))[-1:])
    await processor.rebuild()
    assert processor.status is ProcessorStatus.LIVE
    assert processor.position == end
    assert processor.counters.rebuilds == 1


class LockedFor:
    """A store that another process holds for some attempts."""

    def __init__(self, attempts, clock):
        self.attempts = attempts
        self.clock = clock
        self.tries = 0

    def __call__(self):
        self.tries += 1
        self.clock.advance(1.0)
        if self.tries <= self.attempts:
            raise StoreLocked("/state/p0", "held by another process")
        return MemoryStore()


async def test_a_new_owner_waits_for_the_store(make_fleet):
    """EVT-09: nothing is consumed before the store is open."""
    fleet = await make_fleet(PassLoadFold)
    await fleet.events(50)
    held = LockedFor(3, fleet.clock)
    processor = fleet.processor(0, make_store=held, lock_timeout_s=20)
    opening = asyncio.create_task(processor.open())
    async with asyncio.timeout(60):
        while processor.status is not ProcessorStatus.WAITING:
            await asyncio.sleep(0.001)
        assert processor.position == processor.counters.folded == 0
        await opening
    assert held.tries == 4
    assert processor.status is ProcessorStatus.LIVE


async def test_a_store_that_stays_locked_gives_up_the_partition(make_fleet):
    """EVT-09: with a message that names partition, store, time and what to do."""
    fleet = await make_fleet(PassLoadFold)
    processor = fleet.processor(0, make_store=LockedFor(10**6, fleet.clock), lock_timeout_s=4)
    with pytest.raises(PartitionGivenUp, match=r"ns.forward-pass\[0\] is given up .*/state/p0 .* 4 s; .*--state-dir"):
        await processor.open()
    await processor.close()


async def test_close_ends_the_wait_for_a_store(make_fleet):
    fleet = await make_fleet(PassLoadFold)
    processor = fleet.processor(0, make_store=LockedFor(10**6, fleet.clock), lock_timeout_s=10**9)
    opening = asyncio.create_task(processor.open())
    async with asyncio.timeout(60):
        while processor.status is not ProcessorStatus.WAITING:
            await asyncio.sleep(0.001)
        await processor.close()
        with pytest.raises(Exception, match="is being closed"):
            await opening
    assert processor.status is ProcessorStatus.CLOSED


async def test_a_thread_is_waited_for_when_its_task_is_cancelled():
    began, goes_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    ended = []

    def job():
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(5)
        ended.append(True)

    task = asyncio.create_task(in_thread(job))
    await began.wait()
    task.cancel()
    loop.call_later(0.01, goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_newer_snapshots_of_others_do_not_make_windows_count_twice(make_fleet, caplog):
    """A router wrote a snapshot beyond the published windows: the one before is used."""
    fleet = await make_fleet(KvPartitionFold, 5)
    await fleet.events(200)
    partition = partition_with_records(fleet, await fleet.log.bounds(fleet.topic))
    first = await opened(fleet.processor(partition))
    await first.commit()
    await fleet.snapshot_writer(first).write(partition)
    await first.publish()
    await fleet.events(60)
    await first.catch_up((await fleet.log.bounds(fleet.topic))[partition].end)
    await first.commit()
    await fleet.snapshot_writer(first).write(partition)
    await fleet.events(60)
    second = await opened(fleet.processor(partition))
    await second.publish()
    assert await fleet.published(partition) == await fleet.true_windows(partition)
    assert (await fleet.log.bounds(KV_SNAPSHOTS.qualified(NAMESPACE)))[partition].end > 0


async def test_holes_of_a_compacted_topic_are_no_gap_that_is_waited_for(make_fleet):
    fleet = await make_fleet(MeasuredLoadFold)
    processor = await opened(fleet.processor(0))
    await fleet.events(300)
    await fleet.log.enforce_retention(fleet.clock.now_ms() + 10**10)
    bounds = await fleet.log.bounds(fleet.topic)
    partition = partition_with_records(fleet, bounds)
    records = await fleet.records(partition)
    assert len(records) < bounds[partition].end
    if partition != 0:
        processor = await opened(fleet.processor(partition))
    assert processor.position == bounds[partition].end or await processor.take(records)
    assert processor.position == bounds[partition].end


def test_every_fold_of_the_group_has_a_topic_of_its_own():
    assert {fold.topics[0] for fold in FOLDS} == {KV_EVENTS, FORWARD_PASS, *(f.topics[0] for f in FOLDS[1:])}
    assert len({fold.name for fold in FOLDS}) == len(FOLDS)
