"""What ``/health`` tells of a process's runtime: log, folds, stalls, snapshots. JSON without secrets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dynamo_es.background import DeadTask
from dynamo_es.clock import Clock
from dynamo_es.runtime.metrics_folds import RunningFold, progress
from dynamo_es.runtime.progress import Stall
from streams.runner import RunnerStatus
from streams.snapshot_writer import SnapshotCounters
from streams.state_writer import StoreCondition

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore

STALLED = "stalled"
TASK_DIED = "task-died"
_SHOWN_STALLS = 20


def log_entry(core: RuntimeCore) -> dict[str, Any]:
    """State of the log and of the appends that wait for it."""
    state = core.log_state
    entry: dict[str, Any] = {"state": state.state.value, "reason": state.reason, "url": core.log.url}
    if core.started:
        buffer = core.buffer.stats()
        entry |= {
            "buffered_records": buffer.records,
            "buffered_bytes": buffer.buffered_bytes,
            "dropped_records": buffer.dropped_full + buffer.dropped_refused,
        }
    return entry


def fold_entry(runner: RunningFold) -> dict[str, Any]:
    """State, lag, how much of its start a fold has done until it is live, and what its store does not take."""
    positions = runner.positions()
    lag = sum(max(0, end - positions.get(place, 0)) for place, end in runner.ends().items())
    entry: dict[str, Any] = {"state": runner.status.value, "lag_records": lag}
    if runner.restoring is not None:
        done, partitions = runner.restoring
        entry["restoring_snapshots"] = {"partitions_done": done, "partitions": partitions}
    if runner.status in (RunnerStatus.NEW, RunnerStatus.LOADING, RunnerStatus.CATCHING_UP):
        entry["progress_percent"] = round(100 * progress(runner), 1)
    if runner.store_condition is not StoreCondition.WRITTEN:
        entry["store"] = {"state": runner.store_condition.value, "unwritten_bytes": runner.unwritten_bytes}
    return entry


def folds_entry(core: RuntimeCore) -> dict[str, Any]:
    """All folds of the process by name."""
    return {runner.label: fold_entry(runner) for runner in core.runners()}


def stall_entry(stalls: Sequence[Stall]) -> dict[str, Any]:
    """What makes a process that stands still not ready: which partitions, where, since when."""
    return {
        "stage": STALLED,
        "message": f"Service is not ready: {stalls[0]}",
        "stalled": [
            {
                "fold": stall.fold,
                "topic": stall.topic,
                "partition": stall.partition,
                "offset": stall.offset,
                "lag_records": stall.lag_records,
                "seconds": round(stall.seconds, 1),
            }
            for stall in stalls[:_SHOWN_STALLS]
        ],
    }


def tasks_entry(dead: Sequence[DeadTask]) -> dict[str, Any]:
    """What makes a process not ready whose background tasks died: which, and of what kind of error. Empty: none did."""
    if not dead:
        return {}
    return {
        "stage": TASK_DIED,
        "message": f"Service is not ready: {dead[0]}",
        "dead_tasks": [{"task": task.name, "error": task.error} for task in dead],
    }


def live_answer(dead: Sequence[DeadTask], *, draining: bool) -> tuple[int, dict[str, str]]:
    """Status and body of ``/live``, Dynamo's but for dead tasks.

    Answering is what shows life; a process that only waits for its log must not be killed for it. Nothing but a
    restart brings a background task back, though, so whoever probes liveness is told to start the process again.
    """
    if draining:
        return 503, {"status": "shutting_down", "message": "Service is shutting down"}
    if dead:
        return 503, {"status": TASK_DIED, "message": f"Service must be started again: {dead[0]}"}
    return 200, {"status": "live", "message": "Service is live"}


def snapshot_entry(counters: SnapshotCounters, clock: Clock) -> dict[str, Any]:
    """Snapshots that this process writes, by partition: first offset that is not in them, and their age."""
    now = clock.now_ms()
    partitions = {
        str(partition): {"covered_offset": offset, "age_seconds": round(max(0, now - at_ms) / 1000, 1)}
        for partition, (offset, at_ms) in sorted(counters.covered.items())
    }
    ages = [entry["age_seconds"] for entry in partitions.values()]
    return {
        "written": counters.written,
        "failed": counters.failed,
        "oldest_age_seconds": max(ages, default=None),
        "partitions": partitions,
    }
