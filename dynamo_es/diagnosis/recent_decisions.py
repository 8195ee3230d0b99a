"""Recent decisions, summed up by model. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dynamo_es.router.decision_reasons import decision_reason
from schemas.requests import Candidate, Routed


@dataclass(slots=True)
class RecentDecisions:
    """Of one model, as ``RoutingReport`` counts them; ``mode`` is that of the newest one.

    Several routers may write to one log. Blocks are those of decisions in KV mode. Overlap is in blocks of all tiers
    alike: the weights that the router had are not in the log.
    """

    mode: str = ""
    newest_ms: int = -1
    decisions: Counter[str] = field(default_factory=Counter)
    queried_blocks: int = 0
    matched_blocks: int = 0
    selected_blocks: int = 0

    def add(self, event: Routed, timestamp_ms: int) -> None:
        """Count a decision."""
        if timestamp_ms >= self.newest_ms:
            self.mode, self.newest_ms = event.mode, timestamp_ms
        overlaps = [_overlap(candidate) for candidate in event.candidates]
        best = max(overlaps, default=0)
        # Of the choice, too: its weighted overlap is rounded, and a single block on disk may be none in it.
        chosen = next(
            (
                overlap
                for candidate, overlap in zip(event.candidates, overlaps, strict=True)
                if (candidate.worker_id, candidate.dp_rank) == (event.worker_id, event.dp_rank)
            ),
            event.overlap_blocks,
        )
        reason = decision_reason(event.mode, event.isl_tokens, event.block_size, chosen, overlaps, best, informed=True)
        self.decisions[reason] += 1
        if event.mode != "kv":
            return
        self.queried_blocks += len(event.sequence_hashes) >> 3
        self.matched_blocks += best
        self.selected_blocks += event.overlap_blocks


def _overlap(candidate: Candidate) -> int:
    return candidate.device_blocks + candidate.host_blocks + candidate.disk_blocks
