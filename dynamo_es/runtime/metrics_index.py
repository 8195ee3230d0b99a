"""Metrics of the KV index, of bookings and of snapshots."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry

from dynamo_es.clock import Clock
from dynamo_es.runtime.metrics import Collector, LabelBound, Samples, counter, gauge
from schemas.kv_events import TIERS
from streams.kv_index_state import KvIndexState
from streams.requests import RequestsState
from streams.runner import FoldRunner
from streams.snapshot_writer import SnapshotCounters, SnapshotWriter

SOURCES = gauge(
    "dynamo_es_index_sources", "Sources of KV events (model, worker, rank) by how far they are trusted", "trust"
)
BLOCKS = gauge("dynamo_es_index_blocks", "Blocks that workers hold, each worker's counted", "model", "tier")
ENTRIES = gauge(
    "dynamo_es_index_entries",
    "Distinct blocks in the tables of the index, those removed a moment ago included",
    "model",
    "tier",
)
BYTES = gauge("dynamo_es_index_bytes", "Memory of the index", "model", "tier")
BATCHES = counter("dynamo_es_index_batches_total", "Batches of KV events by what became of them", "result")
MISSING = counter("dynamo_es_index_missing_batches_total", "Batches that never came, by the numbers of those that did")
NOOPS = counter("dynamo_es_index_noop_blocks_total", "Blocks stored or removed that changed nothing", "operation")
BOOKINGS = gauge("dynamo_es_open_bookings", "Requests in progress at all routers, as the log tells")
BOOKING_EVENTS = counter("dynamo_es_booking_events_total", "Events of request life by what became of them", "result")
SNAPSHOT_AGE = gauge(
    "dynamo_es_snapshot_age_seconds",
    "Time since the newest snapshot of a partition that this process writes had everything, or since it has to write",
    "partition",
)
SNAPSHOT_OFFSET = gauge("dynamo_es_snapshot_covered_offset", "First offset that is not in that snapshot", "partition")
SNAPSHOT_BEHIND = gauge(
    "dynamo_es_snapshot_uncovered_records", "Folded records that are not in that snapshot", "partition"
)
SNAPSHOTS = counter("dynamo_es_snapshots_total", "Snapshots, and rounds of them, by result", "result")
SNAPSHOT_CHUNKS = counter("dynamo_es_snapshot_chunks_total", "Chunks of blocks written for snapshots")


def register_index(
    registry: CollectorRegistry,
    index: FoldRunner[KvIndexState],
    snapshots: SnapshotWriter | None,
    models: LabelBound,
    clock: Clock,
) -> None:
    """Show an index that this process keeps, and the snapshots that it writes of it."""
    registry.register(IndexCollector(lambda: [index.state], models))
    if snapshots is not None:
        counters = snapshots.counters
        registry.register(SnapshotAgeCollector(lambda: [counters], lambda number: _position(index, number), clock))
        registry.register(SnapshotCollector(counters))


def _position(index: FoldRunner[KvIndexState], partition: int) -> int:
    """Next offset to fold of a partition of the one topic that the index is folded from."""
    return next((offset for place, offset in index.positions().items() if place.partition == partition), 0)


class IndexCollector(Collector):
    """The KV index of this process, whole or in parts."""

    families = (SOURCES, BLOCKS, ENTRIES, BYTES, BATCHES, MISSING, NOOPS)

    def __init__(self, states: Callable[[], Iterable[KvIndexState]], models: LabelBound) -> None:
        self._states = states
        self._models = models

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        for trust in ("exact", "degraded", "retired"):
            samples.add(SOURCES, 0, trust)
        for state in self._states():
            self._fill_state(samples, state)

    def _fill_state(self, samples: Samples, state: KvIndexState) -> None:
        for source in state.sources.values():
            samples.add(SOURCES, 1, "retired" if source.retired else "exact" if source.exact else "degraded")
        for name, index in state.models.items():
            model = self._models.of(name)
            for tier, table, blocks in zip(TIERS, index.tables, index.tier_blocks, strict=True):
                samples.add(BLOCKS, blocks, model, tier)
                samples.add(ENTRIES, table.used, model, tier)
                samples.add(BYTES, table.nbytes, model, tier)
        counters = state.counters
        for result, count in (
            ("seen", counters.batches),
            ("duplicate", counters.duplicates),
            ("straggler", counters.stragglers),
            ("gap", counters.gaps),
            ("skipped-degraded", counters.skipped_degraded),
        ):
            samples.add(BATCHES, count, result)
        samples.add(MISSING, counters.gap_batches)
        samples.add(NOOPS, counters.stored_noop, "stored")
        samples.add(NOOPS, counters.removed_noop, "removed")


class BookingsCollector(Collector):
    """Open bookings of all routers."""

    families = (BOOKINGS, BOOKING_EVENTS)

    def __init__(self, requests: FoldRunner[RequestsState]) -> None:
        self._requests = requests

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        state = self._requests.state
        samples.add(BOOKINGS, len(state.bookings))
        counters = state.counters
        for result, count in (
            ("routed", counters.routed),
            ("finished", counters.finished),
            ("late", counters.late),
            ("duplicate", counters.duplicates),
        ):
            samples.add(BOOKING_EVENTS, count, result)


class SnapshotAgeCollector(Collector):
    """How old the snapshots are that this process writes; nothing of partitions that others write."""

    families = (SNAPSHOT_AGE, SNAPSHOT_OFFSET, SNAPSHOT_BEHIND)

    def __init__(
        self,
        writers: Callable[[], Iterable[SnapshotCounters]],
        position: Callable[[int], int],
        clock: Clock,
    ) -> None:
        """``writers``: what each writer counts. ``position``: next offset to fold of a partition of ``kv-events``."""
        self._writers = writers
        self._position = position
        self._clock = clock

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        now = self._clock.now_ms()
        for counters in self._writers():
            for partition, (offset, at_ms) in counters.covered.items():
                label = str(partition)
                samples.most(SNAPSHOT_AGE, max(0, now - at_ms) / 1000, label)
                samples.most(SNAPSHOT_OFFSET, offset, label)
                samples.most(SNAPSHOT_BEHIND, max(0, self._position(partition) - offset), label)


class SnapshotCollector(Collector):
    """What became of the snapshots of one writer."""

    families = (SNAPSHOTS, SNAPSHOT_CHUNKS)

    def __init__(self, counters: SnapshotCounters) -> None:
        self._counters = counters

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        samples.add(SNAPSHOTS, self._counters.written, "written")
        samples.add(SNAPSHOTS, self._counters.failed, "failed")
        samples.add(SNAPSHOTS, self._counters.refused, "refused")
        samples.add(SNAPSHOT_CHUNKS, self._counters.chunks)
