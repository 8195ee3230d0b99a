from __future__ import annotations

import shutil

from dynamo_es.clock import SystemClock
from dynamo_es.log.doorbell import PollingWatcher
from dynamo_es.log.embedded import EmbeddedLog
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.open import open_log
from tests.contract.log_suite import EventLogSuite


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
