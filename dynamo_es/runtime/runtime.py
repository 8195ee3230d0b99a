"""``DistributedRuntime``: a process's door to the fleet (Dynamo's class; spec: services a.1)."""

from __future__ import annotations

import asyncio
import os
import random
import warnings
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_es.clock import Clock, SystemClock
from dynamo_es.config.options import load
from dynamo_es.config.telemetry_options import TelemetryConfig
from dynamo_es.config.tree import LogConfig, RuntimeConfig, StateConfig, SystemConfig
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import EventLog
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from schemas.registry import ProcessRole

_DISCOVERY = ("kubernetes", "etcd", "file", "mem", "log")
_REQUEST_PLANES = ("nats", "tcp")
_EVENT_PLANES = ("nats", "zmq")


def settings_from_env(env: Mapping[str, str], role: ProcessRole = "worker") -> RuntimeSettings:
    """Settings of a process that has no command line of its own. Raises ``ConfigError``."""
    return RuntimeSettings(
        load(LogConfig, None, env),
        load(StateConfig, None, env),
        load(RuntimeConfig, None, env),
        role,
        load(SystemConfig, None, env),
        load(TelemetryConfig, None, env),
    )


class DistributedRuntime:
    """Dynamo's runtime on the event log.

    The backend names of Dynamo are accepted and checked, and all mean the same here: discovery and events go through
    the log (``DYN_ES_LOG``), requests over ZeroMQ. Constructing it does no I/O; the first endpoint that is served
    or called opens everything.
    """

    def __init__(
        self,
        event_loop: asyncio.AbstractEventLoop,
        discovery_backend: str,
        request_plane: str,
        enable_nats: bool | None = None,
        *,
        event_plane: str | None = None,
        settings: RuntimeSettings | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        log: EventLog | None = None,
    ) -> None:
        """``settings``, ``clock``, ``rng`` and ``log`` are ours: defaults are environment, system, system, and opened.

        Raises:
            DynamoException, ValueError: A backend name that Dynamo does not know.
            ConfigError: A setting is wrong.
        """
        if discovery_backend not in _DISCOVERY:
            raise DynamoException(f"Unknown key-value store type '{discovery_backend}'")
        if request_plane not in _REQUEST_PLANES:
            raise DynamoException(f"Invalid request plane mode: '{request_plane}'. Valid options are: 'nats', 'tcp'")
        if event_plane is not None and event_plane not in _EVENT_PLANES:
            raise ValueError(f"Invalid event_plane value '{event_plane}'. Valid values: 'nats', 'zmq'")
        if enable_nats is not None:
            warnings.warn("enable_nats has no effect", DeprecationWarning, stacklevel=2)
        self._loop = event_loop
        self.core = RuntimeCore(
            settings if settings is not None else settings_from_env(os.environ),
            loop=event_loop,
            clock=clock if clock is not None else SystemClock(),
            rng=rng if rng is not None else random.SystemRandom(),
            log=log,
        )

    def endpoint(self, path: str) -> Endpoint:
        """The endpoint ``namespace.component.endpoint``, optionally behind ``dyn://``. Raises ValueError."""
        return Endpoint(self.core, path)

    def event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it was made for."""
        return self._loop

    def shutdown(self) -> None:
        """Ask for the end: endpoints drain and return. ``close`` waits for it."""
        self._loop.call_soon_threadsafe(self.core.shutdown_event.set)

    async def close(self) -> None:
        """Shut down and wait until everything is closed. Safe to call twice."""
        await self.core.close()

    def set_health_status(self, healthy: bool) -> None:
        """Tell whether this process is well; shown where health is shown."""
        self.core.healthy = healthy

    def register_engine_route(self, name: str, callback: Callable[[Any], Awaitable[Any]]) -> None:
        """Answer ``POST /engine/<name>`` of the system status server (``DYN_SYSTEM_PORT``): JSON in, JSON out."""
        self.core.engine_routes[name] = callback

    def system_status_server_url(self) -> str | None:
        """Where the system status server listens; None: it is off, or nothing was served or called yet."""
        return self.core.system.url if self.core.system is not None else None
