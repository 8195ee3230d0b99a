"""Metrics of a stream processor's worker, read when they are asked for."""

from __future__ import annotations

from dynamo_es.runtime.metrics import Collector, Samples, counter, gauge
from dynamo_es.runtime.metrics_runtime import TASKS_DIED, fill_tasks
from streams.partition_pool import PartitionPool
from streams.partition_processor import ProcessorStatus
from streams.pool_upkeep import PoolUpkeep

READY = gauge("dynamo_es_streams_ready", "1 while all partitions of this worker get on")
POSITION = gauge("dynamo_es_streams_position_offset", "Next offset to fold", "topic", "partition")
LAG = gauge(
    "dynamo_es_streams_lag_records", "Records not folded yet, as last seen; falls while a partition recovers",
    "topic", "partition",
)  # fmt: skip
STATUS = gauge("dynamo_es_streams_partition_status", "1 for the status it has", "topic", "partition", "status")
UNWRITTEN = gauge(
    "dynamo_es_streams_unwritten_bytes", "Changes that are in memory and not in the store; 64 MiB at most wait",
    "topic", "partition",
)  # fmt: skip
_PARTITION_COUNTERS = {
    name: counter(f"dynamo_es_streams_{name}_total", text, "topic", "partition")
    for name, text in (
        ("delivered", "Records that the group's consumer delivered"),
        ("repeated", "Delivered records that had been folded before"),
        ("folded", "Records folded"),
        ("gaps", "Deliveries before which records were missing"),
        ("read", "Records that the processor read from the log itself"),
        ("refused", "Records that went to dead-letters"),
        ("commits", "Commits of state and position"),
        ("failed_commits", "Commits that failed, and are repeated"),
        ("let_go", "Times that too many changes waited for the store; it gets the whole state when it works again"),
        ("rebuilds", "States that did not fit the log, and were folded anew"),
    )
}
_POOL_COUNTERS = {
    name: counter(f"dynamo_es_streams_{name}_total", text)
    for name, text in (
        ("rebalances", "Assignments by the group"),
        ("given_up", "Partitions whose store another process held for too long"),
        ("stalls", "Times that the group's consumer did not do its work"),
        ("snapshots", "Snapshots written"),
        ("failed_snapshots", "Snapshots that failed"),
        ("failed_publications", "Publications of windows that failed"),
    )
}


class PoolCollector(Collector):
    """A prometheus collector; label values are this worker's topics and partitions, and statuses."""

    families = (
        READY,
        POSITION,
        LAG,
        STATUS,
        UNWRITTEN,
        TASKS_DIED,
        *_PARTITION_COUNTERS.values(),
        *_POOL_COUNTERS.values(),
    )

    def __init__(self, pool: PartitionPool, upkeep: PoolUpkeep) -> None:
        self._pool = pool
        self._upkeep = upkeep

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        samples.add(READY, self._upkeep.health().ready)
        fill_tasks(samples, self._upkeep.tasks)
        for name, family in _POOL_COUNTERS.items():
            samples.add(family, getattr(self._pool.counters, name))
        for place, member in self._pool.members.items():
            labels = (place.topic, str(place.partition))
            samples.add(POSITION, member.processor.position, *labels)
            samples.add(LAG, member.processor.lag(), *labels)
            samples.add(UNWRITTEN, member.processor.unwritten_bytes, *labels)
            for status in ProcessorStatus:
                samples.add(STATUS, status is member.processor.status, *labels, status.value)
            for name, family in _PARTITION_COUNTERS.items():
                samples.add(family, getattr(member.processor.counters, name), *labels)
