"""Which workers of an endpoint are overloaded now: the fleet's measured and booked load, judged by the thresholds."""

from __future__ import annotations

from collections.abc import Callable, Collection

from dynamo_es.clock import Clock
from dynamo_es.router.active_sequences import ActiveSequences
from dynamo_es.router.candidates import EndpointRanks
from dynamo_es.router.eligibility import NOBODY
from dynamo_es.router.overload import MEASURED_TTL_S, OverloadMonitor
from streams.worker_load import RankKey, WorkerLoadState


class MeasuredOverload:
    """Reads the view of measured load when it is asked. Belongs to one event loop."""

    def __init__(
        self,
        monitor: OverloadMonitor,
        measured: Callable[[], WorkerLoadState],
        ranks: EndpointRanks,
        sequences: ActiveSequences,
        clock: Clock,
    ) -> None:
        self.monitor = monitor
        self._measured = measured
        self._ranks = ranks
        self._sequences = sequences
        self._clock = clock

    def __call__(self) -> frozenset[int]:
        """Ids of the overloaded workers."""
        if not self.monitor.thresholds.any_set:
            return NOBODY
        now, model = self._clock.now_ms() / 1000, self._ranks.model()
        ranks, measured = self._ranks(), self._measured().ranks
        if self.monitor.thresholds.active_decode_blocks is not None:
            for rank in ranks:
                found = measured.get(RankKey(model, rank.worker_id, rank.dp_rank))
                if found is not None and found.load is not None:
                    load = found.load
                    self.monitor.observe(
                        rank,
                        kv_used_blocks=load.kv_used_blocks,
                        active_decode_blocks=load.active_decode_blocks,
                        total_kv_blocks=load.total_kv_blocks,
                        at=found.load_at_ms / 1000,
                        now=now,
                    )
        return self.monitor.overloaded(ranks, self._ranks.facts, self._sequences.prefill_tokens, now)


def count_stale_workers(measured: WorkerLoadState, registered: Collection[int], now_ms: int) -> dict[str, int]:
    """By model: registered workers that measured their load once and are silent for longer than it counts.

    No busy threshold takes them for busy, whatever they said last. Models without any have 0.
    """
    newest: dict[tuple[str, int], int] = {}
    for key, rank in measured.ranks.items():
        if rank.load is not None and key.worker_id in registered:
            worker = key.model, key.worker_id
            newest[worker] = max(newest.get(worker, 0), rank.load_at_ms)
    found: dict[str, int] = {}
    for (model, _), at_ms in newest.items():
        found[model] = found.get(model, 0) + (now_ms - at_ms > MEASURED_TTL_S * 1000)
    return found
