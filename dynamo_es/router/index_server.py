"""Answering other routers' questions from a KV index of this process: an indexer's partitions, or a router's view."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dynamo_es.log.errors import LogError
from dynamo_es.log.partitioning import partition_for
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import TierOverlap
from dynamo_es.router.index_query import IndexAnswer, IndexQuery, make_answer, read_query
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.runtime.index_owners import INDEX_ENDPOINT, IndexOwner
from schemas.kv_events import KV_EVENTS, key_kv_events
from streams.kv_index_state import KvIndexState, SourceKey
from streams.runner import FoldRunner, RunnerStatus

logger = logging.getLogger(__name__)
_RETRY_S = 1.0
_LOOK_S = 0.1
# Sources whose partition is remembered; finding it takes 6 µs.
_KNOWN_SOURCES = 65_536


class Shard(NamedTuple):
    """A partition that can be asked for: the state that has it (perhaps with others), and its next offset."""

    state: KvIndexState
    next_offset: int


class CaughtUp:
    """Whether a runner's state is whole: it was live once since it began, or began anew."""

    def __init__(self, runner: FoldRunner[KvIndexState]) -> None:
        self._runner = runner
        self._live_since_rebuild = -1

    def look(self) -> bool:
        """Cheap. A log that is away makes no difference: the last view holds."""
        runner = self._runner
        if runner.status is RunnerStatus.LIVE:
            self._live_since_rebuild = runner.counters.rebuilds
        return self._live_since_rebuild == runner.counters.rebuilds


def shards_of(runner: FoldRunner[KvIndexState]) -> Mapping[int, Shard]:
    """All partitions that a runner has, with its state."""
    return {place.partition: Shard(runner.state, offset) for place, offset in runner.positions().items()}


@dataclass(slots=True)
class IndexServerCounters:
    """For metrics. ``partitions``: that questions named; ``uncovered``: those of them that had no answer here."""

    questions: int = 0
    partitions: int = 0
    uncovered: int = 0


class IndexResponder:
    """Answers questions from shards. Synchronous: an answer is of one moment."""

    def __init__(self, shards: Callable[[], Mapping[int, Shard]]) -> None:
        """``shards``: the partitions whose state is whole now."""
        self.counters = IndexServerCounters()
        self._shards = shards
        self._partitions: dict[SourceKey, int] = {}

    def answer(self, query: IndexQuery) -> IndexAnswer:
        """Overlaps of the sources in the partitions that are asked for and are here."""
        shards = self._shards()
        asked = [partition for partition in dict.fromkeys(query.partitions) if partition in shards]
        self.counters.questions += 1
        self.counters.partitions += len(query.partitions)
        self.counters.uncovered += len(query.partitions) - len(asked)
        keys = np.frombuffer(query.sequence_hashes, "<u8").astype(np.uint64, copy=False)
        rows: list[tuple[WorkerRank, TierOverlap]] = []
        for state in {id(shards[partition].state): shards[partition].state for partition in asked}.values():
            has = {partition for partition, shard in shards.items() if shard.state is state}
            whole = has.issubset(asked)
            for source, *depths in state.match_column(query.model, keys, query.block_size):
                if whole or self._partition_of(source.key) in asked:
                    rows.append((WorkerRank(source.key.worker_id, source.key.dp_rank), TierOverlap(*depths)))
        return make_answer({partition: shards[partition].next_offset for partition in asked}, rows)

    async def handle(self, request: Any) -> AsyncGenerator[IndexAnswer, None]:
        """The endpoint's handler: one answer. Raises ``InvalidArgument``."""
        yield self.answer(read_query(request))

    def _partition_of(self, key: SourceKey) -> int:
        found = self._partitions.get(key)
        if found is None:
            if len(self._partitions) >= _KNOWN_SOURCES:
                self._partitions.clear()
            found = self._partitions[key] = partition_for(key_kv_events(*key), KV_EVENTS.partitions)
        return found


class IndexServer:
    """Serves ``INDEX_ENDPOINT`` and keeps registered what it answers for. Belongs to one event loop."""

    def __init__(self, core: RuntimeCore, responder: IndexResponder) -> None:
        self.responder = responder
        self._core = core
        self._endpoint = Endpoint(core, INDEX_ENDPOINT)
        self._said: IndexOwner | None = None
        self._revision = 0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_served(self) -> bool:
        """Whether this process answers, through this object or another one."""
        return self._core.server.serves(self._endpoint.path)

    @property
    def said(self) -> IndexOwner | None:
        """What is registered; None: nothing yet, or that is not known for sure."""
        return self._said

    def start(self, owner: IndexOwner) -> None:
        """Register ``owner`` and serve until the runtime is closed."""
        self._endpoint.set_runtime_data(owner.runtime_data())
        self._said = owner
        self._revision = owner.revision
        self._task = self._core.tasks.spawn(self._serve(), "index-server")
        self._core.add_cleanup(self.close)

    async def say(self, owner: IndexOwner) -> None:
        """Register ``owner``, with a revision of its own, in place of what was registered.

        Raises ``LogError``: say it again.
        """
        if self._said is None or replace(owner, revision=self._said.revision) != self._said:
            self._revision += 1
            owner = replace(owner, revision=self._revision)
            self._endpoint.set_runtime_data(owner.runtime_data())
            self._said = None
            await self._endpoint.register_endpoint_instance()
            self._said = owner

    async def close(self) -> None:
        """Wait for the end of serving, which the runtime's shutdown brings. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _serve(self) -> None:
        while not self._core.shutdown_event.is_set() and not self.is_served:
            try:
                await self._endpoint.serve_endpoint(self.responder.handle)
            except LogError as error:
                logger.warning("questions for the KV index not served, trying again: %s", error)
                await asyncio.sleep(_RETRY_S)


class ViewServer:
    """Lets other routers ask this one's whole view (``serve_indexer``). ``start`` once, ended with the runtime."""

    def __init__(self, core: RuntimeCore, index: FoldRunner[KvIndexState]) -> None:
        self._core = core
        self._index = index
        self._caught_up = CaughtUp(index)
        self.server = IndexServer(core, IndexResponder(self.shards))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve as soon as the view is whole, unless another router of this process does."""
        self._task = self._core.tasks.spawn(self._run(), "view-server")
        self._core.add_cleanup(self.close)

    def shards(self) -> Mapping[int, Shard]:
        """All partitions, or none while the view is being made."""
        return shards_of(self._index) if self._caught_up.look() else {}

    async def close(self) -> None:
        """Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            if self._caught_up.look():
                break
            await asyncio.sleep(_LOOK_S)
        partitions = frozenset(place.partition for place in self._index.positions())
        self.server.start(IndexOwner(self._core.instance_id, partitions, "view"))
