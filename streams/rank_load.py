"""The folds of ``forward-pass`` and ``worker-load`` by windows of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_es.log.base import Record
from schemas.aggregates import MeasuredLoad, PassLoad
from schemas.forward_pass import FORWARD_PASS, ForwardPass
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD, WorkerLoad
from streams.fold import RecordRejected
from streams.windowed_fold import RankState, RankWindowFold


class PassLoadFold(RankWindowFold[PassLoad]):
    """A ``WindowedFold``: passes by rank and window. A message that was numbered before is a repetition."""

    name = "pass-load"
    topics: Sequence[TopicSpec] = (FORWARD_PASS,)
    row_type = PassLoad

    def apply(self, state: RankState[PassLoad], record: Record, value: Any) -> None:
        if not isinstance(value, ForwardPass):
            raise RecordRejected("forward-pass has no deletions")
        row, previous = self._count(state, record, value)
        if row is None:
            return
        if previous is not None and previous.incarnation == value.incarnation:
            seen = previous.counter
            row.incarnation, row.counter = value.incarnation, max(seen, value.counter)
            if value.counter <= seen:
                row.duplicates += 1
                return
            row.missed += value.counter - seen - 1
        row.incarnation, row.counter = value.incarnation, value.counter
        if value.wall_time_s == 0.0:
            row.heartbeats += 1
            return
        row.passes += 1
        row.wall_time_s += value.wall_time_s
        row.prefill_tokens += value.scheduled.sum_prefill_tokens
        row.decode_requests += value.scheduled.num_decode_requests
        waiting = value.queued.num_prefill_requests + value.queued.num_decode_requests
        row.waiting_max = max(row.waiting_max, waiting)


class MeasuredLoadFold(RankWindowFold[MeasuredLoad]):
    """A ``WindowedFold``: measured load by rank and window. A measurement of the same time is a repetition."""

    name = "measured-load"
    topics: Sequence[TopicSpec] = (WORKER_LOAD,)
    row_type = MeasuredLoad

    def apply(self, state: RankState[MeasuredLoad], record: Record, value: Any) -> None:
        if not isinstance(value, WorkerLoad):
            # A deletion says that the rank is gone; what it measured before stands.
            return
        row, previous = self._count(state, record, value)
        if row is None:
            return
        seen = None if previous is None else (previous.incarnation, previous.at_ms)
        row.incarnation, row.at_ms = value.incarnation, value.at_ms
        if seen == (value.incarnation, value.at_ms):
            return
        row.samples += 1
        if value.kv_used_blocks is not None:
            row.used_blocks_samples += 1
            row.used_blocks_sum += value.kv_used_blocks
            row.used_blocks_max = max(row.used_blocks_max, value.kv_used_blocks)
        row.total_blocks = value.total_kv_blocks or row.total_blocks
        row.running_max = max(row.running_max, value.running or 0)
        row.waiting_max = max(row.waiting_max, value.waiting or 0)
