"""Rows of several column families, and the position, after SIGKILL at any instant."""

from __future__ import annotations

import asyncio
import random
import sys

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.rocks import RocksStore
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from streams.refold import refold
from tests.support.event_storm import EventStorm
from tests.support.processor_process import NAMESPACE, PLACES, WINDOWS, folder_of

KILLS = 8


async def pour(log, stop):
    storm = iter(EventStorm(4))
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    wanted = {make.topics[0] for make in PLACES.values()}
    while not stop.is_set():
        for spec, key, value in (next(storm) for _ in range(30)):
            if spec in wanted:
                entry = Entry(codecs[spec.name].encode(value), key, codecs[spec.name].headers)
                await log.append(spec.qualified(NAMESPACE), entry)
        await asyncio.sleep(0.002)


async def check_stores(log, state_dir):
    """Every partition's rows are the fold of the log up to its position; the positions, summed."""
    covered = 0
    for place, make in PLACES.items():
        fold = make(WINDOWS)
        store = RocksStore(folder_of(state_dir, place), fold.families, lock_timeout_s=5)
        try:
            position = store.positions(fold.name).get(place, 0)
            families = {family: list(store.scan(family)) for family in fold.families}
            assert position or not any(families.values()), families
            stored = fold.load(store)
        finally:
            store.close()
        state, _ = await refold(make(WINDOWS), log, NAMESPACE, until={place: position})
        assert fold.digest(stored) == fold.digest(state), place
        covered += position
    return covered


@pytest.mark.crash
async def test_index_windows_and_position_are_all_there_or_none(tmp_path):
    """EVT-19: one batch over all families of a partition's store, killed before, in and after it."""
    rng = random.Random(5)
    url = f"embedded://{tmp_path}/log"
    log = open_log(url, SystemClock(), rng=rng)
    await log.start()
    await log.create_topics(topic_configs(NAMESPACE, None))
    stop = asyncio.Event()
    pouring = asyncio.create_task(pour(log, stop))
    state_dir = tmp_path / "state"
    covered = []
    try:
        for _ in range(KILLS):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.support.processor_process", url, str(state_dir),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert (await process.stdout.readline()).strip() == b"ready"
            await asyncio.sleep(rng.uniform(0, 0.25))
            process.kill()
            await process.wait()
            covered.append(await check_stores(log, state_dir))
    finally:
        stop.set()
        await pouring
        await log.close()
    assert covered == sorted(covered)
    assert covered[-1] > covered[0] > 0
