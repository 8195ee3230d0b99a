"""Continuous batching of one rank (spec/services h.6). Pure.

``schedule`` decides what the next pass computes, ``complete`` is its end: blocks are cached, tokens come out. Between
the two, requests may be added and aborted.

A request whose prompt another worker computed comes with its KV blocks: it takes their room, and generates at once.

This is vLLM's scheduler. Those of other engines are kinds of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.engines.scheduling.config import SchedulerConfig
from dynamo_es.engines.scheduling.request import Emission, EngineRequest, PassPlan
from dynamo_es.engines.scheduling.timing import NoTiming, PassTimes, TimingModel
from schemas.forward_pass import QueuedRequests, ScheduledRequests

ADMISSION_ERROR = "request rejected: request exceeds worker admission limits"
UNLIMITED = 2**62
"""More tokens than there are."""


class Scheduler:
    """One rank. Requests run in the order of admission; waiting ones are admitted in the order in which they came."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, timing: TimingModel | None = None) -> None:
        """``timing``: of a modelled GPU; None: passes take the time that they take."""
        self._timing = timing or NoTiming()
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._chunked = config.enable_chunked_prefill
        self._max_running = config.max_num_seqs or UNLIMITED
        self._budget = config.max_num_batched_tokens or UNLIMITED
        self._newest_gives_way = config.preemption_mode == "lifo"
        self._max_model_len = config.max_model_len
        self._capacity_tokens = config.num_gpu_blocks * config.block_size
        self.blocks = blocks
        self.running: list[EngineRequest] = []
        self.waiting: deque[EngineRequest] = deque()
        self.preemptions = 0

    def output_room(self, prompt_length: int) -> int:
        """Most output tokens that a request with such a prompt may ask for; under 1: none."""
        # The last token is sampled and never computed, so it needs no room in the cache.
        room = self._capacity_tokens - prompt_length + 1 if prompt_length <= self._capacity_tokens else 0
        return room if self._max_model_len is None else min(room, self._max_model_len - prompt_length)

    def refusal(self, prompt_length: int, max_tokens: int) -> str | None:
        """Why a request can never be served; None if it can."""
        if max_tokens <= self.output_room(prompt_length):
            return None
        if prompt_length > self._capacity_tokens:
            return ADMISSION_ERROR
        if self._max_model_len is not None and prompt_length + max_tokens > self._max_model_len:
            return ADMISSION_ERROR
        return (
            f"{ADMISSION_ERROR}: {prompt_length} prompt tokens and up to {max_tokens} output tokens do not fit "
            f"the {self._capacity_tokens} tokens of the KV cache"
        )

    @property
    def has_work(self) -> bool:
        """Whether a pass would do anything."""
        return bool(self.running or self.waiting)

    def cached_tokens_of(self, request: EngineRequest) -> int:
        """How much of a prompt is cached."""
        if not self._caching:
            return 0
        request.block_size = self._block_size
        request.hash_until(request.prompt_length // self._block_size)
        return self.blocks.match(request.sequence_hashes, len(request.sequence_hashes)) * self._block_size

    def add(self, request: EngineRequest) -> None:
        """Queue a request that ``refusal`` did not refuse."""
        request.block_size = self._block_size
        if self._caching:
            request.hash_until(len(request.tokens) // self._block_size)
        self.waiting.append(request)

    def abort(self, request: EngineRequest) -> None:
        """End a request at once, also in the middle of a pass; its blocks are free when this returns."""
        if request.finished:
            return
        request.finished = True
        self.blocks.release(request.table)
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def schedule(self) -> PassPlan:
        """What the next pass computes. Empty only without work."""
        plan = PassPlan()
        budget, preempted = self._schedule_running(plan)
        if not preempted:
            self._admit(plan, budget)
        self._measure(plan)
        return plan

    def complete(self, plan: PassPlan) -> list[Emission]:
        """The pass is over: cache full blocks, give out tokens, release who is done."""
        emissions: list[Emission] = []
        over = False
        for request, count in plan.work.items():
            if request.finished:
                continue
            request.computed += count
            if self._caching:
                self._keep_computed(request)
            if request.computed < len(request.tokens):
                continue
            request.decoding = True
            token = next(request.output, None)
            if token is not None:
                request.tokens.append(token)
            reason = request.end_after(token)
            emissions.append(Emission(request, token, reason))
            if reason is not None:
                over = request.finished = True
                self._leave(request)
        if over:
            self.running = [request for request in self.running if not request.finished]
        return emissions

    def _schedule_running(self, plan: PassPlan) -> tuple[int, bool]:
        budget, preempted = self._budget, False
        for request in list(self.running):
            if budget <= 0:
                break
            if not request.table:
                continue
            left = len(request.tokens) - request.computed
            count = min(left, budget)
            if count < left and not self._chunked and plan.work:
                continue
            while not self._grow(request, request.computed + count):
                preempted = True
                victim = self.running[-1] if self._newest_gives_way else self.running[0]
                budget += plan.work.pop(victim, 0)
                self._preempt(victim)
                if victim is request:
                    break
            else:
                plan.work[request] = count
                budget -= count
        return budget, preempted

    def _grow(self, request: EngineRequest, tokens: int) -> bool:
        missing = -(-tokens // self._block_size) - len(request.table)
        return missing <= 0 or self.blocks.allocate(request.table, missing)

    def _preempt(self, victim: EngineRequest) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._forget_progress(victim)
        self.waiting.appendleft(victim)

    def _forget_progress(self, victim: EngineRequest) -> None:
        self.blocks.release(victim.table)
        victim.computed = victim.kept = 0
        victim.decoding = False
        victim.preempted = True

    def _admit(self, plan: PassPlan, budget: int) -> None:
        size = self._block_size
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            length = len(request.tokens)
            matched = self._matched(request)
            left = min(length, 1) if request.arrives else length - matched * size
            count = min(left, budget)
            if count < left and not self._chunked and (self.running or plan.work):
                break
            if not self._fits(request, matched):
                break
            self.waiting.popleft()
            self._begin(request, matched, count)
            plan.work[request] = count
            budget -= count

    def _matched(self, request: EngineRequest) -> int:
        """Blocks of a waiting request that are cached; something must be left to compute, or no token comes out."""
        if not self._caching:
            return 0
        return self.blocks.match(request.sequence_hashes, max(0, len(request.tokens) - 1) // self._block_size)

    def _fits(self, request: EngineRequest, matched: int) -> bool:
        needed = max(1, -(-len(request.tokens) // self._block_size))
        return self.blocks.fits(request.sequence_hashes, matched, needed)

    def _begin(self, request: EngineRequest, matched: int, count: int) -> None:
        """Let a request that fits run: with its cached blocks, and room for the next ``count`` tokens."""
        self.blocks.reuse(request.table, request.sequence_hashes, matched)
        request.kept = matched
        request.computed = matched * self._block_size
        if request.arrives:
            request.computed = len(request.tokens) - count
            request.decoding = True
        elif not request.preempted:
            request.cached_tokens = request.computed
        # An empty prompt still takes a block, so that a running request always has one.
        self._grow(request, max(1, request.computed + count))
        request.preempted = False
        self.running.append(request)

    def _keep_computed(self, request: EngineRequest) -> None:
        """Cache the blocks that are full and computed."""
        end = request.computed // self._block_size
        if end <= request.kept:
            return
        request.hash_until(end)
        for index in range(request.kept, end):
            self._keep_block(request, index)
        request.kept = end

    def _keep_block(self, request: EngineRequest, index: int) -> None:
        parent = request.sequence_hashes[index - 1] if index else None
        self.blocks.cache(
            request.table[index], request.sequence_hashes[index], request.block_hashes[index], parent, (request, index)
        )

    def _leave(self, request: EngineRequest) -> None:
        """A request is done."""
        self.blocks.release(request.table)

    def _measure(self, plan: PassPlan) -> None:
        prefixes, chunks, prompts, contexts = [], [], [], []
        # The modelled time of a recomputation is that of its prompt, without what had been generated.
        timed_prefixes, timed_chunks = [], []
        emitting = emitters = 0
        for request, count in plan.work.items():
            length = len(request.tokens)
            if request.decoding:
                contexts.append(length)
                emitting += length
                emitters += 1
                continue
            prefixes.append(request.computed)
            chunks.append(count)
            prompts.append(request.prompt_length)
            timed_prefixes.append(min(request.computed, request.prompt_length))
            timed_chunks.append(min(request.computed + count, request.prompt_length) - timed_prefixes[-1])
            if request.computed + count == length:
                emitting += max(1, length)
                emitters += 1
        decode = self._timing.decode_ms(emitting, emitters, self._capacity_tokens)
        plan.times = PassTimes(self._timing.prefill_ms(timed_prefixes, timed_chunks), decode)
        plan.scheduled = ScheduledRequests(
            len(chunks),
            sum(chunks),
            _variance(prompts),
            sum(prefixes),
            len(contexts),
            sum(contexts),
            _variance(contexts),
        )
        if self.waiting:
            fresh = [request.prompt_length for request in self.waiting if not request.preempted]
            again = [len(request.tokens) for request in self.waiting if request.preempted]
            plan.queued = QueuedRequests(
                len(fresh), sum(fresh), _variance(fresh), len(again), sum(again), _variance(again)
            )


def _variance(values: Sequence[int]) -> float:
    """Population variance."""
    count = len(values)
    if count < 2:
        return 0.0
    mean = sum(values) / count
    return sum((value - mean) ** 2 for value in values) / count
