"""Which pools a data centre has: the registry's workers, and the ranks of theirs whose blocks are known. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dynamo_es.router.overload import MEASURED_TTL_S
from dynamo_es.services.dc_relay.readiness import find_readiness
from dynamo_es.services.dc_relay.settings import RelayScope
from schemas.dc_relay import LoadSignal, ModelReadiness, PoolStatus, RelayPool
from schemas.registry import ModelCard
from schemas.worker_load import WorkerLoad
from streams.kv_index_state import KvIndexState, Source, SourceKey
from streams.registry import RegistryState
from streams.worker_load import RankKey, WorkerLoadState

EndpointPath = tuple[str, str, str]


class ScopedWorkers:
    """The workers in scope that have a model, as the registry was when this was made.

    Attributes:
        cards: Their model cards.
        endpoints: Where they are.
    """

    def __init__(self, registry: RegistryState, scope: RelayScope) -> None:
        self.cards = [card for card in registry.models.values() if scope.includes(card)]
        self.endpoints = {_path_of(card) for card in self.cards if not card.suffix}
        self._serving = {
            (item.namespace, item.component, item.endpoint, item.instance_id)
            for item in registry.instances.values()
            if item.state == "serving"
        }
        # A worker's events name its model and not its endpoint: one with a model on two belongs to the first.
        self._bases: dict[tuple[int, str], ModelCard] = {}
        for card in sorted(self.cards, key=_path_of, reverse=True):
            if not card.suffix:
                self._bases[card.instance_id, card.display_name] = card

    def card_of(self, key: SourceKey) -> ModelCard | None:
        """Card of the worker that a source of KV events belongs to; None: it is not in scope, or gone."""
        return self._bases.get((key.worker_id, key.model))

    def readiness(self) -> list[ModelReadiness]:
        """Which models can be served."""
        return find_readiness(self.cards, lambda card: (*_path_of(card), card.instance_id) in self._serving)


@dataclass(slots=True)
class PoolMembers:
    """Ranks of one pool: those whose blocks count, those whose events are missing; and what their workers are."""

    pool: RelayPool
    exact: list[Source] = field(default_factory=list)
    degraded: list[Source] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)
    is_eagle: bool = False

    @property
    def bits(self) -> int:
        """The ranks whose blocks count, as a bit set of slots."""
        bits = 0
        for source in self.exact:
            bits |= source.bit
        return bits

    @property
    def places(self) -> frozenset[tuple[SourceKey, int]]:
        """The same as sources with their slots: blocks of a source that moved are others."""
        return frozenset((source.key, source.slot) for source in self.exact)


def find_members(index: KvIndexState, workers: ScopedWorkers) -> dict[RelayPool, PoolMembers]:
    """All pools, also those of which no rank's blocks count."""
    found: dict[RelayPool, PoolMembers] = {}
    for source in index.sources.values():
        card = None if source.retired else workers.card_of(source.key)
        if card is None:
            continue
        pool = RelayPool(*_path_of(card), source.key.model, source.block_size)
        members = found.get(pool)
        if members is None:
            members = found[pool] = PoolMembers(pool)
        (members.exact if source.exact else members.degraded).append(source)
        members.roles.add(card.worker_type)
        members.is_eagle = members.is_eagle or card.runtime_config.get("enable_eagle") is True
    return found


class Fences:
    """Ranks that were asked to announce themselves anew and did not. Times are a monotonic clock's seconds."""

    def __init__(self, patience_s: float) -> None:
        """``patience_s``: how long a rank may be degraded before it is fenced."""
        self._patience_s = patience_s
        self._since: dict[SourceKey, float] = {}

    def look(self, pools: Mapping[RelayPool, PoolMembers], now: float) -> set[SourceKey]:
        """The fenced ones; a rank that is exact again, or gone, is forgotten."""
        self._since = {
            source.key: self._since.get(source.key, now) for members in pools.values() for source in members.degraded
        }
        return {key for key, since in self._since.items() if now - since >= self._patience_s}


def pool_status(
    members: PoolMembers, blocks: int, fenced: set[SourceKey], load: WorkerLoadState, now_ms: int
) -> PoolStatus:
    """What a status says of a pool; ``blocks``: those that readers were told of."""
    newest = [
        rank.load
        for source in members.exact
        if (rank := load.ranks.get(RankKey(*source.key))) is not None
        and rank.load is not None
        and now_ms - rank.load_at_ms <= MEASURED_TTL_S * 1000
    ]
    return PoolStatus(
        members.pool,
        sorted(members.roles),
        members.is_eagle,
        len(members.exact),
        sum(source.key in fenced for source in members.degraded),
        blocks,
        _signal(newest, "kv_used_blocks"),
        _signal(newest, "total_kv_blocks"),
        _signal(newest, "active_decode_blocks"),
        _signal(newest, "running"),
        _signal(newest, "waiting"),
    )


def _signal(loads: list[WorkerLoad], name: str) -> LoadSignal:
    told = [value for load in loads if (value := getattr(load, name)) is not None]
    return LoadSignal(sum(max(0, value) for value in told), len(told))


def _path_of(card: ModelCard) -> EndpointPath:
    return card.namespace, card.component, card.endpoint
