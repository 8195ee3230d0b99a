"""Which data centre a prompt should go to: what its pools hold, whether they can serve it, how busy they are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.router.hashing import block_seed, hash_prompt
from schemas.dc_relay import LoadSignal, ModelReadiness, PoolStatus, RelayPool
from streams.dc_relay_state import DataCentre, DcRelayState, Pool


@dataclass(frozen=True, slots=True)
class PromptQuery:
    """What is asked.

    Attributes:
        model: Name of the model, an alias of it, or a LoRA adapter.
        token_ids: The prompt.
        lora_name: Adapter that its blocks are hashed with; None: ``model`` if that is an adapter.
        cache_salt: Cache namespace that its blocks are hashed with.
    """

    model: str
    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """A pool that has the model; or a data centre that can serve it and has no pool, as its workers tell no blocks.

    Attributes:
        entry: What the data centre told of the model.
        pool: None: it has none.
        matched_blocks: Leading blocks of the prompt that some worker of the pool holds; no single one need hold all.
        known: Its blocks are known; otherwise nothing is matched.
        ready: Its data centre can serve the model.
        stale: Its data centre was not heard of for too long; what is said of it may be over.
        age_s: Time since it was.
        status: What its relay told last of the pool.
    """

    dc_id: str
    entry: ModelReadiness
    pool: RelayPool | None
    matched_blocks: int
    known: bool
    ready: bool
    stale: bool
    age_s: float
    status: PoolStatus | None

    @property
    def matched_tokens(self) -> int:
        """Tokens of the matched blocks."""
        return 0 if self.pool is None else self.matched_blocks * self.pool.block_size

    @property
    def busy(self) -> float | None:
        """Used part of the KV blocks of the ranks that tell both; None: unknown."""
        if self.status is None:
            return None
        used, total = self.status.kv_used_blocks, self.status.kv_total_blocks
        return used.total / total.total if used.ranks and used.ranks == total.ranks and total.total else None

    def to_json(self) -> dict[str, Any]:
        """For people and for HTTP; what only a pool has is null, or 0, without one."""
        pool, status = self.pool, self.status
        return {
            "dc_id": self.dc_id,
            "namespace": self.entry.namespace,
            "component": None if pool is None else pool.component,
            "endpoint": None if pool is None else pool.endpoint,
            "model": self.entry.model,
            "block_size": None if pool is None else pool.block_size,
            "roles": self.entry.present if status is None else status.roles,
            "matched_blocks": self.matched_blocks,
            "matched_tokens": self.matched_tokens,
            "known": self.known,
            "ready": self.ready,
            "stale": self.stale,
            "age_seconds": round(self.age_s, 3),
            "blocks": 0 if status is None else status.blocks,
            "ranks": 0 if status is None else status.ranks,
            "fenced_ranks": 0 if status is None else status.fenced_ranks,
            "load": {name: None if status is None else _signal(getattr(status, name)) for name in _SIGNALS},
        }


_SIGNALS = ("kv_used_blocks", "kv_total_blocks", "active_decode_blocks", "running", "waiting")


def find_candidates(
    states: Iterable[DcRelayState], query: PromptQuery, now_ms: int, stale_after_s: float
) -> list[PoolCandidate]:
    """All pools that have the model, the best first: those that are ready and not stale, by longest match, least used.

    Data centres that are ready and have no pool of it are among them: nothing is known of their blocks.

    ``states``: one for each topic that is followed; a data centre that is in several counts where it was heard of last.

    Raises:
        TypeError, OverflowError: A token is no u32.
    """
    found: list[PoolCandidate] = []
    prompt = _Prompt(query)
    for state, centre in _newest_centres(states):
        age_s = max(0, now_ms - centre.seen_ms) / 1000
        stale = age_s > stale_after_s
        for entry, lora, status in _pools_with(centre, query):
            key = None if status is None else status.pool
            pool = None if key is None else centre.pools.get(key)
            matched, known = 0, False
            if status is not None and pool is not None and pool.held is not None:
                matched, known = prompt.match(state, pool, lora, is_eagle=status.is_eagle), True
            found.append(PoolCandidate(centre.dc_id, entry, key, matched, known, entry.ready, stale, age_s, status))
    return sorted(found, key=_rank)


class _Prompt:
    """A prompt's hashes and matches, each computed once: one walk finds the matches of all pools of a model."""

    def __init__(self, query: PromptQuery) -> None:
        self._query = query
        self._hashes: dict[tuple[int, bool, str | None], list[int]] = {}
        self._matches: dict[tuple[int, str, int, bool, str | None], dict[int, int]] = {}

    def match(self, state: DcRelayState, pool: Pool, lora: str | None, *, is_eagle: bool) -> int:
        """Leading blocks that the pool holds."""
        model, block_size = pool.pool.model, pool.pool.block_size
        key = id(state), model, block_size, is_eagle, lora
        if key not in self._matches:
            found = state.match(model, self._hashes_of(block_size, is_eagle, lora), block_size)
            self._matches[key] = {id(match.pool): match.blocks for match in found}
        return self._matches[key].get(id(pool), 0)

    def _hashes_of(self, block_size: int, is_eagle: bool, lora: str | None) -> list[int]:
        key = block_size, is_eagle, lora
        if key not in self._hashes:
            seed = block_seed(lora, self._query.cache_salt)
            _, self._hashes[key] = hash_prompt(self._query.token_ids, block_size, seed, is_eagle=is_eagle)
        return self._hashes[key]


def _rank(candidate: PoolCandidate) -> tuple[Any, ...]:
    busy = candidate.busy
    return (
        not candidate.ready or candidate.stale, -candidate.matched_tokens, busy is None, busy or 0.0,
        candidate.dc_id, candidate.entry.namespace, candidate.pool.path if candidate.pool is not None else "",
        candidate.entry.model,
    )  # fmt: skip


def _newest_centres(states: Iterable[DcRelayState]) -> Iterator[tuple[DcRelayState, DataCentre]]:
    newest: dict[str, tuple[DcRelayState, DataCentre]] = {}
    for state in states:
        for centre in state.centres.values():
            known = newest.get(centre.dc_id)
            if centre.status is not None and (known is None or centre.seen_ms > known[1].seen_ms):
                newest[centre.dc_id] = state, centre
    yield from newest.values()


def _pools_with(
    centre: DataCentre, query: PromptQuery
) -> Iterator[tuple[ModelReadiness, str | None, PoolStatus | None]]:
    """Pools of a data centre that serve the name that is asked for, with the adapter to hash with; None: it is ready
    without one.
    """
    assert centre.status is not None
    for entry in centre.status.models:
        lora = query.lora_name
        if query.model not in (entry.model, *entry.aliases):
            if query.model not in entry.adapters:
                continue
            lora = lora or query.model
        pools = [
            status
            for status in centre.status.pools
            if (status.pool.namespace, status.pool.model) == (entry.namespace, entry.model)
        ]
        for status in pools:
            yield entry, lora, status
        if entry.ready and not pools:
            yield entry, lora, None


def _signal(signal: LoadSignal) -> dict[str, int] | None:
    return {"total": signal.total, "ranks": signal.ranks} if signal.ranks else None
