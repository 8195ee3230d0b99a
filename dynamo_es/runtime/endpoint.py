"""Endpoints: what a process serves and what it calls (Dynamo's ``Endpoint``; spec: services a.2–a.4)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from dynamo_es.errors import DynamoException
from dynamo_es.log.errors import LogError
from dynamo_es.runtime.client import Client
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.request_server import Handler
from schemas.registry import REGISTRY, Instance, InstanceState, key_instance

if TYPE_CHECKING:
    from dynamo_es.publishers.scope import PublisherScope

logger = logging.getLogger(__name__)
_SCHEME = "dyn://"


def parse_endpoint_path(path: str) -> tuple[str, str, str]:
    """Namespace, component and endpoint of ``namespace.component.endpoint``; nothing else is checked.

    Raises:
        ValueError: Not three parts.
    """
    parts = path.removeprefix(_SCHEME).split(".")
    if len(parts) != 3:
        raise ValueError(
            f"Invalid endpoint path '{path}'. Expected format: 'namespace.component.endpoint' or "
            "'dyn://namespace.component.endpoint'"
        )
    return parts[0], parts[1], parts[2]


class Endpoint:
    """One endpoint path in one process. Made by ``DistributedRuntime.endpoint``."""

    def __init__(self, core: RuntimeCore, path: str) -> None:
        self.core = core
        self.namespace, self.component, self.name = parse_endpoint_path(path)
        self._extra: dict[str, str] = {}

    @property
    def path(self) -> str:
        """``namespace/component/endpoint``, the name on the request plane."""
        return f"{self.namespace}/{self.component}/{self.name}"

    @property
    def parts(self) -> tuple[str, str, str]:
        """Namespace, component and endpoint."""
        return self.namespace, self.component, self.name

    def connection_id(self) -> int:
        """Instance id of this process: all its endpoints share it, and publishers take it as worker id."""
        return self.core.instance_id

    def set_runtime_data(self, data: Mapping[str, str]) -> None:
        """Small facts that are registered with the instance; call before ``serve_endpoint``."""
        self._extra = dict(data)

    async def serve_endpoint(
        self,
        handler: Handler,
        graceful_shutdown: bool = True,
        metrics_labels: list[tuple[str, str]] | None = None,
        health_check_payload: Mapping[str, Any] | None = None,
    ) -> tuple[()]:
        """Serve until the runtime shuts down, then drain: no new streams, open ones run to their end.

        ``handler(request, context)`` (or ``handler(request)``) is an async generator function; each item it yields
        is one item of the caller's stream. ``graceful_shutdown`` False cuts open streams instead of draining.
        ``metrics_labels`` and ``health_check_payload`` are accepted for Dynamo's sake.

        Raises:
            DynamoException: The endpoint is served in this process already.
            LogError: It could not be registered.
        """
        core = self.core
        await core.start()
        if core.server.serves(self.path):
            raise DynamoException(
                f"Failed to create work handler metrics: endpoint {self.path} is already registered in this process"
            )
        served = core.server.add_endpoint(self.path, handler)
        drained = core.endpoint_opened()
        try:
            await self._register("serving")
            await core.shutdown_event.wait()
            if graceful_shutdown:
                await self._drain(served.idle)
        finally:
            core.server.remove_endpoint(self.path)
            try:
                await core.registration.unregister(self._key())
            except LogError as error:
                logger.warning("endpoint %s not taken back, its lease will end: %s", self.path, error)
            drained.set_result(None)
        return ()

    async def register_endpoint_instance(self) -> None:
        """Put the instance back after ``unregister_endpoint_instance``. Raises ``LogError``."""
        await self.core.start()
        await self._register("serving")

    async def unregister_endpoint_instance(self) -> None:
        """Take the instance out of discovery; open streams go on. Raises ``LogError``."""
        await self.core.start()
        await self.core.registration.unregister(self._key())

    async def client(self, router_mode: object = None) -> Client:
        """A client of this endpoint; there need be no instance yet. ``router_mode`` is accepted for Dynamo's sake."""
        await self.core.start()
        return Client(self.core, self.namespace, self.component, self.name)

    def publisher_scope(self) -> PublisherScope:
        """What a publisher on this endpoint needs."""
        from dynamo_es.runtime.publishing import EndpointScope

        return EndpointScope(self)

    async def _register(self, state: InstanceState) -> None:
        core = self.core
        await core.registration.register(
            self._key(),
            Instance(
                version=REGISTRY.version,
                namespace=self.namespace,
                component=self.component,
                endpoint=self.name,
                instance_id=core.instance_id,
                lease_id=0,
                transport="zmq",
                address=core.address,
                state=state,
                runtime_data=self._extra,
                public_key=core.public_key,
            ),
        )

    async def _drain(self, idle: asyncio.Event) -> None:
        core = self.core
        try:
            await self._register("draining")
        except LogError as error:
            logger.warning("draining not announced: %s", error)
        try:
            async with asyncio.timeout(core.settings.runtime.drain_timeout_s):
                # Requests that were routed here before the announcement arrived are still taken.
                await asyncio.sleep(min(0.2, core.settings.runtime.drain_timeout_s))
                await idle.wait()
        except TimeoutError:
            logger.warning("endpoint %s: streams still open after the drain time are cut", self.path)

    def _key(self) -> bytes:
        return key_instance(self.namespace, self.component, self.name, self.core.instance_id)


EngineRoute = Callable[[Any], Awaitable[Any]]
