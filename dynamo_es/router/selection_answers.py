"""How the selection service words its choices and refusals (spec: router-core E.5, E.10). Pure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.booked import already_booked
from dynamo_es.router.cost_selector import NO_OVERLAP
from dynamo_es.router.errors import NoEligibleWorker, PinNotAllowed, RouterQueueLimitExceeded, SelectionServiceError
from dynamo_es.router.selection_partition import BookingTaken, Partition, Selected


def selection_answer(partition: Partition, selected: Selected) -> dict[str, Any]:
    """A choice. Overlap is in tokens, the most that any rank of the chosen worker holds; each tier with those above."""
    rank, size = selected.rank, partition.block_size
    spec = selected.worker
    held = {other: selected.overlaps.get(WorkerRank(rank.worker_id, other), NO_OVERLAP) for other in spec.ranks}
    longest = size * max(map(sum, held.values()))
    return {
        "model_name": partition.key.model_name,
        "routing_group": partition.key.routing_group,
        "worker_id": rank.worker_id,
        "dp_rank": rank.dp_rank,
        "endpoint": spec.endpoint,
        "block_size": size,
        "overlap": {
            "longest_matched": longest,
            "gpu": size * max(tiers.device for tiers in held.values()),
            "dp": {str(other): size * tiers.device for other, tiers in held.items()},
            "cpu": size * max(tiers.device + tiers.host for tiers in held.values()),
            "disk": longest,
        },
        "effective_prefill_tokens": selected.best.prefill_tokens,
    }


@contextmanager
def scheduler_errors(request_id: str) -> Iterator[None]:
    """Refusals of the scheduler, as the service words them."""
    try:
        yield
    except BookingTaken as error:
        text = f"failed to book scheduler state: {already_booked(request_id, error.rank)}"
        raise SelectionServiceError("scheduler", 409, text) from error
    except PinNotAllowed as error:
        raise SelectionServiceError("scheduler", 400, str(error)) from error
    except NoEligibleWorker as error:
        raise SelectionServiceError("scheduler", 503, str(error)) from error
    except RouterQueueLimitExceeded as error:
        details: dict[str, str | int] = {
            "policy_class": error.policy_class,
            "limit_kind": error.limit_kind,
            "current": error.current,
            "limit": error.limit,
        }
        raise SelectionServiceError("scheduler", 503, str(error), details) from error
