"""Data centres of one process: a log each, workers with KV events, a relay."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dynamo_es.clock import SystemClock
from dynamo_es.log.memory import MemoryLog
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.runtime.runtime import DistributedRuntime
from dynamo_es.services.dc_relay.relay import DcRelay
from dynamo_es.services.dc_relay.settings import RelayScope, RelaySettings
from schemas.registry import key_model
from schemas.worker_load import WORKER_LOAD, WorkerLoad
from tests.support.runtimes import PATIENT, SharedLog, make_runtime

BLOCK = 4
ENDPOINT = "ns.backend.generate"
FACTS = read_model_facts(BUILTIN_MODEL)


class Worker:
    """A worker that serves an endpoint, has a model, and tells of its KV cache."""

    def __init__(self, runtime: DistributedRuntime, endpoint: str, model: str) -> None:
        self.runtime, self.path, self.model = runtime, endpoint, model
        self.publisher: KvEventPublisher
        self._serving: asyncio.Task[object] | None = None

    async def start(self) -> None:
        core = self.runtime.core
        await core.start()

        async def answer(request, context):
            yield {}

        endpoint = self.runtime.endpoint(self.path)
        self._serving = asyncio.create_task(endpoint.serve_endpoint(answer))
        path = self.path.split(".")
        card = make_card(FACTS, path, core.instance_id, name=self.model, block_size=BLOCK, runtime_config={})
        await core.registration.register(key_model(*path, core.instance_id), card)

    def publish_events(self) -> None:
        self.publisher = KvEventPublisher(self.runtime.endpoint(self.path), kv_block_size=BLOCK)

    def store(self, tokens: list[int]) -> list[int]:
        """The engine caches a prompt, under hashes of its own."""
        blocks = len(tokens) // BLOCK
        hashes = [abs(hash((self.model, tuple(tokens[: (n + 1) * BLOCK])))) for n in range(blocks)]
        self.publisher.publish_stored(tokens[: blocks * BLOCK], [BLOCK] * blocks, hashes)
        return hashes

    async def tell_load(self, used: int, waiting: int = 0) -> None:
        core = self.runtime.core
        load = WorkerLoad(1, self.model, core.instance_id, 0, 1, used, None, 100, 1, waiting, core.clock.now_ms())
        await core.appender.append(WORKER_LOAD, f"{self.model}/{core.instance_id}:0".encode(), load)

    async def leave(self) -> None:
        await self.runtime.close()
        if self._serving is not None:
            await self._serving


class Site:
    """One data centre: on ``log``, or else on the log at ``url``."""

    def __init__(
        self, dc_id: str, log: MemoryLog | None = None, *, url: str = "memory://", namespace: str = "dynamo"
    ) -> None:
        self.dc_id, self._log, self._url, self._namespace = dc_id, log, url, namespace
        self._runtimes: list[DistributedRuntime] = []
        self._workers: list[Worker] = []

    @property
    def log(self) -> MemoryLog:
        assert self._log is not None
        return self._log

    async def worker(self, endpoint: str = ENDPOINT, model: str = "m", *, events: bool = True) -> Worker:
        worker = Worker(self._make_runtime(), endpoint, model)
        await worker.start()
        if events:
            worker.publish_events()
        self._workers.append(worker)
        return worker

    def runtime(self) -> DistributedRuntime:
        runtime = self._make_runtime()
        self._runtimes.append(runtime)
        return runtime

    def _make_runtime(self) -> DistributedRuntime:
        return make_runtime(self._log, url=self._url, namespace=self._namespace, runtime=PATIENT)

    async def relay(self, scope: RelayScope = RelayScope(), **settings: object) -> DcRelay:  # noqa: B008
        relay = DcRelay(self.runtime().core, RelaySettings(self.dc_id, scope, **settings))  # type: ignore[arg-type]
        await relay.start()
        return relay

    async def close(self) -> None:
        for runtime in reversed(self._runtimes):
            await runtime.close()
        for worker in self._workers:
            await worker.leave()


@asynccontextmanager
async def site(dc_id: str, log: MemoryLog | None = None) -> AsyncIterator[Site]:
    """A data centre without workers and without a relay; everything is closed at the end."""
    log = log or MemoryLog(dc_id, SystemClock(), random.Random(1))
    await log.start()
    made = Site(dc_id, log)
    try:
        yield made
    finally:
        await made.close()
        await log.close()


def shared(log: MemoryLog) -> MemoryLog:
    """The log for someone who would close it."""
    return SharedLog(log)  # type: ignore[return-value]
