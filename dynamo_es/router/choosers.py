"""How a worker is chosen, one class a router mode (spec: router-core D.14). Pure: views and candidates are handed in.

Load is what routers booked: it counts from the decision on, so that a burst spreads. The KV mode is in ``kv_chooser``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from dynamo_es.errors import InvalidArgument
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.cost import CandidateCost
from dynamo_es.router.routing_request import FactsSource, RoutingRequest
from dynamo_es.runtime.discovery import choose_device_aware


class Choice(NamedTuple):
    """A worker, and what the choice rested on. Hash lists are empty where the mode does not hash.

    ``tracking_hashes``: identities under which the prompt's blocks are booked. ``prefill_tokens``: to book.
    ``positions``: how far the indexes of other processes were that were asked.
    """

    rank: WorkerRank
    tokens_hashes: Sequence[int]
    sequence_hashes: Sequence[int]
    tracking_hashes: Sequence[int]
    overlap_blocks: int
    cached_tokens: int
    prefill_tokens: int
    costs: Sequence[CandidateCost]
    config_digest: str
    positions: Sequence[tuple[TopicPartition, int]] = ()


class Chooser(Protocol):
    """Chooses among candidates. Books nothing: the caller does."""

    @property
    def mode(self) -> str:
        """Name of the router mode."""

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        """One of ``candidates``: the ranks that may take the request, sorted, at least one.

        Raises:
            InvalidArgument: The request cannot be routed as it is.
        """


def plain_choice(rank: WorkerRank, request: RoutingRequest) -> Choice:
    """A choice that looked at nothing but ranks and their load."""
    return Choice(rank, (), (), (), 0, 0, len(request.token_ids), (), "")


class RoundRobinChooser:
    """Ranks in turn, however the set changes."""

    mode = "round-robin"

    def __init__(self) -> None:
        self._last = WorkerRank(-1, -1)

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        self._last = next((rank for rank in candidates if rank > self._last), candidates[0])
        return plain_choice(self._last, request)


class RandomChooser:
    """Any rank."""

    mode = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        return plain_choice(candidates[self._rng.randrange(len(candidates))], request)


class DirectChooser:
    """The worker that the request names; it must name one."""

    mode = "direct"

    def __init__(self, sequences: ActiveSequences, rng: random.Random) -> None:
        self._least_loaded = LeastLoadedChooser(sequences, rng)

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        if request.worker_id is None:
            raise InvalidArgument("router mode direct sends each request to the worker that it names; it names none")
        return self._least_loaded.choose(request, candidates)


class LeastLoadedChooser:
    """The rank with the fewest requests; ties at random."""

    mode = "least-loaded"

    def __init__(self, sequences: ActiveSequences, rng: random.Random) -> None:
        self._sequences = sequences
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        loads = [self._sequences.load(rank).requests for rank in candidates]
        least = min(loads)
        best = [rank for rank, load in zip(candidates, loads, strict=True) if load == least]
        return plain_choice(best[self._rng.randrange(len(best))], request)


class PowerOfTwoChooser:
    """The less loaded of two ranks that are drawn at random: nearly as even as the least loaded, without a herd."""

    mode = "power-of-two"

    def __init__(self, sequences: ActiveSequences, rng: random.Random) -> None:
        self._sequences = sequences
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        if len(candidates) == 1:
            return plain_choice(candidates[0], request)
        first, second = self._rng.sample(candidates, 2)
        load = self._sequences.load
        return plain_choice(second if load(second).requests < load(first).requests else first, request)


class DeviceAwareChooser:
    """The least loaded rank of the kind of device that has less to do for its strength (``cuda_to_cpu_ratio``)."""

    mode = "device-aware-weighted"

    def __init__(
        self, sequences: ActiveSequences, facts: FactsSource, cuda_to_cpu_ratio: float, rng: random.Random
    ) -> None:
        self._sequences = sequences
        self._facts = facts
        self._ratio = cuda_to_cpu_ratio
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        rank = choose_device_aware(
            candidates,
            lambda item: self._facts(item.worker_id).device_type,
            lambda item: self._sequences.load(item).requests,
            self._ratio,
            self._rng,
        )
        return plain_choice(rank, request)
