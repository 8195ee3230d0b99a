from __future__ import annotations

from typing import Any

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.publishers.kv_stream import KvStream, split_records
from schemas.columns import pack_u64, unpack_u64
from schemas.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from tests.unit.publishers.support import ListSink, Reader


def store(*blocks: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored("device", parent, pack_u64(blocks), pack_u64(blocks))


def remove(*blocks: int) -> BlocksRemoved:
    return BlocksRemoved("device", pack_u64(blocks))


class Publisher:
    """A stream with the state that its engine would have."""

    def __init__(self, sink: ListSink, model: str | None = "m", **options: Any) -> None:
        self.sink, self.clock, self.model = sink, ManualClock(), model
        self.blocks: dict[int, None] = {}
        numbers = iter(range(100, 200))
        self.stream = KvStream(
            sink=sink, model_name=lambda: self.model, worker_id=7, dp_rank=2, block_size=16,
            new_incarnation=lambda: next(numbers), state=self._state, clock=self.clock, **options,
        )  # fmt: skip
        self.stream.catch_up()

    def _state(self) -> list[KvEvent]:
        return [store(*self.blocks)] if self.blocks else []

    def publish(self, *events: KvEvent) -> bool:
        for event in events:
            if isinstance(event, BlocksStored):
                self.blocks.update(dict.fromkeys(unpack_u64(event.sequence_hashes)))
            elif isinstance(event, BlocksRemoved):
                for block in unpack_u64(event.sequence_hashes):
                    self.blocks.pop(block, None)
            else:
                self.blocks.clear()
        return self.stream.publish(events)

    def check(self) -> None:
        reader = Reader().apply_all(self.sink.kv)
        assert reader.gaps == 0
        assert reader.held(rank=2) == set(self.blocks)


def test_an_incarnation_begins_with_an_empty_reset_and_numbers_are_dense() -> None:
    publisher = Publisher(ListSink())
    publisher.publish(store(1, 2))
    publisher.publish(remove(1))
    first, second, third = publisher.sink.kv
    assert (first.reset, first.events, first.incarnation) == (True, [], 100)
    assert [record.seq for record in publisher.sink.kv] == [0, 1, 2]
    assert not second.reset
    assert (third.model, third.worker_id, third.dp_rank, third.block_size) == ("m", 7, 2, 16)
    assert publisher.sink.records[0][1] == b"m/7:2"
    publisher.check()


def test_an_empty_batch_is_no_record() -> None:
    publisher = Publisher(ListSink())
    assert publisher.publish()
    assert len(publisher.sink.kv) == 1


def test_after_a_lost_record_readers_become_exact_without_asking() -> None:
    sink = ListSink()
    publisher = Publisher(sink)
    publisher.publish(store(1, 2, 3))
    sink.room = 0
    assert not publisher.publish(remove(2))
    assert publisher.stream.behind
    publisher.publish(store(4))
    sink.room = None
    assert not publisher.publish(store(5)), "not before it is time to try again"
    publisher.clock.advance(1)
    assert publisher.stream.catch_up()
    assert [record.seq for record in sink.kv] == [0, 1, 2]
    assert sink.kv[-1].reset
    publisher.publish(remove(1))
    publisher.check()
    assert publisher.blocks.keys() == {3, 4, 5}
    assert publisher.stream.counters.losses == 1


def test_a_record_lost_in_the_middle_of_a_reset_starts_it_again() -> None:
    sink = ListSink()
    publisher = Publisher(sink, max_record_bytes=200)
    publisher.publish(store(*range(40)))
    sink.room = 0
    publisher.publish(store(99))
    publisher.clock.advance(1)
    sink.room = 2
    assert not publisher.stream.catch_up()
    publisher.clock.advance(10)
    sink.room = None
    assert publisher.stream.catch_up()
    publisher.check()
    assert [record.seq for record in sink.kv] == list(range(len(sink.kv)))
    assert sum(record.reset for record in sink.kv) == 3


def test_attempts_become_rarer_while_the_log_is_away() -> None:
    sink = ListSink()
    publisher = Publisher(sink)
    sink.room = 0
    publisher.publish(store(1))
    for _ in range(600):
        publisher.clock.advance(0.1)
        publisher.stream.catch_up()
    assert sink.refused < 25


def test_before_the_model_is_known_nothing_is_sent_and_nothing_is_lost() -> None:
    publisher = Publisher(ListSink(), model=None)
    publisher.publish(store(1, 2))
    publisher.publish(remove(1))
    assert not publisher.sink.records
    publisher.model = "late"
    publisher.clock.advance(0.2)
    assert publisher.stream.catch_up()
    assert [record.model for record in publisher.sink.kv] == ["late"]
    publisher.check()


def test_EVT_04_a_new_incarnation_starts_at_zero_with_what_is_known_then() -> None:
    publisher = Publisher(ListSink())
    publisher.publish(store(1, 2))
    publisher.blocks.clear()
    publisher.stream.begin_incarnation()
    publisher.publish(store(3))
    assert [(record.incarnation, record.seq, record.reset) for record in publisher.sink.kv] == [
        (100, 0, True), (100, 1, False), (101, 0, True), (101, 1, False),
    ]  # fmt: skip
    publisher.check()


def test_a_resync_stays_in_the_incarnation() -> None:
    publisher = Publisher(ListSink())
    publisher.publish(store(1, 2))
    publisher.stream.resync()
    last = publisher.sink.kv[-1]
    assert (last.incarnation, last.seq, last.reset) == (100, 2, True)
    publisher.check()


@pytest.mark.parametrize("blocks", [60_000, 1])
def test_records_stay_under_half_a_megabyte(blocks: int) -> None:
    sink = ListSink()
    publisher = Publisher(sink)
    publisher.publish(store(*range(2**40, 2**40 + blocks)))
    publisher.publish(*(store(2**63 + i, parent=2**62) for i in range(20_000)))
    publisher.publish(remove(*range(2**40, 2**40 + blocks)))
    publisher.stream.resync()
    publisher.check()
    assert max(sink.sizes) < 512 * 1024


def test_a_long_event_is_cut_into_a_chain() -> None:
    parts = [batch[0] for batch in split_records([store(*range(100), parent=7)], 200)]
    assert all(isinstance(part, BlocksStored) for part in parts)
    blocks = [unpack_u64(part.sequence_hashes) for part in parts if isinstance(part, BlocksStored)]
    assert sum(blocks, ()) == tuple(range(100))
    assert [part.parent for part in parts if isinstance(part, BlocksStored)] == [
        7,
        *(block[-1] for block in blocks[:-1]),
    ]


def test_a_clear_is_small_and_keeps_its_place() -> None:
    batches = list(split_records([store(1), AllBlocksCleared(), store(2)], 10_000))
    assert [type(event) for event in batches[0]] == [BlocksStored, AllBlocksCleared, BlocksStored]
