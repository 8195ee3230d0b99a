"""The life of routed requests: decide, book, send, release; each step an event, none of them waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.errors import Cancelled, CannotConnect
from dynamo_es.log.base import TopicPartition
from dynamo_es.publishers.sink import EventSink
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.choosers import NO_WORKER, Choice, Chooser, RoutingRequest
from dynamo_es.router.errors import BookingConflict, NoEligibleWorker, UnknownRequest
from dynamo_es.runtime.client import Client
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from schemas.columns import pack_u64
from schemas.requests import REQUESTS, Candidate, Finished, Outcome, PrefillCompleted, ReadPosition, Routed
from streams.requests import BookingKey

logger = logging.getLogger(__name__)
# A request whose instance could not be reached is sent elsewhere; nothing of it had started.
MAX_ATTEMPTS = 3


@dataclass(slots=True)
class Booked:
    """An open booking of this router. Times are a monotonic clock's seconds."""

    key: BookingKey
    choice: Choice
    routed_at: float
    first_token_at: float | None = None
    output_tokens: int = 0


@dataclass(slots=True)
class RouterCounters:
    """For metrics."""

    decisions: dict[str, int] = field(default_factory=dict)
    lost_events: int = 0
    matched_blocks: int = 0
    queried_blocks: int = 0


class RequestRouter:
    """Routes requests to the ranks of one endpoint by one chooser. Belongs to one event loop.

    A decision is booked in memory in the same step, so that the next decision sees it; the events follow through the
    sink, which never blocks. Every booking is released exactly once.
    """

    def __init__(
        self,
        chooser: Chooser,
        sequences: ActiveSequences,
        client: Client,
        candidates: Callable[[], Sequence[WorkerRank]],
        sink: EventSink,
        *,
        router_id: int,
        model: Callable[[], str],
        block_size: int,
        positions: Callable[[], Mapping[TopicPartition, int]],
        clock: Clock,
        defer: Callable[[Callable[[], None]], object] = lambda work: work(),
    ) -> None:
        """``defer`` runs what a request need not wait for a little later, in order; an event loop's ``call_soon``."""
        self.chooser = chooser
        self._defer = defer
        self.counters = RouterCounters()
        self._sequences = sequences
        self._client = client
        self._candidates = candidates
        self._sink = sink
        self._router_id = router_id
        self._model = model
        self._block_size = block_size
        self._positions = positions
        self._clock = clock
        self._open: dict[str, Booked] = {}

    @property
    def open_requests(self) -> int:
        """Bookings of this router that are not released."""
        return len(self._open)

    def route(self, request: RoutingRequest, attempt: int = 1, exclude: frozenset[int] = frozenset()) -> Booked:
        """Decide and book.

        Raises:
            NoEligibleWorker, InvalidArgument: As ``Chooser.choose``; nothing is booked.
            BookingConflict: The request id is booked.
        """
        if request.request_id in self._open:
            rank = self._open[request.request_id].choice.rank
            raise BookingConflict(
                f"failed to book scheduler state: Request {request.request_id} already exists (assigned to worker "
                f"WorkerWithDpRank {{ worker_id: {rank.worker_id}, dp_rank: {rank.dp_rank} }})"
            )
        started = time.perf_counter_ns()
        choice = self.choose(request, exclude)
        key = BookingKey(request.request_id, attempt)
        self._sequences.book(key, choice.rank, choice.sequence_hashes, choice.prefill_tokens)
        booked = Booked(key, choice, self._clock.monotonic())
        self._open[request.request_id] = booked
        self._count(choice, len(request.token_ids))
        positions = tuple(self._positions().items())
        decided_us = (time.perf_counter_ns() - started) // 1000
        self._defer(lambda: self._emit(self._routed_event(request, booked, positions, decided_us)))
        return booked

    def choose(self, request: RoutingRequest, exclude: frozenset[int] = frozenset()) -> Choice:
        """Decide without booking. Raises as ``route``."""
        candidates = self._candidates()
        if exclude:
            candidates = [rank for rank in candidates if rank.worker_id not in exclude]
        if not candidates:
            raise NoEligibleWorker(NO_WORKER)
        return self.chooser.choose(request, candidates)

    def complete_prefill(self, request_id: str) -> None:
        """The first token came. Raises ``UnknownRequest``; a second time changes nothing."""
        booked = self._find(request_id)
        if booked.first_token_at is None:
            booked.first_token_at = self._clock.monotonic()
            self._sequences.complete_prefill(booked.key)
            event = PrefillCompleted(REQUESTS.version, booked.key.request_id, booked.key.attempt, self._router_id)
            self._defer(lambda: self._emit(event))

    def release(self, request_id: str, outcome: Outcome = "ok", detail: str = "") -> None:
        """The request is over. Raises ``UnknownRequest`` if it was released before."""
        booked = self._find(request_id)
        del self._open[request_id]
        self._sequences.release(booked.key)
        now = self._clock.monotonic()
        first = booked.first_token_at
        event = Finished(
            version=REQUESTS.version,
            request_id=booked.key.request_id,
            attempt=booked.key.attempt,
            router_id=self._router_id,
            outcome=outcome,
            output_tokens=booked.output_tokens,
            first_token_ms=-1 if first is None else int((first - booked.routed_at) * 1000),
            duration_ms=int((now - booked.routed_at) * 1000),
            detail=detail[:200],
        )
        self._defer(lambda: self._emit(event))

    async def stream(
        self, routing: RoutingRequest, payload: dict[str, Any], context: Context
    ) -> AsyncGenerator[list[Any], None]:
        """Route, send, and pass on the worker's items in the batches in which they come.

        ``payload`` gets the choice under ``routing``. An instance that cannot be reached is passed over, up to three
        attempts in all.

        Raises:
            DynamoException: Typed, as the worker or the transport failed.
        """
        failed: frozenset[int] = frozenset()
        for attempt in range(1, MAX_ATTEMPTS + 1):
            booked = self.route(routing, attempt, failed)
            try:
                async with aclosing(self._attempt(booked, payload, context)) as batches:
                    async for batch in batches:
                        yield batch
                return
            except (CannotConnect, Overloaded) as error:
                failed |= {booked.choice.rank.worker_id}
                if attempt == MAX_ATTEMPTS or routing.worker_id is not None or not self._has_other(failed):
                    raise
                logger.warning("request %s: %s; trying another worker", routing.request_id, error)

    async def _attempt(
        self, booked: Booked, payload: dict[str, Any], context: Context
    ) -> AsyncGenerator[list[Any], None]:
        request_id = booked.key.request_id
        rank = booked.choice.rank
        routing = payload.get("routing")
        payload = {
            **payload,
            "request_id": request_id,
            "routing": {
                **(routing if isinstance(routing, dict) else {}),
                "worker_id": rank.worker_id,
                "dp_rank": rank.dp_rank,
                "overlap_blocks": booked.choice.overlap_blocks,
            },
        }
        outcome: Outcome = "error"
        detail = ""
        try:
            async with aclosing(self._client.stream(payload, rank.worker_id, context)) as batches:
                async for batch in batches:
                    tokens = _count_tokens(batch)
                    if tokens and booked.first_token_at is None:
                        self.complete_prefill(request_id)
                    booked.output_tokens += tokens
                    yield batch
            outcome = "cancelled" if context.is_stopped() else "ok"
        except (CannotConnect, Overloaded) as error:
            outcome, detail = "migrated", str(error)
            raise
        except (Cancelled, GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        except Exception as error:
            # The class only: a worker's text may quote the prompt, and prompts never reach the log.
            detail = type(error).__name__
            raise
        finally:
            self.release(request_id, outcome, detail)

    def _has_other(self, failed: frozenset[int]) -> bool:
        return any(rank.worker_id not in failed for rank in self._candidates())

    def _find(self, request_id: str) -> Booked:
        booked = self._open.get(request_id)
        if booked is None:
            raise UnknownRequest(f"Request {request_id} not found")
        return booked

    def _count(self, choice: Choice, isl_tokens: int) -> None:
        """Why it went as it did, in a bounded set of reasons."""
        if self.chooser.mode != "kv":
            reason = self.chooser.mode
        elif isl_tokens < self._block_size:
            reason = "prompt-under-one-block"
        elif choice.overlap_blocks:
            reason = "overlap"
        elif any(item.effective_overlap for item in choice.costs):
            reason = "load-over-overlap"
        else:
            reason = "no-overlap"
        self.counters.decisions[reason] = self.counters.decisions.get(reason, 0) + 1
        self.counters.matched_blocks += choice.overlap_blocks
        self.counters.queried_blocks += len(choice.sequence_hashes)

    def _routed_event(
        self,
        request: RoutingRequest,
        booked: Booked,
        positions: Sequence[tuple[TopicPartition, int]],
        decided_us: int,
    ) -> Routed:
        choice = booked.choice
        return Routed(
            version=REQUESTS.version,
            request_id=booked.key.request_id,
            attempt=booked.key.attempt,
            router_id=self._router_id,
            model=self._model(),
            mode=self.chooser.mode,
            worker_id=choice.rank.worker_id,
            dp_rank=choice.rank.dp_rank,
            block_size=self._block_size,
            isl_tokens=len(request.token_ids),
            sequence_hashes=pack_u64(choice.sequence_hashes),
            tokens_hashes=pack_u64(choice.tokens_hashes),
            overlap_blocks=choice.overlap_blocks,
            cached_tokens=choice.cached_tokens,
            prefill_tokens=choice.prefill_tokens,
            candidates=[
                Candidate(
                    item.candidate.rank.worker_id, item.candidate.rank.dp_rank, item.candidate.device,
                    item.candidate.host, item.candidate.disk, item.candidate.load.prefill_tokens,
                    item.decode_blocks, item.candidate.load.requests, item.cost,
                )
                for item in choice.costs
            ],
            config_digest=choice.config_digest,
            positions=[
                ReadPosition(position.topic, position.partition, offset)
                for position, offset in positions
            ],
            decided_us=decided_us,
        )  # fmt: skip

    def _emit(self, event: Routed | PrefillCompleted | Finished) -> None:
        if not self._sink.offer(REQUESTS, event.request_id.encode(), event):
            self.counters.lost_events += 1


def _count_tokens(batch: Sequence[Any]) -> int:
    return sum(len(item.get("token_ids") or ()) for item in batch if isinstance(item, dict))
