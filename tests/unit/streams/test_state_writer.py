"""What a store has while it refuses or hangs, and when it works again: always a state that is one."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.store.errors import StoreFull
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvents
from streams import kv_index
from streams.block_table import PAGE
from streams.fold import RecordRejected
from streams.kv_index import KvIndexFold
from streams.kv_partition import KvPartitionFold
from streams.rank_load import MeasuredLoadFold, PassLoadFold
from streams.registry import RegistryFold
from streams.request_load import RequestLoadFold
from streams.requests import RequestsFold
from streams.state_writer import StateWriter, StoreCondition
from streams.windows import WindowSettings
from streams.worker_load import WorkerLoadFold
from tests.support.event_storm import EventStorm

WINDOWS = WindowSettings(window_ms=1000, kept_ms=20_000)
FOLDS = {
    "registry": RegistryFold,
    "kv-index": KvIndexFold,
    "worker-load": WorkerLoadFold,
    "requests": RequestsFold,
    "kv-partition": lambda: KvPartitionFold(WINDOWS),
    "request-load": lambda: RequestLoadFold(WINDOWS),
    "pass-load": lambda: PassLoadFold(WINDOWS),
    "measured-load": lambda: MeasuredLoadFold(WINDOWS),
}
each_fold = pytest.mark.parametrize("make_fold", FOLDS.values(), ids=list(FOLDS))


@dataclass
class Counters:
    commits: int = 0
    failed_commits: int = 0
    let_go: int = 0


class Disk(MemoryStore):
    """Refuses, or hangs until it may go on."""

    def __init__(self):
        super().__init__()
        self.refuses = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.hangs = threading.Event()

    def commit(self, *arguments):
        if not self.may_go_on.is_set():
            self.hangs.set()
            assert self.may_go_on.wait(60)
            self.hangs.clear()
        if self.refuses:
            raise StoreFull("disk", "no space left")
        super().commit(*arguments)


class History:
    """A fold with its writer, and all records that were folded."""

    def __init__(self, make_fold, max_unwritten_bytes=6_000):
        self.make_fold = make_fold
        self.fold = make_fold()
        self.state = self.fold.new_state()
        self.disk, self.clock, self.counters = Disk(), ManualClock(), Counters()
        self.writer = StateWriter(
            self.fold, self.disk, "fold",
            clock=self.clock, counters=self.counters, max_unwritten_bytes=max_unwritten_bytes,
        )  # fmt: skip
        self.records = []
        self.positions = {}
        self._storm = iter(EventStorm(3, self.fold.topics))
        self._codecs = {spec.name: TopicCodec(spec) for spec in self.fold.topics}

    def feed(self, count):
        for spec, key, value in itertools.islice(self._storm, count):
            self.clock.advance(0.05)
            place = TopicPartition(spec.name, 0)
            offset = self.positions.get(place, 0)
            data = None if value is None else self._codecs[spec.name].encode(value)
            record = Record(spec.name, 0, offset, self.clock.now_ms(), key, data, self._codecs[spec.name].headers)
            self.records.append((record, value))
            self._apply(self.state, record, value)
            self.positions[place] = offset + 1

    async def commit(self, **options):
        return await self.writer.commit(self.state, self.positions, **options)

    def check(self, store=None):
        """What the store has is the fold of the records up to its positions."""
        store = store or self.disk
        positions = store.positions(self.fold.name)
        state = self.make_fold().new_state()
        for record, value in self.records:
            if record.offset < positions.get(TopicPartition(record.topic, 0), 0):
                self._apply(state, record, value)
        assert self.fold.digest(self.make_fold().load(store)) == self.fold.digest(state)
        return sum(positions.values())

    def _apply(self, state, record, value):
        try:
            self.fold.apply(state, record, value)
        except RecordRejected:
            return


@each_fold
async def test_a_store_that_refuses_for_long_costs_no_memory_and_has_everything_when_it_works_again(make_fold, caplog):
    history = History(make_fold)
    history.feed(200)
    assert await history.commit()
    history.disk.refuses = True
    while history.writer.condition is not StoreCondition.BEHIND:
        history.feed(50)
        assert not await history.commit()
        assert history.writer.unwritten_bytes <= 6_000
    assert history.check() == 200
    for _ in range(3):
        history.feed(40)
        assert not await history.commit()
        assert history.writer.unwritten_bytes == 0
    assert history.check() == 200
    assert history.counters.let_go == 1
    assert "the whole state is written when the store works again" in caplog.text
    history.disk.refuses = False
    assert await history.commit()
    assert history.writer.condition is StoreCondition.WRITTEN
    assert "the store works again and has the whole state" in caplog.text
    assert history.check() == len(history.records)
    history.feed(100)
    assert await history.commit()
    assert history.check() == len(history.records)
    assert history.fold.digest(history.make_fold().load(history.disk)) == history.fold.digest(history.state)


@each_fold
async def test_changes_of_a_short_failure_are_written_as_they_are(make_fold):
    history = History(make_fold, max_unwritten_bytes=10_000_000)
    history.disk.refuses = True
    for _ in range(3):
        history.feed(40)
        assert not await history.commit()
    assert history.writer.condition is StoreCondition.REFUSES
    history.disk.refuses = False
    assert await history.commit()
    assert history.counters.let_go == 0
    assert history.check() == 120


@each_fold
async def test_the_fold_goes_on_within_the_bound_while_the_store_hangs(make_fold):
    history = History(make_fold)
    history.disk.may_go_on.clear()
    history.feed(100)
    commit = asyncio.create_task(history.commit())
    assert await asyncio.to_thread(history.disk.hangs.wait, 60)
    while history.writer.condition is not StoreCondition.BEHIND:
        history.feed(50)
        history.writer.collect(history.state, history.positions)
    assert not commit.done()
    history.disk.may_go_on.set()
    assert await commit
    # What was in hand is there, and what was let go is still to come.
    assert history.check() == 100
    assert history.writer.condition is StoreCondition.BEHIND
    assert await history.commit()
    assert history.check() == len(history.records)


@each_fold
@pytest.mark.parametrize("bound", [1, 10_000_000], ids=["whole", "changes"])
async def test_a_commit_that_is_cancelled_while_the_store_refuses_loses_nothing(make_fold, bound):
    history = History(make_fold, max_unwritten_bytes=bound)
    history.disk.refuses = True
    history.feed(80)
    assert not await history.commit()
    history.disk.may_go_on.clear()
    history.feed(20)
    commit = asyncio.create_task(history.commit())
    assert await asyncio.to_thread(history.disk.hangs.wait, 60)
    commit.cancel()
    history.disk.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert history.writer.condition is not StoreCondition.WRITTEN
    history.disk.refuses = False
    history.feed(20)
    assert await history.commit()
    assert history.writer.condition is StoreCondition.WRITTEN
    assert history.check() == len(history.records)


async def test_the_bound_holds_and_is_told_while_a_read_hangs():
    history = History(RegistryFold)
    go_on, reads = threading.Event(), threading.Event()

    def hang(store):
        reads.set()
        assert go_on.wait(60)

    read = asyncio.create_task(history.writer.read(hang))
    assert await asyncio.to_thread(reads.wait, 60)
    history.clock.advance(60)
    assert history.writer.condition is StoreCondition.HANGS
    while history.writer.condition is not StoreCondition.BEHIND:
        history.feed(50)
        history.writer.collect(history.state, history.positions)
        assert history.writer.unwritten_bytes <= 6_000
    go_on.set()
    await read
    assert await history.commit()
    assert history.check() == len(history.records)


@each_fold
async def test_records_that_come_while_the_whole_state_is_made_and_written_are_not_lost(make_fold):
    history = History(make_fold, max_unwritten_bytes=1)
    history.disk.refuses = True
    history.feed(150)
    assert not await history.commit()
    assert history.writer.condition is StoreCondition.BEHIND
    history.disk.refuses = False
    history.disk.may_go_on.clear()
    commit = asyncio.create_task(history.commit())
    async with asyncio.timeout(60):
        while not history.disk.hangs.is_set():
            history.feed(5)
            history.writer.collect(history.state, history.positions)
            await asyncio.sleep(0)
    history.feed(5)
    history.disk.may_go_on.set()
    await commit
    history.check()
    assert await history.commit()
    assert history.check() == len(history.records)


def test_blocks_that_come_go_and_move_while_all_are_marked_are_written_right(monkeypatch):
    """Sources are cleared and pages of the table split in between."""
    monkeypatch.setattr(kv_index, "_MARK_ROWS", PAGE)
    rng = random.Random(7)
    fold = KvIndexFold()
    state, seqs, known = fold.new_state(), Counter(), [rng.getrandbits(64) for _ in range(20_000)]

    def feed(worker, *events):
        batch = KvEvents(1, "m", worker, 0, 1, seqs[worker], 4, seqs[worker] == 0, list(events))
        fold.apply(state, Record("kv-events", 0, 0, 0, b"key", b"", ()), batch)
        seqs[worker] += 1

    for worker in range(4):
        feed(worker, stored(rng.sample(known, 9_000)))
    fold.changes(state)
    marking, pieces = fold.mark_all(state), 0
    for _ in marking:
        pieces += 1
        worker = rng.randrange(5)
        feed(worker, BlocksRemoved("device", stored(rng.sample(known, 500)).sequence_hashes))
        feed(worker, stored([*rng.sample(known, 300), *(rng.getrandbits(64) for _ in range(1_000))]))
        if pieces % 7 == 0:
            feed(worker, AllBlocksCleared(), stored(rng.sample(known, 50)))
        fold.housekeep(state)
    assert pieces > 30
    store = MemoryStore()
    store.commit("kv-index", fold.changes(state), {})
    assert fold.digest(fold.load(store)) == fold.digest(state)


def stored(hashes):
    column = pack_u64(hashes)
    return BlocksStored("device", None, column, column)


async def test_a_whole_state_is_not_made_in_vain_all_the_time():
    history = History(KvIndexFold, max_unwritten_bytes=1)
    history.disk.refuses = True
    history.feed(10)
    tries = 0
    for _ in range(600):
        before = history.counters.failed_commits
        await history.commit(patient=True)
        tries += history.counters.failed_commits - before
        history.clock.advance(1.0)
    # After 1, 2, 4 s and so on up to a minute.
    assert 10 < tries < 20
    history.disk.refuses = False
    history.clock.advance(60.0)
    assert await history.commit(patient=True)
    assert history.check() == 10


async def test_a_commit_that_waited_while_the_state_began_anew_writes_nothing():
    history = History(RegistryFold)
    history.disk.may_go_on.clear()
    history.feed(10)
    first = asyncio.create_task(history.commit())
    assert await asyncio.to_thread(history.disk.hangs.wait, 60)
    wipe = asyncio.create_task(history.writer.wipe())
    await asyncio.sleep(0)
    history.feed(10)
    second = asyncio.create_task(history.commit())
    await asyncio.sleep(0)
    history.disk.may_go_on.set()
    assert await first
    await wipe
    assert not await second
    assert history.disk.positions("registry") == {}


@each_fold
async def test_SCALE_08_after_any_order_of_failures_the_store_is_a_fold_of_the_log(make_fold):
    """A kill at any instant leaves what the store has then; each such state is looked at."""
    rng = random.Random(4)
    history = History(make_fold, max_unwritten_bytes=3_000)
    for _ in range(25):
        history.feed(rng.randint(0, 20))
        history.disk.refuses = rng.random() < 0.6
        if rng.random() < 0.2:
            history.writer.collect(history.state, history.positions)
        await history.commit(patient=rng.random() < 0.5)
        history.check()
    history.disk.refuses = False
    assert await history.commit()
    assert history.check() == len(history.records)
