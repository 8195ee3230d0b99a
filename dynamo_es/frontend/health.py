"""What ``/health`` tells beside the models' readiness: log, views, stores, instances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_es.frontend.contracts import ModelDirectory
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.views import RoutingViews
from streams.runner import RunnerStatus


class RuntimeHealth:
    """A ``HealthSource`` over a process's runtime."""

    def __init__(self, core: RuntimeCore, views: RoutingViews, directory: ModelDirectory) -> None:
        self._core = core
        self._views = views
        self._directory = directory

    def report(self) -> Mapping[str, Any]:
        core = self._core
        buffer = core.buffer.stats()
        views = {
            runner.fold.name: {"state": runner.status.value, "lag_records": runner.lag()}
            for runner in self._views.runners()
        }
        away = any(runner.status is RunnerStatus.LOG_AWAY for runner in self._views.runners())
        instances = sorted(core.registry.state.instances.values(), key=lambda instance: instance.instance_id)
        return {
            "endpoints": sorted({f"dyn://{item.namespace}.{item.component}.{item.endpoint}" for item in instances}),
            "instances": [
                {
                    "namespace": item.namespace,
                    "component": item.component,
                    "endpoint": item.endpoint,
                    "instance_id": item.instance_id,
                    "transport": {item.transport: item.address},
                    "device_type": item.device_type,
                    "state": item.state,
                }
                for item in instances
            ],
            "log": {
                "state": "away" if away else "ok",
                "url": core.log.url,
                "buffered_records": buffer.records,
                "buffered_bytes": buffer.buffered_bytes,
                "dropped_records": buffer.dropped_full + buffer.dropped_refused,
            },
            "views": views,
            "store": {"path": core.store.path if core.store is not None else None},
            "models": {
                name: {"ready": status.ready, "reason": status.reason}
                for name, status in self._directory.statuses().items()
            },
        }
