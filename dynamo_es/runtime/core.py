"""Everything that a process needs to take part in a fleet, built once and passed around."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import LogConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.log.base import EventLog
from dynamo_es.log.buffered import BufferedAppender
from dynamo_es.log.errors import LogReplaced
from dynamo_es.log.open import open_log
from dynamo_es.log.state import AppendWatch, LogCondition, LogState
from dynamo_es.runtime.appender import TopicAppender
from dynamo_es.runtime.curve import load_curve_keys, start_authenticator
from dynamo_es.runtime.declared_topics import declared_topics
from dynamo_es.runtime.errors import RuntimeClosed
from dynamo_es.runtime.lease_monitor import LeaseMonitor
from dynamo_es.runtime.log_janitor import LogJanitor
from dynamo_es.runtime.log_takeover import LogTakeover
from dynamo_es.runtime.process_store import open_store
from dynamo_es.runtime.progress import ProgressWatch
from dynamo_es.runtime.registration import Registration, check_heartbeat
from dynamo_es.runtime.request_client import ConnectionPool
from dynamo_es.runtime.request_plane import build_connection_pool, build_request_server
from dynamo_es.runtime.resync_answers import ResyncAnswers
from dynamo_es.store.base import StateStore
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS
from schemas.registry import ProcessRole
from streams.compacted import CompactedTopic
from streams.fold import Fold
from streams.registry import RegistryFold, RegistryState
from streams.restoring import SnapshotSource
from streams.runner import FoldRunner, RunnerStatus

if TYPE_CHECKING:
    from starlette.routing import Route

    from dynamo_es.runtime.system_server import SystemServer
    from dynamo_es.telemetry.otel import OtelTracing

logger = logging.getLogger(__name__)
S = TypeVar("S")
# At most this often publishers announce everything anew because the log refuses events.
_START_OVER_S = 1.0
# Sockets of a process: one for each runtime that serves, three for each instance that it calls. libzmq's own limit is
# 1,023, which a frontend before 341 workers reaches; its greatest is 65,535.
_MAX_SOCKETS = 65_535
Cleanup = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Configuration and role of a process."""

    log: LogConfig = field(default_factory=LogConfig)
    state: StateConfig = field(default_factory=StateConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    role: ProcessRole = "worker"
    system: SystemConfig = field(default_factory=SystemConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)


class RuntimeCore:
    """Log, appender, registry view, lease, request plane of one process. Belongs to one event loop.

    ``start`` opens everything in order and is undone by ``close``; if it raises, nothing stays open.

    A process that is many instances at once (mock workers) has a runtime for each. All but the first are its guests:
    they have a lease, registrations and a request server of their own, and use the host's log, buffer, state, registry
    view and connections; what the bounds of those allow is for all of them together.
    """

    def __init__(
        self,
        settings: RuntimeSettings,
        *,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        rng: random.Random,
        log: EventLog | None = None,
        host: RuntimeCore | None = None,
    ) -> None:
        """``log`` replaces the one that the settings name (it is started and closed here all the same).

        ``host``: makes this one its guest; ``start`` starts the host too, and the host's ``close`` closes this one.
        """
        check_heartbeat(settings.runtime.heartbeat_s, settings.runtime.lease_ttl_s)
        self.settings = settings
        self.clock = clock
        self.rng = rng
        self.instance_id = rng.getrandbits(64)
        self.shutdown_event = asyncio.Event()
        self._began_at = clock.monotonic()
        self.host = host
        self._guests: list[RuntimeCore] = []
        self.tasks: BackgroundTasks = BackgroundTasks() if host is None else host.tasks
        if host is not None:
            log = host.log
        self.log: EventLog = log if log is not None else open_log(settings.log.url, clock=clock)
        keys = settings.runtime.curve_key_file
        self.curve_keys = load_curve_keys(keys) if keys else None
        self.public_key = self.curve_keys.public.decode() if self.curve_keys else None
        self.store: StateStore | None = None
        self.healthy = True
        self.loop = loop
        self.renewals: list[Callable[[], None]] = []
        # For the system status server: other runtimes of this process that it speaks for, what POST /engine/<name>
        # calls, and what publishers count.
        self.companions: list[RuntimeCore] = []
        self.engine_routes: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.system_routes: list[Route] = []  # Of its own kind; before ``start``.
        self.publisher_counts: list[Callable[[], Mapping[str, int]]] = []
        # What else /health tells of this process, by name: JSON without secrets, quick to make.
        self.health_parts: dict[str, Callable[[], Any]] = {}
        self.system: SystemServer | None = None
        self.tracing: OtelTracing | None = None
        self._start_over_timer: asyncio.TimerHandle | None = None
        self._connected_revision = -1
        self._cleanups: list[Cleanup] = []
        self._closers: list[Cleanup] = []
        self._start_lock = asyncio.Lock()
        self._started = False
        self._closed = False
        self._serving: set[asyncio.Future[None]] = set()
        self._registry_waiters: list[asyncio.Future[None]] = []
        self._appends = AppendWatch(clock, self._on_replaced)
        self._takeover: LogTakeover | None = None
        self._runners: list[FoldRunner[Any]] = []
        self.progress = ProgressWatch(
            self.runners, timeout_s=settings.state.stall_timeout_s, clock=clock, tasks=self.tasks
        )
        self.appender: TopicAppender
        self.pool: ConnectionPool
        self._zmq: zmq.Context[zmq.Socket[bytes]] | None = None
        self._authenticator: AsyncioAuthenticator | None = None

    async def start(self) -> None:
        """Open the log, create its topics, follow the registry, take a lease, bind the request plane. Idempotent.

        Raises:
            LogError, StoreError, RequestPlaneError, ConfigError: With what to do.
        """
        async with self._start_lock:
            if self._closed:
                raise RuntimeClosed("the runtime was shut down")
            if not self._started:
                try:
                    await self._open()
                except BaseException:
                    await self._unwind()
                    raise
                self._started = True

    @property
    def started(self) -> bool:
        """After ``start``; appender, registry, request plane and lease are there."""
        return self._started

    def uptime_s(self) -> float:
        """Seconds since it was made."""
        return self.clock.monotonic() - self._began_at

    def runners(self) -> Sequence[FoldRunner[Any]]:
        """Every fold that was made with ``make_runner``, in that order."""
        return self._runners

    @property
    def log_state(self) -> LogState:
        """How the log does, as this process's readers and appends see it; cheap, for health and metrics."""
        if not self._started:
            return LogState(LogCondition.AWAY, "the log is not open yet")
        appends = self.buffer.state()
        if appends.state is LogCondition.REPLACED:
            return appends
        for runner in self._runners:
            if runner.status is RunnerStatus.LOG_AWAY and runner.last_error is not None:
                replaced = isinstance(runner.last_error, LogReplaced)
                return LogState(LogCondition.REPLACED if replaced else LogCondition.AWAY, str(runner.last_error))
        return appends

    @property
    def address(self) -> str:
        """Where other processes reach this one's request plane."""
        runtime = self.settings.runtime
        host = runtime.advertise_host or runtime.host
        if host in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            host = socket.gethostname()
        return f"tcp://{f'[{host}]' if ':' in host else host}:{self.server.port}"

    def endpoint_opened(self) -> asyncio.Future[None]:
        """Told by an endpoint that serves; it resolves the future when it has drained, and ``close`` waits for that."""
        drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving.add(drained)
        drained.add_done_callback(self._serving.discard)
        return drained

    async def registry_changed(self) -> None:
        """Wait for the next batch of registry records; raises ``RuntimeClosed`` at shutdown."""
        if self.shutdown_event.is_set():
            raise RuntimeClosed("the runtime is shutting down")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._registry_waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._registry_waiters:
                self._registry_waiters.remove(waiter)

    def _wake_registry_waiters(self) -> None:
        waiters, self._registry_waiters = self._registry_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def add_cleanup(self, cleanup: Cleanup) -> None:
        """Call ``cleanup`` at ``close``, before log and store are closed; last added, first called."""
        self._cleanups.append(cleanup)

    def drop_cleanup(self, cleanup: Cleanup) -> None:
        """Whoever was to be closed is closed already; nothing if it was not to be."""
        if cleanup in self._cleanups:
            self._cleanups.remove(cleanup)

    def _drop_connections(self) -> None:
        """Close connections to processes that are gone."""
        state = self.registry.state
        if state.revision != self._connected_revision:
            self._connected_revision = state.revision
            self.pool.keep_only({(item.address, item.instance_id) for item in state.instances.values()})

    async def close(self) -> None:
        """Drain, give back the lease, close everything; guests first. Safe to call twice."""
        self.shutdown_event.set()
        self._wake_registry_waiters()
        async with self._start_lock:
            if self._closed:
                return
            self._closed = True
            await asyncio.gather(*(guest.close() for guest in self._guests))
            if self._serving:
                await asyncio.wait(self._serving, timeout=self.settings.runtime.drain_timeout_s + 1.0)
            while self._cleanups:
                await self._cleanups.pop()()
            await self._unwind()

    async def _open(self) -> None:
        settings = self.settings
        self.open_tracing()
        await self._open_system_server()
        if self.host is None:
            await self._open_log()
        else:
            await self._use(self.host)
        self._listen(self._wake_registry_waiters)
        await self._open_server()
        self.registration = Registration(
            self.appender,
            self._registry_state,
            owner=settings.role,
            owner_id=self.instance_id,
            ttl_s=settings.runtime.lease_ttl_s,
            heartbeat_s=settings.runtime.heartbeat_s,
            rng=self.rng,
            tasks=self.tasks,
        )
        self.registration.on_renewed_identity = self.renewals
        await self.registration.start()
        self._closers.append(self.registration.close)
        if self.host is None:
            await self._keep_house()

    async def _open_log(self) -> None:
        settings = self.settings
        await self.log.start()
        self._closers.append(self.log.close)
        await self.log.create_topics(declared_topics(settings.log))
        self.store = open_store(settings.state)
        self._closers.append(self._close_store)
        self.buffer = BufferedAppender(
            self.log,
            clock=self.clock,
            rng=self.rng,
            max_records=settings.log.buffer_records,
            max_bytes=settings.log.buffer_bytes,
            linger_s=settings.log.linger_ms / 1000,
            on_refused=self._on_refused,
            watch=self._appends,
            tasks=self.tasks,
        )
        self.buffer.start()
        self._closers.append(self._close_buffer)
        self.appender = TopicAppender(self.log, self.buffer, settings.log.namespace, self.clock, self._appends)
        self.kv_snapshots = CompactedTopic(KV_SNAPSHOTS, self.log, settings.log.namespace, self.appender)
        self.registry = self.make_runner(RegistryFold())
        self.registry.add_listener(ResyncAnswers(self.registry, self._publishers).look)
        await self.registry.start()
        self._closers.append(self.registry.stop)
        self._open_connections()

    async def _use(self, host: RuntimeCore) -> None:
        await host.start()
        self.store = host.store
        self.buffer = host.buffer
        self.appender = host.appender
        self.kv_snapshots = host.kv_snapshots
        self.registry = host.registry
        self.pool = host.pool
        self._zmq = host._zmq
        self.tracing = host.tracing
        host._guests.append(self)
        self._closers.append(self._leave)

    async def _leave(self) -> None:
        assert self.host is not None
        self.host._guests.remove(self)

    def _listen(self, listener: Callable[[], None]) -> None:
        """To the registry, until this runtime is closed."""
        self.registry.add_listener(listener)

        async def stop_listening() -> None:
            self.registry.remove_listener(listener)

        self._closers.append(stop_listening)

    async def _keep_house(self) -> None:
        """What is done once in a process: leases of others, the log's end and its replacement, stalls."""
        settings = self.settings
        self._takeover = LogTakeover(self.log, declared_topics(settings.log), self._announce_all, self.rng, self.tasks)
        self._closers.append(self._takeover.close)
        self.monitor = LeaseMonitor(
            self.registry,
            self.appender,
            own_lease=lambda: self.registration.lease_id,
            name=f"{socket.gethostname()}/{self.instance_id:x}",
            interval_s=settings.runtime.heartbeat_s,
            clock=self.clock,
            rng=self.rng,
            tasks=self.tasks,
        )
        self.monitor.start()
        self._closers.append(self.monitor.close)
        janitor = LogJanitor(
            self.log, interval_s=settings.log.retention_interval_s, clock=self.clock, rng=self.rng, tasks=self.tasks
        )
        janitor.start()
        self._closers.append(janitor.close)
        self.progress.start()
        self._closers.append(self.progress.close)
        await self.registry.wait_caught_up(settings.state.catch_up_timeout_s)

    async def _announce_all(self) -> None:
        for core in self._instances():
            await core.registration.announce()

    def _instances(self) -> list[RuntimeCore]:
        """This runtime and its guests that have a lease."""
        return [self, *(guest for guest in self._guests if guest.started)]

    def make_runner(
        self,
        fold: Fold[S],
        pace_s: float = 0.0,
        snapshots: SnapshotSource | None = None,
        *,
        store: StateStore | None = None,
        partitions: Collection[int] | None = None,
    ) -> FoldRunner[S]:
        """A runner for ``fold`` on this process's log; start it, and stop it with ``add_cleanup``.

        ``store``: the process's own by default. ``partitions``: see ``FoldRunner``.
        """
        assert self.store is not None
        runner = FoldRunner(
            fold,
            self.log,
            store if store is not None else self.store,
            self.settings.log.namespace,
            clock=self.clock,
            dead_letters=self.appender,
            flush_interval_s=self.settings.state.flush_interval_s,
            pace_s=pace_s,
            snapshots=snapshots,
            partitions=partitions,
            tasks=self.tasks,
        )
        self._runners.append(runner)
        return runner

    def drop_runner(self, runner: FoldRunner[Any]) -> None:
        """Show a runner no more that was stopped before the process ends."""
        self._runners.remove(runner)

    def open_tracing(self) -> None:
        """Begin to trace if the options ask for it; ``start`` does so too. Raises ``MissingExtra``."""
        if self.host is None and self.settings.telemetry.enabled and self.tracing is None:
            from dynamo_es.telemetry.open import open_tracing

            settings = self.settings
            self.tracing = open_tracing(settings.telemetry, role=settings.role, instance_id=self.instance_id)
            if self.tracing is not None:
                self._closers.append(self.tracing.close)

    async def _open_system_server(self) -> None:
        if self.settings.system.port < 0:
            return
        from dynamo_es.runtime.system_server import SystemServer

        self.system = SystemServer(self)
        await self.system.start()
        self._closers.append(self.system.close)

    async def _open_server(self) -> None:
        assert self._zmq is not None
        self.server = build_request_server(self, self._zmq)
        await self.server.start()
        self._closers.append(self.server.close)

    def _open_connections(self) -> None:
        self._zmq = zmq.Context()
        self._zmq.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._closers.append(self._close_zmq)
        if self.curve_keys is not None:
            self._authenticator = start_authenticator(self._zmq, self.curve_keys)
            self._closers.append(self._close_authenticator)
        self.pool = build_connection_pool(self, self._zmq)
        self._closers.append(self._close_pool)
        self._listen(self._drop_connections)

    def _on_refused(self, topic: str, key: bytes | None) -> None:
        """An event that a publisher takes for published is lost (its topic is gone, for one): publishers start over."""
        if topic == KV_EVENTS.qualified(self.settings.log.namespace):
            for core in self._instances():
                core.start_over_soon()

    def _publishers(self) -> Mapping[int, Callable[[], None]]:
        return {core.instance_id: core.start_over_soon for core in self._instances()}

    def start_over_soon(self) -> None:
        """Let this runtime's publishers announce everything anew, within a second."""
        if self._start_over_timer is None:
            self._start_over_timer = self.loop.call_later(_START_OVER_S, self._start_over)

    def _on_replaced(self, error: LogReplaced) -> None:
        if self._takeover is not None:
            self._takeover.notice(error)

    def _start_over(self) -> None:
        self._start_over_timer = None
        for callback in self.renewals:
            callback()

    def _registry_state(self) -> RegistryState:
        return self.registry.state

    async def _unwind(self) -> None:
        if self._start_over_timer is not None:
            self._start_over_timer.cancel()
        while self._closers:
            await self._closers.pop()()

    async def _close_buffer(self) -> None:
        await self.buffer.close(timeout_s=5.0)

    async def _close_store(self) -> None:
        if self.store is not None:
            await asyncio.to_thread(self.store.close)

    async def _close_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()

    async def _close_pool(self) -> None:
        self.pool.close()

    async def _close_zmq(self) -> None:
        if self._zmq is not None:
            await asyncio.to_thread(self._zmq.term)
