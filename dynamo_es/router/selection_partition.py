"""One partition of the selection service: its index, its workers, their load, and its queue (spec: router-core E)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.clock import Clock
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.admission import AdmissionQueue
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.cost import CandidateCost
from dynamo_es.router.cost_selector import NO_OVERLAP, CostSelector, Overlaps, PreparedPrompt
from dynamo_es.router.eligibility import eligible_ranks
from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.policy_config import PolicyProfile
from dynamo_es.router.reports import dump_events, load_row, overlap_report
from dynamo_es.router.routing_request import UNKNOWN_WORKER, RoutingRequest, WorkerFacts
from dynamo_es.router.selection_prompts import PromptHasher
from dynamo_es.router.selection_requests import PartitionKey, PromptQuery, SelectRequest, WorkerSpec
from dynamo_es.router.tracking import TrackingIdentities
from streams.requests import BookingKey

# Bookings older than this are taken for forgotten by their owner (DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS); they are
# looked for this often, when somebody asks.
DEFAULT_EXPIRY_S = 3600.0
_EXPIRY_CHECK_S = 30.0


@dataclass(frozen=True, slots=True)
class Selected:
    """A choice: the rank with its cost, its worker as it was then, and what every rank holds of the prompt."""

    best: CandidateCost
    worker: WorkerSpec
    prompt: PreparedPrompt
    overlaps: Overlaps

    @property
    def rank(self) -> WorkerRank:
        """Who was chosen."""
        return self.best.candidate.rank

    @property
    def booked_prefill_tokens(self) -> int:
        """Prompt tokens to book."""
        return self.best.prefill_tokens if self.prompt.settings.router_track_prefill_tokens else 0


class Partition:
    """Block size and kind of windows are fixed when it is made, for ever. Belongs to one event loop."""

    def __init__(
        self,
        key: PartitionKey,
        *,
        block_size: int,
        is_eagle: bool,
        settings: KvRouterSettings,
        profile: PolicyProfile | None,
        tracking: TrackingIdentities,
        clock: Clock,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        expiry_s: float = DEFAULT_EXPIRY_S,
    ) -> None:
        """``profile``: the policy classes by which requests wait; None: nobody waits."""
        self.key = key
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.index = EngineIndex()
        self.sequences = ActiveSequences()
        self.prompts = PromptHasher(key, block_size, is_eagle, tracking)
        self.workers: dict[int, WorkerSpec] = {}
        self._facts: dict[int, WorkerFacts] = {}
        self._ranks: list[WorkerRank] = []
        self._clock = clock
        self._expiry_s = expiry_s
        self._checked_at = clock.monotonic()
        self._selector = CostSelector(
            self.sequences, block_size=block_size, settings=settings, facts=self._facts_of, rng=rng
        )
        self.queue: AdmissionQueue | None = None
        if profile is not None:
            self.queue = AdmissionQueue(
                profile,
                eligible=self._eligible,
                prefill_tokens=self.sequences.prefill_tokens,
                facts=self._facts_of,
                workers=lambda: len(self.workers),
                clock=clock,
                loop=loop,
            )

    @property
    def ranks(self) -> Sequence[WorkerRank]:
        """All ranks of its workers, sorted."""
        return self._ranks

    def add_worker(self, spec: WorkerSpec) -> None:
        """A worker can be chosen from now on."""
        self.workers[spec.worker_id] = spec
        self._facts[spec.worker_id] = WorkerFacts(
            taints=spec.taints,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            total_kv_blocks=spec.total_kv_blocks,
        )
        self._refresh()

    def remove_worker(self, worker_id: int) -> None:
        """A worker is gone, with what it held and what was booked on it."""
        if self.workers.pop(worker_id, None) is None:
            return
        del self._facts[worker_id]
        self.index.clear_ranks(worker_id)
        self.sequences.release_worker(worker_id)
        self._refresh()

    async def select(self, request: SelectRequest, prompt: PreparedPrompt, book: bool) -> Selected:
        """Choose a worker when it is the request's turn, and book the request on it if asked to.

        Raises:
            BookingTaken: The request id is booked.
            NoEligibleWorker, PinNotAllowed, RouterQueueLimitExceeded: As for every router.
        """
        overlaps = self.index.match(prompt.tokens_hashes)

        def place(waited: bool) -> Selected:
            known = self.index.match(prompt.tokens_hashes) if waited else overlaps
            candidates = self._eligible(request.routing)
            best, _ = self._selector.choose(request.routing, prompt, candidates, known)
            selected = Selected(best, self.workers[best.candidate.rank.worker_id], prompt, known)
            if book:
                self.book(
                    request.routing.request_id, selected.rank, prompt.tracking_hashes, selected.booked_prefill_tokens
                )
            return selected

        if self.queue is None:
            return place(False)
        return await self.queue.submit(
            request.routing,
            prompt.isl_tokens,
            lambda ranks: self._selector.best_cached_tokens(prompt, overlaps, ranks),
            place,
            (lambda selected: self.free(request.routing.request_id)) if book else (lambda selected: None),
        )

    def book(self, request_id: str, rank: WorkerRank, hashes: Sequence[int], prefill_tokens: int) -> None:
        """Add a booking. Raises ``BookingTaken``."""
        key = BookingKey(request_id, 1)
        if not self.sequences.book(key, rank, hashes, prefill_tokens, self._clock.monotonic()):
            taken = self.sequences.rank_of(key)
            assert taken is not None
            raise BookingTaken(taken)

    def holds(self, request_id: str) -> bool:
        """Whether the request is booked here."""
        return BookingKey(request_id, 1) in self.sequences

    def rank_of(self, request_id: str) -> WorkerRank | None:
        """Where the request is booked."""
        return self.sequences.rank_of(BookingKey(request_id, 1))

    def complete_prefill(self, request_id: str) -> None:
        """The request's prompt is computed; whoever waits may have his turn."""
        self.sequences.complete_prefill(BookingKey(request_id, 1))
        self.update()

    def add_output_block(self, request_id: str, decay_fraction: float | None) -> None:
        """The request generated one more block."""
        self.sequences.add_output_block(BookingKey(request_id, 1), decay_fraction)

    def free(self, request_id: str) -> None:
        """The request is over; whoever waits may have his turn."""
        self.sequences.release(BookingKey(request_id, 1))
        self.update()

    def update(self) -> None:
        """Load may have gone down."""
        if self.queue is not None:
            self.queue.update()

    def expire(self) -> None:
        """Take away bookings that are too old, if it is time to look."""
        now = self._clock.monotonic()
        if now - self._checked_at >= _EXPIRY_CHECK_S:
            self._checked_at = now
            if self.sequences.release_older(now - self._expiry_s):
                self.update()

    def loads(self) -> dict[str, Any]:
        """What is booked and what waits."""
        queue = self.queue.queue if self.queue is not None else None
        return {
            "model_name": self.key.model_name,
            "routing_group": self.key.routing_group,
            "loads": [load_row(rank, self.sequences.load(rank), 0, 0) for rank in self._ranks],
            "pending_count": len(queue) if queue is not None else 0,
            "pending_isl_tokens": queue.isl_tokens if queue is not None else 0,
        }

    def potential_loads(self, query: PromptQuery) -> list[dict[str, int]]:
        """Load of every rank with a prompt added. Raises ValueError."""
        prompt = self.prompts.prepare(query.prompt, query.settings)
        overlaps = self.index.match(prompt.tokens_hashes)
        tracks_prefill = query.settings.router_track_prefill_tokens
        return [
            load_row(
                item.candidate.rank,
                item.candidate.load,
                item.prefill_tokens if tracks_prefill else 0,
                item.candidate.new_blocks,
            )
            for item in self._selector.costs(prompt, self._ranks, overlaps)
        ]

    def overlap_scores(self, query: PromptQuery) -> dict[str, Any]:
        """What every rank holds of a prompt. Raises ValueError."""
        prompt = self.prompts.prepare(query.prompt, query.settings)
        rows = {**dict.fromkeys(self._ranks, NO_OVERLAP), **self.index.match(prompt.tokens_hashes)}
        return overlap_report(self.block_size, len(prompt.tokens_hashes), rows.items(), query.settings)

    def snapshot(self) -> dict[str, Any]:
        """All that the index holds, as router events."""
        return {"block_size": self.block_size, "events": list(dump_events(self.index.dump()))}

    def _eligible(self, request: RoutingRequest) -> Sequence[WorkerRank]:
        return eligible_ranks(request, self._ranks, self._facts_of)

    def _facts_of(self, worker_id: int) -> WorkerFacts:
        return self._facts.get(worker_id, UNKNOWN_WORKER)

    def _refresh(self) -> None:
        self._ranks = sorted(WorkerRank(spec.worker_id, rank) for spec in self.workers.values() for rank in spec.ranks)
        self.update()


class BookingTaken(Exception):
    """The request id is booked on ``rank``; whoever asks for the booking says it in his words."""

    def __init__(self, rank: WorkerRank) -> None:
        super().__init__(f"booked on {rank}")
        self.rank = rank
