"""Continuous batching of one rank of the mock engine (spec/services h.6). Pure.

``schedule`` decides what the next pass computes, ``complete`` is its end: blocks are cached, tokens come out. Between
the two, requests may be added and aborted.

A request whose prompt another worker computed comes with its KV blocks: it takes their room, and generates at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dynamo_es.engines.mock.block_manager import BlockManager
from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.mock.timing import PassTimes, decode_ms, prefill_ms
from dynamo_es.router.hashing import HASH_SEED, compute_sequence_hashes, hash_blocks
from schemas.forward_pass import QueuedRequests, ScheduledRequests

ADMISSION_ERROR = "request rejected: request exceeds worker admission limits"
_UNLIMITED = 2**62


class MockRequest:
    """A request in the engine. ``tokens`` is the prompt with what was generated so far."""

    __slots__ = (
        "arrived_from", "block_hashes", "cached_tokens", "computed", "decoding", "finished", "max_tokens", "output",
        "preempted", "prompt_length", "seed", "sequence_hashes", "table", "tokens", "transferred",
    )  # fmt: skip

    def __init__(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        output: Iterator[int],
        seed: int = HASH_SEED,
        transferred: bool = False,
    ) -> None:
        """``output`` gives the generated tokens, and may end before ``max_tokens``. ``seed``: ``block_seed``.
        ``transferred``: another worker computed the prompt.
        """
        self.transferred = transferred
        self.arrived_from: int | None = None
        self.tokens = list(prompt)
        self.prompt_length = len(self.tokens)
        self.max_tokens = max_tokens
        self.output = output
        self.seed = seed
        self.block_hashes: list[int] = []
        self.sequence_hashes: list[int] = []
        self.table: list[int] = []
        self.computed = 0
        self.cached_tokens = 0
        self.decoding = False
        self.preempted = False
        self.finished = False

    @property
    def generated(self) -> int:
        """Tokens that came out."""
        return len(self.tokens) - self.prompt_length


class Emission(NamedTuple):
    """What a request gets from a pass: a token (None: it had no more), and why it is over, if it is."""

    request: MockRequest
    token: int | None
    finish_reason: str | None


@dataclass(slots=True)
class PassPlan:
    """One pass: how many tokens of which requests are computed."""

    work: dict[MockRequest, int] = field(default_factory=dict)
    times: PassTimes = field(default_factory=lambda: PassTimes(0.0, 0.0))
    scheduled: ScheduledRequests = field(default_factory=ScheduledRequests)
    queued: QueuedRequests = field(default_factory=QueuedRequests)


class MockScheduler:
    """One rank. Requests run in the order of admission; waiting ones are admitted in the order in which they came."""

    def __init__(self, config: MockEngineConfig, blocks: BlockManager) -> None:
        self._block_size = config.block_size
        self._caching = config.enable_prefix_caching
        self._chunked = config.enable_chunked_prefill
        self._max_running = config.max_num_seqs or _UNLIMITED
        self._budget = config.max_num_batched_tokens or _UNLIMITED
        self._newest_gives_way = config.preemption_mode == "lifo"
        self._decode_takes_time = config.worker_type != "prefill"
        self._max_model_len = config.max_model_len
        self._capacity_tokens = config.num_gpu_blocks * config.block_size
        self.blocks = blocks
        self.running: list[MockRequest] = []
        self.waiting: deque[MockRequest] = deque()
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

    def add(self, request: MockRequest) -> None:
        """Queue a request that ``refusal`` did not refuse."""
        if self._caching:
            request.block_hashes = hash_blocks(request.tokens, self._block_size, request.seed)
            request.sequence_hashes = compute_sequence_hashes(request.block_hashes)
        self.waiting.append(request)

    def abort(self, request: MockRequest) -> None:
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
        over, size = False, self._block_size
        for request, count in plan.work.items():
            if request.finished:
                continue
            before = request.computed if request.arrived_from is None else request.arrived_from
            request.arrived_from = None
            request.computed += count
            if self._caching and request.computed // size > before // size:
                self._cache_full_blocks(request, before)
            if request.computed < len(request.tokens):
                continue
            request.decoding = True
            token = next(request.output, None)
            if token is not None:
                request.tokens.append(token)
            reason = "stop" if token is None else "length" if request.generated >= request.max_tokens else None
            emissions.append(Emission(request, token, reason))
            if reason is not None:
                over = request.finished = True
                self.blocks.release(request.table)
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

    def _grow(self, request: MockRequest, tokens: int) -> bool:
        missing = -(-tokens // self._block_size) - len(request.table)
        return missing <= 0 or self.blocks.allocate(request.table, missing)

    def _preempt(self, victim: MockRequest) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self.blocks.release(victim.table)
        victim.computed = 0
        victim.decoding = False
        victim.preempted = True
        self.waiting.appendleft(victim)

    def _admit(self, plan: PassPlan, budget: int) -> None:
        size = self._block_size
        while self.waiting and budget > 0 and len(self.running) < self._max_running:
            request = self.waiting[0]
            length = len(request.tokens)
            # Something must be left to compute, or no token comes out.
            matched = self.blocks.match(request.sequence_hashes, max(0, length - 1) // size) if self._caching else 0
            arrives = request.transferred and not request.preempted
            left = min(length, 1) if arrives else length - matched * size
            count = min(left, budget)
            if count < left and not self._chunked and (self.running or plan.work):
                break
            if not self.blocks.fits(request.sequence_hashes, matched, max(1, -(-length // size))):
                break
            self.waiting.popleft()
            self.blocks.reuse(request.table, request.sequence_hashes, matched)
            request.computed = matched * size
            if arrives:
                request.arrived_from, request.computed = request.computed, length - left
                request.decoding = True
            # An empty prompt still takes a block, so that a running request always has one.
            self._grow(request, max(1, request.computed + count))
            if not request.preempted and not arrives:
                request.cached_tokens = request.computed
            request.preempted = False
            self.running.append(request)
            plan.work[request] = count
            budget -= count

    def _cache_full_blocks(self, request: MockRequest, computed_before: int) -> None:
        size = self._block_size
        first, end = computed_before // size, request.computed // size
        hashes, sequences = request.block_hashes, request.sequence_hashes
        if len(hashes) < end:
            fresh = hash_blocks(request.tokens[len(hashes) * size : end * size], size, request.seed)
            sequences += compute_sequence_hashes(fresh, sequences[-1] if sequences else None)
            hashes += fresh
        for index in range(first, end):
            parent = sequences[index - 1] if index else None
            self.blocks.cache(request.table[index], sequences[index], hashes[index], parent)

    def _measure(self, plan: PassPlan) -> None:
        prefixes, chunks, prompts, contexts = [], [], [], []
        # The modelled time of a recomputation is that of its prompt, without what had been generated.
        timed_prefixes, timed_chunks = [], []
        emitting = 0
        for request, count in plan.work.items():
            length = len(request.tokens)
            if request.decoding:
                contexts.append(length)
                emitting += length
                continue
            prefixes.append(request.computed)
            chunks.append(count)
            prompts.append(request.prompt_length)
            timed_prefixes.append(min(request.computed, request.prompt_length))
            timed_chunks.append(min(request.computed + count, request.prompt_length) - timed_prefixes[-1])
            if request.computed + count == length:
                emitting += max(1, length)
        decode = decode_ms(emitting, self._capacity_tokens) if self._decode_takes_time else 0.0
        plan.times = PassTimes(prefill_ms(timed_prefixes, timed_chunks), decode)
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
