"""Metrics of the load that workers measured of themselves."""

from __future__ import annotations

from dynamo_es.router.measured_overload import count_stale_workers
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.metrics import Collector, LabelBound, Samples, gauge
from dynamo_es.runtime.views import RoutingViews

STALE = gauge(
    "dynamo_es_stale_load_workers",
    "Registered workers whose last measurement of their load is so old that it counts for nothing",
    "model",
)


class MeasuredLoadCollector(Collector):
    """What is known of the workers that are registered now."""

    families = (STALE,)

    def __init__(self, core: RuntimeCore, views: RoutingViews, models: LabelBound) -> None:
        self._core = core
        self._views = views
        self._models = models

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        registered = {instance.instance_id for instance in self._core.registry.state.instances.values()}
        counts = count_stale_workers(self._views.worker_load.state, registered, self._core.clock.now_ms())
        for model, count in counts.items():
            samples.add(STALE, count, self._models.of(model))
