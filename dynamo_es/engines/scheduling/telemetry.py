"""What an engine's schedulers tell the log: KV events, one forward pass a pass, load when it changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dynamo_es.engines.scheduling.config import SchedulerConfig
from dynamo_es.engines.scheduling.scheduler import Scheduler
from dynamo_es.publishers.forward_pass import HEARTBEAT_INTERVAL_S, ForwardPassPublisher
from dynamo_es.publishers.kv_stream import KvStream
from dynamo_es.publishers.scope import PublisherScope
from dynamo_es.publishers.worker_metrics import RESEND_INTERVAL_S, LoadSlots, MeasuredLoad
from schemas.forward_pass import QueuedRequests, ScheduledRequests

# Load changes in almost every pass; between two values of a rank at least this much time passes.
LOAD_INTERVAL_S = 0.01
TICK_S = 0.1


@dataclass(slots=True)
class _Rank:
    scheduler: Scheduler
    kv: KvStream
    forward_pass: ForwardPassPublisher
    last_pass_at: float


class EngineTelemetry:
    """Publishers of all ranks of an engine. Belongs to the scope's loop; ``start`` first, ``close`` last."""

    def __init__(self, scope: PublisherScope, config: SchedulerConfig, schedulers: Sequence[Scheduler]) -> None:
        self._clock = scope.clock
        self._loop = scope.loop
        self._total_blocks = config.num_gpu_blocks
        incarnation = scope.rng.getrandbits(64)
        self._loads = LoadSlots(scope.sink, scope.clock, scope.model_name, scope.worker_id, incarnation)
        self._ranks = [
            _Rank(
                scheduler,
                KvStream(
                    sink=scope.sink,
                    model_name=scope.model_name,
                    worker_id=scope.worker_id,
                    dp_rank=rank,
                    block_size=config.block_size,
                    new_incarnation=lambda: scope.rng.getrandbits(64),
                    state=scheduler.blocks.state,
                    clock=scope.clock,
                ),
                ForwardPassPublisher(scope.sink, scope.model_name, scope.worker_id, rank, incarnation),
                scope.clock.monotonic(),
            )
            for rank, scheduler in enumerate(schedulers)
        ]
        scope.add_counts(self._counts)
        self._told_at = float("-inf")
        self._all_told_at = scope.clock.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def kv_streams(self) -> Sequence[KvStream]:
        """The KV event stream of each rank."""
        return [rank.kv for rank in self._ranks]

    def start(self) -> None:
        """Announce empty caches and idle ranks, and begin heartbeats."""
        for number, rank in enumerate(self._ranks):
            rank.kv.catch_up(now=True)
            self._note_load(number, rank)
        self._loads.tell()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def on_pass(
        self, rank_number: int, wall_time_s: float, scheduled: ScheduledRequests, queued: QueuedRequests
    ) -> None:
        """A pass of a rank is over, its tokens are out."""
        rank = self._ranks[rank_number]
        rank.last_pass_at = self._clock.monotonic()
        rank.forward_pass.publish(wall_time_s, scheduled, queued)
        self.on_change(rank_number)

    def on_change(self, rank_number: int) -> None:
        """Something changed outside of a pass: a request was aborted, the cache was cleared."""
        rank = self._ranks[rank_number]
        events = rank.scheduler.blocks.drain_events()
        if events:
            rank.kv.publish(events)
        self._note_load(rank_number, rank)
        if self._clock.monotonic() - self._told_at >= LOAD_INTERVAL_S:
            self._tell_loads()

    def resync(self) -> None:
        """Announce all blocks again, for readers that lost records."""
        for rank in self._ranks:
            rank.scheduler.blocks.drain_events()
            rank.kv.resync()

    def begin_incarnation(self) -> None:
        """Announce all blocks under a new number, for readers that gave this worker up."""
        for rank in self._ranks:
            rank.scheduler.blocks.drain_events()
            rank.kv.begin_incarnation()

    def close(self) -> None:
        """Tell the last load and stop. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            for number, rank in enumerate(self._ranks):
                self._note_load(number, rank)
            self._loads.tell()

    def _counts(self) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for rank in self._ranks:
            totals.update(asdict(rank.kv.counters))
            totals["known_blocks"] += rank.scheduler.blocks.used
        return totals

    def _note_load(self, number: int, rank: _Rank) -> None:
        scheduler = rank.scheduler
        load = MeasuredLoad(
            kv_used_blocks=scheduler.blocks.used,
            total_kv_blocks=self._total_blocks,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
        )
        self._loads.put(number, load)

    def _tell_loads(self) -> None:
        self._told_at = self._clock.monotonic()
        self._loads.tell()

    def _tick(self) -> None:
        now = self._clock.monotonic()
        for rank in self._ranks:
            rank.kv.catch_up()
            if now - rank.last_pass_at >= HEARTBEAT_INTERVAL_S:
                rank.last_pass_at = now
                rank.forward_pass.publish(0.0, ScheduledRequests(), QueuedRequests())
        if now - self._all_told_at >= RESEND_INTERVAL_S:
            self._all_told_at = now
            self._loads.tell_all()
        else:
            self._tell_loads()
        self._timer = self._loop.call_later(TICK_S, self._tick)
