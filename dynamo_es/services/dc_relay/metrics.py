"""Metrics of a relay, and of the view over the relays of several data centres."""

from __future__ import annotations

from dynamo_es.runtime.metrics import Collector, Samples, counter, gauge
from dynamo_es.runtime.metrics_runtime import TASKS_DIED, fill_tasks
from dynamo_es.services.dc_relay.global_view import GlobalKvView
from dynamo_es.services.dc_relay.relay import DcRelay

ENDPOINTS = gauge("dynamo_es_relay_endpoints", "Endpoints with a model that the relay watches", "state")
POOLS = gauge("dynamo_es_relay_pools", "Pools that readers were told of")
BLOCKS = gauge("dynamo_es_relay_blocks", "Blocks of these pools")
RECORDS = counter("dynamo_es_relay_records_total", "What the relay told: statuses, snapshots of pools, deltas", "kind")
CHANGES = counter("dynamo_es_relay_changed_blocks_total", "Blocks that came or went in its deltas", "change")
FAILURES = counter("dynamo_es_relay_failures_total", "Publications that failed; everything is then told anew")
LIVES = counter("dynamo_es_relay_lives_total", "Times that the relay began to tell everything: its start, and failures")
LEFT_OUT = gauge(
    "dynamo_es_relay_left_out", "What is not told, being more than readers take: pools, blocks of pools, models, names",
    "kind",
)  # fmt: skip
HEALTHY = gauge("dynamo_es_relay_healthy", "1: what was published last is in the log")

CENTRES = gauge("dynamo_es_global_data_centres", "Data centres that relays tell of", "state")
GLOBAL_POOLS = gauge("dynamo_es_global_pools", "Pools of all data centres: with blocks that are known, or not", "state")
GLOBAL_RECORDS = counter("dynamo_es_global_records_total", "Records of dc-relay that were read", "outcome")


class RelayCollector(Collector):
    """One relay."""

    families = (ENDPOINTS, POOLS, BLOCKS, RECORDS, CHANGES, FAILURES, LIVES, LEFT_OUT, HEALTHY)

    def __init__(self, relay: DcRelay) -> None:
        self._relay = relay

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        health, pools, counts = self._relay.health(), self._relay.pools(), self._relay.counts
        samples.add(ENDPOINTS, health["endpoint_count"], "watched")
        samples.add(ENDPOINTS, health["active_endpoint_count"], "active")
        samples.add(ENDPOINTS, health["fenced_endpoint_count"], "fenced")
        samples.add(POOLS, len(pools))
        samples.add(BLOCKS, sum(pools.values()))
        samples.add(RECORDS, counts.statuses, "status")
        samples.add(RECORDS, counts.snapshots, "snapshot")
        samples.add(RECORDS, counts.deltas, "delta")
        samples.add(CHANGES, counts.added, "added")
        samples.add(CHANGES, counts.removed, "removed")
        samples.add(FAILURES, counts.failures)
        samples.add(LIVES, counts.lives)
        left = self._relay.left_out
        samples.add(LEFT_OUT, left.pools, "pools")
        samples.add(LEFT_OUT, left.models, "models")
        samples.add(LEFT_OUT, left.names, "names")
        samples.add(LEFT_OUT, self._relay.pools_given_up(), "blocks")
        samples.add(HEALTHY, int(health["healthy"]))


class GlobalViewCollector(Collector):
    """One view."""

    families = (CENTRES, GLOBAL_POOLS, GLOBAL_RECORDS, TASKS_DIED)

    def __init__(self, view: GlobalKvView) -> None:
        self._view = view

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        for age in ("fresh", "stale"):
            samples.add(CENTRES, 0, age)
        for entry in self._view.data_centres():
            samples.add(CENTRES, 1, "stale" if entry["stale"] else "fresh")
        for tasks in self._view.tasks:
            fill_tasks(samples, tasks)
        for state in self._view.states:
            for pool in state.pools():
                samples.add(GLOBAL_POOLS, 1, "known" if pool.held is not None else "unknown")
            counters = state.counters
            samples.add(GLOBAL_RECORDS, counters.records, "read")
            samples.add(GLOBAL_RECORDS, counters.duplicates, "duplicate")
            samples.add(GLOBAL_RECORDS, counters.stragglers, "straggler")
            samples.add(GLOBAL_RECORDS, counters.gaps, "after_gap")
            samples.add(GLOBAL_RECORDS, counters.torn, "torn_snapshot")
            samples.add(GLOBAL_RECORDS, counters.skipped, "skipped")
