"""A worker's partitions at assignments, rebalances and stalls; no consumer group, time by hand."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import pytest

from dynamo_es.log.base import TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.store.errors import StoreLocked
from dynamo_es.store.memory import MemoryStore
from schemas.kv_snapshots import KV_SNAPSHOTS
from streams.kv_partition import KvPartitionFold
from streams.partition_pool import Member, PartitionPool, PoolSettings
from streams.partition_processor import ProcessorStatus
from streams.pool_metrics import PoolCollector
from streams.pool_upkeep import PoolUpkeep
from streams.rank_load import PassLoadFold
from tests.support.partition_fleet import NAMESPACE, PartitionFleet
from tests.support.runtimes import wait_for

SETTINGS = PoolSettings(
    flush_interval_s=5, publish_interval_s=10, snapshot_interval_s=60, check_interval_s=5, stall_timeout_s=30,
    retry_s=0.02, handover_s=0.5, heartbeat_s=3, session_timeout_s=10,
)  # fmt: skip


class Worker:
    """A pool over a fleet's topic, and what it was told."""

    def __init__(self, fleet, stores=None, **settings):
        self.fleet = fleet
        self.stores = stores if stores is not None else {}
        self.processor_settings = {}
        self.acked = []
        self.stalled = []
        self.pool = PartitionPool(
            self.make, {fleet.topic: fleet.spec.partitions},
            settings=replace(SETTINGS, **settings), clock=fleet.clock, rng=fleet.rng,
        )  # fmt: skip
        self.upkeep = PoolUpkeep(self.pool, fleet.log, clock=fleet.clock, on_stalled=self.stalled.append)

    def make(self, place):
        store = self.stores.setdefault(place.partition, MemoryStore())
        processor = self.fleet.processor(place.partition, store, **self.processor_settings.get(place.partition, {}))
        writer = self.fleet.snapshot_writer(processor) if isinstance(processor.fold, KvPartitionFold) else None
        return Member(processor, writer)

    def place(self, partition):
        return TopicPartition(self.fleet.topic, partition)

    def assign(self, *partitions):
        self.pool.assign([self.place(partition) for partition in partitions])

    def processor(self, partition):
        return self.pool.members[self.place(partition)].processor

    async def live(self, *partitions):
        async with asyncio.timeout(60):
            while not all(self.processor(number).status is ProcessorStatus.LIVE for number in partitions):
                await asyncio.sleep(0.001)

    async def deliver(self, partition, records):
        number = len(self.acked)
        await self.pool.take(self.place(partition), records, lambda: self.acked.append((partition, records)))
        return len(self.acked) > number

    async def pass_time(self, seconds, step=1.0):
        """Let upkeep run, a tick a second."""
        for _ in range(int(seconds / step)):
            self.fleet.clock.advance(step)
            self.upkeep.tick()
            await self.upkeep.settle()
            for member in self.pool.members.values():
                if member.snapshot is not None:
                    await asyncio.wait({member.snapshot})


@pytest.fixture
async def fleet():
    fleet = PartitionFleet(PassLoadFold)
    await fleet.start()
    yield fleet
    await fleet.log.close()


@pytest.fixture
async def kv_fleet():
    fleet = PartitionFleet(KvPartitionFold)
    await fleet.start()
    yield fleet
    await fleet.log.close()


@pytest.fixture
async def busiest(fleet):
    """The partition with most records."""
    await fleet.events(100)
    bounds = await fleet.log.bounds(fleet.topic)
    return max(bounds, key=lambda number: bounds[number].end)


async def test_assigned_partitions_open_and_fold(fleet, busiest):
    worker = Worker(fleet)
    worker.assign(0, 1, 2, 3)
    assert worker.processor(busiest).status is ProcessorStatus.NEW, "assign does not wait"
    await worker.live(0, 1, 2, 3)
    position = worker.processor(busiest).position
    await fleet.events(100)
    records = await fleet.records(busiest, position)
    assert await worker.deliver(busiest, records)
    assert worker.processor(busiest).position == position + len(records)
    await worker.pool.close()


async def test_a_rebalance_commits_and_keeps_what_stays(fleet, busiest):
    worker = Worker(fleet)
    worker.assign(0, 1, 2, 3)
    await worker.live(0, 1, 2, 3)
    await worker.pool.suspend()
    kept = worker.processor(busiest)
    assert worker.stores[busiest].positions("pass-load") == {kept.place: kept.position}
    assert await fleet.published(busiest) == await fleet.true_windows(busiest)
    assert not await worker.deliver(busiest, await fleet.records(busiest))
    worker.assign(busiest)
    assert worker.processor(busiest) is kept
    assert kept.status is ProcessorStatus.LIVE
    assert list(worker.pool.members) == [kept.place]
    assert await worker.deliver(busiest, await fleet.records(busiest)), "all repeated"
    await worker.pool.close()


async def test_a_partition_that_is_revoked_while_its_batch_is_in_hand_goes_no_further(fleet, busiest):
    """EVT-13: what is committed is an explicit position of a partition that is still owned; the next owner goes on."""
    other = (busiest + 1) % 4
    stores = {}
    worker = Worker(fleet, stores)
    worker.assign(busiest, other)
    await worker.live(busiest, other)
    await fleet.events(400)
    await worker.pool.suspend()
    worker.assign(other)
    assert not await worker.deliver(busiest, await fleet.records(busiest)), "delivered before, not owned any more"
    assert worker.acked == []
    await worker.pool.close()
    heir = Worker(fleet, stores)
    heir.assign(busiest)
    await heir.live(busiest)
    await heir.pool.close()
    assert await fleet.published(busiest) == await fleet.true_windows(busiest)


async def test_deliveries_before_a_partition_is_live_are_acknowledged_after(fleet, busiest):
    worker = Worker(fleet)
    gate = asyncio.Event()
    reader = fleet.log.reader

    worker.processor_settings[busiest] = {"make_store": lambda: _wait_for(gate, loop)}
    loop = asyncio.get_running_loop()
    worker.assign(busiest)
    records = await fleet.records(busiest)
    assert not await worker.deliver(busiest, records[:5])
    assert not await worker.deliver(busiest, records[5:])
    gate.set()
    await worker.live(busiest)
    await worker.pass_time(1)
    assert worker.acked == [(busiest, records[:5]), (busiest, records[5:])]
    assert fleet.log.reader == reader
    await worker.pool.close()


def _wait_for(gate, loop):
    asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(5)
    return MemoryStore()


async def test_held_deliveries_are_bounded(fleet, busiest, monkeypatch):
    monkeypatch.setattr("streams.partition_pool._MAX_HELD", 4)
    worker = Worker(fleet)
    gate, loop = asyncio.Event(), asyncio.get_running_loop()
    worker.processor_settings[busiest] = {"make_store": lambda: _wait_for(gate, loop)}
    worker.assign(busiest)
    records = await fleet.records(busiest)
    for start in range(0, 9, 3):
        await worker.deliver(busiest, records[start : start + 3])
    assert worker.acked == [(busiest, records[0:3]), (busiest, records[3:6])]
    gate.set()
    await worker.pool.close()


class Held:
    """A store that another process holds until it lets go."""

    def __init__(self, clock):
        self.clock = clock
        self.free = False

    def __call__(self):
        self.clock.advance(0.5)
        if not self.free:
            raise StoreLocked("/shared/p", "held by another process")
        return MemoryStore()


async def test_only_the_partition_whose_store_is_held_is_given_up(fleet, caplog):
    """EVT-09: the worker stays alive, folds the others, and tries again later."""
    held = Held(fleet.clock)
    worker = Worker(fleet)
    worker.processor_settings[0] = {"make_store": held, "lock_timeout_s": 2.0}
    worker.assign(0, 1)
    await worker.live(1)
    async with asyncio.timeout(60):
        while not worker.pool.counters.given_up:
            await asyncio.sleep(0.001)
    assert "ns.forward-pass[0] is given up by this worker: /shared/p is held by another process" in caplog.text
    assert worker.processor(0).counters.folded == 0
    assert worker.processor(1).status is ProcessorStatus.LIVE
    assert any("[0] is given up" in reason for reason in worker.upkeep.health().reasons)
    held.free = True
    await worker.live(0)
    assert worker.upkeep.health().ready
    await worker.pool.close()


async def test_partitions_that_the_topic_got_later_are_refused(fleet, caplog):
    """EVT-16: a topic that grows while it is used breaks the order of its keys."""
    worker = Worker(fleet)
    worker.assign(0, 7)
    await worker.live(0)
    assert list(worker.pool.members) == [worker.place(0)]
    assert "ns.forward-pass[7] is refused: the topic had 4 partitions when this worker started" in caplog.text
    await worker.pool.close()


async def test_a_growing_topic_is_flagged(fleet, monkeypatch, caplog):
    """EVT-16"""
    worker = Worker(fleet)
    worker.assign(0)
    await worker.live(0)
    describe = fleet.log.describe

    async def grown(topic):
        return replace(await describe(topic), partitions=12)

    monkeypatch.setattr(fleet.log, "describe", grown)
    await worker.pass_time(6)
    assert "topic 'ns.forward-pass' had 4 partitions and has 12 now" in caplog.text
    assert not worker.upkeep.health().ready
    await worker.pool.close()


async def test_leaving_hands_everything_over(kv_fleet):
    await kv_fleet.events(200)
    worker = Worker(kv_fleet)
    worker.assign(*range(8))
    await worker.live(*range(8))
    await worker.pool.close()
    await worker.pool.close()
    bounds = await kv_fleet.log.bounds(KV_SNAPSHOTS.qualified(NAMESPACE))
    for partition in range(8):
        events = await kv_fleet.records(partition)
        assert bounds[partition].end or not events, "a last snapshot of each that has something"
        assert await kv_fleet.published(partition) == await kv_fleet.true_windows(partition)
    heir = Worker(kv_fleet)
    heir.assign(*range(8))
    await heir.live(*range(8))
    assert sum(member.processor.counters.read for member in heir.pool.members.values()) == 0
    await heir.pool.close()


async def test_a_partition_that_moves_away_is_let_go_without_delay(kv_fleet):
    """Its new owner may wait for the store: a snapshot is written only if one is due."""
    await kv_fleet.events(100)
    worker = Worker(kv_fleet)
    worker.assign(*range(8))
    await worker.live(*range(8))
    await worker.pool.suspend()
    worker.assign()
    await worker.pool.close()
    bounds = await kv_fleet.log.bounds(KV_SNAPSHOTS.qualified(NAMESPACE))
    assert not any(limits.end for limits in bounds.values())


async def test_a_rebalance_does_not_wait_for_a_log_that_hangs(fleet, busiest, monkeypatch):
    worker = Worker(fleet, handover_s=0.05)
    worker.assign(busiest)
    await worker.live(busiest)

    async def hang(topic, entries):
        await asyncio.Event().wait()

    monkeypatch.setattr(fleet.log, "append_all", hang)
    async with asyncio.timeout(60):
        await worker.pool.suspend()
    assert worker.stores[busiest].positions("pass-load"), "committed all the same"
    monkeypatch.undo()
    await worker.pool.close()


async def test_a_partition_that_cannot_be_opened_is_tried_again(fleet, caplog):
    tries = []

    def store():
        tries.append(1)
        if len(tries) < 3:
            raise ZeroDivisionError
        return MemoryStore()

    worker = Worker(fleet)
    worker.processor_settings[0] = {"make_store": store}
    worker.assign(0)
    await worker.live(0)
    assert caplog.text.count("not opened, will try again") == 2
    await worker.pool.close()


async def test_upkeep_commits_publishes_and_writes_snapshots(kv_fleet):
    await kv_fleet.events(100)
    bounds = await kv_fleet.log.bounds(kv_fleet.topic)
    partition = max(bounds, key=lambda number: bounds[number].end)
    worker = Worker(kv_fleet)
    worker.assign(partition)
    await worker.live(partition)
    processor = worker.processor(partition)
    await worker.pass_time(5)
    assert worker.stores[partition].positions("kv-partition") == {processor.place: processor.position}
    await worker.pass_time(6)
    assert await kv_fleet.published(partition) == await kv_fleet.true_windows(partition)
    await worker.pass_time(55)
    assert worker.pool.counters.snapshots == 1
    await worker.pass_time(120)
    assert worker.pool.counters.snapshots == 1, "nothing came in since"
    await worker.pool.close()


async def test_an_idle_partition_raises_no_alarm(fleet, busiest):
    """EVT-15"""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    await worker.pass_time(15 * 60)
    assert worker.upkeep.health().ready
    assert worker.stalled == []
    await worker.pool.close()


async def test_records_that_nobody_delivers_are_read_and_the_consumer_is_replaced(fleet, busiest, caplog):
    """EVT-14: the consumer is gone without an error; positions go on, and it is made anew."""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    for _ in range(9):
        await fleet.events(60)
        await worker.pass_time(5)
    processor = worker.processor(busiest)
    end = (await fleet.log.bounds(fleet.topic))[busiest].end
    assert processor.counters.delivered == 0
    assert end - processor.position < 60, "at most two checks behind"
    (error,) = worker.stalled
    assert error.place == processor.place
    assert 0 < error.offset <= processor.position
    assert f"ns.forward-pass[{busiest}] at offset {error.offset}:" in str(error)
    assert not worker.upkeep.health().ready
    await worker.pool.close()


async def test_records_that_come_while_the_log_is_asked_for_its_end_are_no_loss(fleet, busiest, monkeypatch):
    """A busy broker answers late: its answer is older than what the consumer has brought meanwhile."""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    processor = worker.processor(busiest)
    ask, overtaken = fleet.log.bounds, []

    async def answer_late(topic):
        bounds = await ask(topic)
        if topic != fleet.topic:
            return bounds
        with monkeypatch.context() as at_once:
            at_once.setattr(fleet.log, "bounds", ask)
            await fleet.events(40)
            await worker.deliver(busiest, await fleet.records(busiest, processor.position))
        overtaken.append(processor.position > bounds[busiest].end)
        return bounds

    monkeypatch.setattr(fleet.log, "bounds", answer_late)
    await worker.pass_time(20)
    assert any(overtaken)
    assert processor.counters.rebuilds == 0
    assert processor.status is ProcessorStatus.LIVE
    await worker.pool.close()


async def test_slow_deliveries_are_no_stall(fleet, busiest):
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    for _ in range(12):
        await fleet.events(30)
        await worker.deliver(busiest, (await fleet.records(busiest, worker.processor(busiest).position))[:1])
        await worker.pass_time(5)
    assert worker.stalled == []
    await worker.pool.close()


async def test_a_handler_that_hangs_is_told_with_its_offset(fleet, busiest, monkeypatch):
    """EVT-15: the alarm names topic, partition and offset."""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    position = worker.processor(busiest).position
    await fleet.events(100)
    records = await fleet.records(busiest, position)

    async def hang(records):
        await asyncio.Event().wait()

    monkeypatch.setattr(worker.processor(busiest), "_apply", hang)
    hanging = asyncio.create_task(worker.deliver(busiest, records))
    for _ in range(40):
        fleet.clock.advance(1)
        worker.upkeep.tick()
        await asyncio.sleep(0)
    assert f"ns.forward-pass[{busiest}] at offset {position}: its handler hangs" in str(worker.stalled[0])
    hanging.cancel()
    await asyncio.wait({hanging})
    monkeypatch.undo()
    await worker.upkeep.settle()
    await worker.pool.close()


async def test_a_log_that_is_away_is_no_stall(fleet, busiest, monkeypatch):
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)

    async def away(topic):
        raise LogUnavailable("no broker answers")

    monkeypatch.setattr(fleet.log, "describe", away)
    await worker.pass_time(120)
    assert worker.stalled == []
    assert worker.upkeep.health().reasons == ["the log is away: no broker answers"]
    monkeypatch.undo()
    await worker.pass_time(6)
    assert worker.upkeep.health().ready
    await worker.pool.close()


async def test_a_group_that_never_settles_is_joined_anew(fleet, busiest):
    """EVT-14: revoked, and never assigned again."""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    await worker.pool.suspend()
    await worker.pass_time(59)
    assert worker.stalled == []
    await worker.pass_time(3)
    assert worker.stalled[0].place is None
    await worker.pool.close()


async def test_a_topic_that_is_made_anew_is_folded_anew(fleet, busiest, monkeypatch):
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    await worker.pass_time(11)
    describe = fleet.log.describe

    async def other(topic):
        return replace(await describe(topic), topic_id="another")

    monkeypatch.setattr(fleet.log, "describe", other)
    await worker.pass_time(6)
    await worker.live(busiest)
    assert worker.processor(busiest).counters.rebuilds == 1
    assert worker.processor(busiest).topic_id == "another"
    await worker.pass_time(30)
    assert worker.processor(busiest).counters.rebuilds == 1
    assert await fleet.published(busiest) == await fleet.true_windows(busiest)
    await worker.pool.close()


async def test_a_process_that_stood_still_publishes_nothing_at_once(fleet, busiest, caplog):
    """Another worker may own the partitions by now, and have published more."""
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    await worker.pass_time(2)
    await fleet.events(50)
    await worker.processor(busiest).catch_up((await fleet.log.bounds(fleet.topic))[busiest].end)
    await worker.pass_time(60, step=60)
    assert "this process stood still for 6" in caplog.text
    assert await fleet.published(busiest) == {}
    await worker.pass_time(8)
    assert await fleet.published(busiest) == await fleet.true_windows(busiest)
    await worker.pool.close()


async def test_metrics_tell_position_lag_and_status(fleet, busiest):
    from prometheus_client import CollectorRegistry, generate_latest

    worker = Worker(fleet)
    registry = CollectorRegistry()
    registry.register(PoolCollector(worker.pool, worker.upkeep))
    assert b"dynamo_es_streams_ready 0.0" in generate_latest(registry)
    worker.assign(busiest)
    await worker.live(busiest)
    text = generate_latest(registry).decode()
    position = worker.processor(busiest).position
    labels = f'{{partition="{busiest}",topic="ns.forward-pass"}}'
    assert f"dynamo_es_streams_position_offset{labels} {float(position)}" in text
    assert f"dynamo_es_streams_read_total{labels} {float(position)}" in text
    assert (
        f'dynamo_es_streams_partition_status{{partition="{busiest}",status="live",topic="ns.forward-pass"}} 1' in text
    )
    assert "dynamo_es_streams_ready 1.0" in text
    assert "dynamo_es_streams_rebalances_total 1.0" in text
    await worker.pool.close()


async def test_DISC_10_a_worker_whose_upkeep_dies_is_not_ready(fleet, monkeypatch):
    worker = Worker(fleet)
    monkeypatch.setattr(worker.upkeep, "tick", lambda: 1 // 0)
    worker.upkeep.start()
    await wait_for(lambda: worker.upkeep.tasks.dead)
    health = worker.upkeep.health()
    assert not health.ready
    assert "background task partition-upkeep died of ZeroDivisionError" in health.reasons[0]
    await worker.upkeep.close()
    await worker.pool.close()


async def test_a_store_that_hangs_is_told_and_no_reason_to_replace_the_consumer(fleet, busiest, monkeypatch):
    worker = Worker(fleet)
    worker.assign(busiest)
    await worker.live(busiest)
    go_on, hangs = threading.Event(), threading.Event()
    store = worker.stores[busiest]
    commit = store.commit

    def hang(*arguments):
        hangs.set()
        assert go_on.wait(60)
        commit(*arguments)

    monkeypatch.setattr(store, "commit", hang)
    async with asyncio.timeout(60):
        while not hangs.is_set():
            fleet.clock.advance(1)
            worker.upkeep.tick()
            await asyncio.sleep(0.001)
    for _ in range(60):
        fleet.clock.advance(1)
        worker.upkeep.tick()
        await asyncio.sleep(0)
    assert worker.stalled == []
    assert worker.upkeep.health().reasons == [f"ns.forward-pass[{busiest}] waits for its store, which hangs"]
    go_on.set()
    await worker.pass_time(1)
    assert worker.upkeep.health().ready
    await worker.pool.close()
