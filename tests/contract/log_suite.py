"""What every event log must do. A backend's test class inherits this and says how to open one.

Times are only deadlines for failure: a test waits for what must happen, never for a while.
"""

from __future__ import annotations

import abc
import asyncio
import time
import uuid
from collections import defaultdict
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from dynamo_es.log.base import Bounds, Entry, EventLog, LogReader, Position, Record, TopicConfig, TopicPartition
from dynamo_es.log.errors import (
    LogClosed,
    LogReplaced,
    LogUnavailable,
    OffsetOutOfRange,
    RecordTooLarge,
    TopicMismatch,
    UnknownTopic,
)

DEADLINE_S = 60.0
HOUR_MS = 3_600_000

# Partition of 4 and of 12 that Kafka's Java client gives these keys (murmur2, positive, modulo).
MURMUR2 = {
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


def kafka_partition(key: bytes, partitions: int) -> int:
    return (MURMUR2[key] & 0x7FFFFFFF) % partitions


def from_start(topic: str, partitions: int) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, number): 0 for number in range(partitions)}


async def read(reader: LogReader, count: int) -> list[Record]:
    """The next ``count`` records, in the order of the polls."""
    records: list[Record] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(records) < count:
        left = deadline - time.monotonic()
        assert left > 0, f"{len(records)} of {count} records in time"
        batch = await reader.poll(max_records=count - len(records), timeout_s=left)
        for part in batch.values():
            records.extend(part)
    assert len(records) == count
    return records


async def read_to_end(log: EventLog, reader: LogReader, topic: str) -> list[Record]:
    """Records up to the end as it is now."""
    bounds = await log.bounds(topic)
    records: list[Record] = []
    deadline = time.monotonic() + DEADLINE_S
    while any(reader.positions()[TopicPartition(topic, number)] < bound.end for number, bound in bounds.items()):
        assert time.monotonic() < deadline, "the end in time"
        for part in (await reader.poll(timeout_s=0.2)).values():
            records.extend(part)
    return records


class EventLogSuite(abc.ABC):
    """Hooks: ``place`` and ``open``; flags say what a backend leaves to others."""

    # ``open`` with the same place gives another handle to the same log, also after the first one was closed.
    supports_second_handle: ClassVar[bool] = True
    # ``trim`` drops something (in units of at most about 64 kB of records).
    supports_trim: ClassVar[bool] = True
    # ``enforce_retention`` drops and compacts by itself (no broker does it).
    supports_retention: ClassVar[bool] = True

    @pytest.fixture
    def place(self, tmp_path) -> Any:
        """What names the log for ``open``."""
        return tmp_path / "log"

    @abc.abstractmethod
    async def open(self, place: Any) -> EventLog:
        """A handle, started."""

    @abc.abstractmethod
    async def delete_topic(self, log: EventLog, place: Any, topic: str) -> None:
        """Delete a topic behind the log's back, as an administrator does."""

    @pytest.fixture
    async def log(self, place):
        log = await self.open(place)
        yield log
        await log.close()

    @pytest.fixture
    async def other(self, place, log):
        if not self.supports_second_handle:
            pytest.skip("one handle a log")
        other = await self.open(place)
        yield other
        await other.close()

    @pytest.fixture
    async def handles(self, place, log):
        """All handles that the backend allows: two, or one."""
        if not self.supports_second_handle:
            yield [log]
            return
        other = await self.open(place)
        yield [log, other]
        await other.close()

    async def make_topic(self, log: EventLog, partitions: int = 1, **settings: Any) -> str:
        name = f"suite.{uuid.uuid4().hex}"
        await log.create_topics([TopicConfig(name, partitions, replication=1, **settings)])
        return name

    # ---- topics ----

    async def test_create_topics_is_idempotent(self, log):
        topic = await self.make_topic(log, 3)
        before = await log.describe(topic)
        await log.append(topic, Entry(b"v"))
        await log.create_topics([TopicConfig(topic, 3, replication=1)])
        assert await log.describe(topic) == before
        assert before.name == topic
        assert before.partitions == 3
        assert before.topic_id
        assert topic in await log.list_topics()
        assert list(await log.list_topics()) == sorted(await log.list_topics())

    async def test_create_topics_from_many_tasks_at_once_makes_one(self, handles):
        name = f"suite.{uuid.uuid4().hex}"
        await asyncio.gather(*(handle.create_topics([TopicConfig(name, 2, replication=1)]) for handle in handles * 4))
        ids = {(await handle.describe(name)).topic_id for handle in handles}
        assert len(ids) == 1

    async def test_EVT_16_another_partition_count_is_refused(self, log):
        topic = await self.make_topic(log, 2)
        with pytest.raises(TopicMismatch) as caught:
            await log.create_topics([TopicConfig(topic, 4, replication=1)])
        assert (caught.value.topic, caught.value.found, caught.value.wanted) == (topic, 2, 4)
        assert (await log.describe(topic)).partitions == 2

    async def test_a_topic_is_altered_in_place(self, handles):
        log, other = handles[0], handles[-1]
        topic = await self.make_topic(log, 2, retention_ms=HOUR_MS, max_record_bytes=50_000)
        await log.append(topic, Entry(b"v" * 40_000, b"k"))
        before = await log.describe(topic)
        wanted = TopicConfig(topic, 2, retention_ms=2 * HOUR_MS, max_record_bytes=100_000)
        assert {"retention_ms", "max_record_bytes"} <= log.alterable
        await log.alter_topic(wanted)
        for handle in (log, other):
            deadline = time.monotonic() + DEADLINE_S
            while (found := await handle.describe(topic)) == before:
                assert time.monotonic() < deadline
            assert (found.topic_id, found.partitions) == (before.topic_id, 2)
            assert (found.retention_ms, found.max_record_bytes) == (2 * HOUR_MS, 100_000)
        await log.append(topic, Entry(b"v" * 90_000, b"k"))
        records = await read(other.reader(from_start(topic, 2)), 2)
        assert [len(record.value) for record in records] == [40_000, 90_000]
        await log.alter_topic(replace(wanted, retention_ms=None))
        deadline = time.monotonic() + DEADLINE_S
        while (await log.describe(topic)).retention_ms is not None:
            assert time.monotonic() < deadline

    async def test_EVT_16_a_partition_count_is_never_altered(self, log):
        topic = await self.make_topic(log, 2, retention_ms=HOUR_MS)
        before = await log.describe(topic)
        with pytest.raises(TopicMismatch, match=f"{topic}.* has 2 partitions"):
            await log.alter_topic(TopicConfig(topic, 4, retention_ms=2 * HOUR_MS))
        assert await log.describe(topic) == before

    async def test_unknown_topic_is_named(self, log):
        missing = f"suite.{uuid.uuid4().hex}"
        for call in (
            log.append(missing, Entry(b"v")),
            log.append_all(missing, [Entry(b"v")]),
            log.bounds(missing),
            log.describe(missing),
            log.alter_topic(TopicConfig(missing, 1)),
        ):
            with pytest.raises(UnknownTopic) as caught:
                await call
            assert caught.value.topic == missing
        assert missing not in await log.list_topics()

    @pytest.mark.parametrize("length", [1, 9], ids=["shorter", "longer"])
    async def test_EVT_08_a_topic_made_anew_is_told_to_readers_and_appends(self, log, place, length):
        """A successor of the same name must not pass for the topic, also where it is longer than what was read."""
        topic = await self.make_topic(log)
        await log.append_all(topic, [Entry(b"old %d" % number) for number in range(5)])
        reader = log.reader(from_start(topic, 1))
        await read(reader, 5)
        await self.delete_topic(log, place, topic)
        deadline = time.monotonic() + DEADLINE_S
        while topic in await log.list_topics():
            assert time.monotonic() < deadline
        config = TopicConfig(topic, 1, replication=1)
        maker = await self.open(place) if self.supports_second_handle else log
        await maker.create_topics([config])
        refusals = 0
        appended = 0
        while appended < length or not refusals:
            assert time.monotonic() < deadline
            try:
                await log.append(topic, Entry(b"new %d" % appended))
                appended += 1
            except LogReplaced:
                refusals += 1
            except (LogUnavailable, UnknownTopic):
                continue
        assert refusals == 1
        with pytest.raises(LogReplaced, match=f"{topic}.*deleted and made anew"):
            while True:
                assert time.monotonic() < deadline
                await reader.poll(timeout_s=1.0)
        with pytest.raises(LogReplaced):
            await reader.poll(timeout_s=DEADLINE_S)
        records = await read(log.reader(from_start(topic, 1)), appended)
        assert [record.value for record in records] == [b"new %d" % number for number in range(appended)]
        if maker is not log:
            await maker.close()

    async def test_reopening_the_same_log_changes_nothing(self, log):
        topic = await self.make_topic(log)
        await log.append(topic, Entry(b"0"))
        reader = log.reader(from_start(topic, 1))
        before = log.log_id
        await log.reopen()
        assert log.log_id == before
        assert (await log.append(topic, Entry(b"1"))).offset == 1
        assert [record.value for record in await read(reader, 2)] == [b"0", b"1"]

    async def test_a_topic_made_later_can_be_used(self, log):
        name = f"suite.{uuid.uuid4().hex}"
        with pytest.raises(UnknownTopic):
            await log.append(name, Entry(b"v"))
        await log.create_topics([TopicConfig(name, 1, replication=1)])
        assert await log.append(name, Entry(b"v")) == Position(name, 0, 0)

    # ---- appending ----

    async def test_offsets_are_dense_from_zero(self, log):
        topic = await self.make_topic(log)
        assert await log.bounds(topic) == {0: Bounds(0, 0)}
        for number in range(5):
            assert await log.append(topic, Entry(b"%d" % number)) == Position(topic, 0, number)
        positions = await log.append_all(topic, [Entry(b"%d" % number) for number in range(5, 300)])
        assert list(positions) == [Position(topic, 0, number) for number in range(5, 300)]
        assert await log.bounds(topic) == {0: Bounds(0, 300)}
        records = await read(log.reader(from_start(topic, 1)), 300)
        assert [(record.offset, record.value) for record in records] == [(n, b"%d" % n) for n in range(300)]

    async def test_appending_nothing_is_nothing(self, log):
        topic = await self.make_topic(log)
        assert list(await log.append_all(topic, [])) == []
        assert await log.bounds(topic) == {0: Bounds(0, 0)}

    async def test_a_key_goes_where_kafka_clients_send_it(self, log):
        topic = await self.make_topic(log, 12)
        for key in MURMUR2:
            position = await log.append(topic, Entry(b"v", key))
            assert position.partition == kafka_partition(key, 12)
        positions = await log.append_all(topic, [Entry(b"v", key) for key in MURMUR2])
        assert [position.partition for position in positions] == [kafka_partition(key, 12) for key in MURMUR2]

    async def test_a_partition_that_is_named_wins(self, log):
        topic = await self.make_topic(log, 4)
        positions = await log.append_all(topic, [Entry(b"v", b"abc", partition=number) for number in (3, 0, 2, 1, 3)])
        assert [position.partition for position in positions] == [3, 0, 2, 1, 3]

    async def test_records_without_key_land_somewhere(self, log):
        topic = await self.make_topic(log, 4)
        positions = await log.append_all(topic, [Entry(b"%d" % number) for number in range(40)])
        assert all(0 <= position.partition < 4 for position in positions)
        records = await read(log.reader(from_start(topic, 4)), 40)
        assert {record.value for record in records} == {b"%d" % number for number in range(40)}

    async def test_order_per_key_is_kept(self, log):
        topic = await self.make_topic(log, 4)
        keys = list(MURMUR2)
        for start in range(0, 300, 60):
            entries = [Entry(b"%d" % number, keys[number % len(keys)]) for number in range(start, start + 60)]
            await log.append_all(topic, entries)
        seen = defaultdict(list)
        for record in await read(log.reader(from_start(topic, 4)), 300):
            seen[record.key].append(int(record.value))
        for index, key in enumerate(keys):
            assert seen[key] == list(range(index, 300, len(keys)))

    async def test_everything_of_a_record_comes_back(self, log):
        topic = await self.make_topic(log)
        entries = [
            Entry(b"value", b"key", (("schema", b"kv-events/1"), ("other", b"")), 1_700_000_000_123),
            Entry(None, b"key"),
            Entry(b"", b""),
            Entry(b"value", None),
            Entry(b"\x00\xff" * 10, b"\x00", (("same", b"1"), ("same", b"2"), ("ü", b"\xff\x00"))),
        ]
        before = int(time.time() * 1000)
        await log.append_all(topic, entries)
        records = await read(log.reader(from_start(topic, 1)), len(entries))
        for entry, record in zip(entries, records, strict=True):
            assert (record.topic, record.partition) == (topic, 0)
            assert (record.key, record.value, record.headers) == (entry.key, entry.value, entry.headers)
        assert records[0].timestamp_ms == 1_700_000_000_123
        for record in records[1:]:
            assert before - 1000 <= record.timestamp_ms <= int(time.time() * 1000) + 1000

    async def test_a_megabyte_fits(self, log):
        topic = await self.make_topic(log)
        value = bytes(range(250)) * 4_000
        await log.append_all(topic, [Entry(b"small"), Entry(value), Entry(b"after")])
        records = await read(log.reader(from_start(topic, 1)), 3)
        assert [record.value for record in records] == [b"small", value, b"after"]

    async def test_a_record_that_is_too_large_is_refused_alone(self, log):
        topic = await self.make_topic(log, max_record_bytes=10_000)
        with pytest.raises(RecordTooLarge) as caught:
            await log.append(topic, Entry(b"x" * 20_000, b"k"))
        assert (caught.value.topic, caught.value.limit) == (topic, 10_000)
        assert caught.value.size >= 20_000
        assert await log.append(topic, Entry(b"x" * 5_000)) == Position(topic, 0, 0)

    async def test_many_tasks_append_at_once(self, log):
        topic = await self.make_topic(log, 3)

        async def work(writer: int) -> list[Position]:
            return [await log.append(topic, Entry(b"%d/%d" % (writer, n), b"w%d" % writer)) for n in range(30)]

        positions = await asyncio.gather(*(work(writer) for writer in range(20)))
        assert len({position for own in positions for position in own}) == 600
        for own in positions:
            assert [position.offset for position in own] == sorted(position.offset for position in own)
        records = await read(log.reader(from_start(topic, 3)), 600)
        at = {(record.topic, record.partition, record.offset): record.value for record in records}
        for writer, own in enumerate(positions):
            assert [at[position] for position in own] == [b"%d/%d" % (writer, n) for n in range(30)]

    # ---- reading ----

    async def test_reading_starts_at_the_offset(self, log):
        topic = await self.make_topic(log)
        await log.append_all(topic, [Entry(b"%d" % number) for number in range(20)])
        reader = log.reader({TopicPartition(topic, 0): 15})
        assert [record.offset for record in await read(reader, 5)] == [15, 16, 17, 18, 19]
        assert reader.positions() == {TopicPartition(topic, 0): 20}

    async def test_a_reader_may_start_at_the_end(self, log):
        topic = await self.make_topic(log)
        await log.append(topic, Entry(b"old"))
        reader = log.reader({TopicPartition(topic, 0): 1})
        assert await reader.poll(timeout_s=0.05) == {}
        await log.append(topic, Entry(b"new"))
        assert [record.value for record in await read(reader, 1)] == [b"new"]

    async def test_poll_returns_at_most_max_records_and_loses_none(self, log):
        topic = await self.make_topic(log, 2)
        entries = [Entry(b"%d" % number, partition=number % 2) for number in range(100)]
        await log.append_all(topic, entries)
        reader = log.reader(from_start(topic, 2))
        seen = defaultdict(list)
        deadline = time.monotonic() + DEADLINE_S
        while sum(map(len, seen.values())) < 100:
            assert time.monotonic() < deadline
            batch = await reader.poll(max_records=7, timeout_s=5)
            assert 1 <= sum(map(len, batch.values())) <= 7
            for (name, partition), records in batch.items():
                assert name == topic
                seen[partition].extend(record.offset for record in records)
        assert seen == {0: list(range(50)), 1: list(range(50))}

    async def test_a_poll_sees_what_was_appended_before_it(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        await log.append(topic, Entry(b"first"))
        await read(reader, 1)
        for number in range(5):
            await log.append(topic, Entry(b"%d" % number))
            assert [record.value for record in await read(reader, 1)] == [b"%d" % number]

    async def test_timeout_zero_does_not_wait(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        assert await asyncio.wait_for(reader.poll(timeout_s=0), DEADLINE_S) == {}
        assert reader.positions() == {TopicPartition(topic, 0): 0}

    async def test_a_timeout_without_records_gives_nothing(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        started = time.monotonic()
        assert await asyncio.wait_for(reader.poll(timeout_s=0.1), DEADLINE_S) == {}
        assert time.monotonic() - started >= 0.09

    async def test_a_waiting_poll_wakes_up(self, log):
        topic = await self.make_topic(log, 2)
        reader = log.reader(from_start(topic, 2))
        await reader.poll(timeout_s=0)
        for number in range(3):
            waiting = asyncio.create_task(reader.poll())
            done, _ = await asyncio.wait((waiting,), timeout=0.05)
            assert not done
            await log.append(topic, Entry(b"%d" % number, partition=number % 2))
            batch = await asyncio.wait_for(waiting, DEADLINE_S)
            assert [[record.value for record in part] for part in batch.values()] == [[b"%d" % number]]

    async def test_a_waiting_poll_wakes_up_for_another_handle(self, log, other):
        topic = await self.make_topic(log)
        reader = other.reader(from_start(topic, 1))
        waiting = asyncio.create_task(reader.poll())
        done, _ = await asyncio.wait((waiting,), timeout=0.05)
        assert not done
        await log.append(topic, Entry(b"v"))
        batch = await asyncio.wait_for(waiting, DEADLINE_S)
        assert [record.value for record in batch[TopicPartition(topic, 0)]] == [b"v"]

    async def test_a_cancelled_poll_loses_nothing(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        for number in range(20):
            waiting = asyncio.create_task(reader.poll())
            for _ in range(number):
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait((waiting,))
            await log.append(topic, Entry(b"%d" % number))
            if not waiting.cancelled():
                await reader.close()
                reader = log.reader({TopicPartition(topic, 0): number})
            assert [record.value for record in await read(reader, 1)] == [b"%d" % number]

    async def test_seek_goes_back_and_forth(self, log):
        topic = await self.make_topic(log)
        await log.append_all(topic, [Entry(b"%d" % number) for number in range(10)])
        position = TopicPartition(topic, 0)
        reader = log.reader({position: 0})
        await read(reader, 10)
        for offset in (3, 0, 9, 5):
            reader.seek(position, offset)
            assert reader.positions() == {position: offset}
            assert [record.offset for record in await read(reader, 10 - offset)] == list(range(offset, 10))

    async def test_one_reader_reads_several_topics(self, log):
        one, two = await self.make_topic(log, 2), await self.make_topic(log, 3)
        await log.append_all(one, [Entry(b"1/%d" % number, partition=number % 2) for number in range(10)])
        await log.append_all(two, [Entry(b"2/%d" % number, partition=number % 3) for number in range(9)])
        reader = log.reader({**from_start(one, 2), **from_start(two, 3)})
        records = await read(reader, 19)
        assert {record.value for record in records if record.topic == one} == {b"1/%d" % n for n in range(10)}
        assert {record.value for record in records if record.topic == two} == {b"2/%d" % n for n in range(9)}
        expected = {**{TopicPartition(one, n): 5 for n in range(2)}, **{TopicPartition(two, n): 3 for n in range(3)}}
        assert reader.positions() == expected

    async def test_readers_do_not_share_positions(self, log):
        topic = await self.make_topic(log)
        await log.append_all(topic, [Entry(b"%d" % number) for number in range(5)])
        readers = [log.reader(from_start(topic, 1)) for _ in range(3)]
        for reader in readers:
            assert len(await read(reader, 5)) == 5

    async def test_an_offset_above_the_end_is_out_of_range(self, log):
        topic = await self.make_topic(log)
        await log.append_all(topic, [Entry(b"v")] * 3)
        reader = log.reader({TopicPartition(topic, 0): 4})
        with pytest.raises(OffsetOutOfRange) as caught:
            await asyncio.wait_for(reader.poll(timeout_s=DEADLINE_S), DEADLINE_S)
        error = caught.value
        assert (error.topic, error.partition, error.offset, error.start, error.end) == (topic, 0, 4, 0, 3)
        reader.seek(TopicPartition(topic, 0), error.start)
        assert len(await read(reader, 3)) == 3

    async def test_readers_see_committed_records_in_order_while_writers_race(self, log, handles):
        topic = await self.make_topic(log, 2)
        readers = [handle.reader(from_start(topic, 2)) for handle in handles]
        total = len(handles) * 3 * 40 * 3

        async def write(handle: EventLog, writer: int) -> list[Position]:
            positions: list[Position] = []
            for number in range(40):
                batch = [Entry(b"%d/%d" % (writer, number * 3 + n), b"w%d" % writer) for n in range(3)]
                positions.extend(await handle.append_all(topic, batch))
            return positions

        async def follow(reader: LogReader) -> dict[int, list[Record]]:
            seen: dict[int, list[Record]] = {0: [], 1: []}
            while sum(map(len, seen.values())) < total:
                for (_, partition), records in (await reader.poll(timeout_s=DEADLINE_S)).items():
                    for record in records:
                        assert record.offset == len(seen[partition]), "no gap, nothing twice"
                        seen[partition].append(record)
            return seen

        followers = [asyncio.create_task(follow(reader)) for reader in readers]
        writes = await asyncio.gather(
            *(write(h, w) for w, h in enumerate(handle for handle in handles for _ in range(3)))
        )
        views = await asyncio.wait_for(asyncio.gather(*followers), DEADLINE_S)
        assert all(view == views[0] for view in views)
        at = {(r.topic, r.partition, r.offset): r.value for records in views[0].values() for r in records}
        assert len(at) == total
        for writer, positions in enumerate(writes):
            assert [at[position] for position in positions] == [b"%d/%d" % (writer, n) for n in range(120)]
            assert [p.offset for p in positions] == sorted(p.offset for p in positions)

    # ---- offsets by time ----

    async def test_offset_at_finds_the_first_record_since(self, log):
        topic = await self.make_topic(log, 2)
        base = int(time.time() * 1000) - 100_000
        stamps = [0, 1000, 1000, 2000, 5000]
        await log.append_all(topic, [Entry(b"v", partition=0, timestamp_ms=base + stamp) for stamp in stamps])
        position = TopicPartition(topic, 0)
        for stamp, offset in ((-5, 0), (0, 0), (1, 1), (1000, 1), (1001, 3), (2000, 3), (5000, 4)):
            assert await log.offset_at(position, base + stamp) == offset
        assert await log.offset_at(position, base + 5001) == 5
        assert await log.offset_at(TopicPartition(topic, 1), base) == 0

    # ---- another handle, another life ----

    async def test_another_handle_reads_and_writes_the_same_log(self, log, other):
        topic = await self.make_topic(log)
        assert other.log_id == log.log_id
        assert log.log_id
        await log.append(topic, Entry(b"one"))
        assert await other.append(topic, Entry(b"two")) == Position(topic, 0, 1)
        await log.append(topic, Entry(b"three"))
        records = await read(other.reader(from_start(topic, 1)), 3)
        assert [record.value for record in records] == [b"one", b"two", b"three"]

    async def test_reopening_keeps_everything(self, log, place):
        if not self.supports_second_handle:
            pytest.skip("gone with its handle")
        topic = await self.make_topic(log, 2)
        await log.append_all(topic, [Entry(b"%d" % number, partition=number % 2) for number in range(50)])
        before = (log.log_id, await log.describe(topic), await log.bounds(topic))
        await log.close()
        again = await self.open(place)
        try:
            assert (again.log_id, await again.describe(topic), await again.bounds(topic)) == before
            assert len(await read(again.reader(from_start(topic, 2)), 50)) == 50
            assert await again.append(topic, Entry(b"v", partition=0)) == Position(topic, 0, 25)
        finally:
            await again.close()

    # ---- closing ----

    async def test_close_ends_a_waiting_poll(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        waiting = asyncio.create_task(reader.poll())
        await asyncio.wait((waiting,), timeout=0.05)
        await reader.close()
        await reader.close()
        with pytest.raises(LogClosed):
            await asyncio.wait_for(waiting, DEADLINE_S)
        with pytest.raises(LogClosed):
            await reader.poll(timeout_s=0)

    async def test_closing_the_log_finishes_appends_and_ends_readers(self, log):
        topic = await self.make_topic(log)
        reader = log.reader(from_start(topic, 1))
        waiting = asyncio.create_task(reader.poll())
        appends = [asyncio.create_task(log.append(topic, Entry(b"%d" % number))) for number in range(20)]
        await asyncio.sleep(0)
        await log.close()
        await log.close()
        outcomes = await asyncio.gather(*appends, return_exceptions=True)
        assert all(isinstance(outcome, Position | LogClosed) for outcome in outcomes)
        outcome = (await asyncio.gather(waiting, return_exceptions=True))[0]
        assert isinstance(outcome, LogClosed | dict)
        with pytest.raises(LogClosed):
            await reader.poll()
        with pytest.raises(LogClosed):
            await log.append(topic, Entry(b"v"))
        with pytest.raises(LogClosed):
            await log.bounds(topic)

    # ---- dropping ----

    async def test_trim_drops_below_the_offset_only(self, log):
        topic = await self.make_topic(log)
        position = TopicPartition(topic, 0)
        assert await log.trim(position, 0) == 0
        for begin in range(0, 400, 10):
            await log.append_all(topic, [Entry(b"%04d" % n + b"x" * 1000) for n in range(begin, begin + 10)])
        start = await log.trim(position, 300)
        assert 0 <= start <= 300
        assert await log.bounds(topic) == {0: Bounds(start, 400)}
        records = await read(log.reader({position: start}), 400 - start)
        assert [(r.offset, int(r.value[:4])) for r in records] == [(n, n) for n in range(start, 400)]
        assert await log.trim(position, 0) == start
        assert await log.append(topic, Entry(b"next")) == Position(topic, 0, 400)
        if self.supports_trim:
            assert start > 0

    async def test_EVT_05_a_trimmed_offset_is_out_of_range(self, log):
        if not self.supports_trim:
            pytest.skip("trims nothing")
        topic = await self.make_topic(log)
        position = TopicPartition(topic, 0)
        for begin in range(0, 400, 10):
            await log.append_all(topic, [Entry(b"x" * 1000) for _ in range(begin, begin + 10)])
        start = await log.trim(position, 399)
        assert start > 0
        reader = log.reader({position: start - 1})
        with pytest.raises(OffsetOutOfRange) as caught:
            await asyncio.wait_for(reader.poll(), DEADLINE_S)
        assert (caught.value.offset, caught.value.start, caught.value.end) == (start - 1, start, 400)
        reader.seek(position, caught.value.start)
        assert (await read(reader, 1))[0].offset == start

    async def test_retention_drops_what_is_old_and_keeps_what_is_not(self, log):
        if not self.supports_retention:
            pytest.skip("the broker's work")
        kept = await self.make_topic(log)
        topic = await self.make_topic(log, retention_ms=HOUR_MS)
        now = int(time.time() * 1000)
        for name in (kept, topic):
            for begin in range(0, 300, 10):
                stamp = now - 2 * HOUR_MS if begin < 200 else now
                await log.append_all(name, [Entry(b"x" * 1000, timestamp_ms=stamp) for _ in range(10)])
        trimmed = await log.enforce_retention(now)
        start = trimmed[TopicPartition(topic, 0)]
        assert 0 < start <= 200
        assert await log.bounds(topic) == {0: Bounds(start, 300)}
        assert await log.bounds(kept) == {0: Bounds(0, 300)}
        trimmed = await log.enforce_retention(now + 3 * HOUR_MS)
        assert trimmed == {TopicPartition(topic, 0): 300}
        assert await log.append(topic, Entry(b"v")) == Position(topic, 0, 300)

    async def test_compaction_keeps_the_newest_of_each_key(self, log):
        if not self.supports_retention:
            pytest.skip("the broker's work")
        topic = await self.make_topic(log, 1, compacted=True)
        for number in range(200):
            await log.append_all(topic, [Entry(b"%d" % number + b"x" * 1000, b"k%d" % (number % 3))])
        await log.append_all(topic, [Entry(None, b"k0"), Entry(b"last", b"k1")])
        now = int(time.time() * 1000)
        await log.enforce_retention(now + 2 * HOUR_MS)
        records = await read_to_end(log, log.reader(from_start(topic, 1)), topic)
        assert [(record.offset, record.key) for record in records] == [(197, b"k2"), (200, b"k0"), (201, b"k1")]
        assert records[1].value is None
        assert records[2].value == b"last"
        assert await log.bounds(topic) == {0: Bounds(0, 202)}
        # A day later nobody needs the deletion any more.
        await log.append(topic, Entry(b"new", b"k3"))
        await log.enforce_retention(now + 27 * HOUR_MS)
        records = await read_to_end(log, log.reader(from_start(topic, 1)), topic)
        assert [(r.offset, r.key) for r in records] == [(197, b"k2"), (201, b"k1"), (202, b"k3")]
