"""Who may take a request (spec: router-core D.6, D.7). Pure.

In this order: the request's allowed workers, its required taints, the overloaded set; and a pin goes before all of it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.errors import AllWorkersOverloaded, NoEligibleWorker, PinNotAllowed
from dynamo_es.router.routing_request import FactsSource, RoutingRequest

NO_WORKER = "no endpoints available to route work"
NOBODY: frozenset[int] = frozenset()
_F32 = struct.Struct("<f")


def eligible_ranks(
    request: RoutingRequest,
    ranks: Sequence[WorkerRank],
    facts: FactsSource,
    overloaded: Collection[int] = NOBODY,
) -> Sequence[WorkerRank]:
    """The ranks of ``ranks`` that may take the request, in their order; at least one.

    ``overloaded``: ids of workers that are above a busy threshold.

    Raises:
        NoEligibleWorker: Pin, allowed workers and taints leave nobody.
        PinNotAllowed: The pinned worker is not among the allowed ones.
        AllWorkersOverloaded: Who is left is overloaded.
    """
    allowed, pinned = request.allowed_worker_ids, request.worker_id
    if pinned is not None:
        if allowed is not None and pinned not in allowed:
            raise PinNotAllowed(pinned)
        ranks = [rank for rank in ranks if rank.worker_id == pinned]
    elif allowed is not None:
        ranks = [rank for rank in ranks if rank.worker_id in allowed]
    if request.dp_rank is not None:
        ranks = [rank for rank in ranks if rank.dp_rank == request.dp_rank]
    if request.constraints is not None and request.constraints.required_taints:
        required = frozenset(request.constraints.required_taints)
        ranks = [rank for rank in ranks if required <= facts(rank.worker_id).taints]
    if not ranks:
        raise NoEligibleWorker(NO_WORKER)
    if overloaded:
        free = [rank for rank in ranks if rank.worker_id not in overloaded]
        if not free:
            raise AllWorkersOverloaded(
                "all eligible workers are overloaded" if pinned is None else f"pinned worker {pinned} is overloaded"
            )
        return free
    return ranks


def taint_multiplier(preferred: Mapping[str, float], taints: Collection[str]) -> float:
    """What the cost of a worker with ``taints`` is multiplied with: from 1/e (most preferred) to e; 1 is neutral."""
    weight = sum(value for taint, value in preferred.items() if taint in taints)
    try:
        # Dynamo adds the weights up in single precision.
        (weight,) = _F32.unpack(_F32.pack(weight))
    except OverflowError:
        weight = math.copysign(math.inf, weight)
    return 1.0 if math.isnan(weight) else math.exp(-math.tanh(weight))
