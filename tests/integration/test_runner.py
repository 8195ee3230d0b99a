from __future__ import annotations

import asyncio
import copy
import logging
import random
import threading

import pytest

from dynamo_es.clock import ManualClock, SystemClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.errors import LogUnavailable, OffsetOutOfRange, UnknownTopic
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.errors import StoreFull
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksStored, KvEvents, key_kv_events
from schemas.registry import REGISTRY, Instance, key_instance
from schemas.requests import REQUESTS, Finished
from streams import runner as runner_module
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.registry import RegistryFold
from streams.requests import HORIZON_MS, RequestsFold
from streams.runner import FoldRunner, RunnerStatus
from streams.state_writer import StoreCondition
from tests.support.runtimes import wait_for

NS = "ns"
TOPIC = KV_EVENTS.qualified(NS)


class Letters:
    def __init__(self):
        self.kept = []

    def offer_dead_letter(self, letter):
        self.kept.append(letter)


@pytest.fixture
async def log():
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    await log.create_topics(topic_configs(NS, None))
    yield log
    await log.close()


def runner_on(log, store, letters=None, flush=0.05, **settings):
    return FoldRunner(
        KvIndexFold(), log, store, NS,
        clock=SystemClock(), dead_letters=letters if letters is not None else Letters(), flush_interval_s=flush,
        **settings,
    )  # fmt: skip


def batch(seq, *blocks, worker=1):
    column = pack_u64(blocks)
    return KvEvents(1, "m", worker, 0, 5, seq, 4, seq == 0, [BlocksStored("device", None, column, column)])


async def append(log, value, key=None):
    codec = TopicCodec(KV_EVENTS)
    key = key_kv_events(value.model, value.worker_id, 0) if key is None else key
    return await log.append(TOPIC, Entry(codec.encode(value), key, codec.headers))


async def test_read_your_writes(log):
    runner = runner_on(log, MemoryStore())
    await runner.start()
    for seq in range(50):
        position = await append(log, batch(seq, 100 + seq))
        await runner.wait_applied(position, 5)
        assert sum(runner.state.models["m"].tier_blocks) == seq + 1
    assert runner.lag() == 0
    await runner.stop()


async def test_wait_applied_times_out_for_what_is_not_there(log):
    runner = runner_on(log, MemoryStore())
    await runner.start()
    position = await append(log, batch(0, 1))
    with pytest.raises(TimeoutError):
        await runner.wait_applied(position._replace(offset=position.offset + 1), 0.05)
    await runner.stop()


async def test_a_restart_goes_on_where_the_store_is(log):
    store = MemoryStore()
    first = runner_on(log, store)
    await first.start()
    for seq in range(20):
        await append(log, batch(seq, seq))
    await first.wait_caught_up(5)
    await first.stop()
    for seq in range(20, 30):
        await append(log, batch(seq, seq))
    second = runner_on(log, store)
    await second.start()
    await second.wait_caught_up(5)
    assert second.counters.records == 10
    folded, _ = await refold(KvIndexFold(), log, NS)
    assert second.fold.digest(second.state) == second.fold.digest(folded)
    await second.stop()


async def test_bad_records_become_dead_letters_and_nothing_stops(log):
    letters = Letters()
    runner = runner_on(log, MemoryStore(), letters)
    await runner.start()
    await append(log, batch(0, 1))
    key = key_kv_events("m", 1, 0)
    for bad in (b"", b"\xff", b"\x93", b"not msgpack", b"\x95\xa9kv-events\x63", bytes(1_048_000)):
        await log.append(TOPIC, Entry(bad, key))
    await log.append(TOPIC, Entry(None, key))
    position = await append(log, batch(1, 2))
    await runner.wait_applied(position, 5)
    assert sum(runner.state.models["m"].tier_blocks) == 2
    assert len(letters.kept) == 7
    assert {letter.reason for letter in letters.kept} >= {"undecodable", "rejected", "too_large"}
    assert max(len(letter.value or b"") for letter in letters.kept) == 65_536
    await runner.stop()


@pytest.mark.parametrize("change", ["log_id", "topic", "beyond_end", "fold_version"])
async def test_EVT_08_state_that_does_not_fit_the_log_is_folded_anew(log, change, caplog):
    store = MemoryStore()
    first = runner_on(log, store)
    await first.start()
    await append(log, batch(0, 1, 2, 3))
    await first.wait_caught_up(5)
    await first.stop()
    partition = TopicPartition(TOPIC, next(p for p, b in (await log.bounds(TOPIC)).items() if b.end))
    if change == "beyond_end":
        store.commit("kv-index", [], {partition: 500})
    else:
        name = {"log_id": "log_id", "topic": f"topic_id:{TOPIC}", "fold_version": "fold_version"}[change]
        store.commit("kv-index", [], {}, {name: "another"})
    second = runner_on(log, store)
    await second.start()
    await second.wait_caught_up(5)
    assert second.counters.records == 1
    assert sum(second.state.models["m"].tier_blocks) == 3
    assert "folding anew" in caplog.text
    await second.stop()
    assert store.positions("kv-index")[partition] == 1


async def test_EVT_11_rows_without_a_position_are_not_used(log):
    store = MemoryStore()
    first = runner_on(log, store)
    await first.start()
    await append(log, batch(0, 1, 2, 3))
    await first.wait_caught_up(5)
    await first.stop()
    store._positions.clear()
    second = runner_on(log, store)
    await second.start()
    await second.wait_caught_up(5)
    assert sum(second.state.models["m"].tier_blocks) == 3
    assert second.counters.records == 1
    await second.stop()


class FailingStore(MemoryStore):
    failing = False

    def commit(self, *arguments):
        if self.failing:
            raise StoreFull("mem", "no space left")
        super().commit(*arguments)


async def test_changes_of_a_failed_commit_are_in_the_next_one(log):
    store = FailingStore()
    runner = runner_on(log, store, flush=0.02)
    await runner.start()
    store.failing = True
    await append(log, batch(0, 1, 2))
    await runner.wait_caught_up(5)
    async with asyncio.timeout(60):
        while not runner.counters.failed_commits:
            await asyncio.sleep(0.005)
    await append(log, batch(1, 3))
    await runner.wait_caught_up(5)
    store.failing = False
    await runner.stop()
    restarted = KvIndexFold().load(store)
    assert KvIndexFold().digest(restarted) == runner.fold.digest(runner.state)


async def test_SCALE_08_a_store_that_refuses_for_long_costs_no_memory_and_no_record(log, caplog):
    """A kill meanwhile finds the last state that was written, and what came after it in the log."""
    store = FailingStore()
    runner = runner_on(log, store, flush=0.01, max_unwritten_bytes=2_000)
    await runner.start()
    await runner.wait_applied(await append(log, batch(0, 1, 2)), 60)
    await runner.commit()
    store.failing = True
    seq = 1
    while runner.store_condition is not StoreCondition.BEHIND:
        await runner.wait_applied(await append(log, batch(seq, 1000 + seq)), 60)
        seq += 1
        assert runner.unwritten_bytes <= 4_000
    for _ in range(30):
        await append(log, batch(seq, 1000 + seq))
        seq += 1
    await runner.wait_caught_up(60)
    assert runner.counters.let_go == 1
    assert sum(runner.state.models["m"].tier_blocks) == seq + 1
    assert sum(store.positions("kv-index").values()) == 1
    after_a_kill = runner_on(log, copy.deepcopy(store))
    await after_a_kill.start()
    await after_a_kill.wait_caught_up(60)
    assert after_a_kill.counters.records == seq - 1
    assert after_a_kill.fold.digest(after_a_kill.state) == runner.fold.digest(runner.state)
    await after_a_kill.stop()
    store.failing = False
    await wait_for(lambda: runner.store_condition is StoreCondition.WRITTEN)
    await runner.stop()
    assert "has the whole state" in caplog.text
    assert sum(store.positions("kv-index").values()) == seq
    folded, _ = await refold(KvIndexFold(), log, NS)
    assert KvIndexFold().digest(KvIndexFold().load(store)) == KvIndexFold().digest(folded)


async def test_a_store_that_hangs_holds_up_neither_the_view_nor_its_readers(log):
    class HangingStore(MemoryStore):
        may_go_on, hangs = threading.Event(), threading.Event()

        def commit(self, *arguments):
            self.hangs.set()
            assert self.may_go_on.wait(60)
            super().commit(*arguments)

    store = HangingStore()
    runner = runner_on(log, store, flush=0.01, max_unwritten_bytes=2_000)
    await runner.start()
    await append(log, batch(0, 1, 2))
    await wait_for(store.hangs.is_set)
    for seq in range(1, 40):
        await runner.wait_applied(await append(log, batch(seq, 1000 + seq)), 60)
        assert runner.unwritten_bytes <= 4_000
    assert runner.status is RunnerStatus.LIVE
    store.may_go_on.set()
    await wait_for(lambda: runner.store_condition is StoreCondition.WRITTEN and runner.counters.commits > 1)
    await runner.stop()
    assert KvIndexFold().digest(KvIndexFold().load(store)) == runner.fold.digest(runner.state)


class AwayLog:
    """A log that is away when told so."""

    def __init__(self, log, error=None):
        self._log, self.away = log, False
        self.error = error or LogUnavailable("the broker is away")

    def __getattr__(self, name):
        return getattr(self._log, name)

    def reader(self, positions):
        outer, inner = self, self._log.reader(positions)

        class Reader:
            async def poll(self, **options):
                if outer.away:
                    raise outer.error
                return await inner.poll(max_records=options["max_records"], timeout_s=0.02)

            def __getattr__(self, name):
                return getattr(inner, name)

        return Reader()


@pytest.mark.parametrize("error", [LogUnavailable("away"), UnknownTopic("t")], ids=["away", "unknown-topic"])
async def test_EVT_18_the_view_outlives_the_log_and_goes_on_after_it(log, error):
    """Also one whose brokers do not know the topic for a moment."""
    away = AwayLog(log, error)
    runner = runner_on(away, MemoryStore())
    await runner.start()
    await runner.wait_applied(await append(log, batch(0, 1)), 5)
    away.away = True
    async with asyncio.timeout(60):
        while runner.status is not RunnerStatus.LOG_AWAY:
            await asyncio.sleep(0.005)
    assert sum(runner.state.models["m"].tier_blocks) == 1
    position = await append(log, batch(1, 2))
    away.away = False
    await runner.wait_applied(position, 5)
    async with asyncio.timeout(60):
        while runner.status is not RunnerStatus.LIVE:
            await asyncio.sleep(0.005)
    assert sum(runner.state.models["m"].tier_blocks) == 2
    await runner.stop()


async def test_a_position_that_fell_out_of_retention_means_folding_anew(log):
    store = MemoryStore()
    runner = runner_on(log, store)
    await runner.start()
    position = await append(log, batch(0, 1))
    await runner.wait_applied(position, 5)
    place = TopicPartition(position.topic, position.partition)
    for seq in range(1, 5):
        await append(log, batch(seq, seq + 1))
    await runner.wait_caught_up(5)
    await log.trim(place, 3)
    runner._reader.seek(place, 1)
    async with asyncio.timeout(60):
        while not runner.counters.rebuilds:
            await append(log, batch(5, 99))
            await asyncio.sleep(0.01)
    await runner.wait_caught_up(5)
    source = next(iter(runner.state.sources.values()))
    assert not source.exact
    await runner.stop()


async def test_a_state_that_is_to_begin_anew_waits_for_a_store_that_refuses(log):
    class RefusesToWipe(MemoryStore):
        refused = 0

        def wipe(self, *arguments):
            if self.refused < 3:
                self.refused += 1
                raise StoreFull("mem", "no space left")
            super().wipe(*arguments)

    reads, store = FailingReads(log), RefusesToWipe()
    runner = runner_on(reads, store)
    await runner.start()
    await runner.wait_applied(await append(log, batch(0, 1)), 60)
    reads.failures.append(OffsetOutOfRange(TOPIC, 0, 0, 5, 9))
    await wait_for(lambda: runner.counters.rebuilds)
    assert store.refused == 3
    await runner.wait_applied(await append(log, batch(1, 2)), 60)
    assert sum(runner.state.models["m"].tier_blocks) == 2
    await runner.stop()


class FailingReads:
    """A log whose readers return nothing while ``held``, and raise ``failures``, one a poll."""

    def __init__(self, log):
        self._log, self.failures, self.held, self.waiting = log, [], False, False
        self.asked_for = []

    def __getattr__(self, name):
        return getattr(self._log, name)

    def reader(self, positions):
        outer, inner = self, self._log.reader(positions)

        class Reader:
            async def poll(self, **options):
                while outer.held and not outer.failures:
                    outer.waiting = True
                    await asyncio.sleep(0.005)
                if outer.failures:
                    raise outer.failures.pop(0)
                outer.asked_for.append(options["max_records"])
                return await inner.poll(max_records=options["max_records"], timeout_s=0.02)

            def __getattr__(self, name):
                return getattr(inner, name)

        return Reader()


async def test_EVT_06_a_replica_that_begins_anew_takes_nothing_from_the_others(log):
    """Its state is its own; the log, which they share, is nothing that a start resets."""
    other, store = runner_on(log, MemoryStore()), MemoryStore()
    await other.start()
    for seq in range(20):
        await append(log, batch(seq, seq + 1))
    await other.wait_caught_up(60)
    bounds = {topic: await log.bounds(topic) for topic in await log.list_topics()}
    for _ in range(3):
        anew = runner_on(log, store)
        await anew.start()
        await anew.wait_caught_up(60)
        assert anew.fold.digest(anew.state) == other.fold.digest(other.state)
        assert anew.counters.records == 20
        await anew.stop()
        store.wipe(anew.fold.name, anew.fold.families)
    assert {topic: await log.bounds(topic) for topic in await log.list_topics()} == bounds
    assert (other.counters.records, other.counters.rebuilds, other.status) == (20, 0, RunnerStatus.LIVE)
    await other.wait_applied(await append(log, batch(20, 21)), 60)
    await other.stop()


async def test_SCALE_02_the_log_is_the_buffer_of_a_fold_that_is_slower_than_its_source(log):
    """However far it is behind, it takes one bounded read at a time, tells its lag, and drops nothing."""
    codec = TopicCodec(KV_EVENTS)
    key = key_kv_events("m", 1, 0)
    entries = [Entry(codec.encode(batch(seq, seq + 1)), key, codec.headers) for seq in range(10_000)]
    await log.append_all(TOPIC, entries)
    failing = FailingReads(log)
    runner = runner_on(failing, MemoryStore())
    lags = []
    runner.add_listener(lambda: lags.append(runner.lag()))
    await runner.start()
    assert runner.lag() == 10_000
    await runner.wait_caught_up(60)
    assert runner.counters.records == 10_000
    assert lags[0] > 0
    assert lags[-1] == 0
    assert max(failing.asked_for) <= 4096
    (source,) = runner.state.sources.values()
    assert (source.exact, source.next_seq) == (True, 10_000)
    await runner.stop()


async def test_a_long_way_to_the_logs_end_is_told_as_it_goes(log, monkeypatch, caplog):
    monkeypatch.setattr(runner_module, "PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO)
    codec = TopicCodec(KV_EVENTS)
    key = key_kv_events("m", 1, 0)
    entries = [Entry(codec.encode(batch(seq, seq + 1)), key, codec.headers) for seq in range(10_000)]
    await log.append_all(TOPIC, entries)
    runner = runner_on(log, MemoryStore())
    await runner.start()
    await runner.wait_caught_up(60)
    await runner.stop()
    assert "kv-index: 4096 of 10000 records read" in caplog.messages
    assert "kv-index: 8192 of 10000 records read" in caplog.messages


async def test_DISC_04_a_registry_that_is_read_anew_loses_nobody_until_all_of_it_is_read(log):
    """Neither an error nor a half-read topic is a reason to take workers for gone; its end without them is."""
    failing = FailingReads(log)
    runner = FoldRunner(
        RegistryFold(), failing, MemoryStore(), NS, clock=SystemClock(), dead_letters=Letters(), flush_interval_s=0.05
    )
    await runner.start()
    codec, topic = TopicCodec(REGISTRY), REGISTRY.qualified(NS)
    for number in (1, 2, 3):
        value = Instance(1, "n", "c", "e", number, number, "zmq", "tcp://h:1")
        key = key_instance("n", "c", "e", number)
        position = await log.append(topic, Entry(codec.encode(value), key, codec.headers))
    await runner.wait_applied(position, 60)
    seen = set()
    runner.add_listener(lambda: seen.add(frozenset(item.instance_id for item in runner.state.instances.values())))
    failing.held = True
    async with asyncio.timeout(60):
        while not failing.waiting:
            await asyncio.sleep(0.005)
    await log.append(topic, Entry(None, key_instance("n", "c", "e", 2)))
    # The position fell out of retention; then the broker goes away in the middle of reading all of it again.
    failing.failures = [OffsetOutOfRange(topic, 0, 3, 4, 9), LogUnavailable("away"), LogUnavailable("away")]
    async with asyncio.timeout(60):
        while failing.failures or runner.counters.rebuilds < 3:
            await asyncio.sleep(0.005)
    assert len(runner.state.instances) == 3
    assert not runner.positions()
    failing.held = False
    await runner.wait_caught_up(60)
    assert seen == {frozenset((1, 3))}
    await runner.stop()


async def test_a_fold_with_a_horizon_and_no_state_skips_what_is_older():
    clock = ManualClock()
    log = MemoryLog("test", clock, random.Random(1))
    await log.start()
    await log.create_topics(topic_configs(NS, None))
    codec = TopicCodec(REQUESTS)
    for name in ("old", "new"):
        event = Finished(1, name, 1, 7, "ok", 3, 1, 2, "")
        await log.append(REQUESTS.qualified(NS), Entry(codec.encode(event), name.encode(), codec.headers))
        clock.advance(HORIZON_MS / 1000)
    store = MemoryStore()
    for expected in (1, 0):
        runner = FoldRunner(RequestsFold(), log, store, NS, clock=clock, dead_letters=Letters())
        await runner.start()
        await runner.wait_caught_up(5)
        assert runner.counters.records == expected
        await runner.stop()
    await log.close()


async def test_offsets_that_have_no_record_are_passed(log):
    """The newest record of a compacted topic may be one that compaction took: nothing is left to wait for."""
    topic = REGISTRY.qualified(NS)
    position = await log.append(topic, Entry(None, b"lease/1", (), 1000))
    await log.enforce_retention(SystemClock().now_ms() + 7 * 86_400_000)
    assert (await log.bounds(topic))[0].end == position.offset + 1
    runner = FoldRunner(
        RegistryFold(), log, MemoryStore(), NS, clock=SystemClock(), dead_letters=Letters(), flush_interval_s=0.05
    )
    await runner.start()
    await runner.wait_caught_up(5)
    assert runner.counters.records == 0
    await runner.stop()
