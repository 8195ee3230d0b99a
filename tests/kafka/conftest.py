from __future__ import annotations

import contextlib

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.kafka import KafkaLog
from tests.kafka.broker import KafkaBroker, missing_tools


@pytest.fixture
async def open_kafka():
    """Opens logs at a URL and closes them at the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def open_at(servers: str, options: str = "") -> KafkaLog:
            log = KafkaLog.from_url(f"kafka://{servers}{options}", SystemClock(), {})
            stack.push_async_callback(log.close)
            await log.start()
            return log

        yield open_at


@pytest.fixture(scope="module")
def _killable_broker(tmp_path_factory):
    if (reason := missing_tools()) is not None:
        pytest.skip(f"killing a broker needs one of our own: {reason}")
    broker = KafkaBroker(tmp_path_factory.mktemp("broker"))
    yield broker
    broker.stop()


@pytest.fixture
def own_broker(_killable_broker):
    """A running broker that the test may kill; the next one finds it running again."""
    if not _killable_broker.is_running:
        _killable_broker.start()
    return _killable_broker
