"""A stream processor of your own, and how to test it without a broker. Copy this file and change the fold.

A processor has three parts, each tested alone:

1. a fold: pure, what a record does to the state, and how the state becomes rows;
2. a ``PartitionProcessor``: keeps rows and position together and is exact whatever is delivered;
3. a Faust agent: hands what Kafka delivers to the processor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import faust
import msgspec
import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, Record, TopicPartition
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.base import Change, Put, StateRows
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from schemas.topic import TopicSpec
from streams.faust_agents import record_of
from streams.fold import RecordRejected
from streams.partition_processor import PartitionProcessor
from streams.testing import FoldDriver

FAMILY = "prefill-tokens"
TOPIC = FORWARD_PASS.qualified("dynamo")


class PrefillTokens:
    """The state: prompt tokens that each worker computed, and which of them are not written yet."""

    def __init__(self) -> None:
        self.by_worker: dict[int, int] = {}
        self.dirty: set[int] = set()


class PrefillTokensFold:
    """1. The fold. No clock, no I/O, no randomness: the same records give the same state, wherever and whenever."""

    name = "prefill-tokens"  # owner of the positions in a store
    version = 1  # a higher one makes existing stores fold anew
    topics: Sequence[TopicSpec] = (FORWARD_PASS,)
    families: Sequence[str] = (FAMILY,)
    horizon_ms: int | None = None

    def new_state(self) -> PrefillTokens:
        return PrefillTokens()

    def apply(self, state: PrefillTokens, record: Record, value: Any) -> None:
        # The value is decoded and checked already. What makes no sense goes to dead-letters and changes nothing.
        if not isinstance(value, ForwardPass):
            raise RecordRejected("forward-pass has no deletions")
        tokens = value.scheduled.sum_prefill_tokens
        state.by_worker[value.worker_id] = state.by_worker.get(value.worker_id, 0) + tokens
        state.dirty.add(value.worker_id)

    def changes(self, state: PrefillTokens) -> list[Change]:
        # Rows that changed. They are written with the position in one batch: all of it survives a crash, or none.
        rows: list[Change] = [
            Put(FAMILY, worker.to_bytes(8, "big"), msgspec.msgpack.encode(state.by_worker[worker]))
            for worker in state.dirty
        ]
        state.dirty = set()
        return rows

    def mark_all(self, state: PrefillTokens) -> Iterator[None]:
        # After a long failure of the disk the store is written anew, all of it.
        state.dirty = set(state.by_worker)
        return iter(())

    def load(self, rows: StateRows) -> PrefillTokens:
        state = PrefillTokens()
        for key, value in rows.scan(FAMILY):
            state.by_worker[int.from_bytes(key, "big")] = msgspec.msgpack.decode(value, type=int)
        return state

    def adopt(self, previous: PrefillTokens, state: PrefillTokens) -> None:
        return None

    def digest(self, state: PrefillTokens) -> str:
        return repr(sorted(state.by_worker.items()))

    def housekeep(self, state: PrefillTokens) -> bool:
        return False

    def compaction(self, state: PrefillTokens) -> Callable[[StateRows], list[Change]] | None:
        return None


def forward_pass(worker: int, tokens: int) -> ForwardPass:
    return ForwardPass(
        1, "m", worker, 0, 1, 0, 0.1, ScheduledRequests(sum_prefill_tokens=tokens), QueuedRequests()
    )  # fmt: skip


def test_the_fold() -> None:
    """A fold is tested with values in and state out; the driver encodes, decodes, and restarts it from rows."""
    driver = FoldDriver(PrefillTokensFold())
    driver.feed(forward_pass(worker=1, tokens=100))
    driver.feed(forward_pass(worker=2, tokens=10))
    driver.commit()
    driver.feed(forward_pass(worker=1, tokens=50))
    driver.feed(None)
    assert driver.state.by_worker == {1: 150, 2: 10}
    assert driver.rejected == ["forward-pass has no deletions"]
    # As after SIGKILL: from the last committed rows, then the records that came after them.
    assert driver.restarted().digest() == driver.replayed().digest() == driver.digest()
    assert driver.rewritten().digest() == driver.digest()


class NoLetters:
    """Where refused records go. In a real worker: ``TopicAppender``, which writes them to topic dead-letters."""

    def offer_dead_letter(self, letter: Any) -> None:
        raise AssertionError(letter)


@pytest.fixture
async def log():
    """The log in memory keeps the same promises as Kafka's."""
    log = MemoryLog("example", ManualClock(), random.Random(1))
    await log.start()
    await log.create_topics(topic_configs("dynamo", None, [FORWARD_PASS]))
    yield log
    await log.close()


async def append(log: MemoryLog, worker: int, tokens: int) -> None:
    codec = TopicCodec(FORWARD_PASS)
    await log.append(TOPIC, Entry(codec.encode(forward_pass(worker, tokens)), b"key", codec.headers, None, 0))


async def records_of(log: MemoryLog) -> Sequence[Record]:
    reader = log.reader({TopicPartition(TOPIC, 0): 0})
    found = await reader.poll(timeout_s=0)
    await reader.close()
    return found[TopicPartition(TOPIC, 0)]


def processor_on(log: MemoryLog, store: MemoryStore) -> PartitionProcessor[PrefillTokens]:
    return PartitionProcessor(
        PrefillTokensFold(), TopicPartition(TOPIC, 0), log, "dynamo",
        make_store=lambda: store, clock=ManualClock(), rng=random.Random(1), dead_letters=NoLetters(),
    )  # fmt: skip


async def test_the_processor(log: MemoryLog) -> None:
    """2. Deliveries may repeat and skip records: each counts once all the same."""
    processor = processor_on(log, MemoryStore())
    await processor.open()
    for tokens in (1, 2, 4, 8, 16):
        await append(log, worker=1, tokens=tokens)
    records = await records_of(log)
    await processor.take(records[:2])
    await processor.take(records[1:3])  # one of them again
    await processor.take(records[4:])  # one is missing: the processor reads it from the log itself
    assert processor.state.by_worker == {1: 31}
    assert processor.counters.repeated == 1
    await processor.close()  # commits


async def test_the_agent(log: MemoryLog) -> None:
    """3. Faust's test context runs an agent without a broker; what is put in is what Kafka would deliver."""
    processor = processor_on(log, MemoryStore())
    await processor.open()
    app = faust.App("example", broker="kafka://nowhere", store="memory://", env_prefix="EXAMPLE_")
    # What acknowledgements go to. The real one makes an event loop as soon as it is asked for.
    app.consumer = Mock()
    topic = app.topic(TOPIC, key_serializer="raw", value_serializer="raw")

    async def fold_passes(stream: Any) -> Any:
        # Batches, not single events: Faust's own cost is per event, ours per batch.
        async for events in stream.noack_take(100, within=0.01):
            if await processor.take([record_of(event) for event in events]):
                for event in events:
                    event.ack()  # the group's offset; the position that counts is in the store
            yield len(events)

    await append(log, worker=1, tokens=100)
    await append(log, worker=7, tokens=5)
    async with app.agent(topic)(fold_passes).test_context() as agent:
        for record in await records_of(log):
            await agent.put(record.value, key=record.key, headers=dict(record.headers))
    assert processor.state.by_worker == {1: 100, 7: 5}
    await processor.close()
