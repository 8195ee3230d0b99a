"""Metrics that every process of a fleet has: log, folds, lease, registry, request plane, publishers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynamo_es import __version__
from dynamo_es.background import BackgroundTasks
from dynamo_es.log.state import LogCondition
from dynamo_es.runtime.index_owners import INDEX_PATH
from dynamo_es.runtime.metrics import OTHER, Collector, Samples, counter, gauge
from dynamo_es.runtime.metrics_folds import FOLD_FAMILIES, fill_fold
from dynamo_es.runtime.tracing import TraceCounts
from schemas.catalog import TOPICS
from schemas.dead_letters import REASONS
from schemas.registry import Instance

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore

_ENDPOINT = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")
_TOPIC_NAMES = frozenset(spec.name for spec in TOPICS)
# What a dead letter names that never reached a topic: an engine's own event.
_ENGINE = "engine"

PROCESS_INFO = gauge("dynamo_es_process_info", "1: version and role of this process", "version", "role")
UPTIME = gauge("dynamo_component_uptime_seconds", "Time since this process began")
LOG_STATE = gauge("dynamo_es_log_state", "1 for the state that the log is in", "state")
BUFFER_RECORDS = gauge("dynamo_es_log_buffer_records", "Appends that wait for the log")
BUFFER_BYTES = gauge("dynamo_es_log_buffer_bytes", "Size of the appends that wait for the log")
BUFFER_LIMIT_RECORDS = gauge("dynamo_es_log_buffer_limit_records", "Appends that may wait (--log-buffer-records)")
BUFFER_LIMIT_BYTES = gauge("dynamo_es_log_buffer_limit_bytes", "Their size at most (--log-buffer-bytes)")
BUFFER_AGE = gauge("dynamo_es_log_buffer_oldest_age_seconds", "How long the oldest append has waited")
BUFFER_APPENDED = counter("dynamo_es_log_buffer_appended_total", "Buffered appends that the log acknowledged")
BUFFER_DROPPED = counter(
    "dynamo_es_log_buffer_dropped_total",
    "Appends that were dropped: the buffer was full, or the log refused them for good",
    "cause",
)
OFFERED = counter("dynamo_es_events_total", "Events of this process by topic, taken or refused", "topic", "result")
DEAD_LETTERS = counter("dynamo_es_dead_letters_total", "Records that this process refused", "topic", "reason")
LEASE_LOST = counter("dynamo_es_lease_lost_total", "Times that others ended this process's lease")
LEASE_FAILED = counter("dynamo_es_lease_failed_renewals_total", "Renewals of the lease that did not reach the log")
REGISTRY = gauge("dynamo_es_registry_entries", "What the registry has", "kind")
LEASES = gauge("dynamo_es_registry_leases", "Valid leases by role of their process", "role")
INSTANCES = gauge("dynamo_es_registry_instances", "Endpoint instances by state, without those of indexers", "state")
REGISTRY_VOID = counter(
    "dynamo_es_registry_void_writes_total", "Registry records that changed nothing, by what was wrong", "cause"
)
STREAMS = gauge("dynamo_es_request_plane_streams", "Streams that this process serves now")
COMPONENT_REQUESTS = counter("dynamo_component_requests_total", "Requests that came to an endpoint", *_ENDPOINT)
COMPONENT_ERRORS = counter("dynamo_component_errors_total", "Requests whose handler failed", *_ENDPOINT, "error_type")
COMPONENT_INFLIGHT = gauge("dynamo_component_inflight_requests", "Requests in progress at an endpoint", *_ENDPOINT)
PUBLISHED_BATCHES = counter("dynamo_es_publisher_batches_total", "Records of KV events that were published")
PUBLISHED_EVENTS = counter("dynamo_es_publisher_events_total", "KV events in them")
PUBLISHER_LOSSES = counter("dynamo_es_publisher_losses_total", "Times that the buffer took no more KV events")
PUBLISHER_RESYNCS = counter("dynamo_es_publisher_resyncs_total", "Times that all blocks were announced again")
PUBLISHER_INCARNATIONS = counter("dynamo_es_publisher_incarnations_total", "Times that a cache began empty")
PUBLISHER_ANOMALIES = counter(
    "dynamo_es_publisher_anomalies_total",
    "What was odd about an engine's events (see KvEventPublisher.counters)",
    "kind",
)
PUBLISHER_BLOCKS = gauge("dynamo_es_publisher_blocks", "Blocks that publishers keep track of", "state")

TASKS_DIED = counter(
    "dynamo_es_background_tasks_died_total",
    "Tasks that run as long as the process, and ended by an error",
    "task",
)
TRACE_SPANS = counter("dynamo_es_trace_spans_exported_total", "Spans of traces that the collector took")
TRACE_DROPPED = counter(
    "dynamo_es_trace_spans_dropped_total", "Spans that were lost: no room while they waited, or not taken", "cause"
)

_PUBLISHER = {
    "batches": PUBLISHED_BATCHES,
    "events": PUBLISHED_EVENTS,
    "losses": PUBLISHER_LOSSES,
    "resyncs": PUBLISHER_RESYNCS,
    "incarnations": PUBLISHER_INCARNATIONS,
}
_PUBLISHER_BLOCKS = {"known_blocks": "known", "waiting_blocks": "waiting"}
_WORSE = tuple(LogCondition)


class RuntimeCollector(Collector):
    """Everything that a runtime knows of itself. Several runtimes of one process are added up."""

    families = (
        PROCESS_INFO, UPTIME, LOG_STATE, BUFFER_RECORDS, BUFFER_BYTES, BUFFER_LIMIT_RECORDS, BUFFER_LIMIT_BYTES,
        BUFFER_AGE, BUFFER_APPENDED, BUFFER_DROPPED, OFFERED, DEAD_LETTERS, LEASE_LOST, LEASE_FAILED, REGISTRY, LEASES,
        INSTANCES, REGISTRY_VOID, STREAMS, COMPONENT_REQUESTS, COMPONENT_ERRORS, COMPONENT_INFLIGHT,
        PUBLISHED_BATCHES, PUBLISHED_EVENTS, PUBLISHER_LOSSES, PUBLISHER_RESYNCS, PUBLISHER_INCARNATIONS,
        PUBLISHER_ANOMALIES, PUBLISHER_BLOCKS, TRACE_SPANS, TRACE_DROPPED, TASKS_DIED,
        *FOLD_FAMILIES,
    )  # fmt: skip

    def __init__(self, cores: Callable[[], Sequence[RuntimeCore]]) -> None:
        """``cores``: the runtimes of this process, the first one made first; not empty."""
        self._cores = cores

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``. A runtime that is still starting shows its folds and the state of its log only."""
        cores = self._cores()
        first = cores[0]
        samples.add(PROCESS_INFO, 1, __version__, first.settings.role)
        samples.add(UPTIME, first.uptime_s())
        worst = max((core.log_state.state for core in cores), key=_WORSE.index)
        for condition in LogCondition:
            samples.add(LOG_STATE, condition is worst, condition.value)
        for core in cores:
            stalled = [stall.fold for stall in core.progress.stalls()]
            for runner in core.runners():
                fill_fold(samples, runner, stalled.count(runner.fold.name))
            for counts in core.publisher_counts:
                _fill_publisher(samples, counts())
            if core.started:
                if core.host is None:
                    _fill_log(samples, core)
                samples.add(LEASE_LOST, core.registration.times_lost)
                samples.add(LEASE_FAILED, core.registration.failed_renewals)
                _fill_requests(samples, core)
            if core.host is None:
                fill_tasks(samples, core.tasks)
            if core.host is None and core.tracing is not None:
                _fill_traces(samples, core.tracing)
        # All runtimes of a process see the same registry.
        if first.started:
            _fill_registry(samples, first)


class TasksCollector(Collector):
    """The background tasks that died, of a process without a runtime."""

    families = (TASKS_DIED,)

    def __init__(self, tasks: BackgroundTasks) -> None:
        self._tasks = tasks

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        fill_tasks(samples, self._tasks)


def topic_label(topic: str) -> str:
    """A topic's name without its namespace; ``engine`` for what never was in a topic of ours."""
    name = topic.rpartition(".")[2]
    return name if name in _TOPIC_NAMES else _ENGINE


def fill_tasks(samples: Samples, tasks: BackgroundTasks) -> None:
    """Those of a process that died."""
    for kind, count in tasks.died.items():
        samples.add(TASKS_DIED, count, kind)


def _fill_log(samples: Samples, core: RuntimeCore) -> None:
    stats = core.buffer.stats()
    samples.add(BUFFER_RECORDS, stats.records)
    samples.add(BUFFER_BYTES, stats.buffered_bytes)
    samples.add(BUFFER_LIMIT_RECORDS, core.settings.log.buffer_records)
    samples.add(BUFFER_LIMIT_BYTES, core.settings.log.buffer_bytes)
    samples.most(BUFFER_AGE, stats.oldest_age_s)
    samples.add(BUFFER_APPENDED, stats.appended)
    samples.add(BUFFER_DROPPED, stats.dropped_full, "full")
    samples.add(BUFFER_DROPPED, stats.dropped_refused, "refused")
    counters = core.appender.counters
    for result, counts in (("taken", counters.offered), ("refused", counters.refused)):
        for topic, count in counts.items():
            samples.add(OFFERED, count, topic, result)
    for topic in (*sorted(_TOPIC_NAMES), _ENGINE):
        for reason in REASONS:
            # Nothing is a value as well: a rate over a counter that appears with its first event misses that event.
            samples.add(DEAD_LETTERS, 0, topic, reason)
    for (topic, reason), count in counters.dead_letters.items():
        samples.add(DEAD_LETTERS, count, topic_label(topic), reason if reason in REASONS else OTHER)


def _fill_traces(samples: Samples, counts: TraceCounts) -> None:
    samples.add(TRACE_SPANS, counts.exported)
    samples.add(TRACE_DROPPED, counts.dropped_full, "full")
    samples.add(TRACE_DROPPED, counts.failed, "failed")


def _fill_requests(samples: Samples, core: RuntimeCore) -> None:
    samples.add(STREAMS, core.server.streams)
    for path, served in core.server.endpoints().items():
        labels = path.rsplit("/", 2)
        samples.add(COMPONENT_REQUESTS, served.total, *labels)
        samples.add(COMPONENT_ERRORS, served.errors, *labels, "generate")
        samples.add(COMPONENT_INFLIGHT, served.streams, *labels)


def _fill_registry(samples: Samples, core: RuntimeCore) -> None:
    state = core.registry.state
    for kind, entries in (
        ("lease", state.leases),
        ("lease-end", state.ended),
        ("instance", state.instances),
        ("model", state.models),
        ("resync", state.resyncs),
    ):
        samples.add(REGISTRY, len(entries), kind)
    for lease in state.leases.values():
        samples.add(LEASES, 1, lease.owner)
    _fill_instances(samples, list(state.instances.values()))
    samples.add(REGISTRY_VOID, state.counters.void_endings, "renewed-meanwhile")
    samples.add(REGISTRY_VOID, state.counters.ended_lease_writes, "ended-lease")


def _fill_instances(samples: Samples, instances: Sequence[Instance]) -> None:
    # None is a value as well: an alarm must see a fleet without workers.
    samples.add(INSTANCES, 0, "serving")
    for instance in instances:
        if (instance.namespace, instance.component, instance.endpoint) != INDEX_PATH:
            samples.add(INSTANCES, 1, instance.state)


def _fill_publisher(samples: Samples, counts: Mapping[str, int]) -> None:
    for name, count in counts.items():
        if name in _PUBLISHER:
            samples.add(_PUBLISHER[name], count)
        elif name in _PUBLISHER_BLOCKS:
            samples.add(PUBLISHER_BLOCKS, count, _PUBLISHER_BLOCKS[name])
        else:
            samples.add(PUBLISHER_ANOMALIES, count, name)
