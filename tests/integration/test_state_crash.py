from __future__ import annotations

import asyncio
import itertools
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
from tests.support.fold_process import FAMILIES, FOLDS, NAMESPACE

KILLS = 50


async def pour(log, storm, stop):
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    while not stop.is_set():
        by_topic: dict = {}
        for spec, key, value in itertools.islice(storm, 40):
            data = None if value is None else codecs[spec.name].encode(value)
            by_topic.setdefault(spec.qualified(NAMESPACE), []).append(Entry(data, key, codecs[spec.name].headers))
        for topic, entries in by_topic.items():
            await log.append_all(topic, entries)
        await asyncio.sleep(0.002)


async def digests_of_store(log, state_dir):
    """Digest of each fold's committed rows, and of the log folded up to the committed positions."""
    store = RocksStore(state_dir, FAMILIES, lock_timeout_s=5)
    try:
        result = {}
        for make in FOLDS:
            fold = make()
            positions = store.positions(fold.name)
            state, _ = await refold(fold, log, NAMESPACE, until=positions)
            result[fold.name] = (fold.digest(fold.load(store)), fold.digest(state), sum(positions.values()))
        return result
    finally:
        store.close()


@pytest.mark.crash
async def test_state_equals_a_fold_from_the_start_after_each_of_fifty_kills(tmp_path):
    rng = random.Random(11)
    url = f"embedded://{tmp_path}/log"
    log = open_log(url, SystemClock(), rng=rng)
    await log.start()
    await log.create_topics(topic_configs(NAMESPACE, None))
    stop = asyncio.Event()
    pouring = asyncio.create_task(pour(log, iter(EventStorm(3)), stop))
    state_dir = tmp_path / "state"
    folded = []
    try:
        for _ in range(KILLS):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.support.fold_process", url, str(state_dir),
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            assert (await process.stdout.readline()).strip() == b"ready"
            await asyncio.sleep(rng.uniform(0, 0.12))
            process.kill()
            await process.wait()
            found = await digests_of_store(log, state_dir)
            for name, (stored, expected, _) in found.items():
                assert stored == expected, name
            folded.append(sum(offsets for _, _, offsets in found.values()))
    finally:
        stop.set()
        await pouring
        await log.close()
    assert folded == sorted(folded)
    assert folded[-1] > folded[0] > 0
