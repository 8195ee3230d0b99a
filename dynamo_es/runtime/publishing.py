"""What the runtime gives to the publishers of an endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.publishers.sink import EventSink
from schemas.registry import ModelCard
from schemas.topic import TopicSpec

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore
    from dynamo_es.runtime.endpoint import Endpoint


class RuntimeSink:
    """The process's appender, which may not be open yet when a publisher is constructed: until then events are lost,
    and the publisher announces its state when the sink takes them."""

    def __init__(self, core: RuntimeCore) -> None:
        self._core = core

    def offer(self, topic: TopicSpec, key: bytes, value: msgspec.Struct, *, trace: str = "") -> bool:
        """As ``EventSink.offer``."""
        return self._core.started and self._core.appender.offer(topic, key, value, trace=trace)


class EndpointScope:
    """A ``PublisherScope``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._core = endpoint.core
        self._sink = RuntimeSink(endpoint.core)

    @property
    def sink(self) -> EventSink:
        return self._sink

    @property
    def worker_id(self) -> int:
        return self._core.instance_id

    @property
    def clock(self) -> Clock:
        return self._core.clock

    @property
    def rng(self) -> random.Random:
        return self._core.rng

    @property
    def tasks(self) -> BackgroundTasks:
        return self._core.tasks

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._core.loop

    def model_name(self) -> str | None:
        card = self._card()
        return card.display_name if card is not None else None

    def dp_size(self) -> int:
        card = self._card()
        return int(card.runtime_config.get("data_parallel_size") or 1) if card is not None else 1

    def add_cleanup(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._core.add_cleanup(callback)

    def add_counts(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self._core.publisher_counts.append(counts)

    def add_renewal(self, callback: Callable[[], None]) -> None:
        self._core.renewals.append(callback)

    def _card(self) -> ModelCard | None:
        if not self._core.started:
            return None
        endpoint = self._endpoint
        for row in self._core.registration.rows():
            if (
                isinstance(row, ModelCard)
                and not row.suffix
                and (row.namespace, row.component, row.endpoint)
                == (endpoint.namespace, endpoint.component, endpoint.name)
            ):
                return row
        return None
