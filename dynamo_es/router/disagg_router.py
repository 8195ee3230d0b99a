"""Routing a request over two workers: one that computes its prompt and one that generates (``disaggregation``)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from dynamo_es.errors import Cancelled, Disconnected, DynamoException, InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.choosers import Choice
from dynamo_es.router.conditional_disagg import ConditionalDisagg
from dynamo_es.router.course import MAX_ATTEMPTS
from dynamo_es.router.disaggregation import Bootstrap, PrefillAnswer, new_bootstrap, prefill_payload
from dynamo_es.router.errors import NoEligibleWorker, PrefillFailed
from dynamo_es.router.request_router import RequestRouter
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.placement import Placement

_NO_CHOICE = (NoEligibleWorker, Overloaded, InvalidArgument)


@dataclass(slots=True)
class DisaggCounters:
    """For metrics. Requests: with a hop before the decode worker (by address, by result), and without one (kept by the
    policy, for want of a prefill worker)."""

    bootstrap: int = 0
    result: int = 0
    kept_local: int = 0
    no_prefill: int = 0


class DisaggRouter:
    """Routes over a prefill router and a decode router. Belongs to one event loop.

    Both hops are bookings of one request id: the prefill hop has the first attempt numbers, the decode hop those after.
    A failure of the prefill hop is the request's: it is not tried again without one. Who resumes the request starts it
    over, both hops.
    """

    def __init__(
        self,
        decode: RequestRouter,
        prefill: Callable[[], Awaitable[RequestRouter | None]],
        *,
        block_size: int,
        rng: random.Random,
        policy: ConditionalDisagg | None = None,
        needs_prefill: Callable[[], bool] = lambda: True,
        is_active: Callable[[], bool] = lambda: True,
    ) -> None:
        """``prefill`` gives the router of the prefill workers; None: there is none. ``policy`` None: every prompt goes
        to them. ``needs_prefill``: whether the decode workers said that they cannot do without. ``is_active``: False
        while the workers compute all prompts themselves; then there is no reason to ask this router.
        """
        self.decode = decode
        self.is_active = is_active
        self.counters = DisaggCounters()
        self._prefill = prefill
        self._block_size = block_size
        self._rng = rng
        self._policy = policy
        self._needs_prefill = needs_prefill

    async def stream(
        self, routing: RoutingRequest, payload: dict[str, Any], context: Context, lane: Lane | None = None
    ) -> AsyncGenerator[list[Any], None]:
        """Items of the decode worker, in the batches in which they come; as ``RequestRouter.stream``.

        Raises:
            NoEligibleWorker: There is no prefill worker, and the decode workers need one.
            PrefillFailed: The prefill worker handed nothing over.
            DynamoException: As either hop's ``RequestRouter.stream``.
        """
        prefill = await self._prefill()
        if prefill is None or not prefill.has_workers():
            if self._needs_prefill():
                raise NoEligibleWorker("no prefill worker is available")
            self.counters.no_prefill += 1
            items = self.decode.stream(routing, payload, context, lane=lane)
        elif (rank := await self._local_rank(routing, prefill)) is not None:
            self.counters.kept_local += 1
            items = self.decode.stream(replace(routing, preferred=rank), payload, context, lane=lane)
        else:
            items = self._two_hops(prefill, routing, payload, context, lane)
        async with aclosing(items) as batches:
            async for batch in batches:
                yield batch

    async def locate(self, routing: RoutingRequest, placement: Placement) -> bool:
        """As ``RequestRouter.locate``, for both hops."""
        if not await self.decode.locate(routing, placement):
            return False
        prefill = await self._prefill()
        if prefill is not None and prefill.has_workers() and await self._local_rank(routing, prefill) is None:
            await prefill.locate(_prefill_hop(routing), placement)
        return True

    async def _local_rank(self, routing: RoutingRequest, prefill: RequestRouter) -> WorkerRank | None:
        """The decode rank that is to compute the prompt itself; None: a prefill worker does."""
        policy = self._policy
        if policy is None or routing.prefill_worker_id is not None or self.decode.chooser.mode != "kv":
            return None
        try:
            choice = await self.decode.consider(routing)
        except _NO_CHOICE:
            return None
        other = None
        if policy.asks_prefill_load:
            try:
                other = prefill.state_of((await prefill.consider(_prefill_hop(routing))).rank)
            except _NO_CHOICE:
                other = None
        device = next((item.candidate.device for item in choice.costs if item.candidate.rank == choice.rank), 0)
        isl_tokens, cached = len(routing.token_ids), device * self._block_size
        return choice.rank if policy.keeps_local(isl_tokens, cached, self.decode.state_of(choice.rank), other) else None

    async def _two_hops(
        self,
        prefill: RequestRouter,
        routing: RoutingRequest,
        payload: dict[str, Any],
        context: Context,
        lane: Lane | None,
    ) -> AsyncGenerator[list[Any], None]:
        hop = _PrefillHop(prefill, _prefill_hop(routing), prefill_payload(payload), context, self._rng)
        served = False
        try:
            bootstrap = await hop.chosen()
            if bootstrap is None:
                self.counters.result += 1
                handed_over: Mapping[str, Any] = {"prefill_result": await hop.result()}
                if context.is_stopped():
                    return
            else:
                self.counters.bootstrap += 1
                handed_over = {"bootstrap_info": bootstrap.value()}
            items = self.decode.stream(
                _decode_hop(routing), _decode_payload(payload, hop.rank, handed_over), hop.decode, lane=lane
            )
            async with aclosing(items) as batches:
                async for batch in batches:
                    yield batch
            hop.raise_failure()
            served = True
        except DynamoException:
            hop.raise_failure()
            raise
        finally:
            await hop.close(served=served)


class _PrefillHop:
    """A prompt on its way through a prefill worker; runs from construction on. ``close`` last.

    ``decode``: the context for the decode hop; it is stopped when the prompt fails. ``rank``: who was sent the prompt
    last; None before ``chosen``.
    """

    def __init__(
        self,
        router: RequestRouter,
        routing: RoutingRequest,
        payload: dict[str, Any],
        context: Context,
        rng: random.Random,
    ) -> None:
        self._router = router
        self._parent = context
        self._rng = rng
        self._resumption = routing.resumption
        self._context = context.child()
        self.decode = context.child()
        loop = asyncio.get_running_loop()
        self._chosen: asyncio.Future[Bootstrap | None] = loop.create_future()
        self.rank: WorkerRank | None = None
        self._failure: BaseException | None = None
        self._task = loop.create_task(self._run(routing, payload), name="prefill-hop")
        self._task.add_done_callback(self._on_done)

    async def chosen(self) -> Bootstrap | None:
        """Where the prefill worker hands over; None: in its answer. Raises what the hop fails with before."""
        await asyncio.wait((self._chosen, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not self._chosen.done():
            # It raises: a hop ends without a choice only by an error.
            await self._task
        return self._chosen.result()

    async def result(self) -> dict[str, Any]:
        """The ``prefill_result``. Raises what the hop fails with."""
        answer = await self._task
        return {} if self._parent.is_stopped() else answer.result()

    def raise_failure(self) -> None:
        """Raise what the prompt failed with, if it did."""
        if self._failure is not None:
            raise self._failure

    async def close(self, *, served: bool) -> None:
        """The decode worker needs the prompt no longer: it is done (``served``), or will not be."""
        if served:
            self._context.conclude("ok")
        else:
            self._context.stop_generating()
        self._task.cancel()
        await asyncio.wait((self._task,))
        self._parent.release(self._context)
        self._parent.release(self.decode)

    async def _run(self, routing: RoutingRequest, payload: dict[str, Any]) -> PrefillAnswer:
        answer = PrefillAnswer()
        items = self._router.stream(routing, payload, self._context, self._on_choice)
        try:
            async with aclosing(items) as batches:
                async for frames in batches:
                    answer.take(frames)
        except Cancelled as error:
            if self._context.is_stopped():
                raise
            raise PrefillFailed("the prefill worker gave the request up") from error
        return answer

    def _on_choice(self, choice: Choice) -> Mapping[str, Any]:
        self.rank = choice.rank
        if self._chosen.done():
            if self._chosen.result() is None:
                return {}
            raise Disconnected("the prefill worker was lost when the decode worker had its address")
        address = self._router.facts(choice.rank.worker_id).bootstrap
        bootstrap = new_bootstrap(address, self._rng) if address is not None else None
        self._chosen.set_result(bootstrap)
        return {} if bootstrap is None else {"bootstrap_info": bootstrap.value()}

    def _on_done(self, task: asyncio.Task[PrefillAnswer]) -> None:
        if task.cancelled():
            return
        self._failure = task.exception()
        if self._failure is not None:
            resumption = self._resumption
            goes_on = resumption is not None and resumption.is_resuming
            self.decode.conclude("migrated" if goes_on else "error", type(self._failure).__name__)


def _prefill_hop(routing: RoutingRequest) -> RoutingRequest:
    return replace(
        routing,
        worker_id=routing.prefill_worker_id,
        dp_rank=routing.prefill_dp_rank,
        expected_output_tokens=None,
        stage="prefill",
    )


def _decode_hop(routing: RoutingRequest) -> RoutingRequest:
    return replace(routing, first_attempt=routing.first_attempt + MAX_ATTEMPTS, stage="decode", prompt_computed=True)


def _decode_payload(
    payload: Mapping[str, Any], rank: WorkerRank | None, handed_over: Mapping[str, Any]
) -> dict[str, Any]:
    routing = payload.get("routing")
    told: dict[str, Any] = dict(routing) if isinstance(routing, dict) else {}
    if rank is not None:
        told |= {"prefill_worker_id": rank.worker_id, "prefill_dp_rank": rank.dp_rank}
    return {**payload, **handed_over, "routing": told}
