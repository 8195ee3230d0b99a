"""Which workers have too much to do to be given more (busy thresholds; spec: router-core D.10). Time is passed in.

A rank is busy by *decode* while the KV blocks that it uses, or those that its decoding requests hold, are more than
``active_decode_blocks`` times its capacity: each signal counts with the last value that the worker told, so a rank that
crossed the threshold by one signal is let go only by news of that signal. It is busy by *prefill* while the prompt
tokens that routers booked there are more than ``active_prefill_tokens``, or more than ``active_prefill_tokens_frac``
times what it computes in one step. A worker is overloaded when all of its ranks are.

What a worker measured counts for ``ttl_s`` and is unknown afterwards, and unknown is never busy: a worker that went
silent after a bad moment would get nothing for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.eligibility import NOBODY
from dynamo_es.router.routing_request import FactsSource

# Workers repeat what they measured every 10 s.
MEASURED_TTL_S = 30.0
# Of a worker that does not say: Dynamo's stand-in, which makes a fraction of it never be reached.
UNKNOWN_MAX_BATCHED_TOKENS = 10_000_000


@dataclass(frozen=True, slots=True)
class BusyThresholds:
    """Dynamo's three thresholds; None: not asked.

    Attributes:
        active_decode_blocks: Fraction (0 to 1) of the rank's KV blocks.
        active_prefill_tokens: Tokens.
        active_prefill_tokens_frac: Multiple of the rank's ``max_num_batched_tokens``.
    """

    active_decode_blocks: float | None = None
    active_prefill_tokens: int | None = None
    active_prefill_tokens_frac: float | None = None

    @property
    def any_set(self) -> bool:
        """Whether anything can be busy at all."""
        return (self.active_decode_blocks, self.active_prefill_tokens, self.active_prefill_tokens_frac) != (None,) * 3


@dataclass(slots=True)
class _Signal:
    value: int | None = None
    at: float = 0.0

    def put(self, value: int | None, at: float) -> None:
        if value is not None and at >= self.at:
            self.value, self.at = value, at

    def fresh(self, now: float, ttl_s: float) -> int | None:
        return self.value if now - self.at <= ttl_s else None


class _Measured:
    __slots__ = ("active_decode_blocks", "kv_used_blocks", "total_kv_blocks")

    def __init__(self) -> None:
        self.kv_used_blocks = _Signal()
        self.active_decode_blocks = _Signal()
        self.total_kv_blocks = _Signal()


class OverloadMonitor:
    """Keeps what workers measured and judges ranks. ``thresholds`` may be replaced at any time.

    Times are seconds of one clock; a measurement from the future counts as one of now. Ranks that are not asked for
    any more are forgotten.
    """

    def __init__(self, thresholds: BusyThresholds, ttl_s: float = MEASURED_TTL_S) -> None:
        self.thresholds = thresholds
        self._ttl_s = ttl_s
        self._measured: dict[WorkerRank, _Measured] = {}

    def observe(
        self,
        rank: WorkerRank,
        *,
        kv_used_blocks: int | None,
        active_decode_blocks: int | None,
        total_kv_blocks: int | None,
        at: float,
        now: float,
    ) -> None:
        """A worker's own measurement; None leaves what was known of that signal."""
        at = min(at, now)
        known = self._measured.setdefault(rank, _Measured())
        known.kv_used_blocks.put(kv_used_blocks, at)
        known.active_decode_blocks.put(active_decode_blocks, at)
        known.total_kv_blocks.put(total_kv_blocks, at)

    def overloaded(
        self,
        ranks: Sequence[WorkerRank],
        facts: FactsSource,
        prefill_tokens: Callable[[WorkerRank], int],
        now: float,
    ) -> frozenset[int]:
        """Ids of the workers all of whose ranks (of ``ranks``, which are all there are) are busy."""
        if not self.thresholds.any_set:
            return NOBODY
        if len(self._measured) > len(ranks):
            self._measured = {rank: self._measured[rank] for rank in ranks if rank in self._measured}
        busy: set[int] = set()
        free: set[int] = set()
        for rank in ranks:
            (busy if self.is_busy(rank, facts, prefill_tokens(rank), now) else free).add(rank.worker_id)
        return frozenset(busy - free)

    def is_busy(self, rank: WorkerRank, facts: FactsSource, prefill_tokens: int, now: float) -> bool:
        """Judge one rank. ``prefill_tokens``: booked there and not computed yet."""
        thresholds = self.thresholds
        known = facts(rank.worker_id)
        limit = thresholds.active_prefill_tokens
        if limit is not None and prefill_tokens > limit:
            return True
        fraction = thresholds.active_prefill_tokens_frac
        if fraction is not None:
            batched = known.max_num_batched_tokens or UNKNOWN_MAX_BATCHED_TOKENS
            if prefill_tokens > fraction * batched:
                return True
        if thresholds.active_decode_blocks is None:
            return False
        measured = self._measured.get(rank)
        if measured is None:
            return False
        total = measured.total_kv_blocks.fresh(now, self._ttl_s) or known.total_kv_blocks
        if not total:
            return False
        ceiling = thresholds.active_decode_blocks * total
        signals = (measured.kv_used_blocks, measured.active_decode_blocks)
        return any((value := signal.fresh(now, self._ttl_s)) is not None and value > ceiling for signal in signals)
