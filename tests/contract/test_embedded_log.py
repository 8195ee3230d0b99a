from __future__ import annotations

import gc
import shutil
import weakref

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry, Record, TopicConfig, TopicPartition
from dynamo_es.log.doorbell import PollingWatcher
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.open import open_log
from tests.contract.log_suite import EventLogSuite
from tests.support.runtimes import wait_for


class EmbeddedSuite(EventLogSuite):
    async def delete_topic(self, log, place, topic):
        shutil.rmtree(place / "topics" / topic)


class TestEmbeddedLog(EmbeddedSuite):
    async def open(self, place):
        log = open_log(f"embedded://{place}?segment_bytes=32768", SystemClock())
        await log.start()
        return log


class TestEmbeddedLogWithFsync(EmbeddedSuite):
    async def open(self, place):
        log = open_log(f"embedded://{place}?segment_bytes=65536&durability=fsync", SystemClock())
        await log.start()
        return log


class TestEmbeddedLogWithoutInotify(EmbeddedSuite):
    async def open(self, place):
        log = EmbeddedLog(
            place,
            SystemClock(),
            options=EmbeddedOptions(segment_bytes=65_536, recheck_s=5.0),
            watcher=PollingWatcher,
        )
        await log.start()
        return log


def held(kind):
    return [item for item in gc.get_objects() if type(item) is kind]


def records_of(topic):
    """Lists of such records that somebody has."""
    return [item for item in held(list) if item and isinstance(item[0], Record) and item[0].topic == topic]


async def test_what_was_read_is_freed_when_nobody_has_it_any_more(tmp_path):
    """By a reader that reads on, and by one that was closed: snapshots are read again and again, megabytes each."""
    log = open_log(f"embedded://{tmp_path / 'log'}", SystemClock())
    await log.start()
    await log.create_topics([TopicConfig("read-and-freed", 1)])
    await log.append("read-and-freed", Entry(b"value", b"key"))
    place = TopicPartition("read-and-freed", 0)
    reading, closed = log.reader({place: 0}), log.reader({place: 0})
    gone = weakref.ref(closed)
    gc.collect()
    gc.disable()
    try:
        for reader in (reading, closed):
            assert [len(records) for records in (await reader.poll(timeout_s=60)).values()] == [1]
        await closed.close()
        del reader, closed
        # A thread that has done its work forgets it a moment later.
        await wait_for(lambda: gone() is None and not records_of("read-and-freed"))
    finally:
        gc.enable()
    await reading.close()
    await log.close()
