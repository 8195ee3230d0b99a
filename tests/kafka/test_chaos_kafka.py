"""Routers' replicas, publishers, a stream worker and the broker killed with -9 at random instants, a hundred times.

At the end every acknowledged batch is in the log and folded once, and three replicas, a replica that starts from
snapshots, and a fold from the start agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import EventLog
from dynamo_es.log.errors import LogError
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from streams.kv_index import KvIndexFold
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from tests.kafka.broker import KafkaBroker
from tests.support.chaos import DEADLINE_S, ChaosProcesses, check_batches, ends_of
from tests.support.fold_process import NAMESPACE, NoLetters
from tests.support.snapshots import snapshot_topic

pytestmark = [pytest.mark.kafka, pytest.mark.crash]
KILLS = {"replica": 46, "publisher": 40, "streams": 8, "broker": 6}
REPLICAS = 3
PUBLISHERS = 3


class Chaos(ChaosProcesses):
    """The processes, and the broker, which comes back as well."""

    def __init__(self, broker: KafkaBroker, folder: Path) -> None:
        super().__init__(f"kafka://{broker.bootstrap}", folder, NAMESPACE)
        self.broker = broker

    async def kill(self, kind: str, number: int) -> None:
        if kind != "broker":
            await super().kill(kind, number)
            return
        self.broker.kill()
        await asyncio.sleep(0.2)
        self.broker.spawn()
        await asyncio.to_thread(self.broker.wait_ready)


@pytest.fixture
async def chaos(own_broker, tmp_path) -> AsyncIterator[Chaos]:
    chaos = Chaos(own_broker, tmp_path)
    yield chaos
    await chaos.end_all()


async def until(condition, what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


async def from_snapshots(log: EventLog) -> tuple[str, int]:
    """Digest of a replica that starts without state, and how many records it read."""
    fold = KvIndexFold()
    runner = FoldRunner(
        fold, log, MemoryStore(), NAMESPACE, clock=SystemClock(), dead_letters=NoLetters(),
        snapshots=SnapshotStart(log, NAMESPACE, fold.version, snapshot_topic(log, NAMESPACE)),
    )  # fmt: skip
    await runner.start()
    await runner.wait_caught_up(DEADLINE_S)
    digest = fold.digest(runner.state)
    await runner.stop()
    return digest, runner.counters.records


async def test_a_hundred_kills_lose_nothing_and_all_replicas_agree(chaos: Chaos, open_kafka):
    rng = random.Random(5)
    log = await open_kafka(chaos.broker.bootstrap)
    await log.create_topics(topic_configs(NAMESPACE, 1))
    for kind, count in (("replica", REPLICAS), ("publisher", PUBLISHERS), ("streams", 1)):
        for number in range(count):
            await chaos.begin(kind, number)

    async def all_publish() -> bool:
        return {worker for worker, _ in chaos.acknowledged()} == set(range(PUBLISHERS))

    await until(all_publish, "every publisher has something acknowledged")
    plan = [kind for kind, kills in KILLS.items() for _ in range(kills)]
    rng.shuffle(plan)
    counts = {"replica": REPLICAS, "publisher": PUBLISHERS, "streams": 1, "broker": 1}
    for kind in plan:
        await chaos.kill(kind, rng.randrange(counts[kind]))
        await asyncio.sleep(rng.uniform(0, 0.6))
    await chaos.end_all("publisher")
    await settle(chaos, log)


async def settle(chaos: Chaos, log: EventLog) -> None:
    """Let everything come to rest, and compare."""

    async def answers() -> bool:
        with contextlib.suppress(LogError):
            return bool(await ends_of(log, NAMESPACE))
        return False

    await until(answers, "the broker answers")
    ends = await ends_of(log, NAMESPACE)
    acknowledged = chaos.acknowledged()
    expected = await check_batches(log, NAMESPACE, acknowledged)
    assert {await chaos.converged_digest(number, ends) for number in range(REPLICAS)} == {expected}
    total = sum(ends.values())
    read = total

    async def snapshots_help() -> bool:
        nonlocal read
        if chaos.running["streams", 0].returncode is not None:
            await chaos.begin("streams", 0)
        digest, read = await from_snapshots(log)
        assert digest == expected
        return read < total / 2

    await until(snapshots_help, "the stream worker left snapshots")
    print(f"{total} records, {sum(acknowledged.values())} acknowledged batches, {len(acknowledged)} lives; ", end="")
    print(f"a new replica read {read} records")
