"""Puts the HTTP application together. Nothing is shared between two applications."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from dynamo_es.clock import Clock
from dynamo_es.config.tree import FrontendConfig, HttpPathsConfig
from dynamo_es.frontend.admin import build_admin
from dynamo_es.frontend.asgi import FrontendApp, InferenceApp
from dynamo_es.frontend.contracts import HealthSource, ModelDirectory
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.request_trace import RequestTracer
from dynamo_es.frontend.route_extensions import FrontendRoute
from dynamo_es.frontend.routes import inference_routes
from dynamo_es.frontend.service import FrontendService


def random_id() -> str:
    """A random UUID."""
    return str(uuid.uuid4())


def build_app(
    config: FrontendConfig,
    directory: ModelDirectory,
    health: HealthSource,
    metrics: FrontendMetrics,
    clock: Clock,
    executor: Executor,
    new_id: Callable[[], str] = random_id,
    paths: HttpPathsConfig | None = None,
    extensions: Sequence[FrontendRoute] = (),
    tracing: RequestTracer | None = None,
) -> FrontendApp:
    """The ASGI application: inference routes raw, everything else FastAPI.

    Args:
        config: Limits and options.
        directory: Models.
        health: What ``/health`` reports.
        metrics: Counters; ``/metrics`` shows their whole registry.
        clock: Time.
        executor: Threads for large prompts; the caller shuts it down.
        new_id: Makes request ids, UUIDs.
        paths: Of the routes; by default Dynamo's.
        extensions: Further routes; their paths are checked already (``check_duplicates``).
        tracing: Begins traces of inference requests; None: there are none.
    """
    places = paths if paths is not None else HttpPathsConfig()
    service = FrontendService(config, directory, metrics, clock, new_id, executor, tracing=tracing)
    inference = InferenceApp(service, inference_routes(config, places, clock, new_id))
    return FrontendApp(service, inference, build_admin(service, inference, health, places, extensions))
