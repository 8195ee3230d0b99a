"""What a publisher needs from the endpoint that it belongs to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.publishers.sink import EventSink


class PublisherScope(Protocol):
    """The surroundings of the publishers of one endpoint, all of one event loop.

    ``Endpoint.publisher_scope()`` returns it; a publisher keeps it for its life.
    """

    @property
    def sink(self) -> EventSink:
        """Where events go."""

    @property
    def worker_id(self) -> int:
        """Instance id (u64) of this process: the worker id of publishers that are given none."""

    @property
    def clock(self) -> Clock:
        """Time."""

    @property
    def rng(self) -> random.Random:
        """Source of incarnation numbers; must differ between two starts of a process."""

    @property
    def tasks(self) -> BackgroundTasks:
        """Background tasks of the process: one that dies makes it not ready."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """Loop on which the sink is called."""

    def model_name(self) -> str | None:
        """Served model name; None until ``register_model``. Asked again and again until it is there; cheap."""

    def dp_size(self) -> int:
        """Data-parallel ranks of this worker; 1 while nobody said otherwise. Cheap."""

    def add_renewal(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` after the process lost its registration and got a new one.

        Readers have retired everything that it published: a publisher begins a new incarnation and announces what
        its engine holds.
        """

    def add_counts(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Show these counts among the process's metrics, added to those of its other publishers. Cheap to call."""

    def add_cleanup(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Have ``callback`` awaited at shutdown, while the sink still takes events. It must be idempotent."""


class PublisherEndpoint(Protocol):
    """An endpoint, as far as publishers know it."""

    def publisher_scope(self) -> PublisherScope:
        """The surroundings of this endpoint's publishers."""
