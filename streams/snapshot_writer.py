"""Writing snapshots of the KV index, and trimming the log below those that were verified.

One of the supervisors of the stream processors: a log or store that is away only delays the next snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.log.base import Bounds, Entry, EventLog, TopicPartition
from dynamo_es.log.errors import LogError
from dynamo_es.store.base import StateStore
from dynamo_es.store.errors import StoreError
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotManifest, KvSnapshotRecord
from streams.committed_rows import CommittedRows
from streams.compacted import CompactedTopic
from streams.snapshots import SnapshotPlan, SnapshotRefused, check_snapshot, chunk_keys, manifests_in, plan_snapshot

logger = logging.getLogger(__name__)
_BATCH = 16


@dataclass(slots=True)
class SnapshotCounters:
    """For metrics.

    Attributes:
        covered: For each partition that is written here: the next offset of its newest snapshot, and the time (Unix
            ms) at which that last had everything that was folded. Offset 0 and the time when it came to this process
            while there is none.
    """

    written: int = 0
    chunks: int = 0
    failed: int = 0
    refused: int = 0
    covered: dict[int, tuple[int, int]] = field(default_factory=dict)


class SnapshotWriter:
    """Writes a snapshot of each owned partition of ``kv-events`` every ``interval_s``, if something changed.

    What it writes comes from the runner's committed rows. Several writers of one partition do no harm: the newest whole
    snapshot counts, and a round leaves a partition to another writer whose snapshot went on since the round before.
    """

    def __init__(
        self,
        log: EventLog,
        runner: CommittedRows,
        namespace: str,
        snapshots: CompactedTopic,
        *,
        owned: Callable[[], Collection[int]],
        name: str,
        clock: Clock,
        rng: random.Random,
        interval_s: float = 60.0,
        trims: bool = False,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """Does nothing yet.

        ``snapshots``: the topic ``kv-snapshots``. ``owned``: partitions to write now. ``trims``: drop records past
        their retention, below what is covered.
        """
        self.counters = SnapshotCounters()
        self._log = log
        self._runner = runner
        self._namespace = namespace
        self._snapshots = snapshots
        self._owned = owned
        self._name = name
        self._clock = clock
        self._rng = rng
        self._interval_s = interval_s
        self._trims = trims
        self._tasks = tasks or BackgroundTasks()
        self._codec = TopicCodec(KV_SNAPSHOTS)
        self._task: asyncio.Task[None] | None = None
        # Newest offset that a snapshot covered when this one last looked.
        self._seen: dict[int, int] = {}

    def start(self) -> None:
        """Begin."""
        self._task = self._tasks.spawn(self._run(), "snapshot-writer")

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def write_owned(self) -> None:
        """One round: commit, then a snapshot of every owned partition that moved and that nobody else is writing.

        Raises:
            LogError, StoreError: The rest of the round is left for the next one.
        """
        await self._runner.commit()
        owned = sorted(self._owned())
        now = self._clock.now_ms()
        covered = self.counters.covered
        self.counters.covered = {partition: covered.get(partition, (0, now)) for partition in owned}
        for partition in owned:
            await self.write(partition, beside_others=True)

    async def write(self, partition: int, *, beside_others: bool = False) -> KvSnapshotManifest | None:
        """Write the snapshot of one partition; None if nothing came in since the newest one that holds.

        ``beside_others``: also none if another writer's snapshot went on since this one last looked.

        Raises ``LogError`` and ``StoreError``.
        """
        records = await self._snapshots.read(partition)
        topic = KV_EVENTS.qualified(self._namespace)
        topic_id = (await self._log.describe(topic)).topic_id
        bounds = await self._log.bounds(topic)
        if partition not in bounds:
            return None
        previous = self._newest_whole(records, partition, topic_id, bounds[partition])
        position = TopicPartition(topic, partition)
        now = self._clock.now_ms()
        plan = None
        if not (beside_others and self._is_written_by_another(partition, previous)):
            plan = await self._runner.read_store(
                lambda store: self._plan(store, position, len(bounds), topic_id, previous)
            )
        if plan is not None:
            await self._append(plan, records, previous)
        covered = plan.manifest if plan is not None else previous[1] if previous is not None else None
        if covered is not None:
            self._seen[partition] = covered.next_offset
        # Without a plan nothing was committed since the newest one that holds, or another one sees to it.
        self.counters.covered[partition] = (covered.next_offset if covered is not None else 0, now)
        if covered is not None and self._trims:
            await self._trim(position, covered, topic_id)
        return plan.manifest if plan is not None else None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s * self._rng.uniform(0.8, 1.2))
            try:
                await self.write_owned()
            except (LogError, StoreError) as error:
                self.counters.failed += 1
                logger.warning("snapshots not written, next try in %g s: %s", self._interval_s, error)

    def _is_written_by_another(self, partition: int, newest: tuple[int, KvSnapshotManifest] | None) -> bool:
        if newest is None or newest[1].written_by == self._name:
            return False
        return newest[1].next_offset > self._seen.get(partition, newest[1].next_offset)

    def _newest_whole(
        self, records: dict[bytes, KvSnapshotRecord], partition: int, topic_id: str, bounds: Bounds
    ) -> tuple[int, KvSnapshotManifest] | None:
        for generation, manifest in manifests_in(records, partition):
            try:
                check_snapshot(
                    manifest, records, topic_id=topic_id, fold_version=self._runner.fold.version, bounds=bounds
                )
            except SnapshotRefused as error:
                self.counters.refused += 1
                logger.warning("snapshot of partition %d is written anew: %s", partition, error)
                continue
            return generation, manifest
        return None

    def _plan(
        self,
        store: StateStore,
        position: TopicPartition,
        partitions: int,
        topic_id: str,
        previous: tuple[int, KvSnapshotManifest] | None,
    ) -> SnapshotPlan | None:
        next_offset = store.positions(self._runner.fold.name).get(position)
        if next_offset is None or (previous is not None and previous[1].next_offset >= next_offset):
            return None
        return plan_snapshot(
            store,
            partition=position.partition,
            partitions=partitions,
            next_offset=next_offset,
            topic_id=topic_id,
            fold_version=self._runner.fold.version,
            snapshot_id=f"{self._rng.getrandbits(64):016x}",
            written_by=self._name,
            previous=previous,
        )

    async def _append(
        self,
        plan: SnapshotPlan,
        records: dict[bytes, KvSnapshotRecord],
        previous: tuple[int, KvSnapshotManifest] | None,
    ) -> None:
        """Chunks, then the manifest, then the end of what neither this snapshot nor the one before needs."""
        topic = KV_SNAPSHOTS.qualified(self._namespace)
        partition = plan.manifest.partition
        for start in range(0, len(plan.chunks), _BATCH):
            entries = [self._entry(key, chunk, partition) for key, chunk in plan.chunks[start : start + _BATCH]]
            await self._log.append_all(topic, entries)
        await self._log.append(topic, self._entry(plan.manifest_key, plan.manifest, partition))
        needed = plan.live_keys()
        if previous is not None:
            needed.update(chunk_keys(previous[1]))
        void = [key for key in records if not key.startswith(b"manifest/") and key not in needed]
        if void:
            await self._log.append_all(topic, [Entry(None, key, (), None, partition) for key in void])
        self.counters.written += 1
        self.counters.chunks += len(plan.chunks)

    def _entry(self, key: bytes, value: KvSnapshotRecord, partition: int) -> Entry:
        return Entry(self._codec.encode(value), key, self._codec.headers, None, partition)

    async def _trim(self, position: TopicPartition, manifest: KvSnapshotManifest, topic_id: str) -> None:
        """Drop what is past its retention and covered, after the snapshot was read back and checked."""
        bounds = (await self._log.bounds(position.topic))[position.partition]
        if KV_EVENTS.retention_ms is None:
            return
        expired = await self._log.offset_at(position, self._clock.now_ms() - KV_EVENTS.retention_ms)
        before = min(expired, manifest.next_offset)
        if before <= bounds.start:
            return
        records = await self._snapshots.read(position.partition)
        newest = self._newest_whole(records, position.partition, topic_id, bounds)
        if newest is None:
            logger.warning("%s[%d] not trimmed: no snapshot of it holds", position.topic, position.partition)
            return
        start = await self._log.trim(position, min(before, newest[1].next_offset))
        if start > bounds.start:
            logger.info("%s[%d] starts at offset %d now", position.topic, position.partition, start)
