"""Metrics of log, views and router on the frontend's ``/metrics`` page, read when the page is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dynamo_es.frontend.contracts import ModelStatus
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.log.state import LogCondition
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.views import RoutingViews


class RoutedModels(Protocol):
    """Where the routers are."""

    def routers(self) -> Sequence[tuple[str, RoutedTokenEngine]]:
        """Loaded models with their engines."""

    def statuses(self) -> Mapping[str, ModelStatus]:
        """Known models, aliases included."""


class ViewsCollector:
    """A prometheus collector; every label value comes from a bounded set (views, topics, models, reasons)."""

    def __init__(self, core: RuntimeCore, views: RoutingViews, models: RoutedModels, log: LogWatch) -> None:
        self._core = core
        self._log = log
        self._views = views
        self._models = models

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._log_metrics()
        yield from self._view_metrics()
        yield from self._index_metrics()
        yield from self._router_metrics()
        yield from self._worker_metrics()

    def _log_metrics(self) -> Iterator[Metric]:
        state = self._log.look()
        gauge = GaugeMetricFamily("dynamo_es_log_state", "1 for the state that the log is in", labels=["state"])
        for condition in LogCondition:
            gauge.add_metric([condition.value], condition is state.state)
        yield gauge
        stats = self._core.buffer.stats()
        for name, text, value in (
            ("dynamo_es_log_buffer_records", "Appends that wait for the log", stats.records),
            ("dynamo_es_log_buffer_bytes", "Their size", stats.buffered_bytes),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        dropped = stats.dropped_full + stats.dropped_refused
        yield CounterMetricFamily("dynamo_es_log_buffer_dropped", "Appends that did not fit", value=dropped)

    def _view_metrics(self) -> Iterator[Metric]:
        lag = GaugeMetricFamily("dynamo_es_view_lag_records", "Records not folded yet, as last seen", labels=["view"])
        records = CounterMetricFamily("dynamo_es_view_records", "Records folded", labels=["view"])
        letters = CounterMetricFamily("dynamo_es_view_dead_letters", "Records refused", labels=["view"])
        commits = CounterMetricFamily("dynamo_es_view_commits", "Commits of state and positions", labels=["view"])
        failed = CounterMetricFamily("dynamo_es_view_failed_commits", "Commits that failed", labels=["view"])
        for runner in self._views.runners():
            name = [runner.fold.name]
            lag.add_metric(name, runner.lag())
            records.add_metric(name, runner.counters.records)
            letters.add_metric(name, runner.counters.dead_letters)
            commits.add_metric(name, runner.counters.commits)
            failed.add_metric(name, runner.counters.failed_commits)
        yield from (lag, records, letters, commits, failed)

    def _index_metrics(self) -> Iterator[Metric]:
        state = self._views.kv_index.state
        live = [source for source in state.sources.values() if not source.retired]
        sources = GaugeMetricFamily("dynamo_es_index_sources", "Sources of KV events", labels=["trust"])
        sources.add_metric(["exact"], sum(source.exact for source in live))
        sources.add_metric(["degraded"], sum(not source.exact for source in live))
        yield sources
        blocks = sum(sum(index.tier_blocks) for index in state.models.values())
        yield GaugeMetricFamily("dynamo_es_index_blocks", "Blocks held by workers, all tiers", value=blocks)
        keys = sum(index.entries() for index in state.models.values())
        yield GaugeMetricFamily("dynamo_es_index_keys", "Distinct blocks in memory", value=keys)
        events = CounterMetricFamily("dynamo_es_index_batches", "Batches of KV events by result", labels=["result"])
        counters = state.counters
        for result, value in (
            ("seen", counters.batches),
            ("duplicate", counters.duplicates),
            ("straggler", counters.stragglers),
            ("gap", counters.gaps),
            ("skipped_degraded", counters.skipped_degraded),
        ):
            events.add_metric([result], value)
        yield events

    def _router_metrics(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "dynamo_es_routing_decisions", "Decisions by what decided", labels=["model", "reason"]
        )
        matched = CounterMetricFamily(
            "dynamo_es_routing_matched_blocks", "Cached blocks at the choice", labels=["model"]
        )
        queried = CounterMetricFamily("dynamo_es_routing_queried_blocks", "Blocks of the prompts", labels=["model"])
        active = GaugeMetricFamily("dynamo_es_routing_active_requests", "Bookings of this router", labels=["model"])
        for model, engine in self._models.routers():
            counters = engine.router.counters
            for reason, count in counters.decisions.items():
                decisions.add_metric([model, reason], count)
            matched.add_metric([model], counters.matched_blocks)
            queried.add_metric([model], counters.queried_blocks)
            active.add_metric([model], engine.router.open_requests)
        yield from (decisions, matched, queried, active)

    def _worker_metrics(self) -> Iterator[Metric]:
        refused = GaugeMetricFamily(
            "dynamo_es_refused_workers", "Workers that registered something else under a model's name", labels=["model"]
        )
        uncredited = GaugeMetricFamily(
            "dynamo_es_other_block_size_workers", "Workers whose cache earns no credit", labels=["model"]
        )
        for model, status in self._models.statuses().items():
            refused.add_metric([model], len(status.refused))
            uncredited.add_metric([model], len(status.other_block_sizes))
        yield from (refused, uncredited)
