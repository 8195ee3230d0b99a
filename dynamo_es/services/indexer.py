"""The indexer process: keeps some partitions of the KV index and answers routers (``use_remote_indexer``)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.config.partition_list import parse_partitions
from dynamo_es.config.tree import IndexerConfig
from dynamo_es.log.base import EventLog
from dynamo_es.router.source_reaper import SourceReaper
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.metrics import MAX_MODELS, BoundsCollector, LabelBound
from dynamo_es.runtime.metrics_index import IndexCollector, SnapshotAgeCollector
from dynamo_es.services.index_partitions import PartitionKeeper
from dynamo_es.services.indexer_metrics import IndexerCollector
from dynamo_es.store.base import StateStore
from dynamo_es.store.layout import PROCESS_FOLDER, partition_folder
from dynamo_es.store.memory import MemoryStore
from dynamo_es.store.rocks import RocksMemory, RocksStore
from schemas.kv_events import KV_EVENTS
from streams.kv_index import KvIndexFold


@dataclass(frozen=True, slots=True)
class IndexerSettings:
    """Everything that an indexer process is configured by."""

    process: RuntimeSettings
    indexer: IndexerConfig = field(default_factory=IndexerConfig)


async def run_indexer(
    settings: IndexerSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[int], None] = lambda instance_id: None,
) -> None:
    """Serve until ``stop`` is set, then hand over to the other indexers.

    ``on_ready`` is told the instance id once it answers for all partitions that it is to have.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    core = RuntimeCore(
        _process_settings(settings.process), loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log
    )
    core.healthy = False
    try:
        await core.start()
        keeper = build_indexer(core, settings)
        keeper.start()
        SourceReaper(core, keeper.index_states).start()
        if await _first(keeper.settled, stop):
            core.healthy = True
            on_ready(core.instance_id)
            await stop.wait()
        await keeper.leave(settings.process.runtime.drain_timeout_s)
    finally:
        await core.close()


def build_indexer(core: RuntimeCore, settings: IndexerSettings) -> PartitionKeeper:
    """The partitions of an indexer on a runtime that was started, shown on its status server. Not started."""
    text = settings.indexer.partitions
    given = parse_partitions(text, KV_EVENTS.partitions) if text is not None else None
    topic = KV_EVENTS.qualified(core.settings.log.namespace)

    memory = RocksMemory.for_partitions()

    def make_store(partition: int) -> StateStore:
        state_dir = settings.process.state.state_dir
        if state_dir is None:
            return MemoryStore(f"memory://{topic}-{partition}")
        folder = partition_folder(Path(state_dir), topic, partition)
        return RocksStore(folder, KvIndexFold.families, memory=memory)

    keeper = PartitionKeeper(core, make_store, given=given)
    core.health_parts["index"] = lambda: index_entry(keeper)
    if core.system is not None:
        models = LabelBound("index_model", MAX_MODELS)
        core.system.registry.register(IndexCollector(lambda: keeper.index_states().values(), models))
        core.system.registry.register(SnapshotAgeCollector(keeper.snapshots, keeper.position, core.clock))
        core.system.registry.register(IndexerCollector(keeper))
        core.system.registry.register(BoundsCollector(models))
    return keeper


def index_entry(keeper: PartitionKeeper) -> dict[str, Any]:
    """The indexer's part of ``/health``."""
    said = keeper.server.said
    answered = said.partitions if said is not None else frozenset()
    return {
        "kind": said.kind if said is not None else None,
        "wanted": sorted(keeper.wanted()),
        "partitions": {
            str(number): {"whole": member.is_whole, "registered": number in answered, "offset": member.position}
            for number, member in sorted(keeper.members.items())
        },
    }


def _process_settings(process: RuntimeSettings) -> RuntimeSettings:
    """The process's own store beside those of its partitions."""
    folder = process.state.state_dir
    if folder is None:
        return process
    return replace(process, state=replace(process.state, state_dir=str(Path(folder) / PROCESS_FOLDER)))


async def _first(awaited: asyncio.Event, stop: asyncio.Event) -> bool:
    """Wait for either; whether ``awaited`` was set."""
    waits = [asyncio.ensure_future(awaited.wait()), asyncio.ensure_future(stop.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    return awaited.is_set() and not stop.is_set()
