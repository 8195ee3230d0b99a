"""How a worker is chosen, one class a router mode. Pure: views and candidates are handed in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.config import KvRouterSettings, override_settings
from dynamo_es.router.cost import CandidateCost, CandidateInput, choose_candidate, cost_candidates, round_half_away
from dynamo_es.router.errors import NoEligibleWorker
from dynamo_es.router.hashing import block_seed, compute_block_hash_for_seq, compute_sequence_hashes, hash_prompt
from streams.kv_index_state import KvIndexState, Overlap

_NO_OVERLAP = (None, 0, 0, 0)
NO_WORKER = "no endpoints available to route work"


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a decision needs of a request.

    ``token_ids``: the prompt as it is hashed (with multimodal placeholders where the engine has them).
    ``worker_id``, ``dp_rank``: pins; either may be given alone.
    """

    request_id: str
    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_namespace: str | None = None
    block_mm_infos: Sequence[dict[str, Any] | None] | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    config_override: Mapping[str, Any] | None = None


class Choice(NamedTuple):
    """A worker, and what the choice rested on. Hash lists are empty where the mode does not hash."""

    rank: WorkerRank
    tokens_hashes: Sequence[int]
    sequence_hashes: Sequence[int]
    overlap_blocks: int
    cached_tokens: int
    prefill_tokens: int
    costs: Sequence[CandidateCost]
    config_digest: str


class Chooser(Protocol):
    """Chooses among candidates. Books nothing: the caller does."""

    @property
    def mode(self) -> str:
        """Name of the router mode."""

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        """One of ``candidates`` (sorted).

        Raises:
            NoEligibleWorker: None may take it.
            InvalidArgument: The request cannot be routed as it is.
        """


def eligible(request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Sequence[WorkerRank]:
    """Candidates that the request's pins leave. Raises ``NoEligibleWorker`` if there are none."""
    if request.worker_id is not None:
        candidates = [rank for rank in candidates if rank.worker_id == request.worker_id]
    if request.dp_rank is not None:
        candidates = [rank for rank in candidates if rank.dp_rank == request.dp_rank]
    if not candidates:
        raise NoEligibleWorker(NO_WORKER)
    return candidates


def _plain_choice(rank: WorkerRank, request: RoutingRequest) -> Choice:
    return Choice(rank, (), (), 0, 0, len(request.token_ids), (), "")


class RoundRobinChooser:
    """Ranks in turn, however the set changes."""

    mode = "round-robin"

    def __init__(self) -> None:
        self._last = WorkerRank(-1, -1)

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        found = eligible(request, candidates)
        self._last = next((rank for rank in found if rank > self._last), found[0])
        return _plain_choice(self._last, request)


class RandomChooser:
    """Any rank."""

    mode = "random"

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        found = eligible(request, candidates)
        return _plain_choice(found[self._rng.randrange(len(found))], request)


class KvChooser:
    """The cheapest rank by cached prefix and booked load."""

    mode = "kv"

    def __init__(
        self,
        index: IndexSource,
        sequences: ActiveSequences,
        *,
        model: ModelSource,
        block_size: int,
        settings: KvRouterSettings,
        rng: random.Random,
    ) -> None:
        self._index = index
        self._sequences = sequences
        self._model = model
        self._block_size = block_size
        self.settings = settings
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        if not request.token_ids:
            raise InvalidArgument("token_ids must not be empty")
        found = eligible(request, candidates)
        settings = self._settings_for(request)
        tokens_hashes, sequence_hashes = self.hash(request)
        costs = self.costs(sequence_hashes, len(request.token_ids), found, settings)
        best = choose_candidate(costs, settings.router_temperature, self._rng)
        return Choice(
            rank=best.candidate.rank,
            tokens_hashes=tokens_hashes,
            sequence_hashes=sequence_hashes,
            overlap_blocks=round_half_away(best.effective_overlap),
            cached_tokens=best.cached_tokens,
            prefill_tokens=best.prefill_tokens if settings.router_track_prefill_tokens else 0,
            costs=costs,
            config_digest=settings.digest() if settings is not self.settings else self._digest(),
        )

    def hash(self, request: RoutingRequest) -> tuple[list[int], list[int]]:
        """Tokens hashes and sequence hashes of the prompt's complete blocks."""
        if request.block_mm_infos is not None:
            tokens_hashes = compute_block_hash_for_seq(
                request.token_ids,
                self._block_size,
                request.block_mm_infos,
                request.lora_name,
                None,
                request.cache_namespace,
            )
            return tokens_hashes, compute_sequence_hashes(tokens_hashes)
        try:
            return hash_prompt(
                request.token_ids, self._block_size, block_seed(request.lora_name, request.cache_namespace)
            )
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"token_ids: {error}") from error

    def costs(
        self,
        sequence_hashes: Sequence[int],
        isl_tokens: int,
        candidates: Sequence[WorkerRank],
        settings: KvRouterSettings,
    ) -> list[CandidateCost]:
        """Cost of every candidate for a prompt, from the views as they are now."""
        overlaps: dict[tuple[int, int], Overlap] = {}
        if settings.use_kv_events:
            for overlap in self._index().match(self._model(), sequence_hashes, self._block_size):
                key = overlap.source.key
                overlaps[key.worker_id, key.dp_rank] = overlap
        load, new_blocks = self._sequences.load, self._sequences.new_blocks
        tracked = sequence_hashes if settings.router_track_active_blocks else ()
        inputs = []
        for rank in candidates:
            _, device, host, disk = overlaps.get(rank, _NO_OVERLAP)
            inputs.append(CandidateInput(rank, device, host, disk, load(rank), new_blocks(rank, tracked)))
        return cost_candidates(inputs, isl_tokens, self._block_size, settings.weights())

    def _settings_for(self, request: RoutingRequest) -> KvRouterSettings:
        if not request.config_override:
            return self.settings
        try:
            return override_settings(self.settings, request.config_override)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(str(error)) from error

    def _digest(self) -> str:
        if self._known_digest[0] is not self.settings:
            self._known_digest = (self.settings, self.settings.digest())
        return self._known_digest[1]

    _known_digest: tuple[KvRouterSettings | None, str] = (None, "")


class IndexSource(Protocol):
    """Gives the KV index as it is now."""

    def __call__(self) -> KvIndexState: ...


class ModelSource(Protocol):
    """Gives the name under which the routed model's KV events stand."""

    def __call__(self) -> str: ...
