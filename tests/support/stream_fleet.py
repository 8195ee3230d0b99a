"""Workers of the stream processors as processes, the events that they fold meanwhile, and what must hold at the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from dynamo_es.log.base import Entry, EventLog, Record, TopicPartition
from dynamo_es.runtime.appender import topic_configs
from dynamo_es.store.memory import MemoryStore
from schemas.aggregates import AGGREGATES, Progress
from schemas.catalog import TOPICS
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotManifest
from schemas.topic import TopicSpec
from streams.kv_index import KvIndexFold
from streams.refold import refold
from streams.snapshot_log import SnapshotStart
from streams.stream_worker import FOLDS
from streams.windows import WindowSettings
from tests.support.event_storm import EventStorm
from tests.support.snapshots import snapshot_topic

DEADLINE_S = 90.0
WINDOW_S = 2
SNAPSHOT_S = 2
# The brokers' least.
SESSION_S = 6
PARTITIONS = sum(spec.partitions for spec in FOLDS)
# By partition: what its newest snapshot covers, and who wrote that.
Manifests = dict[int, tuple[int, str]]


class StreamWorker:
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


class StreamFleet:
    """Topics of their own, workers on them, and a storm of events that goes on meanwhile."""

    def __init__(self, log: EventLog, url: str, folder: Path, replication: int = 1) -> None:
        self.log = log
        self.url = url
        self.folder = folder
        self._replication = replication
        self.namespace = f"s-{uuid.uuid4().hex[:8]}"
        self.workers: list[StreamWorker] = []
        self.storming = asyncio.Event()
        self._storm = iter(EventStorm(7))
        self._codecs = {spec.name: TopicCodec(spec) for spec in TOPICS}

    async def start(self) -> None:
        await self.log.create_topics(topic_configs(self.namespace, self._replication))

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
    async def events(self) -> AsyncIterator[None]:
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

    async def worker(self, state_dir: str, *command: str, **environment: str) -> StreamWorker:
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
        worker = StreamWorker(process, messages)
        self.workers.append(worker)
        return worker

    async def until(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> float:
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
        found: dict[bytes, Any] = {}
        for record in await self.records(spec):
            found.pop(record.key, None)
            if record.value is not None:
                found[record.key] = self._codecs[spec.name].decode(record.value, record.headers)
        return found

    async def records(self, spec: TopicSpec) -> list[Record]:
        """All records of a topic up to its present end, in order within each partition."""
        topic = spec.qualified(self.namespace)
        bounds = {TopicPartition(topic, number): limits for number, limits in (await self.log.bounds(topic)).items()}
        found: list[Record] = []
        reader = self.log.reader({place: limits.start for place, limits in bounds.items()})
        while any(reader.positions()[place] < limits.end for place, limits in bounds.items()):
            for records in (await reader.poll(timeout_s=1.0)).values():
                found += records
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

    async def manifests(self) -> Manifests:
        """Newest snapshot of each partition: what it covers, and who wrote it."""
        found: Manifests = {}
        for record in (await self.newest(KV_SNAPSHOTS)).values():
            if isinstance(record, KvSnapshotManifest):
                newest = found.get(record.partition, (-1, ""))
                found[record.partition] = max(newest, (record.next_offset, record.written_by))
        return found

    async def handovers(self, since_ms: int) -> list[float]:
        """Seconds from the last snapshot of a partition by one worker to the first by another, after ``since_ms``."""
        last: dict[int, tuple[str, int]] = {}
        gaps = []
        for record in await self.records(KV_SNAPSHOTS):
            value = None
            if record.value is not None:
                value = self._codecs[KV_SNAPSHOTS.name].decode(record.value, record.headers)
            if isinstance(value, KvSnapshotManifest):
                writer, written_ms = last.get(value.partition, (value.written_by, record.timestamp_ms))
                if writer != value.written_by and record.timestamp_ms >= since_ms:
                    gaps.append((record.timestamp_ms - written_ms) / 1000)
                last[value.partition] = (value.written_by, record.timestamp_ms)
        return gaps

    def snapshots_of(self, worker: StreamWorker) -> list[int]:
        """The partitions whose snapshots fell to this worker, ever."""
        topic = KV_EVENTS.qualified(self.namespace)
        return [number for number in range(KV_EVENTS.partitions) if f"{topic}[{number}]" in worker.live()]

    async def are_newer(self, before: Manifests, partitions: list[int], by: StreamWorker) -> bool:
        """Whether ``by`` has written a snapshot of each of the partitions that covers more than the one ``before``."""
        now = await self.manifests()
        return all(
            now[number][0] > before[number][0] and now[number][1].endswith(f"/{by.process.pid}")
            for number in partitions
            if before.get(number, (0, ""))[0]
        )

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
