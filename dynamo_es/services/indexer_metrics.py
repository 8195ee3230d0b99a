"""Metrics of an indexer: which partitions it has, what it was asked, and its snapshots.

A partition that was handed over takes its counts along: counters of the index and of snapshots then fall.
"""

from __future__ import annotations

from dynamo_es.runtime.metrics import Collector, Samples, counter, gauge
from dynamo_es.runtime.metrics_index import SNAPSHOT_CHUNKS, SNAPSHOTS
from dynamo_es.services.index_partitions import PartitionKeeper

PARTITIONS = gauge(
    "dynamo_es_indexer_partitions",
    "Partitions that this indexer is to have, follows, has whole, and is registered for",
    "state",
)
QUESTIONS = counter("dynamo_es_indexer_questions_total", "Prompts that routers asked for")
ASKED = counter("dynamo_es_indexer_asked_partitions_total", "Partitions that they named, answered for or not", "result")


class IndexerCollector(Collector):
    """One indexer."""

    families = (PARTITIONS, QUESTIONS, ASKED, SNAPSHOTS, SNAPSHOT_CHUNKS)

    def __init__(self, keeper: PartitionKeeper) -> None:
        self._keeper = keeper

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        keeper = self._keeper
        said = keeper.server.said
        for state, count in (
            ("wanted", len(keeper.wanted())),
            ("followed", len(keeper.members)),
            ("whole", len(keeper.shards())),
            ("registered", len(said.partitions) if said is not None else 0),
        ):
            samples.add(PARTITIONS, count, state)
        counters = keeper.server.responder.counters
        samples.add(QUESTIONS, counters.questions)
        samples.add(ASKED, counters.partitions - counters.uncovered, "answered")
        samples.add(ASKED, counters.uncovered, "uncovered")
        for snapshots in keeper.snapshots():
            samples.add(SNAPSHOTS, snapshots.written, "written")
            samples.add(SNAPSHOTS, snapshots.failed, "failed")
            samples.add(SNAPSHOTS, snapshots.refused, "refused")
            samples.add(SNAPSHOT_CHUNKS, snapshots.chunks)
