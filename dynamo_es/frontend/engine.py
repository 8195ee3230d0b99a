"""From a preprocessed request to a worker, and on to another one if that fails: the ``TokenEngine`` over a router."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import chain
from typing import Any

from dynamo_es.errors import CannotConnect, DynamoException, InvalidArgument
from dynamo_es.frontend.errors import QUEUE_FULL, WORKER_FULL, WORKERS_BUSY, overloaded
from dynamo_es.frontend.migration import Migration, MigrationObserver, MigrationSettings
from dynamo_es.http_error import HttpError
from dynamo_es.router.course import MAX_ATTEMPTS
from dynamo_es.router.disagg_router import DisaggRouter
from dynamo_es.router.errors import (
    AllWorkersOverloaded,
    BookingConflict,
    NoEligibleWorker,
    PrefillFailed,
    RouterQueueLimitExceeded,
)
from dynamo_es.router.kv_router import routing_request
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import NoInstances, Overloaded
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.placement import Placement

logger = logging.getLogger(__name__)
_NO_MIGRATION = MigrationSettings()
_NOBODY_ELSE = (NoEligibleWorker, NoInstances, Overloaded)


def _routing(request: dict[str, Any], request_id: str, **course: Any) -> RoutingRequest:
    """As ``routing_request``; several lists of ids count as one, and text, which nobody counted, as none."""
    token_ids = request.get("token_ids")
    if token_ids is None:
        request = {**request, "token_ids": []}
    elif isinstance(token_ids, list) and token_ids and isinstance(token_ids[0], list):
        request = {**request, "token_ids": list(chain.from_iterable(token_ids))}
    return routing_request(request, request_id, **course)


class RoutedTokenEngine:
    """A ``TokenEngine``: routes each request, passes on what its worker says, and carries it on if that one fails.

    Attributes:
        router: To the workers that answer.
        disagg: Over these and the workers that compute prompts for them; None: each computes its own.
        migration: When requests are carried on.
    """

    def __init__(
        self,
        router: RequestRouter,
        disagg: DisaggRouter | None = None,
        migration: MigrationSettings = _NO_MIGRATION,
        observer: MigrationObserver | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """``migration``: when requests are carried on; ``observer`` counts that, by ``now``, a monotonic clock."""
        self.router = router
        self.disagg = disagg
        self.migration = migration
        self._observer = observer
        self._now = now

    async def generate(
        self, request: dict[str, Any], context: Context, lane: Lane | None = None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        migration = Migration(request, self.migration, self._observer, self._now)
        if lane is not None and self.migration.limit:
            lane.watch(migration.take)
        try:
            while True:
                try:
                    async with aclosing(self._send(migration, context, lane)) as batches:
                        async for batch in batches:
                            yield migration.take(batch)
                    return
                except DynamoException as error:
                    if migration.is_over:
                        break
                    # What a prefill worker did not hand over is told by who asked for it, after its booking's end.
                    missed = isinstance(error, PrefillFailed) and migration.may_resume(error)
                    if not (migration.is_resuming or missed) or context.is_stopped():
                        if migration.failure is not None and isinstance(error, _NOBODY_ELSE):
                            raise migration.failure from error
                        raise
                    logger.warning(
                        "request %s lost its worker (%s); it is carried on", context.id(), type(error).__name__
                    )
        except DynamoException as error:
            migration.end(error)
            told = self._told(error, request, context)
            if told is error:
                raise
            raise told from error
        if rest := migration.rest():
            yield rest

    def generate_by(
        self, request: dict[str, Any], context: Context, lane: Lane
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """As ``LaneEngine``."""
        return self.generate(request, context, lane)

    async def locate(self, request: dict[str, Any], context: Context) -> Placement | None:
        """As ``LocatingEngine``."""
        placement, routing = Placement(), _routing(request, context.id())
        route = self.disagg if self.disagg is not None and self.disagg.is_active() else self.router
        try:
            return placement if await route.locate(routing, placement) else None
        except DynamoException as error:
            told = self._told(error, request, context)
            if told is error:
                raise
            raise told from error

    def _send(
        self, migration: Migration, context: Context, lane: Lane | None
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """To one worker; or, if it cannot be reached, to others."""
        request = migration.begin()
        route = self.disagg if self.disagg is not None and self.disagg.is_active() else self.router
        routing = _routing(
            request,
            context.id(),
            first_attempt=migration.last_attempt + 1,
            excluded=migration.excluded,
            resumption=migration,
            trace="" if context.trace is None else context.trace.traceparent,
        )
        if route is self.disagg:
            migration.last_attempt += 2 * MAX_ATTEMPTS
        return route.stream(routing, request, context, lane=lane)

    def _told(self, error: DynamoException, request: dict[str, Any], context: Context) -> Exception:
        """A failure as ``TokenEngine.generate`` raises it."""
        if isinstance(error, (NoEligibleWorker, NoInstances)):
            pinned = _routing(request, context.id()).worker_id
            if pinned is not None and not self.router.has_worker(pinned):
                return InvalidArgument("Invalid request")
            return CannotConnect(str(error))
        if isinstance(error, RouterQueueLimitExceeded):
            return overloaded(QUEUE_FULL)
        if isinstance(error, Overloaded):
            return overloaded(WORKERS_BUSY if isinstance(error, AllWorkersOverloaded) else WORKER_FULL)
        if isinstance(error, BookingConflict):
            return HttpError(409, f"request id {context.id()} is in use")
        return error
