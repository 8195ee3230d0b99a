"""Metrics of folds: how far they are behind, how fast they go, and what became of their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from dynamo_es.log.base import TopicPartition
from dynamo_es.runtime.metrics import Samples, counter, gauge
from streams.runner import RunnerCounters, RunnerStatus
from streams.state_writer import StoreCondition

FOLD_LAG = gauge(
    "dynamo_es_fold_lag_records", "Records that are not folded yet, as last measured", "fold", "topic", "partition"
)
FOLD_POSITION = gauge("dynamo_es_fold_position_offset", "Next offset to fold", "fold", "topic", "partition")
FOLD_RECORDS = counter("dynamo_es_fold_records_total", "Records folded", "fold")
FOLD_REFUSED = counter("dynamo_es_fold_refused_records_total", "Records that went to dead-letters", "fold")
FOLD_COMMITS = counter("dynamo_es_fold_commits_total", "Commits of state and positions", "fold")
FOLD_FAILED_COMMITS = counter("dynamo_es_fold_failed_commits_total", "Commits that failed, and are repeated", "fold")
FOLD_UNWRITTEN = gauge(
    "dynamo_es_fold_unwritten_bytes", "Changes that are in memory and not in the store; 64 MiB at most wait", "fold"
)
FOLD_LET_GO = counter(
    "dynamo_es_fold_let_go_total",
    "Times that too many changes waited for the store; it gets the whole state when it works again",
    "fold",
)
FOLD_REBUILDS = counter(
    "dynamo_es_fold_rebuilds_total",
    "Times that state was thrown away because the log no longer had what came next",
    "fold",
)
FOLD_STATE = gauge(
    "dynamo_es_fold_state", "Folds in each state: 1, unless a process runs several of a name", "fold", "state"
)
FOLD_PROGRESS = gauge(
    "dynamo_es_fold_progress_ratio",
    "0 to 1: how much of its start a fold has done: of the snapshots to read, then of the records behind them",
    "fold",
)
FOLD_STALLED = gauge(
    "dynamo_es_fold_stalled_partitions", "Partitions that are not folded on although they have more", "fold"
)
FOLD_FAMILIES = (
    FOLD_LAG, FOLD_POSITION, FOLD_RECORDS, FOLD_REFUSED, FOLD_COMMITS, FOLD_FAILED_COMMITS, FOLD_REBUILDS, FOLD_STATE,
    FOLD_PROGRESS, FOLD_STALLED, FOLD_UNWRITTEN, FOLD_LET_GO,
)  # fmt: skip


class NamedFold(Protocol):
    """A fold's name."""

    @property
    def name(self) -> str:
        """Fit for a label."""


class RunningFold(Protocol):
    """What is told of a fold that runs; ``streams.runner.FoldRunner`` is one."""

    status: RunnerStatus
    counters: RunnerCounters
    restoring: tuple[int, int] | None
    began: Mapping[TopicPartition, int]

    @property
    def store_condition(self) -> StoreCondition:
        """How its store does."""

    @property
    def unwritten_bytes(self) -> int:
        """Changes that are not in the store."""

    @property
    def fold(self) -> NamedFold:
        """What runs."""

    def positions(self) -> Mapping[TopicPartition, int]:
        """Next offset to fold, by partition."""

    def ends(self) -> Mapping[TopicPartition, int]:
        """End of each partition, as last seen."""


def progress(runner: RunningFold) -> float:
    """How much of its start a fold has done, 0 to 1: of the snapshots while it reads those, then of the tail."""
    if runner.status is RunnerStatus.LIVE:
        return 1.0
    if runner.restoring is not None:
        done, partitions = runner.restoring
        return done / partitions if partitions else 1.0
    ends = runner.ends()
    positions = runner.positions()
    whole = sum(max(0, end - runner.began.get(place, 0)) for place, end in ends.items())
    left = sum(max(0, end - positions.get(place, 0)) for place, end in ends.items())
    if not whole:
        return 0.0 if runner.status in (RunnerStatus.NEW, RunnerStatus.LOADING) else 1.0
    return max(0.0, 1.0 - left / whole)


def fill_fold(samples: Samples, runner: RunningFold, stalled: int) -> None:
    """One fold's samples. ``stalled``: partitions that stand still."""
    name = runner.fold.name
    positions = runner.positions()
    for place, end in runner.ends().items():
        labels = (name, place.topic.rpartition(".")[2], str(place.partition))
        position = positions.get(place, 0)
        samples.add(FOLD_LAG, max(0, end - position), *labels)
        samples.most(FOLD_POSITION, position, *labels)
    counters = runner.counters
    samples.add(FOLD_RECORDS, counters.records, name)
    samples.add(FOLD_REFUSED, counters.dead_letters, name)
    samples.add(FOLD_COMMITS, counters.commits, name)
    samples.add(FOLD_FAILED_COMMITS, counters.failed_commits, name)
    samples.add(FOLD_UNWRITTEN, runner.unwritten_bytes, name)
    samples.add(FOLD_LET_GO, counters.let_go, name)
    samples.add(FOLD_REBUILDS, counters.rebuilds, name)
    for status in RunnerStatus:
        samples.add(FOLD_STATE, status is runner.status, name, status.value)
    samples.most(FOLD_PROGRESS, progress(runner), name)
    samples.add(FOLD_STALLED, stalled, name)
