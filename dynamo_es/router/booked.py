"""What a router remembers of a request that it booked, and what it counts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.choosers import Choice
from dynamo_es.router.cost import round_half_away
from dynamo_es.router.decision_reasons import decision_reason
from schemas.requests import Stage
from streams.requests import BookingKey


@dataclass(slots=True)
class Booked:
    """An open booking of this router. Times are a monotonic clock's seconds.

    ``session``: digest of its session, or empty. ``prefill_s``: how long the prompt is expected to take; None: unknown.
    ``positions``, ``decided_us``: as in ``Routed``. ``is_known``: the log has it, or will;
    ``is_current``: as it was announced last. ``trace``: its ``traceparent``, or empty.
    """

    key: BookingKey
    choice: Choice
    routed_at: float
    isl_tokens: int
    expected_output_tokens: int | None
    session: bytes
    prefill_s: float | None
    stage: Stage
    positions: Sequence[tuple[TopicPartition, int]] = ()
    decided_us: int = 0
    is_known: bool = False
    is_current: bool = False
    first_token_at: float | None = None
    output_tokens: int = 0
    trace: str = ""


@dataclass(slots=True)
class RouterCounters:
    """For metrics. Blocks of prompts: ``queried`` all, ``matched`` those that the best candidate had, ``selected``
    those that the chosen one had.
    """

    decisions: dict[str, int] = field(default_factory=dict)
    queried_blocks: int = 0
    matched_blocks: int = 0
    selected_blocks: int = 0

    def count(self, mode: str, choice: Choice, isl_tokens: int, block_size: int, *, informed: bool) -> None:
        """Count a decision, by why it went as it did. ``informed``: the cache of some worker was known."""
        overlaps = [item.effective_overlap for item in choice.costs]
        best = max(overlaps, default=0.0)
        chosen: float = choice.overlap_blocks
        if best and not chosen:
            # It is rounded: a single block on disk would be none.
            chosen = next((item.effective_overlap for item in choice.costs if item.candidate.rank == choice.rank), 0.0)
        reason = decision_reason(mode, isl_tokens, block_size, chosen, overlaps, best, informed=informed)
        self.decisions[reason] = self.decisions.get(reason, 0) + 1
        self.queried_blocks += len(choice.sequence_hashes)
        self.matched_blocks += round_half_away(best)
        self.selected_blocks += choice.overlap_blocks


def already_booked(request_id: str, rank: WorkerRank) -> str:
    """Dynamo's words for a booking whose request id is taken."""
    return (
        f"Request {request_id} already exists (assigned to worker "
        f"WorkerWithDpRank {{ worker_id: {rank.worker_id}, dp_rank: {rank.dp_rank} }})"
    )
