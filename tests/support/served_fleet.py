"""Workers and a whole frontend in this process, over one memory log: requests go in as ASGI calls, events come out."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dynamo_es.clock import SystemClock
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import FrontendConfig, LogConfig, MockConfig, RuntimeConfig, StateConfig, WorkerConfig
from dynamo_es.engines.mock_worker import MockWorkerSettings, run_mock_workers
from dynamo_es.frontend.app import build_app
from dynamo_es.frontend.discovery import RegistryModels
from dynamo_es.frontend.health import RuntimeHealth
from dynamo_es.frontend.log_watch import LogWatch
from dynamo_es.frontend.main import process_metrics
from dynamo_es.frontend.metrics_views import register_views
from dynamo_es.log.base import Entry, EventLog, Position, Record, TopicPartition
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.memory import MemoryLog
from dynamo_es.router.config import KvRouterSettings
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeSettings
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.request_server import Batch
from dynamo_es.runtime.runtime import DistributedRuntime
from dynamo_es.runtime.views import RoutingViews
from schemas.codec import TopicCodec
from schemas.registry import key_model
from schemas.requests import REQUESTS, Finished
from tests.support.runtimes import FAST, SharedLog, make_runtime, wait_for
from tests.unit.frontend.asgi_client import Reply, call

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


class ReadOnlyAtTimes:
    """A log that takes no appends while ``read_only`` is set."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.read_only = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)

    async def append(self, topic: str, entry: Entry) -> Position:
        self._check()
        return await self._log.append(topic, entry)

    async def append_all(self, topic: str, entries: Sequence[Entry]) -> list[Position]:
        self._check()
        return await self._log.append_all(topic, entries)

    def _check(self) -> None:
        if self.read_only:
            raise LogUnavailable("the folder is read-only")


class ServedFleet:
    """One frontend, and whatever workers a test starts. ``frontend_log`` is the log as the frontend sees it."""

    def __init__(
        self,
        log: EventLog,
        state: StateConfig | None = None,
        settings: KvRouterSettings | None = None,
        config: FrontendConfig | None = None,
        runtime: RuntimeConfig = FAST,
        telemetry: TelemetryConfig | None = None,
        **routing: Any,
    ) -> None:
        """``runtime``, ``telemetry``: of the frontend and of workers. ``routing``: more of what ``RegistryModels``
        takes for its routers.
        """
        self.config = config or FrontendConfig(router_mode="kv")
        self.settings, self.routing = settings or KvRouterSettings(), routing
        self.runtime, self.telemetry = runtime, telemetry
        self.log = log
        self.frontend_log = ReadOnlyAtTimes(log)
        self.frontend = make_runtime(
            self.frontend_log, role="frontend", state=state, runtime=runtime, telemetry=telemetry  # type: ignore[arg-type]
        )  # fmt: skip
        self.core = self.frontend.core
        self._workers: list[tuple[asyncio.Event, asyncio.Task[None]]] = []
        self._runtimes: list[tuple[DistributedRuntime, asyncio.Task[Any]]] = []

    async def start(self, executor: ThreadPoolExecutor) -> None:
        await self.core.start()
        views = RoutingViews(self.core)
        await views.start()
        self.views = views
        self.metrics = process_metrics(self.core, "dynamo_frontend")
        config = self.config
        self.models = RegistryModels(
            self.core, views, config, self.settings, self.metrics.forget,
            migrations=self.metrics.migrations_of, **self.routing,
        )  # fmt: skip
        self.models.refresh()
        log_watch = LogWatch(self.core)
        log_watch.start()
        register_views(self.metrics.registry, self.core, views, self.models, "dynamo_frontend")
        health = RuntimeHealth(self.core, views, self.models, log_watch)
        self.app = build_app(
            config, self.models, health, self.metrics, SystemClock(), executor, tracing=self.core.tracing
        )

    async def mock_worker(
        self, worker: WorkerConfig | None = None, wait: bool = True, *, buffer_records: int = 100_000, **mock: Any
    ) -> asyncio.Event:
        """A mock worker that is registered, and whose model is ready (``wait``); set the event to end it.

        ``buffer_records``: how many of its appends may wait for the log.
        """
        log = LogConfig(url="memory://", buffer_records=buffer_records)
        settings = MockWorkerSettings(
            RuntimeSettings(log, StateConfig(flush_interval_s=0.2), self.runtime, "worker"),
            worker or WorkerConfig(model_name="m"),
            MockConfig(**{"speedup_ratio": 0.0, **mock}),
        )
        stop, ready = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(
            run_mock_workers(
                settings, stop, clock=SystemClock(), rng=random.Random(len(self._workers)), log=SharedLog(self.log),  # type: ignore[arg-type]
                on_ready=lambda _: ready.set(),
            )
        )  # fmt: skip
        self._workers.append((stop, task))
        first = asyncio.create_task(ready.wait())
        await asyncio.wait([first, task], return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if task.done():
            task.result()
        if not wait:
            return stop
        name = settings.worker.model_name
        await wait_for(lambda: (status := self.models.statuses().get(name)) is not None and status.ready)
        return stop

    async def scripted_worker(
        self, batches: list[list[Any]], name: str = "m", *, wait: bool = True, **card: Any
    ) -> list[Any]:
        """A worker that answers every request with these batches of frames; returns the requests that it gets.

        ``card``: other members of its model card. ``wait`` until its model is ready.
        """
        requests: list[Any] = []

        async def answer(request: Any, context: Context) -> AsyncIterator[Batch]:
            requests.append(request)
            for frames in batches:
                yield Batch(frames)

        await self.worker(answer, name, wait=wait, **card)
        return requests

    async def worker(
        self,
        answer: Callable[[Any, Context], AsyncIterator[Any]],
        name: str = "m",
        *,
        wait: bool = True,
        settings: RuntimeConfig | None = None,
        **card: Any,
    ) -> DistributedRuntime:
        """A worker with this handler; its runtime, which the fleet closes at its end if the test did not."""
        runtime = make_runtime(self.log, runtime=settings or self.runtime, telemetry=self.telemetry)
        await runtime.core.start()
        where = ("dynamo", "backend", "generate")
        self._runtimes.append((runtime, asyncio.create_task(runtime.endpoint(".".join(where)).serve_endpoint(answer))))
        known = make_card(
            read_model_facts(BUILTIN_MODEL), where, runtime.core.instance_id,
            name=name, block_size=16, runtime_config={},
        )  # fmt: skip
        key = key_model(*where, runtime.core.instance_id)
        await runtime.core.registration.register(key, msgspec.structs.replace(known, **card))
        if wait:
            await wait_for(
                lambda: (status := self.models.statuses().get(name)) is not None and status.ready, timeout_s=60
            )
        return runtime

    async def ask(self, path: str, **body: Any) -> Reply:
        """POST with model ``m`` and, for chat, a short message."""
        given = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
        return await call(self.app, path, json.dumps({"model": "m", **given, **body}).encode())

    async def requests_records(self, count: int) -> list[Record]:
        """The first ``count`` records about requests that the log has."""
        await self.core.buffer.flush(5)
        topic = REQUESTS.qualified("dynamo")
        reader = self.log.reader({TopicPartition(topic, number): 0 for number in range(REQUESTS.partitions)})
        found: list[Record] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                for records in (await reader.poll(timeout_s=1)).values():
                    found += records
        await reader.close()
        return found

    async def get(self, path: str) -> Reply:
        return await call(self.app, path, method="GET")

    async def finished(self, count: int = 1) -> list[Finished]:
        """The first ``count`` ends of requests that the log has, in order."""
        await self.core.buffer.flush(5)
        topic = REQUESTS.qualified("dynamo")
        reader = self.log.reader({TopicPartition(topic, number): 0 for number in range(REQUESTS.partitions)})
        codec, found = TopicCodec(REQUESTS), []
        async with asyncio.timeout(60):
            while len(found) < count:
                for records in (await reader.poll(timeout_s=1)).values():
                    for record in records:
                        event = codec.decode(record.value, record.headers)
                        if isinstance(event, Finished):
                            found.append((record.timestamp_ms, event))
        await reader.close()
        return [event for _, event in sorted(found, key=lambda item: item[0])]

    async def close(self) -> None:
        for stop, _ in self._workers:
            stop.set()
        # A worker that could not start has told its test.
        await asyncio.gather(*(task for _, task in self._workers), return_exceptions=True)
        for runtime, serving in self._runtimes:
            await runtime.close()
            await serving
        await self.frontend.close()


@asynccontextmanager
async def served_fleet(
    wrap: Callable[[EventLog], EventLog] = lambda log: log, state: StateConfig | None = None, **routing: Any
) -> AsyncIterator[ServedFleet]:
    """A fleet without workers; everything is closed at the end. ``wrap``: what all see of the log. ``routing``: as of
    ``ServedFleet``.
    """
    log = MemoryLog("test", SystemClock(), random.Random(1))
    await log.start()
    with ThreadPoolExecutor(1) as executor:
        fleet = ServedFleet(wrap(log), state, **routing)
        await fleet.start(executor)
        try:
            yield fleet
        finally:
            await fleet.close()
    await log.close()
