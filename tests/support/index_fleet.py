"""Indexers and routers of one memory log in this process, a storm of KV events, and a whole view to compare with."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from dynamo_es.clock import SystemClock
from dynamo_es.config.tree import IndexerConfig, LogConfig, RuntimeConfig, StateConfig
from dynamo_es.log.base import Entry
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from dynamo_es.router.remote_index import RemoteIndex
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.index_owners import IndexOwner, owners_in
from dynamo_es.runtime.runtime import DistributedRuntime
from dynamo_es.runtime.views import RoutingViews
from dynamo_es.services.indexer import IndexerSettings, run_indexer
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS
from tests.support.event_storm import EventStorm
from tests.support.runtimes import SharedLog, make_runtime, wait_for

BLOCK = 4
TOPIC = KV_EVENTS.qualified("dynamo")
ALL = frozenset(range(KV_EVENTS.partitions))
# Long leases: the storm's workers are nowhere registered, and would be retired as soon as they are taken for gone.
PATIENT = RuntimeConfig(
    lease_ttl_s=600.0, heartbeat_s=0.5, drain_timeout_s=20.0, connect_timeout_s=2.0, inhibited_s=0.3
)


class Indexer:
    """One indexer of this process."""

    def __init__(self, fleet: IndexFleet, number: int, partitions: str | None, state: StateConfig) -> None:
        self.stop, self.ready = asyncio.Event(), asyncio.Event()
        self.instance_id = 0
        settings = IndexerSettings(
            RuntimeSettings(LogConfig(url="memory://"), state, fleet.runtime, "indexer"), IndexerConfig(partitions)
        )
        self.task = asyncio.create_task(
            run_indexer(
                settings, self.stop, clock=SystemClock(), rng=random.Random(number), log=SharedLog(fleet.log),  # type: ignore[arg-type]
                on_ready=self._on_ready,
            )
        )  # fmt: skip

    def _on_ready(self, instance_id: int) -> None:
        self.instance_id = instance_id
        self.ready.set()

    async def end(self) -> None:
        self.stop.set()
        await self.task


class IndexFleet:
    """``view`` folds everything, as a router does that keeps its own index."""

    def __init__(self, log: MemoryLog, runtime: RuntimeConfig, seed: int) -> None:
        self.log, self.runtime = log, runtime
        self.rng = random.Random(seed)
        self._storm = iter(EventStorm(seed, [KV_EVENTS]))
        self._codec = TopicCodec(KV_EVENTS)
        self._indexers: list[Indexer] = []
        self._runtimes: list[DistributedRuntime] = []

    async def start(self) -> None:
        self.router = await self.process("router")
        self.view = RoutingViews(self.router.core)
        await self.view.start()

    async def process(self, role: str) -> DistributedRuntime:
        runtime = make_runtime(self.log, role=role, runtime=self.runtime)
        self._runtimes.append(runtime)
        await runtime.core.start()
        return runtime

    async def remote(self, deadline_s: float = 1.0) -> RemoteIndex:
        """A router's remote index; the deadline is generous, so that a slow machine spoils no comparison."""
        remote = RemoteIndex(self.router.core, deadline_s=deadline_s)
        await remote.start()
        return remote

    async def indexer(self, partitions: str | None = None, *, state: StateConfig | None = None) -> Indexer:
        """An indexer that answers for all that it is to have."""
        indexer = Indexer(
            self,
            len(self._indexers) + 1,
            partitions,
            state or StateConfig(flush_interval_s=0.1, snapshot_interval_s=0.2),
        )
        self._indexers.append(indexer)
        ready = asyncio.create_task(indexer.ready.wait())
        async with asyncio.timeout(60):
            await asyncio.wait([ready, indexer.task], return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if indexer.task.done():
            indexer.task.result()
        return indexer

    def owners(self) -> dict[int, IndexOwner]:
        """As the router's process sees them."""
        return {owner.instance_id: owner for owner in owners_in(self.router.core.registry.state)}

    async def wait_covered(self) -> None:
        await wait_for(
            lambda: set().union(*(owner.partitions for owner in self.owners().values())) == ALL, timeout_s=20
        )

    async def events(self, count: int) -> None:
        for _, key, value in itertools.islice(self._storm, count):
            await self.log.append(TOPIC, Entry(self._codec.encode(value), key, self._codec.headers))

    def prompt(self) -> list[int]:
        """Hashes of which the storm's workers hold some."""
        return [self.rng.randrange(1 << 12) << 50 for _ in range(self.rng.randint(1, 6))]

    def held_prompt(self) -> list[int]:
        """Blocks that some worker holds in device memory, as a prompt."""
        index = self.view.index_states()[0].models["m"]
        slots = [slot for slot, source in index.by_slot.items() if source.counts[0] and source.exact]
        blocks = index.blocks_of(self.rng.choice(slots), 0).tolist() if slots else [1]
        return self.rng.sample(blocks, min(len(blocks), self.rng.randint(1, 8)))

    def expected(self, hashes: Sequence[int]) -> dict[WorkerRank, TierOverlap]:
        found = self.view.index_states()[0].match("m", hashes, BLOCK)
        return {WorkerRank(source.key.worker_id, source.key.dp_rank): TierOverlap(*depths) for source, *depths in found}

    async def settle(self, remote: RemoteIndex) -> None:
        """Wait until the view and all who are asked have what is in the log now."""
        ends = {number: bounds.end for number, bounds in (await self.log.bounds(TOPIC)).items()}
        await self.view.wait_caught_up(20)

        async def is_settled() -> bool:
            told = (await remote.match("m", [1], BLOCK)).positions
            return {place.partition: offset for place, offset in told.items()} == ends

        async with asyncio.timeout(60):
            while not await is_settled():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        for indexer in self._indexers:
            indexer.stop.set()
        await asyncio.gather(*(indexer.task for indexer in self._indexers), return_exceptions=True)
        for runtime in reversed(self._runtimes):
            await runtime.close()


@asynccontextmanager
async def index_fleet(runtime: RuntimeConfig = PATIENT, seed: int = 1) -> AsyncIterator[IndexFleet]:
    """A fleet without indexers; everything is closed at the end."""
    memory = MemoryLog("test", SystemClock(), random.Random(seed))
    await memory.start()
    fleet = IndexFleet(memory, runtime, seed)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()
        await memory.close()
