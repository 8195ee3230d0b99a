"""Routers' replicas, publishers, a stream worker and the broker killed with -9 at random instants, a hundred times.

At the end every acknowledged batch is in the log and folded once, and three replicas, a replica that starts from
snapshots, and a fold from the start agree.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import EventLog, TopicPartition
from dynamo_es.log.errors import LogError
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksStore
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, KvEvents
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.runner import FoldRunner
from streams.snapshot_log import SnapshotStart
from tests.kafka.broker import KafkaBroker
from tests.support.fold_process import FAMILIES, NAMESPACE, NoLetters
from tests.support.snapshots import snapshot_topic

pytestmark = [pytest.mark.kafka, pytest.mark.crash]
KILLS = {"replica": 46, "publisher": 40, "streams": 8, "broker": 6}
REPLICAS = 3
PUBLISHERS = 3
TOPIC = KV_EVENTS.qualified(NAMESPACE)
DEADLINE_S = 90.0


class Chaos:
    """The processes, each of which can be killed and comes back."""

    def __init__(self, broker: KafkaBroker, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.url = f"kafka://{broker.bootstrap}"
        self.running: dict[tuple[str, int], asyncio.subprocess.Process] = {}

    def command(self, kind: str, number: int) -> list[str]:
        if kind == "replica":
            return ["-m", "tests.support.fold_process", self.url, str(self.folder / f"replica-{number}")]
        if kind == "publisher":
            notes = str(self.folder / f"acknowledged-{number}")
            return ["-m", "tests.support.chaos_publisher", self.url, NAMESPACE, str(number), notes]
        return [
            "-m", "dynamo_es.cli.main", "streams", "--log", self.url, "--topic-namespace", NAMESPACE,
            "--state-dir", str(self.folder / "streams"), "--snapshot-interval", "1",
        ]  # fmt: skip

    async def begin(self, kind: str, number: int) -> None:
        output = (self.folder / f"{kind}-{number}.log").open("ab")
        with output:
            self.running[kind, number] = await asyncio.create_subprocess_exec(
                sys.executable, *self.command(kind, number), stdout=output, stderr=output
            )

    async def kill(self, kind: str, number: int) -> None:
        if kind == "broker":
            self.broker.kill()
            await asyncio.sleep(0.2)
            self.broker.spawn()
            await asyncio.to_thread(self.broker.wait_ready)
            return
        await self.end(kind, number)
        await self.begin(kind, number)

    async def end(self, kind: str, number: int) -> None:
        """One that found no broker at its start has ended by itself, with an error: whoever supervises starts it."""
        process = self.running.pop((kind, number), None)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            await process.wait()

    async def end_all(self, kind: str) -> None:
        for _, number in [key for key in self.running if key[0] == kind]:
            await self.end(kind, number)

    def acknowledged(self) -> dict[tuple[int, int], int]:
        """How many batches of each (worker, incarnation) were acknowledged."""
        found: dict[tuple[int, int], int] = {}
        for path in self.folder.glob("acknowledged-*"):
            for line in path.read_text().splitlines():
                worker, incarnation, count = map(int, line.split())
                found[worker, incarnation] = count
        return found


@pytest.fixture
async def chaos(own_broker, tmp_path) -> AsyncIterator[Chaos]:
    chaos = Chaos(own_broker, tmp_path)
    yield chaos
    for kind in ("publisher", "replica", "streams"):
        await chaos.end_all(kind)


async def until(condition, what: str) -> None:
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not await condition():
                await asyncio.sleep(0.2)
    except TimeoutError:
        pytest.fail(f"not within {DEADLINE_S:g} s: {what}")


async def ends_of(log: EventLog) -> dict[TopicPartition, int]:
    return {TopicPartition(TOPIC, number): bounds.end for number, bounds in (await log.bounds(TOPIC)).items()}


async def batches_in(log: EventLog) -> dict[tuple[int, int], set[int]]:
    """Numbers of all batches in the log by (worker, incarnation)."""
    codec = TopicCodec(KV_EVENTS)
    found: dict[tuple[int, int], set[int]] = {}
    ends = await ends_of(log)
    reader = log.reader(dict.fromkeys(ends, 0))
    while any(reader.positions()[place] < end for place, end in ends.items()):
        for records in (await reader.poll(timeout_s=1)).values():
            for record in records:
                value = codec.decode(record.value, record.headers)
                assert isinstance(value, KvEvents)
                found.setdefault((value.worker_id, value.incarnation), set()).add(value.seq)
    await reader.close()
    return found


def stored_digest(folder: Path) -> tuple[str, dict[TopicPartition, int]]:
    store = RocksStore(folder, FAMILIES, lock_timeout_s=10)
    try:
        fold = KvIndexFold()
        return fold.digest(fold.load(store)), dict(store.positions(fold.name))
    finally:
        store.close()


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
            return bool(await ends_of(log))
        return False

    await until(answers, "the broker answers")
    ends = await ends_of(log)
    present = await batches_in(log)
    acknowledged = chaos.acknowledged()
    for life, count in acknowledged.items():
        missing = set(range(count)) - present.get(life, set())
        assert not missing, f"acknowledged and not in the log: {life} {sorted(missing)[:5]}"
    state, _ = await refold(KvIndexFold(), log, NAMESPACE)
    expected = KvIndexFold().digest(state)
    last_life = dict(sorted(present))
    for key, source in state.sources.items():
        assert source.exact
        life = (key.worker_id, source.incarnation)
        assert life[1] == last_life[key.worker_id]
        assert source.next_seq == len(present[life]) >= acknowledged.get(life, 0)
    found = {}
    for number in range(REPLICAS):
        folder = chaos.folder / f"replica-{number}"

        async def caught_up(number=number, folder=folder) -> bool:
            await asyncio.sleep(1.0)
            await chaos.end("replica", number)
            found[number] = stored_digest(folder)
            if all(found[number][1].get(place) == end for place, end in ends.items()):
                return True
            await chaos.begin("replica", number)
            return False

        await until(caught_up, f"replica {number} has everything")
    assert {digest for digest, _ in found.values()} == {expected}
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
