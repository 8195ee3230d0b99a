"""Keeping the KV index true: workers that are gone leave it, workers whose events are missing are asked again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from dynamo_es.log.partitioning import partition_for
from dynamo_es.router.resync import REPEAT_S, DegradedSources
from dynamo_es.runtime.core import RuntimeCore
from schemas.kv_events import KV_EVENTS, KvEvents, SourceRetired, key_kv_events
from schemas.registry import REGISTRY, ResyncAsked
from streams.kv_index_state import KvIndexState, Source, SourceKey
from streams.registry import RegistryState

logger = logging.getLogger(__name__)


class GoneWorkers:
    """Which sources belong to no registered worker for longer than ``grace_s``. Pure: time is handed in."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._missing_since: dict[SourceKey, float] = {}

    def find(self, sources: Mapping[SourceKey, Source], registry: RegistryState, now: float) -> list[Source]:
        """Sources to retire now (monotonic ``now``, seconds)."""
        # A process that starts many workers has told of a model's cache long before it serves it.
        present = {instance.instance_id for instance in registry.instances.values()}
        present |= {card.instance_id for card in registry.models.values()}
        missing = {
            key: self._missing_since.get(key, now)
            for key, source in sources.items()
            if not source.retired and key.worker_id not in present
        }
        self._missing_since = missing
        return [sources[key] for key, since in missing.items() if now - since > self._grace_s]


class SourceReaper:
    """Looks every few seconds and appends ``SourceRetired`` and ``ResyncAsked``; several processes may do so."""

    def __init__(
        self, core: RuntimeCore, states: Callable[[], Mapping[int, KvIndexState]], repeat_s: float = REPEAT_S
    ) -> None:
        """``states``: the index by partition of ``kv-events``. Nothing is done about other partitions. ``repeat_s``:
        see ``DegradedSources``.
        """
        runtime = core.settings.runtime
        self._core = core
        self._states = states
        self._interval_s = runtime.heartbeat_s
        self._gone = GoneWorkers(runtime.lease_ttl_s)
        self._degraded = DegradedSources(f"{core.settings.role}/{core.instance_id:x}", repeat_s)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; stopped with the runtime."""
        self._task = self._core.tasks.spawn(self._run(), "source-reaper")
        self._core.add_cleanup(self.close)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            states = self._states()
            sources = _sources_in(states)
            registry, now = self._core.registry.state, self._core.clock.monotonic()
            for source in self._gone.find(sources, registry, now):
                self._retire(source)
            for key, question in self._degraded.steps(sources, _questions_to(registry, states.keys()), now):
                if question is not None:
                    logger.warning(
                        "events of worker %d (rank %d) are missing: its cache counts for nothing until it announces "
                        "all of it again, which it is asked for", question.worker_id, question.dp_rank,
                    )  # fmt: skip
                self._core.appender.offer(REGISTRY, key, question)

    def _retire(self, source: Source) -> None:
        key = source.key
        logger.info("worker %d (rank %d) is gone: its blocks leave the index", key.worker_id, key.dp_rank)
        batch = KvEvents(
            version=KV_EVENTS.version,
            model=key.model,
            worker_id=key.worker_id,
            dp_rank=key.dp_rank,
            incarnation=source.incarnation,
            seq=0,
            block_size=source.block_size,
            reset=False,
            events=[SourceRetired("its worker is not registered any more")],
        )
        self._core.appender.offer(KV_EVENTS, key_kv_events(*key), batch)


def _sources_in(states: Mapping[int, KvIndexState]) -> Mapping[SourceKey, Source]:
    found: dict[SourceKey, Source] = {}
    for state in {id(state): state for state in states.values()}.values():
        found |= state.sources
    return found


def _questions_to(registry: RegistryState, partitions: Collection[int]) -> Mapping[bytes, ResyncAsked]:
    """Open questions to sources of these partitions: whether others are settled cannot be told here."""
    return {
        key: asked
        for key, asked in registry.resyncs.items()
        if partition_for(key_kv_events(asked.model, asked.worker_id, asked.dp_rank), KV_EVENTS.partitions) in partitions
    }
