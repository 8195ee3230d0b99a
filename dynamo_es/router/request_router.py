"""The life of routed requests: decide, book, send, release; each step an event, none of them waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from dynamo_es.clock import Clock
from dynamo_es.errors import Cancelled, CannotConnect, EngineShutdown, InvalidArgument
from dynamo_es.log.base import TopicPartition
from dynamo_es.publishers.sink import EventSink
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.admission import AdmissionQueue
from dynamo_es.router.booked import Booked, RouterCounters, already_booked
from dynamo_es.router.booking_events import BookingEvents, RouterIdentity
from dynamo_es.router.choosers import Choice, Chooser
from dynamo_es.router.conditional_disagg import RankState
from dynamo_es.router.course import Course, count_tokens, note_choice
from dynamo_es.router.decision_facts import decision_facts
from dynamo_es.router.eligibility import NOBODY, eligible_ranks
from dynamo_es.router.errors import BookingConflict, NoEligibleWorker, UnknownRequest
from dynamo_es.router.kv_chooser import KvChooser
from dynamo_es.router.policy_config import PolicyProfile
from dynamo_es.router.prefill_times import PrefillTimes
from dynamo_es.router.routing_request import UNKNOWN_WORKER, FactsSource, RoutingRequest, WorkerFacts
from dynamo_es.router.session_affinity import SessionAffinity
from dynamo_es.runtime.client import Client
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.placement import Placement
from dynamo_es.runtime.tracing import Hop
from schemas.requests import Outcome
from streams.requests import BookingKey

logger = logging.getLogger(__name__)
T = TypeVar("T")


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
        facts: FactsSource = lambda worker_id: UNKNOWN_WORKER,
        overloaded: Callable[[], frozenset[int]] = lambda: NOBODY,
        track_output_blocks: Callable[[], bool] = lambda: False,
        affinity: SessionAffinity | None = None,
        prefill_times: PrefillTimes | None = None,
        lease_id: Callable[[], int] = lambda: 0,
        later: Callable[[Callable[[], None]], object] = lambda work: None,
    ) -> None:
        """``defer`` runs what a request need not wait for a little later, in order; an event loop's ``call_soon``.

        ``overloaded`` gives the workers that are above a busy threshold. ``track_output_blocks`` says whether what
        requests generate counts as load, too. ``affinity`` keeps sessions together; None: it does not matter which
        session a request is of. ``prefill_times`` predicts how long prompts take (``sequences`` has a clock then).
        ``lease_id`` is this process's lease now: when it changes, call ``announce_open``. ``later`` runs what is handed
        to it after a second or so: events for which the sink had no room are offered again then.
        """
        self.chooser = chooser
        self._defer = defer
        self.counters = RouterCounters()
        self._sequences = sequences
        self._client = client
        self._candidates = candidates
        self._block_size = block_size
        self._positions = positions
        self._clock = clock
        self._facts = facts
        self._overloaded = overloaded
        self._track_output_blocks = track_output_blocks
        self.affinity = affinity
        self._prefill_times = prefill_times
        self._kv = chooser if isinstance(chooser, KvChooser) else None
        self._open: dict[str, Booked] = {}
        identity = RouterIdentity(router_id, model, block_size, lease_id)
        self._events = BookingEvents(sink, later, identity, chooser, self._open)
        self._undo: list[Callable[[], None]] = []
        self._retired = False
        self.admission: AdmissionQueue | None = None

    @property
    def lost_events(self) -> int:
        """Events that found no room when they were offered; for metrics. Some of them were told later."""
        return self._events.refused

    @property
    def open_requests(self) -> int:
        """Bookings of this router that are not released."""
        return len(self._open)

    def queue_by(self, profile: PolicyProfile, loop: asyncio.AbstractEventLoop) -> None:
        """Let requests wait for a worker as ``profile`` says. Only in KV mode, and before the first request."""
        assert self._kv is not None
        self.admission = AdmissionQueue(
            profile,
            eligible=self._eligible,
            prefill_tokens=self._sequences.prefill_tokens,
            facts=self._facts,
            workers=lambda: len({rank.worker_id for rank in self._candidates()}),
            clock=self._clock,
            loop=loop,
        )

    def facts(self, worker_id: int) -> WorkerFacts:
        """What a worker registered."""
        return self._facts(worker_id)

    def has_workers(self) -> bool:
        """Whether there is anybody to route to."""
        return bool(self._candidates())

    def has_worker(self, worker_id: int) -> bool:
        """Whether there is this one."""
        return any(rank.worker_id == worker_id for rank in self._candidates())

    def is_overloaded(self) -> bool:
        """Whether there are workers and all of them are above a busy threshold."""
        overloaded = self._overloaded()
        return bool(overloaded) and all(rank.worker_id in overloaded for rank in self._candidates())

    def state_of(self, rank: WorkerRank) -> RankState:
        """What is booked on a rank, beside what it can do."""
        load, facts = self._sequences.load(rank), self._facts(rank.worker_id)
        return RankState(load.prefill_tokens, facts.max_num_batched_tokens, load.blocks, facts.total_kv_blocks)

    async def close(self) -> None:
        """Fail the requests that wait. Safe to call twice."""
        self._fail_waiting()

    def on_retired(self, undo: Callable[[], None]) -> None:
        """Call ``undo`` when the router is retired and its last request is over."""
        self._undo.append(undo)

    def retire(self) -> None:
        """Nobody will route by it any more: requests that wait fail, open ones go on to their end. Idempotent."""
        self._retired = True
        self._fail_waiting()
        self._let_go_if_idle()

    def _fail_waiting(self) -> None:
        if self.admission is not None:
            self.admission.close(EngineShutdown("the router is shutting down"))

    def _let_go_if_idle(self) -> None:
        if self._retired and not self._open:
            while self._undo:
                self._undo.pop()()

    async def admit(self, request: RoutingRequest) -> Booked:
        """Decide and book, when it is the request's turn; at once if there is no queue. Raises as ``route``, and:

        Raises:
            RouterQueueLimitExceeded: It would have to wait, and its policy class has as much waiting as it may.
            EngineShutdown: The router was closed.
        """
        self._check_free(request.request_id)
        return await self._in_turn(
            request,
            lambda choose: self._book(request, request.first_attempt, choose),
            lambda booked: self.release(booked.key.request_id, "cancelled"),
        )

    async def select(self, request: RoutingRequest) -> Choice:
        """As ``admit``, without booking."""
        return await self._in_turn(request, self._note_choice(request))

    def route(self, request: RoutingRequest, attempt: int = 1, exclude: frozenset[int] = frozenset()) -> Booked:
        """Decide and book, past the queue.

        Raises:
            NoEligibleWorker, PinNotAllowed, AllWorkersOverloaded, SessionElsewhere: Nobody may take it; nothing is
                booked.
            InvalidArgument: As ``Chooser.choose``; nothing is booked.
            BookingConflict: The request id is booked.
        """
        return self._book(request, attempt, lambda: self.choose(request, exclude))

    def choose(self, request: RoutingRequest, exclude: frozenset[int] = frozenset()) -> Choice:
        """Decide without booking, past the queue. Raises as ``route``."""
        return self.chooser.choose(request, self._eligible(request, exclude))

    async def consider(self, request: RoutingRequest, exclude: frozenset[int] = frozenset()) -> Choice:
        """As ``choose``; if the index is with other processes, they are asked."""
        kv = self._kv
        if kv is None or not kv.is_remote:
            return self.choose(request, exclude)
        prompt = kv.prepare(request)
        found = await kv.look_up(prompt)
        return kv.choose_prepared(request, prompt, self._eligible(request, exclude), found)

    async def locate(self, request: RoutingRequest, placement: Placement) -> bool:
        """Note where a request would go now, past the queue. False: this mode cannot say. Raises as ``route``."""
        if self._kv is None:
            return False
        choice = await self.consider(request)
        note_choice(placement, choice, request.stage, len(request.token_ids), self._block_size)
        return True

    async def _in_turn(
        self,
        request: RoutingRequest,
        act: Callable[[Callable[[], Choice]], T],
        undo: Callable[[T], object] = lambda result: None,
    ) -> T:
        """Call ``act`` with what makes the choice, when it is the request's turn."""
        kv, admission = self._kv, self.admission
        if kv is None or (admission is None and not kv.is_remote):
            return act(lambda: self.choose(request))
        prompt = kv.prepare(request)
        found = await kv.look_up(prompt)

        def place(waited: bool) -> T:
            # Nobody else can be asked in here, so after a wait their answers of before still stand.
            known = None if waited and not kv.is_remote else found
            return act(lambda: kv.choose_prepared(request, prompt, self._eligible(request), known))

        if admission is None:
            return place(False)
        return await admission.submit(
            request,
            prompt.isl_tokens,
            lambda ranks: kv.selector.best_cached_tokens(prompt, found.overlaps, ranks),
            place,
            undo,
        )

    def _note_choice(self, request: RoutingRequest) -> Callable[[Callable[[], Choice]], Choice]:
        def act(choose: Callable[[], Choice]) -> Choice:
            choice = choose()
            if request.update_indexer and self._kv is not None:
                self._kv.note(choice)
            return choice

        return act

    def _book(self, request: RoutingRequest, attempt: int, choose: Callable[[], Choice]) -> Booked:
        # Not before, where the request waited: another one may have taken its id meanwhile.
        self._check_free(request.request_id)
        started = time.perf_counter_ns()
        session = self._session_of(request)
        choice = choose()
        if request.prompt_computed:
            choice = choice._replace(prefill_tokens=0)
        key, now = BookingKey(request.request_id, attempt), self._clock.monotonic()
        prefill_s = None
        if self._prefill_times is not None and choice.prefill_tokens:
            prefill_s = self._prefill_times.predict_s(choice.prefill_tokens, choice.cached_tokens)
        if not self._sequences.book(key, choice.rank, choice.tracking_hashes, choice.prefill_tokens, now, prefill_s):
            raise self._conflict(request.request_id, self._sequences.rank_of(key) or choice.rank)
        if request.update_indexer and self._kv is not None:
            self._kv.note(choice)
        isl_tokens = len(request.token_ids)
        booked = Booked(key, choice, now, isl_tokens, request.expected_output_tokens, session, prefill_s, request.stage)
        booked.trace = request.trace
        self._open[request.request_id] = booked
        if self.affinity is not None and session:
            self.affinity.dispatched(session, choice.rank, self._clock.now_ms())
        informed = self._kv is None or self._kv.is_informed()
        self.counters.count(self.chooser.mode, choice, isl_tokens, self._block_size, informed=informed)
        booked.positions = (*self._positions().items(), *choice.positions)
        booked.decided_us = (time.perf_counter_ns() - started) // 1000
        self._defer(lambda: self._events.routed(booked, choice.prefill_tokens))
        return booked

    def _check_free(self, request_id: str) -> None:
        booked = self._open.get(request_id)
        if booked is not None:
            raise self._conflict(request_id, booked.choice.rank)

    def _conflict(self, request_id: str, rank: WorkerRank) -> BookingConflict:
        return BookingConflict(f"failed to book scheduler state: {already_booked(request_id, rank)}")

    def _eligible(self, request: RoutingRequest, exclude: frozenset[int] = frozenset()) -> Sequence[WorkerRank]:
        ranks = self._candidates()
        exclude |= request.excluded
        if exclude:
            ranks = [rank for rank in ranks if rank.worker_id not in exclude]
        affinity, session = self.affinity, self._session_of(request)
        if affinity is None or not session:
            found = eligible_ranks(request, ranks, self._facts, self._overloaded())
        else:
            found = affinity.narrow(
                request,
                session,
                ranks,
                lambda some: eligible_ranks(request, some, self._facts, self._overloaded()),
                self._clock.now_ms(),
            )
        return [request.preferred] if request.preferred is not None and request.preferred in found else found

    def _session_of(self, request: RoutingRequest) -> bytes:
        """Digest of the session to keep together; empty: none."""
        if self.affinity is None or not request.session_id:
            return b""
        return self.affinity.digest(request.session_id)

    def complete_prefill(self, request_id: str) -> None:
        """The first token came. Raises ``UnknownRequest``; a second time changes nothing."""
        booked = self._find(request_id)
        if booked.first_token_at is None:
            booked.first_token_at = self._clock.monotonic()
            self._sequences.complete_prefill(booked.key)
            if not booked.choice.prefill_tokens:
                return
            self._load_fell()
            self._defer(lambda: self._events.prefill_completed(booked))

    def release(self, request_id: str, outcome: Outcome = "ok", detail: str = "") -> None:
        """The request is over. Raises ``UnknownRequest`` if it was released before."""
        booked = self._find(request_id)
        del self._open[request_id]
        self._sequences.release(booked.key)
        if self.affinity is not None and booked.session:
            self.affinity.ended(booked.session, self._clock.now_ms())
        self._load_fell()
        now = self._clock.monotonic()
        self._defer(lambda: self._events.finished(booked, outcome, detail, now))
        self._let_go_if_idle()

    def note_output(self, request_id: str, tokens: int) -> None:
        """The worker generated so many tokens more. Raises ``UnknownRequest``."""
        self._note_output(self._find(request_id), tokens)

    def _note_tokens(self, booked: Booked, tokens: int) -> None:
        """A worker sent them."""
        if booked.first_token_at is None:
            self.complete_prefill(booked.key.request_id)
        self._note_output(booked, tokens)

    def _note_output(self, booked: Booked, tokens: int) -> None:
        known = booked.isl_tokens + booked.output_tokens
        booked.output_tokens += tokens
        if not self._track_output_blocks():
            return
        before, after = -(-known // self._block_size), -(-(known + tokens) // self._block_size)
        expected = booked.expected_output_tokens
        fraction = None if expected is None else max(1 - booked.output_tokens / max(expected, 1), 0.0)
        for _ in range(after - before):
            self._sequences.add_output_block(booked.key, fraction)

    def announce_open(self) -> None:
        """Tell of all open bookings again: others may have given them up with this process's lease."""
        self._events.tell_open()

    async def stream(
        self,
        routing: RoutingRequest,
        payload: dict[str, Any],
        context: Context,
        on_choice: Callable[[Choice], Mapping[str, Any]] = lambda choice: {},
        lane: Lane | None = None,
    ) -> AsyncGenerator[list[Any], None]:
        """Route, send, and pass on the worker's items in the batches in which they come.

        ``payload`` gets the choice under ``routing``, and what ``on_choice`` returns for it. An instance that cannot be
        reached is passed over, up to three attempts in all; ``on_choice`` is asked again then, and may raise. A request
        that other workers failed before (``excluded``) does not wait in a queue again.

        Raises:
            DynamoException: Typed, as the worker or the transport failed.
        """
        course = Course(routing, payload, context, on_choice, lane)
        attempt = first = routing.first_attempt
        while True:
            waits = attempt == first and not routing.excluded
            hop = None if context.hops is None else context.hops.deciding(routing.stage, attempt)
            try:
                booked = await (self.admit(routing) if waits else self._route_again(routing, attempt, course.failed))
            except Exception as error:
                if hop is not None:
                    hop.ended("error", type(error).__name__)
                raise
            try:
                async with aclosing(self._attempt(booked, course, hop)) as batches:
                    async for batch in batches:
                        yield batch
                return
            except (CannotConnect, Overloaded) as error:
                if not course.tries_again:
                    raise
                logger.warning("request %s: %s; trying another worker", routing.request_id, error)
            attempt += 1

    async def _route_again(self, request: RoutingRequest, attempt: int, exclude: frozenset[int]) -> Booked:
        if self._kv is None or not self._kv.is_remote:
            return self.route(request, attempt, exclude)
        choice = await self.consider(request, exclude)
        return self._book(request, attempt, lambda: choice)

    async def _attempt(self, booked: Booked, course: Course, hop: Hop | None) -> AsyncGenerator[list[Any], None]:
        request_id, context, lane = booked.key.request_id, course.context, course.lane
        outcome: Outcome = "error"
        detail = ""
        course.begun = False

        def seen(batch: list[Any]) -> None:
            if tokens := count_tokens(batch):
                self._note_tokens(booked, tokens)

        if lane is not None:
            lane.watch(seen)
        if context.placement is not None:
            self._note(context.placement, booked)
        if hop is not None:
            context.hop_trace = hop.dispatched(lambda: decision_facts(booked, self.chooser.mode))
        try:
            payload = {**course.payload_for(booked), **course.on_choice(booked.choice)}
            items = self._client.stream(payload, booked.choice.rank.worker_id, context, lane)
            async with aclosing(items) as batches:
                async for batch in batches:
                    seen(batch)
                    if hop is not None and not course.begun:
                        hop.answered()
                    course.begun = True
                    yield batch
            outcome, detail = context.conclusion or ("cancelled" if context.is_stopped() else "ok", "")
        except (Cancelled, GeneratorExit, asyncio.CancelledError):
            outcome, detail = context.conclusion or ("cancelled", "")
            raise
        except Exception as error:
            outcome, detail = course.fail(
                error, booked, keeps_hard=self._keeps_hard, has_other=lambda failed: self._has_other(course, failed)
            )
            raise
        finally:
            if lane is not None:
                lane.unwatch(seen)
            self.release(request_id, outcome, detail)
            if hop is not None:
                hop.ended(outcome, detail)

    def _note(self, placement: Placement, booked: Booked) -> None:
        """Tell whoever asked where the request goes."""
        size = self._block_size if self._kv is not None else 0
        note_choice(placement, booked.choice, booked.stage, booked.isl_tokens, size)
        if self._kv is not None:
            placement.queue_depth = len(self.admission.queue) if self.admission is not None else 0
        if placement.sent_at is None:
            placement.sent_at = self._clock.monotonic()

    @property
    def _keeps_hard(self) -> bool:
        return self.affinity is not None and self.affinity.settings.hard

    def _has_other(self, course: Course, failed: frozenset[int]) -> bool:
        try:
            return bool(self._eligible(course.routing, failed))
        except (NoEligibleWorker, InvalidArgument, Overloaded):
            return False

    def _find(self, request_id: str) -> Booked:
        booked = self._open.get(request_id)
        if booked is None:
            raise UnknownRequest(f"Request {request_id} not found")
        return booked

    def _load_fell(self) -> None:
        if self.admission is not None:
            self.admission.update()
