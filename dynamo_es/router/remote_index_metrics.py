"""What metrics and health tell of the KV index that a router asks others for."""

from __future__ import annotations

from typing import Any

from dynamo_es.router.remote_index import RemoteIndex
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.metrics import Collector, Samples, counter, gauge

LOOKUPS = counter(
    "dynamo_es_remote_index_lookups_total",
    "Prompts that were looked up at indexers, by how much of the index answered in time",
    "coverage",
)
QUESTIONS = counter(
    "dynamo_es_remote_index_questions_total", "Questions to single indexers by what became of them", "result"
)
UNANSWERED = counter(
    "dynamo_es_remote_index_unanswered_partitions_total",
    "Partitions of the index that did not answer, summed over prompts: their workers were weighed by load alone",
)
WAITED = counter("dynamo_es_remote_index_wait_seconds_total", "Time that decisions waited for indexers, summed")
MISSING = gauge("dynamo_es_remote_index_missing_partitions", "Partitions that nobody can be asked for now")
OWNERS = gauge("dynamo_es_remote_index_owners", "Processes that answer, asked or left alone for being late", "state")


class RemoteIndexCollector(Collector):
    """The remote index of one process."""

    families = (LOOKUPS, QUESTIONS, UNANSWERED, WAITED, MISSING, OWNERS)

    def __init__(self, remote: RemoteIndex) -> None:
        self._remote = remote

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        counters = self._remote.counters
        for coverage, count in counters.lookups.items():
            samples.add(LOOKUPS, count, coverage)
        for result, count in counters.questions.items():
            samples.add(QUESTIONS, count, result)
        samples.add(UNANSWERED, counters.missing)
        samples.add(WAITED, counters.waited_s)
        samples.add(MISSING, len(self._remote.missing()))
        for state in ("asked", "resting"):
            samples.add(OWNERS, 0, state)
        for owner in self._remote.owners():
            samples.add(OWNERS, 1, "resting" if owner.resting else "asked")


def remote_index_entry(remote: RemoteIndex) -> dict[str, Any]:
    """A router's part of ``/health``: who answers, and what nobody answers for."""
    return {
        "timeout_ms": remote.deadline_s * 1000,
        "missing_partitions": list(remote.missing()),
        "owners": [
            {"instance_id": owner.instance_id, "partitions": list(owner.partitions), "resting": owner.resting}
            for owner in remote.owners()
        ],
        "lookups": dict(remote.counters.lookups),
    }


def show_remote_index(core: RuntimeCore, remote: RemoteIndex) -> None:
    """Show it on the process's status server. One for each process: a second one's figures are not shown."""
    if "remote_index" not in core.health_parts:
        core.health_parts["remote_index"] = lambda: remote_index_entry(remote)
        if core.system is not None:
            core.system.registry.register(RemoteIndexCollector(remote))
