"""The relay as a process of its own, and the view over data centres as one."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.engines.serving import run_until_stopped
from dynamo_es.http_listen import StatusListener
from dynamo_es.log.base import EventLog
from dynamo_es.runtime.core import RuntimeCore, RuntimeSettings
from dynamo_es.runtime.endpoint import Endpoint
from dynamo_es.services.dc_relay.global_view import GlobalKvView
from dynamo_es.services.dc_relay.http import build_relay_app
from dynamo_es.services.dc_relay.metrics import RelayCollector
from dynamo_es.services.dc_relay.relay import DcRelay
from dynamo_es.services.dc_relay.settings import RelaySettings


@dataclass(frozen=True, slots=True)
class RelayProcessSettings:
    """Everything that a relay process is configured by. ``namespace``: of its own endpoint."""

    process: RuntimeSettings
    relay: RelaySettings
    namespace: str = "dynamo"


def health_endpoint(namespace: str, dc_id: str) -> str:
    """Path of the endpoint that a relay process answers ``health`` on, as in Dynamo."""
    return f"{namespace}.kv_dc_relay_{hashlib.sha256(dc_id.encode()).hexdigest()[:32]}.health"


async def run_relay(
    settings: RelayProcessSettings,
    stop: asyncio.Event,
    *,
    clock: Clock,
    rng: random.Random,
    log: EventLog | None = None,
    on_ready: Callable[[str], None] = lambda path: None,
) -> None:
    """Relay until ``stop`` is set. ``on_ready`` is told the path of the health endpoint once it is there.

    Raises:
        DynamoException: It cannot start; says why and what to do. Nothing is left open.
    """
    settings.relay.check()
    core = RuntimeCore(settings.process, loop=asyncio.get_running_loop(), clock=clock, rng=rng, log=log)
    core.healthy = False
    await run_until_stopped(stop, [core], [_relay(core, settings, on_ready)])


async def _relay(core: RuntimeCore, settings: RelayProcessSettings, on_ready: Callable[[str], None]) -> None:
    await core.start()
    relay = DcRelay(core, settings.relay)
    await relay.start()
    core.health_parts["relay"] = relay.health
    if core.system is not None:
        core.system.registry.register(RelayCollector(relay))

    async def health(request: Any) -> AsyncIterator[dict[str, Any]]:
        yield relay.health()

    path = health_endpoint(settings.namespace, settings.relay.dc_id)
    core.healthy = True
    on_ready(path)
    await Endpoint(core, path).serve_endpoint(health)


async def serve_view(
    view: GlobalKvView, host: str, port: int, stop: asyncio.Event, timeout_s: float, on_ready: Callable[[str], None]
) -> None:
    """Follow the relays and answer over HTTP until ``stop`` is set. ``on_ready`` is told the URL.

    Raises:
        AddressUnavailable: The port is taken.
    """
    listener = StatusListener(build_relay_app(view), host, port, options="--relay-host and --relay-port")
    try:
        await view.start(timeout_s)
        await listener.start()
        on_ready(f"http://{f'[{host}]' if ':' in host else host}:{listener.port}")
        await stop.wait()
    finally:
        await listener.close()
        await view.close()
