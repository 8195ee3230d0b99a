"""Calling an endpoint (Dynamo's ``Client``; spec: services a.4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from dynamo_es.errors import CannotConnect, Disconnected, DynamoException, EngineShutdown
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.discovery import (
    Quarantine,
    RoundRobin,
    choose_device_aware,
    choose_random,
    serving_instances,
)
from dynamo_es.runtime.errors import NoInstances, StreamSilent
from dynamo_es.runtime.faults import backend_error
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.request_client import ClientStream
from dynamo_es.runtime.wire import PayloadCodec
from schemas.registry import Instance

CUDA_TO_CPU_RATIO = 8.0


class Annotated:
    """An item with its envelope, as Dynamo's annotated streams give it."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def data(self) -> Any:
        """The payload."""
        return self._data

    def event(self) -> str | None:
        """Event name; None for plain items."""
        return None

    def comments(self) -> list[str] | None:
        """Comments; None for plain items."""
        return None

    def id(self) -> str | None:
        """Item id; None for plain items."""
        return None

    def is_error(self) -> bool:
        """Whether the item stands for an error; errors are raised instead."""
        return False


class Transport(msgspec.Struct, frozen=True):
    """Where an instance listens."""

    kind: str
    address: str


class InstanceView:
    """An instance as Dynamo shows it; a copy, not live."""

    def __init__(self, instance: Instance) -> None:
        self.instance_id = instance.instance_id
        self.namespace = instance.namespace
        self.component = instance.component
        self.endpoint = instance.endpoint
        self.transport = Transport(
            instance.transport,
            f"{instance.address.removeprefix('tcp://')}/{instance.instance_id:x}/{instance.endpoint}",
        )
        self.device_type = instance.device_type
        self.runtime_data = dict(instance.runtime_data)

    def __str__(self) -> str:
        return f"{self.namespace}/{self.component}/{self.endpoint}/{self.instance_id}"

    def __repr__(self) -> str:
        return f"Instance({self})"


class Client:
    """Sends requests to the instances of one endpoint. Made by ``Endpoint.client``; belongs to its event loop.

    Each call encodes its request at once (and raises at once if it cannot), and returns an awaitable of an async
    iterator over the items. Failures of the handler are raised where they occurred in the stream.

    A call to an instance that died ends at once. One to an instance that hangs without dying (it was stopped, its
    machine was cut off) waits until the instance was silent for ``lease_ttl_s`` and then raises Dynamo's
    ``BackendDisconnected`` text: before that, silence may as well be work. Whoever cannot wait so long sets
    ``--backend-stream-timeout``, or a timeout of their own around the call. There is no retry here; a failed instance
    is left out for ``inhibited_s``.
    """

    def __init__(self, core: RuntimeCore, namespace: str, component: str, endpoint: str) -> None:
        self._core = core
        self._where = (namespace, component, endpoint)
        self._path = "/".join(self._where)
        self._payloads = PayloadCodec()
        self._round_robin = RoundRobin()
        self._quarantine = Quarantine(core.settings.runtime.inhibited_s, {})
        self._in_flight: dict[int, int] = {}
        self._revision = -1
        self._known: list[Instance] = []

    def instances(self) -> list[InstanceView]:
        """Instances that take requests."""
        return [InstanceView(instance) for instance in self._serving()]

    def instance_ids(self) -> list[int]:
        """Their ids."""
        return [instance.instance_id for instance in self._serving()]

    async def wait_for_instances(self) -> list[int]:
        """Wait until there is at least one; returns their ids."""
        await self._wait_until(lambda: bool(self._serving()))
        return self.instance_ids()

    async def wait_for_instance_by_runtime_data(self, key: str, value: str, timeout_s: float) -> int:
        """Wait for exactly one instance that registered ``key`` = ``value``; returns its id.

        Raises:
            TimeoutError: None, or more than one, within ``timeout_s`` seconds.
        """

        def matching() -> list[int]:
            return [item.instance_id for item in self._serving() if item.runtime_data.get(key) == value]

        try:
            async with asyncio.timeout(timeout_s):
                await self._wait_until(lambda: len(matching()) == 1)
        except TimeoutError as error:
            found = matching()
            raise TimeoutError(
                f'Timed out waiting for one endpoint instance with runtime_data["{key}"] == "{value}"; '
                f"last_match_count={len(found)}, matching_ids={found}"
            ) from error
        return matching()[0]

    def generate(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> Awaitable[AsyncIterator[Any]]:
        """Send to the next instance in turn."""
        return self.round_robin(request, annotated, context)

    def round_robin(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> Awaitable[AsyncIterator[Any]]:
        """Send to the next instance in turn."""
        return self._call(self._payloads.encode(request), self._round_robin.choose, annotated, context)

    def random(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> Awaitable[AsyncIterator[Any]]:
        """Send to any instance."""
        rng = self._core.rng
        return self._call(self._payloads.encode(request), lambda found: choose_random(found, rng), annotated, context)

    def device_aware_weighted(
        self, request: Any, annotated: bool | None = True, context: Context | None = None
    ) -> Awaitable[AsyncIterator[Any]]:
        """Send to the least loaded instance of the less loaded kind of device."""

        def choose(found: Sequence[Instance]) -> Instance:
            return choose_device_aware(
                found,
                lambda instance: instance.device_type,
                lambda instance: self._in_flight.get(instance.instance_id, 0),
                CUDA_TO_CPU_RATIO,
                self._core.rng,
            )

        return self._call(self._payloads.encode(request), choose, annotated, context)

    def direct(
        self, request: Any, instance_id: int, annotated: bool | None = True, context: Context | None = None
    ) -> Awaitable[AsyncIterator[Any]]:
        """Send to this instance."""
        payload = self._payloads.encode(request)
        return self._start_direct(payload, instance_id, annotated, context)

    def routable(self) -> list[Instance]:
        """Serving instances whose connection did not fail just now; for routers."""
        return self._quarantine.without_inhibited(self._serving(), self._core.clock.monotonic())

    def in_flight(self) -> Mapping[int, int]:
        """Open streams by instance, of this client."""
        return self._in_flight

    def stream(
        self, request: Any, instance_id: int, context: Context, lane: Lane | None = None
    ) -> AsyncGenerator[list[Any], None]:
        """Items of a request to this instance, in the batches in which they arrived; for routers.

        The iteration raises typed errors (``dynamo_es.errors``) in place of Dynamo's ``ValueError`` texts.

        Raises:
            CannotConnect: There is no such instance. From the iteration, as Disconnected and EngineShutdown: the
                instance is quarantined for a while.
        """
        return self._batches(self._find(instance_id), self._payloads.encode(request), context, lane)

    async def _start_direct(
        self, payload: msgspec.Raw, instance_id: int, annotated: bool | None, context: Context | None
    ) -> AsyncIterator[Any]:
        try:
            instance = self._find(instance_id)
        except CannotConnect as error:
            raise DynamoException(f"CannotConnect: {error}") from error
        return await self._start(instance, payload, annotated, context)

    async def _call(
        self,
        payload: msgspec.Raw,
        choose: Any,
        annotated: bool | None,
        context: Context | None,
    ) -> AsyncIterator[Any]:
        found = self.routable()
        if not found:
            raise NoInstances(self._path)
        return await self._start(choose(found), payload, annotated, context)

    async def _start(
        self, instance: Instance, payload: msgspec.Raw, annotated: bool | None, context: Context | None
    ) -> AsyncIterator[Any]:
        batches = self._batches(instance, payload, context if context is not None else Context())
        return _items(batches, bool(annotated))

    async def _batches(
        self, instance: Instance, payload: msgspec.Raw, context: Context, lane: Lane | None = None
    ) -> AsyncGenerator[list[Any], None]:
        number = instance.instance_id
        self._in_flight[number] = self._in_flight.get(number, 0) + 1
        try:
            stream = await self._open(instance, payload, context, lane)
            async with aclosing(stream.batches()) as batches:
                async for batch in batches:
                    yield batch
        except (CannotConnect, Disconnected, EngineShutdown, StreamSilent):
            self._quarantine.inhibit(number, self._core.clock.monotonic())
            raise
        finally:
            self._in_flight[number] -= 1
            if not self._in_flight[number]:
                del self._in_flight[number]

    async def _open(
        self, instance: Instance, payload: msgspec.Raw, context: Context, lane: Lane | None
    ) -> ClientStream:
        connection = await self._core.pool.connect(instance.address, instance.instance_id)
        return connection.open(self._path, payload, context, lane)

    def _find(self, instance_id: int) -> Instance:
        for instance in self._serving():
            if instance.instance_id == instance_id:
                return instance
        raise CannotConnect(f"instance_id={instance_id} not found for endpoint {self._path}")

    def _serving(self) -> list[Instance]:
        state = self._core.registry.state
        if state.revision != self._revision:
            self._known = serving_instances(state, *self._where)
            self._revision = state.revision
        return self._known

    async def _wait_until(self, condition: Any) -> None:
        while not condition():
            await self._core.registry_changed()


async def _items(batches: AsyncGenerator[list[Any], None], annotated: bool) -> AsyncIterator[Any]:
    """Single items. A failure of the handler is raised in Dynamo's form, at its place in the stream."""
    try:
        async with aclosing(batches):
            async for batch in batches:
                for item in batch:
                    if annotated:
                        yield Annotated(item)
                    elif item is not None:
                        yield item
    except CannotConnect as error:
        raise DynamoException(f"CannotConnect: {error}") from error
    except Exception as error:
        raise backend_error(error) from error
