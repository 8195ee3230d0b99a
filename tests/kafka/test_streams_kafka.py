"""Workers of the stream processors as processes, on a real Kafka: joining, leaving, dying."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dynamo_es.cli.streams import work
from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import LogConfig, StateConfig, StreamsConfig, SystemConfig
from dynamo_es.log.base import Entry, TopicPartition
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksStore
from schemas.aggregates import AGGREGATES, Progress
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotManifest
from schemas.topic import TopicSpec
from streams.faust_app import build_app
from streams.kv_index import KvIndexFold
from streams.rank_load import PassLoadFold
from streams.refold import refold
from streams.snapshot_log import SnapshotStart
from streams.stream_worker import FOLDS, StreamsSettings
from streams.windows import WindowSettings
from tests.support.event_storm import EventStorm
from tests.support.snapshots import snapshot_topic

pytestmark = [pytest.mark.kafka, pytest.mark.crash]
DEADLINE_S = 90.0
WINDOW_S = 2
SNAPSHOT_S = 2
# The brokers' least.
SESSION_S = 6


class Worker:
    """A worker process. Its messages are in a file."""

    def __init__(self, process: asyncio.subprocess.Process, messages: Path) -> None:
        self.process = process
        self.ends = False
        self._messages = messages

    def messages(self) -> str:
        return self._messages.read_text()

    def live(self) -> set[str]:
        """Partitions that it opened, ever."""
        return set(re.findall(r"(\S+\[\d+\]): live at", self.messages()))

    async def leave(self) -> None:
        self.ends = True
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            assert await self.process.wait() in (0, -signal.SIGTERM), self.messages()
        assert "Traceback" not in self.messages()


class Fleet:
    """Topics of their own, workers on them, and a storm of events that goes on meanwhile."""

    def __init__(self, log, url, folder) -> None:
        self.log = log
        self.url = url
        self.folder = folder
        self.namespace = f"s-{uuid.uuid4().hex[:8]}"
        self.workers: list[Worker] = []
        self.storming = asyncio.Event()
        self._storm = iter(EventStorm(7))
        self._codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}

    async def start(self) -> None:
        await self.log.create_topics(topic_configs(self.namespace, 1))

    async def append(self, count: int) -> None:
        batches: dict[str, list[Entry]] = {}
        for _ in range(count):
            spec, key, value = next(self._storm)
            codec = self._codecs[spec.name]
            data = None if value is None else codec.encode(value)
            batches.setdefault(spec.qualified(self.namespace), []).append(Entry(data, key, codec.headers))
        for topic, entries in batches.items():
            await self.log.append_all(topic, entries)

    @contextlib.asynccontextmanager
    async def events(self):
        """About 200 events a second until the end of the block."""
        self.storming.set()

        async def storm() -> None:
            while self.storming.is_set():
                await self.append(20)
                await asyncio.sleep(0.1)

        task = asyncio.create_task(storm())
        try:
            yield
        finally:
            self.storming.clear()
            await task

    async def worker(self, state_dir: str, *command: str, **environment: str) -> Worker:
        messages = self.folder / f"worker-{len(self.workers)}.log"
        command = command or ("-m", "dynamo_es.cli.main", "streams")
        with messages.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command,
                env={
                    **os.environ,
                    "DYN_ES_LOG": self.url,
                    "DYN_ES_TOPIC_NAMESPACE": self.namespace,
                    "DYN_ES_STATE_DIR": str(self.folder / state_dir),
                    "DYN_ES_STATE_FLUSH_INTERVAL": "1",
                    "DYN_ES_SNAPSHOT_INTERVAL": str(SNAPSHOT_S),
                    "DYN_ES_STREAMS_SESSION_TIMEOUT": str(SESSION_S),
                    "DYN_ES_STREAMS_PUBLISH_INTERVAL": "1",
                    "DYN_ES_STREAMS_WINDOW": str(WINDOW_S),
                    **environment,
                },
                stdin=asyncio.subprocess.DEVNULL, stdout=file, stderr=asyncio.subprocess.STDOUT,
            )  # fmt: skip
        worker = Worker(process, messages)
        self.workers.append(worker)
        return worker

    async def until(self, condition, what: str, deadline_s: float = DEADLINE_S) -> float:
        """Seconds until ``condition`` (a coroutine function, or a plain one) holds."""
        began = time.monotonic()
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return time.monotonic() - began
            died = any(worker.process.returncode is not None and not worker.ends for worker in self.workers)
            if died or time.monotonic() - began > deadline_s:
                told = "\n".join(worker.messages()[-4000:] for worker in self.workers)
                raise AssertionError(f"not within {deadline_s:g} s: {what}\n{told}")
            await asyncio.sleep(0.1)

    async def newest(self, spec: TopicSpec) -> dict[bytes, Any]:
        """Newest value of each key of a topic, read at once."""
        topic = spec.qualified(self.namespace)
        bounds = {TopicPartition(topic, number): limits for number, limits in (await self.log.bounds(topic)).items()}
        found: dict[bytes, Any] = {}
        reader = self.log.reader({place: limits.start for place, limits in bounds.items()})
        while any(reader.positions()[place] < limits.end for place, limits in bounds.items()):
            for records in (await reader.poll(timeout_s=1.0)).values():
                for record in records:
                    found.pop(record.key, None)
                    if record.value is not None:
                        found[record.key] = self._codecs[spec.name].decode(record.value, record.headers)
        await reader.close()
        return found

    async def is_covered(self) -> bool:
        """Whether published windows cover all that is in the log."""
        covered = {
            (value.topic, value.partition): value.next_offset
            for value in (await self.newest(AGGREGATES)).values()
            if isinstance(value, Progress)
        }
        for spec in FOLDS:
            for partition, bounds in (await self.log.bounds(spec.qualified(self.namespace))).items():
                if covered.get((spec.name, partition), 0) < bounds.end:
                    return False
        return True

    async def check_windows(self) -> int:
        """Published windows are those of a fold from the start; how many there are."""
        published = await self.newest(AGGREGATES)
        expected = {}
        for make in FOLDS.values():
            fold = make(WindowSettings(window_ms=WINDOW_S * 1000))
            state, _ = await refold(fold, self.log, self.namespace)
            windows = fold.windows(state)
            expected |= {windows.key(row): row for row in windows.rows()}
        assert {key: row for key, row in published.items() if not isinstance(row, Progress)} == expected
        return len(expected)

    async def manifests(self) -> dict[int, tuple[int, str]]:
        """Newest snapshot of each partition: what it covers, and who wrote it."""
        found: dict[int, tuple[int, str]] = {}
        for record in (await self.newest(KV_SNAPSHOTS)).values():
            if isinstance(record, KvSnapshotManifest):
                newest = found.get(record.partition, (-1, ""))
                found[record.partition] = max(newest, (record.next_offset, record.written_by))
        return found

    async def check_snapshots(self) -> None:
        """The index that the newest snapshots hold is that of a fold from the start."""
        fold = KvIndexFold()
        topic = KV_EVENTS.qualified(self.namespace)
        bounds = {TopicPartition(topic, number): limits for number, limits in (await self.log.bounds(topic)).items()}
        start = SnapshotStart(self.log, self.namespace, fold.version, snapshot_topic(self.log, self.namespace))
        restored = await start.restore(bounds, lambda done, partitions: None)
        assert {place: restored.positions[place] for place, limits in bounds.items() if limits.end} == {
            place: limits.end for place, limits in bounds.items() if limits.end
        }
        store = MemoryStore()
        store.commit(fold.name, restored.changes, restored.positions)
        state, _ = await refold(fold, self.log, self.namespace)
        assert fold.digest(fold.load(store)) == fold.digest(state)

    async def close(self) -> None:
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.process.kill()
                await worker.process.wait()


@pytest.fixture
async def make_fleet(open_kafka, tmp_path):
    async with contextlib.AsyncExitStack() as stack:

        async def make(bootstrap, options="") -> Fleet:
            fleet = Fleet(await open_kafka(bootstrap, options), f"kafka://{bootstrap}{options}", tmp_path)
            stack.push_async_callback(fleet.close)
            await fleet.start()
            return fleet

        yield make


@pytest.fixture
async def fleet(make_fleet, kafka_bootstrap):
    return await make_fleet(kafka_bootstrap)


PARTITIONS = sum(spec.partitions for spec in FOLDS)


async def test_nothing_is_lost_or_counted_twice_when_workers_join_leave_and_die(fleet, capsys):
    """EVT-13: workers with folders of their own; the second joins, leaves, comes back with its old state, is killed."""
    await fleet.append(1500)
    async with fleet.events():
        first = await fleet.worker("a")
        await fleet.until(lambda: len(first.live()) == PARTITIONS, "the first worker has everything")
        second = await fleet.worker("b")
        joined_s = await fleet.until(lambda: len(second.live()) >= PARTITIONS // 3, "the second has its share")
        moved = [number for number in range(8) if f"{KV_EVENTS.qualified(fleet.namespace)}[{number}]" in second.live()]
        assert moved
        await asyncio.sleep(SNAPSHOT_S)

        before = await fleet.manifests()
        left_at = time.monotonic()
        await second.leave()
        left_s = time.monotonic() - left_at
        own = f"/{first.process.pid}"

        async def covered_again() -> bool:
            now = await fleet.manifests()
            return all(
                now[number][0] > before.get(number, (0, ""))[0] and now[number][1].endswith(own)
                for number in moved
                if number in before and before[number][0]
            )

        gap_s = await fleet.until(covered_again, "snapshots of what the second had, by the first", 30)

        third = await fleet.worker("b")
        await fleet.until(lambda: len(third.live()) >= PARTITIONS // 3, "back with its old state")
        await asyncio.sleep(1.0)
        third.ends = True
        third.process.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        await third.process.wait()
        lost = len(third.live())
        opened = first.messages().count("live at")
        await fleet.until(lambda: first.messages().count("live at") >= opened + lost // 2, "the first took over")
        taken_s = time.monotonic() - killed_at
        await asyncio.sleep(1.0)
    covered_s = await fleet.until(fleet.is_covered, "windows cover everything")
    windows = await fleet.check_windows()
    await first.leave()
    await fleet.check_snapshots()
    assert windows > 100
    with capsys.disabled():
        print(
            f"\njoin {joined_s:.1f} s, clean leave {left_s:.1f} s, snapshot gap after it {gap_s:.1f} s, "
            f"take-over after SIGKILL {taken_s:.1f} s (session timeout {SESSION_S} s), covered {covered_s:.1f} s after "
            f"the last event; {windows} windows equal"
        )


async def test_workers_that_share_a_folder_hand_partitions_over_by_lock(fleet):
    """EVT-09: one store is held by a process that is no worker; its partition waits, the others do not.

    The second worker is the plain ``faust`` command, with its options from the environment.
    """
    await fleet.append(400)
    folder = fleet.folder / "shared"
    place = f"{FORWARD_PASS.qualified(fleet.namespace)}[1]"
    held = folder / f"{FORWARD_PASS.qualified(fleet.namespace)}-1"
    store = await asyncio.to_thread(RocksStore, held, PassLoadFold.families)
    try:
        first = await fleet.worker("shared", DYN_ES_STREAMS_LOCK_TIMEOUT="1")
        await fleet.until(lambda: len(first.live()) == PARTITIONS - 1, "everything but the one")
        assert place not in first.live()
        await fleet.until(lambda: f"{place} is given up by this worker" in first.messages(), "it is given up")
        assert first.process.returncode is None
    finally:
        await asyncio.to_thread(store.close)
    second = await fleet.worker("shared", "-m", "faust", "-A", "streams.faust_app", "worker", "-l", "info")
    async with fleet.events():
        await fleet.until(lambda: len(second.live()) >= PARTITIONS // 3, "stores changed hands")
        await asyncio.sleep(0.5)
    await second.leave()
    await fleet.until(fleet.is_covered, "windows cover everything, the partition that was given up included")
    assert await fleet.check_windows() > 20
    await first.leave()
    await fleet.check_snapshots()


async def test_a_worker_goes_on_after_a_broker_was_away(own_broker, make_fleet):
    """EVT-14: the broker dies and comes back; partitions get on without anybody's help."""
    fleet = await make_fleet(own_broker.bootstrap, "?request_timeout_ms=2000&connect_timeout_ms=2000")
    await fleet.append(300)
    worker = await fleet.worker("a")
    await fleet.until(lambda: len(worker.live()) == PARTITIONS, "it has everything")
    await asyncio.to_thread(own_broker.kill)
    await asyncio.to_thread(own_broker.spawn)
    await asyncio.to_thread(own_broker.wait_ready)

    async def appended() -> bool:
        with contextlib.suppress(Exception):
            await fleet.append(300)
            return True
        return False

    await fleet.until(appended, "the log takes events again")
    await fleet.until(fleet.is_covered, "windows cover everything")
    assert worker.process.returncode is None
    assert await fleet.check_windows() > 20
    await worker.leave()


async def test_a_consumer_that_delivers_nothing_is_made_anew(fleet, caplog):
    """EVT-14: Faust's fetcher is gone without an error. Records are folded all the same, and a new one takes over."""
    settings = StreamsSettings(
        LogConfig(fleet.url, fleet.namespace),
        StateConfig(stall_timeout_s=1.5),
        StreamsConfig(session_timeout_s=SESSION_S, publish_interval_s=0.5, window_s=WINDOW_S),
        SystemConfig(),
    )
    clock, rng = SystemClock(), random.Random(1)
    apps = []

    def build():
        apps.append(
            build_app(settings, clock=clock, rng=rng, registry=CollectorRegistry(), environment={})
        )  # fmt: skip
        return apps[-1]

    stop = asyncio.Event()
    working = asyncio.create_task(work(settings, build, stop, clock, rng))

    def members(number):
        worker = apps[number].worker if len(apps) > number else None
        return list(worker.pool.members.values()) if hasattr(worker, "pool") else []

    await fleet.until(lambda: sum(member.live for member in members(0)) == PARTITIONS, "it has everything")
    first = members(0)
    await apps[0]._fetcher.stop()
    async with fleet.events():
        await fleet.until(lambda: len(apps) == 2, "a second application")
        assert "the group's consumer has delivered none for" in caplog.text
        assert sum(member.processor.counters.read for member in first) > 0
        await fleet.until(lambda: any(member.processor.counters.delivered for member in members(1)), "it delivers")
    await fleet.until(fleet.is_covered, "windows cover everything")
    assert await fleet.check_windows() > 20
    stop.set()
    async with asyncio.timeout(DEADLINE_S):
        await working
