from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.errors import OffsetOutOfRange
from dynamo_es.log.memory import MemoryLog
from dynamo_es.runtime.appender import topic_configs
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.requests import REQUESTS
from streams.refold import refold
from streams.requests import RequestsFold
from tests.support.event_storm import EventStorm

NAMESPACE = "dynamo"
TOPIC = REQUESTS.qualified(NAMESPACE)


@pytest.fixture
async def log():
    log = MemoryLog("refold", ManualClock(), random.Random(1))
    await log.start()
    await log.create_topics(topic_configs(NAMESPACE, None))
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    storm = iter(EventStorm(5))
    for _ in range(600):
        spec, key, value = next(storm)
        data = None if value is None else codecs[spec.name].encode(value)
        await log.append(spec.qualified(NAMESPACE), Entry(data, key, codecs[spec.name].headers))
    yield log
    await log.close()


async def ends_of(log):
    return {TopicPartition(TOPIC, number): bounds.end for number, bounds in (await log.bounds(TOPIC)).items()}


async def fold_requests(log, until=None):
    fold = RequestsFold()
    async with asyncio.timeout(60):
        state, positions = await refold(fold, log, NAMESPACE, until)
    return fold.digest(state), positions


async def test_it_covers_the_log_up_to_its_end(log):
    _, positions = await fold_requests(log)
    assert positions == await ends_of(log)
    assert sum(positions.values()) > 20


async def test_it_stops_where_it_is_told_to(log):
    ends = await ends_of(log)
    half = {position: end // 2 for position, end in ends.items()}
    digest, positions = await fold_requests(log, half)
    assert positions == half
    assert digest != (await fold_requests(log))[0]


async def test_positions_beyond_the_end_do_not_make_it_wait_for_records_that_never_come(log):
    ends = await ends_of(log)
    beyond = {position: end + 1_000 for position, end in ends.items()}
    assert await fold_requests(log, beyond) == await fold_requests(log)


async def test_a_log_that_begins_above_the_positions_gives_nothing(log):
    ends = await ends_of(log)
    for position, end in ends.items():
        await log.trim(position, end)
    fold = RequestsFold()
    digest, positions = await fold_requests(log, dict.fromkeys(ends, 1))
    assert digest == fold.digest(fold.new_state())
    assert positions == ends


async def test_records_that_retention_drops_meanwhile_are_skipped(log):
    """The log is trimmed between the look at its bounds and the first read."""
    ends = await ends_of(log)
    whole, _ = await fold_requests(log)
    make_reader = log.reader

    def trim_first(positions):
        for position, end in ends.items():
            log._drop_below(log._partition(position), end - 1)
        return make_reader(positions)

    log.reader = trim_first
    digest, positions = await fold_requests(log)
    assert positions == ends
    assert digest != whole


async def test_a_log_that_became_shorter_is_an_error(log):
    make_reader = log.reader

    def shorten_first(positions):
        for position in positions:
            partition = log._partition(position)
            partition.records.clear()
            partition.end = -1
        return make_reader(positions)

    log.reader = shorten_first
    with pytest.raises(OffsetOutOfRange):
        await fold_requests(log)
