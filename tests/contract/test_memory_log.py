from __future__ import annotations

from dynamo_es.clock import SystemClock
from dynamo_es.log.open import open_log
from tests.contract.log_suite import EventLogSuite


class TestMemoryLog(EventLogSuite):
    supports_second_handle = False

    async def open(self, place):
        log = open_log("memory://suite", SystemClock())
        await log.start()
        return log

    async def delete_topic(self, log, place, topic):
        del log._topics[topic]
