"""Choosing by cached prefix and booked load: the KV router mode (spec: router-core D.2–D.9).

The steps can be taken one by one: ``prepare`` hashes a prompt, ``look_up`` asks the indexes, ``choose_prepared`` weighs
the ranks and decides. Where the index of KV events is with other processes, only ``look_up`` asks it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from dynamo_es.clock import Clock
from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.approximate_index import ApproximateIndex
from dynamo_es.router.choosers import Choice
from dynamo_es.router.config import override_settings
from dynamo_es.router.config_settings import KvRouterSettings
from dynamo_es.router.cost import round_half_away
from dynamo_es.router.cost_selector import NO_OVERLAP, CostSelector, Lookup, Overlaps, PreparedPrompt, TierOverlap
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks, hash_prompt
from dynamo_es.router.hashing_arguments import check_arguments
from dynamo_es.router.hashing_tracking import TrackingScope
from dynamo_es.router.routing_request import UNKNOWN_WORKER, FactsSource, RoutingRequest
from dynamo_es.router.tracking import TrackingIdentities
from streams.kv_index_state import KvIndexState

# Of the tracking scope: routers of an endpoint know no groups.
ROUTING_GROUP = "default"


class IndexSource(Protocol):
    """Gives the KV index as it is now."""

    def __call__(self) -> KvIndexState: ...


class RemoteSource(Protocol):
    """The KV index of other processes; ``RemoteIndex`` is one."""

    async def match(self, model: str, hashes: Sequence[int], block_size: int) -> Lookup:
        """What every rank holds of a prompt, as far as it can be had in time. Does not raise for what cannot."""


class ModelSource(Protocol):
    """Gives the name under which the routed model's KV events stand."""

    def __call__(self) -> str: ...


class KvChooser:
    """The cheapest rank by cached prefix and booked load. A ``Chooser``."""

    mode = "kv"

    def __init__(
        self,
        index: IndexSource | None,
        sequences: ActiveSequences,
        *,
        model: ModelSource,
        block_size: int,
        settings: KvRouterSettings,
        rng: random.Random,
        facts: FactsSource = lambda worker_id: UNKNOWN_WORKER,
        approximate: ApproximateIndex | None = None,
        tracking: TrackingIdentities | None = None,
        clock: Clock | None = None,
        decode_only: Callable[[], bool] = lambda: False,
        handed_over: KvRouterSettings | None = None,
        remote: RemoteSource | None = None,
        is_eagle: Callable[[], bool] = lambda: False,
    ) -> None:
        """``approximate`` stands in for the index, or beside it, if the settings have one (then ``clock`` is needed).

        ``decode_only`` says whether the workers compute no prompts. ``handed_over``: settings for requests whose prompt
        another worker computes; None: the same. ``remote``: whom to ask where ``index`` is None. ``is_eagle``: whether
        the workers hash a block with the token behind it, for speculative decoding.
        """
        self._index = index
        self._model = model
        self._block_size = block_size
        self.settings = settings
        self.selector = CostSelector(
            sequences, block_size=block_size, settings=settings, facts=facts, rng=rng, decode_only=decode_only
        )
        self._approximate = approximate
        self._remote = remote if settings.use_kv_events else None
        self._tracking = tracking if tracking is not None else TrackingIdentities(None, "", rng)
        self._clock = clock
        self._is_eagle = is_eagle
        self._handed_over = handed_over if handed_over is not None else settings
        self._digests = {id(known): known.digest() for known in (settings, self._handed_over)}

    @property
    def approximate(self) -> ApproximateIndex | None:
        """The index of what was sent where; None if events tell."""
        return self._approximate

    @property
    def is_remote(self) -> bool:
        """Whether the index is with other processes: without ``look_up`` a choice then knows of no KV events."""
        return self._remote is not None

    def is_informed(self) -> bool:
        """Whether the cache of any worker is known, or can be with those who are asked. Cheap."""
        if self._approximate is not None or self._remote is not None:
            return True
        if not self.settings.use_kv_events or self._index is None:
            return False
        return self._index().knows(self._model(), self._block_size)

    def choose(self, request: RoutingRequest, candidates: Sequence[WorkerRank]) -> Choice:
        return self.choose_prepared(request, self.prepare(request), candidates)

    def prepare(self, request: RoutingRequest) -> PreparedPrompt:
        """Hash the prompt and apply the request's overrides.

        Raises:
            InvalidArgument: The prompt is empty or no list of u32, or an override is wrong.
        """
        if not request.token_ids:
            raise InvalidArgument("token_ids must not be empty")
        return self.prepare_query(request)

    def prepare_query(self, request: RoutingRequest) -> PreparedPrompt:
        """As ``prepare``, but an empty prompt is fine: for questions that choose nobody."""
        settings = self._settings_for(request)
        tokens_hashes, sequence_hashes, mm_hashes = self._hash(request)
        tracked: Sequence[int] = ()
        if settings.router_track_active_blocks:
            tracked = sequence_hashes
            if self._tracking.is_keyed or not settings.router_assume_kv_reuse:
                scope = TrackingScope(
                    self._model(), ROUTING_GROUP, self._block_size, request.cache_namespace, request.lora_name
                )
                tracked = self._tracking.identities(
                    request.token_ids,
                    sequence_hashes,
                    scope,
                    assume_reuse=settings.router_assume_kv_reuse,
                    mm_hashes=mm_hashes,
                )
        return PreparedPrompt(len(request.token_ids), tokens_hashes, sequence_hashes, tracked, settings)

    async def look_up(self, prompt: PreparedPrompt) -> Lookup:
        """What every rank holds of a prompt. Waits for nothing unless the index is with other processes."""
        if self._remote is None:
            return Lookup(self.overlaps(prompt), {})
        told = await self._remote.match(self._model(), prompt.sequence_hashes, self._block_size)
        return Lookup(self._with_approximate(dict(told.overlaps), prompt.sequence_hashes), told.positions)

    def overlaps(self, prompt: PreparedPrompt) -> Overlaps:
        """What every rank holds of a prompt, as far as this process knows; ranks that hold nothing are absent."""
        found: dict[WorkerRank, TierOverlap] = {}
        hashes = prompt.sequence_hashes
        if self.settings.use_kv_events and self._index is not None:
            for source, device, host, disk in self._index().match(self._model(), hashes, self._block_size):
                key = source.key
                found[WorkerRank(key.worker_id, key.dp_rank)] = TierOverlap(device, host, disk)
        return self._with_approximate(found, hashes)

    def _with_approximate(self, found: dict[WorkerRank, TierOverlap], hashes: Sequence[int]) -> Overlaps:
        if self._approximate is not None and self._clock is not None:
            for rank, depth in self._approximate.match(hashes, self._clock.monotonic()).items():
                known = found.get(rank, NO_OVERLAP)
                # What the side index adds beyond device memory takes away from what lower tiers add.
                if depth > known[0]:
                    beyond = max(sum(known[:2]), depth)
                    found[rank] = TierOverlap(depth, beyond - depth, max(sum(known), depth) - beyond)
        return found

    def choose_prepared(
        self,
        request: RoutingRequest,
        prompt: PreparedPrompt,
        candidates: Sequence[WorkerRank],
        known: Lookup | None = None,
    ) -> Choice:
        """As ``choose``, for a prompt that is hashed (and looked up) already."""
        settings = prompt.settings
        overlaps, positions = (self.overlaps(prompt), {}) if known is None else known
        best, costs = self.selector.choose(request, prompt, candidates, overlaps)
        return Choice(
            rank=best.candidate.rank,
            tokens_hashes=prompt.tokens_hashes,
            sequence_hashes=prompt.sequence_hashes,
            tracking_hashes=prompt.tracking_hashes,
            overlap_blocks=round_half_away(best.effective_overlap),
            cached_tokens=best.cached_tokens,
            prefill_tokens=best.prefill_tokens if settings.router_track_prefill_tokens else 0,
            costs=costs,
            config_digest=self._digests.get(id(settings)) or settings.digest(),
            positions=tuple(positions.items()),
        )

    def note(self, choice: Choice) -> None:
        """The choice was acted upon: an approximate index learns of it."""
        if self._approximate is not None and self._clock is not None:
            self._approximate.note(choice.rank, choice.tokens_hashes, choice.sequence_hashes, self._clock.monotonic())

    def _hash(self, request: RoutingRequest) -> tuple[list[int], list[int], Sequence[Sequence[int]]]:
        """Tokens hashes and sequence hashes of the prompt's complete blocks, and the hashes of its objects by block."""
        seed = block_seed(request.lora_name, request.cache_namespace)
        if request.block_mm_infos is not None:
            return self._hash_objects(request, seed)
        try:
            return (*hash_prompt(request.token_ids, self._block_size, seed, is_eagle=self._is_eagle()), ())
        except (TypeError, OverflowError) as error:
            raise InvalidArgument(f"token_ids: {error}") from error

    def _hash_objects(self, request: RoutingRequest, seed: int) -> tuple[list[int], list[int], Sequence[Sequence[int]]]:
        try:
            tokens, _, mm_hashes = check_arguments(
                request.token_ids,
                self._block_size,
                request.block_mm_infos,
                request.lora_name,
                None,
                request.cache_namespace,
            )
        except Exception as error:
            # Dynamo's hash function says with exactly this class that ``block_mm_infos`` is malformed.
            raise InvalidArgument(f"block_mm_infos: {error}") from error
        tokens_hashes = hash_blocks(tokens, self._block_size, seed, is_eagle=self._is_eagle(), mm_hashes=mm_hashes)
        return tokens_hashes, compute_sequence_hashes(tokens_hashes), mm_hashes

    def _settings_for(self, request: RoutingRequest) -> KvRouterSettings:
        settings = self._handed_over if request.prompt_computed else self.settings
        if not request.config_override:
            return settings
        try:
            return override_settings(settings, request.config_override)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(str(error)) from error
