"""``dynamo-es state verify``: a store against a fold of the log; whatever the two are, it comes to an end."""

from __future__ import annotations

import asyncio
import random

import pytest

from dynamo_es.cli.main import main
from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import IndexerConfig, LogConfig, StateConfig
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.log.open import open_log
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.process_store import ALL_FAMILIES
from dynamo_es.services.indexer import IndexerSettings, run_indexer
from dynamo_es.store.base import Delete
from dynamo_es.store.layout import process_folder
from dynamo_es.store.rocks import RocksStore
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.requests import REQUESTS
from streams.kv_index import KvIndexFold
from streams.kv_index_rows import BLOCKS_FAMILY
from streams.refold import refold
from streams.requests import RequestsFold
from streams.start import find_start
from tests.support.event_storm import EventStorm

NAMESPACE = "dynamo"
TOPIC = REQUESTS.qualified(NAMESPACE)
EVENTS = KV_EVENTS.qualified(NAMESPACE)


async def make_log(folder, seed):
    """A log with a few hundred events in small segments."""
    log = open_log(f"embedded://{folder}?segment_bytes=16384", SystemClock(), rng=random.Random(seed))
    await log.start()
    await log.create_topics(topic_configs(NAMESPACE, None))
    codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}
    storm = iter(EventStorm(seed))
    for _ in range(40):
        by_topic = {}
        for spec, key, value in (next(storm) for _ in range(20)):
            data = None if value is None else codecs[spec.name].encode(value)
            by_topic.setdefault(spec.qualified(NAMESPACE), []).append(Entry(data, key, codecs[spec.name].headers))
        for topic, entries in by_topic.items():
            await log.append_all(topic, entries)
    return log


async def longest(log):
    """The partition of ``requests`` that has most records."""
    bounds = await log.bounds(TOPIC)
    return TopicPartition(TOPIC, max(bounds, key=lambda number: bounds[number].end))


async def make_store(folder, log, *, moved_to=None):
    """What a process commits that has folded ``requests`` to its end; ``moved_to`` replaces a position."""
    store = RocksStore(folder, ALL_FAMILIES)
    try:
        fold = RequestsFold()
        state, positions = await refold(fold, log, NAMESPACE)
        identity = (await find_start(log, store, fold, NAMESPACE)).identity
        moved = {} if moved_to is None else {await longest(log): moved_to}
        store.commit(fold.name, fold.changes(state), {**positions, **moved}, identity)
    finally:
        store.close()


@pytest.fixture
def verify(tmp_path, capsys):
    """Make what is asked for, then run the command; exit code, output, errors."""

    def run(prepare, log="log"):
        asyncio.run(prepare())
        code = main(["state", "verify", "--log", f"embedded://{tmp_path}/{log}", "--state-dir", f"{tmp_path}/state"])
        return code, *capsys.readouterr()

    return run


def test_a_store_that_agrees(verify, tmp_path):
    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        await make_store(tmp_path / "state", log)
        await log.close()

    code, out, err = verify(prepare)
    assert (code, err) == (0, "")
    assert "registry: nothing committed yet\n" in out
    assert "requests: equal at " in out


def test_the_stores_of_several_processes_behind_one_port(verify, tmp_path):
    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        (tmp_path / "state").mkdir()
        for index in (0, 1):
            await make_store(process_folder(tmp_path / "state", index), log)
        await log.close()

    code, out, err = verify(prepare)
    assert (code, err) == (0, "")
    assert out.count("requests: equal at ") == 2
    assert f"{tmp_path}/state/process-1:\n" in out


def test_a_store_of_another_log(verify, tmp_path):
    """The other log is shorter than the store: folding up to the store's positions would never end."""
    ids = {}

    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        other = await make_log(tmp_path / "other", 2)
        await make_store(tmp_path / "state", log, moved_to=1_000_000)
        ids.update(made_from=log.log_id, now=other.log_id)
        await log.close()
        await other.close()

    code, out, err = verify(prepare, "other")
    assert code == 1
    assert (
        f"requests: OF ANOTHER LOG: the store was made from log {ids['made_from']}, "
        f"embedded://{tmp_path}/other is {ids['now']}\n" in out
    )
    assert err == f"delete {tmp_path}/state: the next start folds it anew from the log\n"


def test_a_store_that_is_ahead_of_its_log(verify, tmp_path):
    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        await make_store(tmp_path / "state", log, moved_to=1_000_000)
        await log.close()

    code, out, _ = verify(prepare)
    assert code == 1
    assert "requests: DOES NOT FIT THE LOG: it is at offset 1000000 of dynamo.requests[" in out
    assert ", which ends at " in out


def test_a_store_below_the_beginning_of_a_trimmed_log(verify, tmp_path):
    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        await make_store(tmp_path / "state", log, moved_to=1)
        place = await longest(log)
        assert await log.trim(place, (await log.bounds(TOPIC))[place.partition].end) > 1
        await log.close()

    code, out, _ = verify(prepare)
    assert code == 1
    assert "requests: DOES NOT FIT THE LOG: it is at offset 1 of dynamo.requests[" in out
    assert ", which starts at " in out


def test_a_difference_tells_what_the_log_has_no_more(verify, tmp_path):
    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        await make_store(tmp_path / "state", log)
        place = await longest(log)
        assert await log.trim(place, (await log.bounds(TOPIC))[place.partition].end) > 1
        await log.close()

    code, out, _ = verify(prepare)
    assert code == 1
    assert "requests: DIFFERENT at " in out
    assert "] begins at offset " in out
    assert ": what was before it is in the store only\n" in out


def test_the_stores_of_an_indexer_are_verified_each_by_itself(verify, tmp_path):
    """Its own, and one for each partition that it follows."""
    partitions = []

    async def prepare():
        log = await make_log(tmp_path / "log", 1)
        partitions.extend(number for number, limits in (await log.bounds(EVENTS)).items() if limits.end)
        await log.close()
        stop = asyncio.Event()
        settings = IndexerSettings(
            RuntimeSettings(
                LogConfig(url=f"embedded://{tmp_path}/log"), StateConfig(str(tmp_path / "state")), role="indexer"
            ),
            IndexerConfig(",".join(map(str, partitions))),
        )
        async with asyncio.timeout(60):
            await run_indexer(
                settings, stop, clock=SystemClock(), rng=random.Random(1), on_ready=lambda _: stop.set()
            )  # fmt: skip

    code, out, err = verify(prepare)
    assert (code, err) == (0, "")
    assert f"{tmp_path}/state/process:\nregistry: equal at " in out
    for partition in partitions:
        assert f"{tmp_path}/state/{EVENTS}-{partition}:\nkv-index: equal at " in out
    assert out.count("kv-index: equal at ") == len(partitions) > 1

    async def spoil():
        """One block's row of the first partition that has one."""
        for partition in partitions:
            folder = tmp_path / "state" / f"{EVENTS}-{partition}"
            store = RocksStore(folder, KvIndexFold.families)
            rows = list(store.scan(BLOCKS_FAMILY))
            if rows:
                spoilt.append(folder)
                store.commit("kv-index", [Delete(BLOCKS_FAMILY, rows[0][0])], {})
            store.close()
            if rows:
                break

    spoilt = []
    code, out, err = verify(spoil)
    assert code == 1
    assert f"{spoilt[0]}:\nkv-index: DIFFERENT at " in out
    assert out.count("kv-index: equal at ") == len(partitions) - 1
    assert err == f"delete {spoilt[0]}: the next start folds it anew from the log\n"
