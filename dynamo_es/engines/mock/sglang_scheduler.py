"""SGLang's scheduling of one rank of the mock engine. Pure.

What differs from vLLM's:

- A pass computes prompts or gives tokens, not both, and prompts come first. A prompt above ``chunked_prefill_size`` is
  computed in parts, and nobody generates before it is through; a pass takes no more than ``max_prefill_tokens``.
- A waiting request is let in if its prompt and its output (``clip_max_new_tokens`` of it at most) fit beside what the
  running ones may still generate, of which a share is kept free. The share begins at 0.7 x
  ``schedule_conservativeness``, falls with every pass that goes well, and rises when somebody had to give way.
- Who gives way has generated least, and of those the longest prompt, and queues again at the end.
- The waiting are served in the order of arrival, or by what is cached of their prompts (``lpm``).
- The cache is a tree of pages: a page that is cached already is shared at once, not kept twice. What a prompt gave is
  cached after its pass, what was generated when the request is done.
"""

from __future__ import annotations

from dynamo_es.engines.mock.config import MockEngineConfig
from dynamo_es.engines.scheduling.block_manager import BlockManager
from dynamo_es.engines.scheduling.request import EngineRequest, PassPlan
from dynamo_es.engines.scheduling.scheduler import UNLIMITED, Scheduler
from dynamo_es.engines.scheduling.timing import TimingModel

# SGLang's own figures.
_FIRST_SHARE = 0.7
_LEAST_SHARE_OF_FIRST = 0.14
_PASSES_TO_LEAST = 600
_TOKENS_AHEAD = 20
# Beyond so many waiting requests SGLang does not look for the longest match any more.
_MOST_MATCHED = 128


class SglangScheduler(Scheduler):
    """One rank, as SGLang would run it."""

    def __init__(self, config: MockEngineConfig, blocks: BlockManager, timing: TimingModel | None = None) -> None:
        super().__init__(config, blocks, timing)
        settings = config.sglang
        self._by_match = settings.schedule_policy == "lpm"
        self._prefill_limit = settings.max_prefill_tokens
        # Parts end where pages do, except where a page is larger than a part.
        pages = settings.chunked_prefill_size // self._block_size * self._block_size
        self._chunk = (pages or settings.chunked_prefill_size) if self._chunked else UNLIMITED
        self._clip = settings.clip_max_new_tokens
        self._first_share = min(1.0, _FIRST_SHARE * settings.schedule_conservativeness)
        self._least_share = self._first_share * _LEAST_SHARE_OF_FIRST
        self.share = self._first_share

    def schedule(self) -> PassPlan:
        plan = PassPlan()
        budget = self._go_on_with_prompt(plan)
        if budget > 0:
            self._let_in(plan, budget)
        if not plan.work:
            self._decode(plan)
        self._measure(plan)
        return plan

    def _go_on_with_prompt(self, plan: PassPlan) -> int:
        """Compute the next part of the prompt that is under way; what is left of the pass's part for others."""
        budget = self._chunk
        for request in self.running:
            if request.decoding:
                continue
            count = min(len(request.tokens) - request.computed, budget)
            # Its room is kept free, see _promised.
            self._grow(request, request.computed + count)
            plan.work[request] = count
            budget -= count
            if budget <= 0:
                break
        return budget

    def _let_in(self, plan: PassPlan, budget: int) -> None:
        taken = sum(plan.work.values())
        for request in self._in_order():
            if budget <= 0 or len(self.running) >= self._max_running:
                break
            matched = self._matched(request)
            length = len(request.tokens)
            left = min(1, length) if request.arrives else length - matched * self._block_size
            count = self._part(left, budget)
            over_limit = taken + left > self._prefill_limit and bool(plan.work)
            if not request.arrives and (over_limit or (left and not count)):
                break
            if not self._fits(request, matched):
                break
            self.waiting.remove(request)
            arrives = request.arrives
            self._begin(request, matched, count)
            if arrives:
                continue  # It generates with the others, in the next pass that does.
            plan.work[request] = count
            budget -= count
            taken += left

    def _part(self, left: int, budget: int) -> int:
        """How much of a prompt a pass begins with: all of it, or whole pages if there are any."""
        if left <= budget:
            return left
        pages = budget // self._block_size * self._block_size
        return pages or (budget if budget == self._chunk else 0)

    def _in_order(self) -> list[EngineRequest]:
        waiting = list(self.waiting)
        if self._by_match and self._caching and len(waiting) <= _MOST_MATCHED:
            waiting.sort(key=self._matched, reverse=True)
        return waiting

    def _fits(self, request: EngineRequest, matched: int) -> bool:
        output = min(request.max_tokens - request.generated, self._clip)
        # The last token is sampled and never computed.
        needed = max(1, -(-(len(request.tokens) + output - 1) // self._block_size))
        promised = sum(map(self._promised, self.running))
        return self.blocks.fits(request.sequence_hashes, matched, needed, promised)

    def _promised(self, running: EngineRequest) -> int:
        """Blocks that are kept free for a running request: for the rest of its prompt, and a share of its output."""
        output = min(running.max_tokens - running.generated, self._clip) * self.share
        length = len(running.tokens) + int(output)
        return max(0, -(-length // self._block_size) - len(running.table))

    def _decode(self, plan: PassPlan) -> None:
        given_way = 0
        while self.running:
            missing = sum(-(-len(request.tokens) // self._block_size) - len(request.table) for request in self.running)
            if missing <= self.blocks.available:
                break
            self._preempt(min(self.running, key=lambda request: (request.generated, -request.prompt_length)))
            given_way += 1
        for request in self.running:
            self._grow(request, len(request.tokens))
            plan.work[request] = len(request.tokens) - request.computed
        if given_way:
            self._raise_share()
        else:
            self.share = max(self._least_share, self.share - (self._first_share - self._least_share) / _PASSES_TO_LEAST)

    def _raise_share(self) -> None:
        generated = sum(request.generated for request in self.running)
        promised = sum(request.max_tokens for request in self.running)
        self.share = min(1.0, (generated + _TOKENS_AHEAD * len(self.running)) / (promised + 1))

    def _preempt(self, victim: EngineRequest) -> None:
        self.preemptions += 1
        self.running.remove(victim)
        self._forget_progress(victim)
        self.waiting.append(victim)

    def _keep_computed(self, request: EngineRequest) -> None:
        # Also a prompt that arrived, which no pass computed.
        if not request.decoding or request.kept < request.prompt_length // self._block_size:
            super()._keep_computed(request)

    def _leave(self, request: EngineRequest) -> None:
        if self._caching:
            super()._keep_computed(request)
        super()._leave(request)

    def _keep_block(self, request: EngineRequest, index: int) -> None:
        if not self.blocks.share(request.table, index, request.sequence_hashes[index]):
            super()._keep_block(request, index)
