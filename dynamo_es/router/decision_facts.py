"""A routing decision as attributes of a trace. Pure; ids and numbers only."""

from __future__ import annotations

from dynamo_es.router.booked import Booked
from dynamo_es.router.choosers import Choice
from dynamo_es.runtime.tracing import Attribute

MAX_CANDIDATES = 16
MAX_POSITIONS = 32


def decision_facts(booked: Booked, mode: str) -> dict[str, Attribute]:
    """The choice and what it rested on, the best candidates and the first log positions only. Ids are text: they do
    not fit into a number of OpenTelemetry.
    """
    choice = booked.choice
    return {
        "dynamo.worker_id": str(choice.rank.worker_id),
        "dynamo.dp_rank": choice.rank.dp_rank,
        "dynamo.router_mode": mode,
        "dynamo.overlap_blocks": choice.overlap_blocks,
        "dynamo.cached_tokens": choice.cached_tokens,
        "dynamo.prompt_tokens": booked.isl_tokens,
        "dynamo.decided_us": booked.decided_us,
        "dynamo.config_digest": choice.config_digest,
        "dynamo.candidate_count": len(choice.costs),
        "dynamo.candidates": _candidates(choice),
        "dynamo.log_positions": [
            f"{position.topic}/{position.partition}@{offset}" for position, offset in booked.positions[:MAX_POSITIONS]
        ],
    }


def _candidates(choice: Choice) -> list[str]:
    """``<worker>:<rank> overlap=<blocks> cost=<blocks>``, the cheapest first."""
    best = sorted(choice.costs, key=lambda item: item.cost)[:MAX_CANDIDATES]
    return [
        f"{item.candidate.rank.worker_id}:{item.candidate.rank.dp_rank} overlap={item.effective_overlap:g} "
        f"cost={item.cost:g}"
        for item in best
    ]
