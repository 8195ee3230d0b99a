"""Letting requests wait for a worker: the event-loop side of ``PolicyQueue``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_es.clock import Clock
from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.errors import AllWorkersOverloaded, NoEligibleWorker
from dynamo_es.router.policy_config import PolicyClass, PolicyProfile
from dynamo_es.router.policy_queue import PolicyQueue, Waiting, is_rank_busy
from dynamo_es.router.routing_request import FactsSource, RoutingRequest

T = TypeVar("T")
# While somebody waits the queue is looked at this often even if nobody says that load went down: other routers'
# requests end too, and workers come and go.
RECHECK_S = 0.1


@dataclass(eq=False, slots=True)
class _Ticket:
    routing: RoutingRequest
    place: Callable[[bool], Any]
    placed: asyncio.Future[Any]


class AdmissionQueue:
    """Places requests at once, or when a worker that may take them is free. Belongs to one event loop.

    A request is placed (chosen and booked) inside ``submit`` or ``update``, never later, so that the next request's
    turn is judged by the load that this one makes.
    """

    def __init__(
        self,
        profile: PolicyProfile,
        *,
        eligible: Callable[[RoutingRequest], Sequence[WorkerRank]],
        prefill_tokens: Callable[[WorkerRank], int],
        facts: FactsSource,
        workers: Callable[[], int],
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``eligible`` raises ``NoEligibleWorker`` or ``AllWorkersOverloaded``; ``workers`` counts the workers."""
        self.queue: PolicyQueue[_Ticket] = PolicyQueue(profile)
        self._eligible = eligible
        self._prefill_tokens = prefill_tokens
        self._facts = facts
        self._workers = workers
        self._clock = clock
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._updating = False
        self._closed: BaseException | None = None

    async def submit(
        self,
        routing: RoutingRequest,
        isl_tokens: int,
        cached_tokens: Callable[[Sequence[WorkerRank]], int],
        place: Callable[[bool], T],
        undo: Callable[[T], object] = lambda placed: None,
    ) -> T:
        """What ``place`` returned, once it was the request's turn.

        ``cached_tokens``: of the prompt, at the one of these ranks that has most of it. ``place`` is told whether the
        request had to wait. ``undo`` is called if the caller was cancelled after its request was placed, as nobody
        would know of it.

        Raises:
            RouterQueueLimitExceeded: It would have to wait and may not.
            Exception: As ``place``, or as the queue was closed with.
        """
        if self._closed is not None:
            raise self._closed
        ranks = self._eligible(routing)
        cached = min(cached_tokens(ranks), isl_tokens)
        policy = self.queue.classify(routing.policy_class, isl_tokens - cached)
        if not self.queue.has_backlog(policy) and self._anyone_free(policy, ranks):
            return place(False)
        ticket = _Ticket(routing, place, self._loop.create_future())
        pin = (routing.worker_id, routing.dp_rank)
        waiting = Waiting(ticket, policy, isl_tokens, cached, None if pin == (None, None) else pin)
        self.queue.enqueue(
            waiting,
            now=self._clock.monotonic(),
            priority_jump=routing.priority_jump,
            strict_priority=routing.strict_priority,
            workers=self._workers(),
        )
        self._arm()
        placed: asyncio.Future[T] = ticket.placed
        try:
            return await placed
        except asyncio.CancelledError:
            self.queue.give_up(waiting)
            if placed.done() and not placed.cancelled() and placed.exception() is None:
                undo(placed.result())
            raise

    def update(self) -> None:
        """Load went down somewhere: place whoever can be placed now."""
        if self._updating or not len(self.queue):
            return
        self._updating = True
        try:
            while (waiting := self.queue.pop_next(self._can_place)) is not None:
                self._place(waiting.item)
        finally:
            self._updating = False

    def close(self, error: BaseException) -> None:
        """Fail everybody who waits, and whoever comes later, with ``error``. Safe to call twice."""
        self._closed = error
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for waiting in self.queue.drain():
            if not waiting.item.placed.done():
                waiting.item.placed.set_exception(error)

    def _place(self, ticket: _Ticket) -> None:
        if ticket.placed.done():
            return
        try:
            ticket.placed.set_result(ticket.place(True))
        except Exception as error:  # noqa: BLE001 - it is the waiting caller's, and raised there
            ticket.placed.set_exception(error)

    def _can_place(self, waiting: Waiting[_Ticket]) -> bool:
        try:
            ranks = self._eligible(waiting.item.routing)
        except (NoEligibleWorker, InvalidArgument):
            # Placing it tells its caller so; to wait for a worker that may never come is worse.
            return True
        except AllWorkersOverloaded:
            return False
        return self._anyone_free(waiting.policy, ranks)

    def _anyone_free(self, policy: PolicyClass, ranks: Sequence[WorkerRank]) -> bool:
        for rank in ranks:
            batched = self._facts(rank.worker_id).max_num_batched_tokens
            if not is_rank_busy(policy, self._prefill_tokens(rank), batched):
                return True
        return False

    def _arm(self) -> None:
        if self._timer is None and len(self.queue):
            self._timer = self._loop.call_later(RECHECK_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.update()
        self._arm()
