"""Looking after an upstream: its health decides whether the worker takes requests, its metrics become load events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from dynamo_es.config.attach_options import AttachConfig
from dynamo_es.engines.attach.find_out import (
    DEFAULT_BLOCK_SIZE,
    METRICS_PATH,
    MODELS_PATH,
    Found,
    find_model,
    read_metrics,
)
from dynamo_es.engines.attach.metrics_page import MetricsPage, loads_of
from dynamo_es.engines.attach.upstream import Upstream
from dynamo_es.engines.attach.vitals import Change, Vitals
from dynamo_es.errors import CannotConnect, ConfigError, DynamoException
from dynamo_es.log.errors import LogError
from dynamo_es.publishers.kv_events import KvEventPublisher
from dynamo_es.publishers.worker_metrics import WorkerMetricsPublisher
from dynamo_es.runtime.endpoint import Endpoint

logger = logging.getLogger(__name__)
_HEALTH_PATH = "/health"


class UpstreamWatch:
    """``run`` while the endpoint is served. Belongs to one event loop.

    While the upstream is not well, the worker's instance is withdrawn; it comes back by itself. An upstream that comes
    back as another process has an empty cache: its KV events begin a new incarnation.
    """

    def __init__(
        self,
        upstream: Upstream,
        config: AttachConfig,
        found: Found,
        endpoint: Endpoint,
        publishers: Sequence[KvEventPublisher],
        metrics: WorkerMetricsPublisher,
    ) -> None:
        """``publishers``: of its KV events, by rank."""
        self._upstream = upstream
        self._config = config
        self._found = found
        self._endpoint = endpoint
        self._publishers = publishers
        self._metrics = metrics
        self.vitals = Vitals()
        self._registered = True
        self._suspected = asyncio.Event()
        self._restarts_seen = 0
        self._health_path: str | None = _HEALTH_PATH
        self._has_metrics = config.metrics_interval_s > 0

    def suspect(self) -> None:
        """A request met something odd: look now."""
        self._suspected.set()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_health(), name="upstream-health")
            if self._has_metrics:
                tasks.create_task(self._watch_metrics(), name="upstream-metrics")

    async def _watch_health(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._config.health_interval_s):
                    await self._suspected.wait()
            except TimeoutError:
                pass
            self._suspected.clear()
            await self._look()
            # However often requests fail, it is not asked more often than this.
            await asyncio.sleep(min(0.05, self._config.health_interval_s))

    async def _look(self) -> None:
        try:
            await self._check()
        except DynamoException as error:
            change = self.vitals.saw_failure(str(error), refused=isinstance(error, CannotConnect))
            if change is Change.DOWN:
                logger.error("the upstream is not well, this worker takes no requests: %s", error)
                self._restarts_seen = self._relayed_restarts()
        else:
            gone = self.vitals.gone
            if not self.vitals.up:
                # Before the first request comes, and before what it leaves in the cache is published.
                await self._on_return(gone=gone)
            if self.vitals.saw_well() is Change.UP:
                logger.info("the upstream is well again")
        await self._settle()

    async def _check(self) -> None:
        """Raises a ``DynamoException`` that says what is wrong."""
        path = self._health_path or MODELS_PATH
        answer = await self._upstream.ask(path)
        if answer.status in (404, 405, 501) and self._health_path is not None:
            self._health_path = None  # Not every server has such a route.
            await self._check()
            return
        if answer.status != 200:
            raise DynamoException(f"{self._upstream.url}{path} answered {answer.status}")
        if not self.vitals.up:
            model, context_length = await find_model(self._upstream, self._config)
            if (model, context_length) != (self._found.model, self._found.context_length):
                raise ConfigError(
                    f"{self._upstream.url} now serves {model!r} with {context_length} tokens, not "
                    f"{self._found.model!r} with {self._found.context_length}; start this worker anew for it"
                )

    async def _on_return(self, *, gone: bool) -> None:
        page = await self._page()
        other = self.vitals.saw_start(None if page is None else page.started_at)
        if (gone if other is None else other) and self._relayed_restarts() == self._restarts_seen:
            self._tell_restart()

    def _relayed_restarts(self) -> int:
        return sum(publisher.counters().get("relay_restarts", 0) for publisher in self._publishers)

    def _tell_restart(self) -> None:
        logger.warning("the upstream was started anew: what its cache held is gone")
        for publisher in self._publishers:
            publisher.restarted()

    async def _settle(self) -> None:
        """The registration follows the state; what fails is done at the next look."""
        wanted = self.vitals.up
        self._endpoint.core.healthy = wanted
        if wanted == self._registered or self._endpoint.core.shutdown_event.is_set():
            return
        try:
            if wanted:
                await self._endpoint.register_endpoint_instance()
            else:
                await self._endpoint.unregister_endpoint_instance()
        except LogError as error:
            logger.warning("the upstream's state is not announced yet: %s", error)
            return
        self._registered = wanted

    async def _watch_metrics(self) -> None:
        while self._has_metrics:
            if self.vitals.up:
                page = await self._page()
                if page is not None:
                    self._publish(page)
                    self._note_start(page)
            await asyncio.sleep(self._config.metrics_interval_s)

    async def _page(self) -> MetricsPage | None:
        if not self._has_metrics:
            return None
        try:
            page = await read_metrics(self._upstream)
        except DynamoException as error:
            logger.debug("no metrics of the upstream: %s", error)
            return None
        if page is None and self.vitals.up:
            logger.info("%s has no %s that is read here: no load events", self._upstream.url, METRICS_PATH)
            self._has_metrics = False
        return page

    def _note_start(self, page: MetricsPage) -> None:
        restarts = self._relayed_restarts()
        if self.vitals.up and self.vitals.saw_start(page.started_at) and restarts == self._restarts_seen:
            self._tell_restart()
        self._restarts_seen = restarts

    def _publish(self, page: MetricsPage) -> None:
        size = self._config.kv_block_size or self._found.block_size or DEFAULT_BLOCK_SIZE
        for rank, load in loads_of(page, size).items():
            self._metrics.publish(
                rank,
                kv_used_blocks=load.kv_used_blocks,
                total_kv_blocks=load.total_kv_blocks,
                running=load.running,
                waiting=load.waiting,
            )
