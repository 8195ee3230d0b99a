"""What ``/health`` tells beside the models' readiness: log, views, snapshots, store, instances, unused workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec

from dynamo_es.background import DeadTask
from dynamo_es.frontend.contracts import NOT_READY, ModelDirectory, ModelStatus
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.router.remote_index import RemoteIndex
from dynamo_es.router.remote_index_metrics import remote_index_entry
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.health import folds_entry, log_entry, snapshot_entry, stall_entry, tasks_entry
from dynamo_es.runtime.metrics_runtime import topic_label
from dynamo_es.runtime.views import RoutingViews

_SHOWN_WORKERS = 10
"""Workers that are named a model and problem; how many there are is always told."""


class RuntimeHealth:
    """A ``HealthSource`` over a process's runtime."""

    def __init__(
        self,
        core: RuntimeCore,
        views: RoutingViews,
        directory: ModelDirectory,
        log: LogWatch,
        remote: RemoteIndex | None = None,
    ) -> None:
        """``remote``: whom the routers ask for the KV index; None: they have it."""
        self._core = core
        self._views = views
        self._directory = directory
        self._log = log
        self._remote = remote

    def report(self) -> Mapping[str, Any]:
        """As ``HealthSource.report``. Not ready only while a view stands still, or if a background task died."""
        core = self._core
        log = self._log_state()
        stalls = core.progress.stalls()
        snapshots = self._views.snapshots
        remote = None if self._remote is None else remote_index_entry(self._remote)
        good = log["state"] == "ok" and not (remote and remote["missing_partitions"])
        instances = sorted(core.registry.state.instances.values(), key=lambda instance: instance.instance_id)
        return {
            "status": "healthy" if good else "degraded",
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
            "log": log,
            "views": folds_entry(core),
            "snapshots": None if snapshots is None else snapshot_entry(snapshots.counters, core.clock),
            **({"remote_index": remote} if remote else {}),
            "refused_records": _refused_records(core),
            "store": {"path": core.store.path if core.store is not None else None},
            "models": {name: model_entry(status) for name, status in self._directory.statuses().items()},
            **({"status": NOT_READY, **stall_entry(stalls)} if stalls else {}),
            **({"status": NOT_READY, **tasks_entry(core.tasks.dead)} if core.tasks.dead else {}),
        }

    def dead_tasks(self) -> Sequence[DeadTask]:
        """As ``HealthSource.dead_tasks``."""
        return self._core.tasks.dead

    def _log_state(self) -> dict[str, Any]:
        self._log.look()
        since = datetime.fromtimestamp(self._log.since_ms / 1000, UTC).isoformat(timespec="seconds")
        return {**log_entry(self._core), "since": since}


def _refused_records(core: RuntimeCore) -> dict[str, dict[str, int]]:
    """Records that this process put among the dead letters, by topic and reason; both are fixed sets."""
    found: dict[str, dict[str, int]] = {}
    for (topic, reason), count in core.appender.counters.dead_letters.items():
        by_reason = found.setdefault(topic_label(topic), {})
        by_reason[reason] = by_reason.get(reason, 0) + count
    return found


def model_entry(status: ModelStatus) -> dict[str, Any]:
    """One model of ``/health``: its readiness, and its workers that are not used or earn no credit, its routing."""
    entry: dict[str, Any] = {"ready": status.ready, "reason": status.reason}
    if status.routed_as is not None:
        entry["routed_as"] = status.routed_as
    elif (routing := status.routing()) is not None:
        entry["routing"] = msgspec.to_builtins(routing)
    if status.refused:
        entry["refused_workers"] = {
            "count": len(status.refused),
            "workers": [
                {"instance_id": worker_id, "reason": refusal.reason, "remedy": refusal.remedy}
                for worker_id, refusal in islice(sorted(status.refused.items()), _SHOWN_WORKERS)
            ],
        }
    if status.other_block_sizes:
        entry["other_block_sizes"] = {
            "count": len(status.other_block_sizes),
            "workers": [
                {
                    "instance_id": worker_id,
                    "reason": f"its KV blocks are of {size} tokens, the router's of {status.block_size}: it serves, "
                    "but its cache earns no credit",
                    "remedy": f"start it with --block-size {status.block_size}",
                }
                for worker_id, size in islice(sorted(status.other_block_sizes.items()), _SHOWN_WORKERS)
            ],
        }
    return entry
