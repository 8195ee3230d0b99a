"""What all inference requests share: limits, drain state, running requests. No I/O here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynamo_es.clock import Clock
from dynamo_es.config.tree import FrontendConfig
from dynamo_es.frontend.contracts import ModelDirectory
from dynamo_es.frontend.metrics import FrontendMetrics
from dynamo_es.frontend.siblings import Siblings

if TYPE_CHECKING:
    from dynamo_es.frontend.http_exchange import HttpExchange
    from dynamo_es.frontend.request_trace import RequestTracer

OFFLOAD_BYTES = 16 * 1024
"""Bodies from this size on are decoded in a thread, too, off the event loop (about 1 ms of work)."""
TOKENIZE_APART_BYTES = 2 * 1024
"""The same for rendering and tokenizing: some 500 tokens, which take 1.5 ms where the cache of tokenization is cold."""
MAX_MEDIA_AT_ONCE = 8
"""Media that are fetched and decoded at a time, in a process; further ones wait."""


@dataclass(slots=True)
class FrontendService:
    """The parts of the inference routes and the state of the process. Belongs to one event loop.

    Attributes:
        config: Options.
        directory: Models.
        metrics: Counters.
        clock: Time.
        new_id: Makes request ids (UUIDs).
        executor: Threads for large prompts; refuses what it has no room for.
        draining: No new inference requests are taken.
        running: Requests in progress.
        idle: Set when the service drains and nothing runs.
        siblings: The other processes on the same port; None: there are none.
        tracing: Begins traces of requests; None: there are none.
        media_slots: Bounds the media that are fetched and decoded at a time.
    """

    config: FrontendConfig
    directory: ModelDirectory
    metrics: FrontendMetrics
    clock: Clock
    new_id: Callable[[], str]
    executor: Executor
    draining: bool = False
    running: set[HttpExchange] = field(default_factory=set)

    idle: asyncio.Event = field(default_factory=asyncio.Event)
    siblings: Siblings | None = None
    tracing: RequestTracer | None = None
    media_slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_MEDIA_AT_ONCE))

    def enter(self, exchange: HttpExchange) -> None:
        """A request began."""
        self.running.add(exchange)

    def leave(self, exchange: HttpExchange) -> None:
        """A request is over; ``idle`` is set when a draining service has none left."""
        self.running.discard(exchange)
        if self.draining and not self.running:
            self.idle.set()

    def drain(self) -> None:
        """Take no new requests from now on."""
        self.draining = True
        if not self.running:
            self.idle.set()

    def interrupt_all(self) -> int:
        """End every running request with an error to its client; returns how many there were."""
        running = list(self.running)
        for exchange in running:
            exchange.interrupt("drain")
        return len(running)
