"""Metrics of models, routers and workers on the frontend's ``/metrics`` page, read when the page is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry

from dynamo_es.frontend.contracts import ModelStatus
from dynamo_es.frontend.engine import RoutedTokenEngine
from dynamo_es.frontend.metrics_hops import HopsCollector
from dynamo_es.frontend.metrics_load import MeasuredLoadCollector
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.metrics import MAX_MODELS, BoundsCollector, Collector, LabelBound, Samples, counter, gauge
from dynamo_es.runtime.metrics_index import BookingsCollector, register_index
from dynamo_es.runtime.views import RoutingViews

DECISIONS = counter("dynamo_es_routing_decisions_total", "Decisions by what decided", "model", "reason")
QUERIED = counter("dynamo_es_routing_queried_blocks_total", "Blocks of prompts", "model")
MATCHED = counter("dynamo_es_routing_matched_blocks_total", "Blocks of prompts that the best worker had", "model")
SELECTED = counter("dynamo_es_routing_selected_blocks_total", "Blocks of prompts that the chosen worker had", "model")
LOST_EVENTS = counter("dynamo_es_routing_lost_events_total", "Events of requests that found no room", "model")
ACTIVE = gauge("dynamo_es_routing_active_requests", "Requests in progress at this router", "model")
REFUSED = gauge(
    "dynamo_es_refused_workers", "Workers that registered something else under a model's name, and get nothing", "model"
)
UNCREDITED = gauge(
    "dynamo_es_other_block_size_workers",
    "Workers whose KV blocks have another size than the router's, so that their cache earns no credit",
    "model",
)


class RoutedModels(Protocol):
    """Where the routers are."""

    def routers(self) -> Sequence[tuple[str, RoutedTokenEngine]]:
        """Loaded models with their engines."""

    def statuses(self) -> Mapping[str, ModelStatus]:
        """Known models, aliases included."""


class RoutersCollector(Collector):
    """Routers and models of a frontend. Reasons come from a fixed set; models are bounded."""

    def __init__(self, models: RoutedModels, names: LabelBound, prefix: str) -> None:
        """``prefix``: of the metrics that are Dynamo's."""
        self._ready = gauge(f"{prefix}_model_ready", "1 when at least one request of it can be routed", "model")
        self._limit = gauge(f"{prefix}_model_migration_limit", "How often one request may go on elsewhere", "model")
        self.families = (
            *(DECISIONS, QUERIED, MATCHED, SELECTED, LOST_EVENTS, ACTIVE),
            *(REFUSED, UNCREDITED, self._ready, self._limit),
        )
        self._models = models
        self._names = names

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        statuses = self._models.statuses()
        self._names.retain(statuses.keys())
        for name, engine in self._models.routers():
            model = self._names.of(name)
            counters = engine.router.counters
            for reason, count in counters.decisions.items():
                samples.add(DECISIONS, count, model, reason)
            samples.add(QUERIED, counters.queried_blocks, model)
            samples.add(MATCHED, counters.matched_blocks, model)
            samples.add(SELECTED, counters.selected_blocks, model)
            samples.add(LOST_EVENTS, engine.router.lost_events, model)
            samples.add(ACTIVE, engine.router.open_requests, model)
            samples.most(self._limit, engine.migration.limit, model)
        for name, status in statuses.items():
            model = self._names.of(name)
            samples.add(REFUSED, len(status.refused), model)
            samples.add(UNCREDITED, len(status.other_block_sizes), model)
            samples.most(self._ready, status.ready, model)


def register_views(
    registry: CollectorRegistry, core: RuntimeCore, views: RoutingViews, models: RoutedModels, prefix: str
) -> None:
    """Show everything that a process which routes knows, beside what every process shows."""
    # Not one bound for both: the index has models whose workers have left, the frontend forgets them.
    indexed, routed = LabelBound("index_model", MAX_MODELS), LabelBound("model", MAX_MODELS)
    if views.kv_index is not None:
        register_index(registry, views.kv_index, views.snapshots, indexed, core.clock)
    registry.register(BookingsCollector(views.requests))
    registry.register(MeasuredLoadCollector(core, views, indexed))
    registry.register(RoutersCollector(models, routed, prefix))
    registry.register(HopsCollector(models.routers, lambda: views.requests.state.sessions, routed))
    registry.register(BoundsCollector(indexed, routed))
