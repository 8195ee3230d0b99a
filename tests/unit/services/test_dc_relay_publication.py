"""What a relay tells: whatever happens at the workers, readers hold what a plain look at the index says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable

import pytest

from dynamo_es.runtime.model_card import BUILTIN_MODEL, make_card, read_model_facts
from dynamo_es.services.dc_relay import publication
from dynamo_es.services.dc_relay.pools import Fences, PoolMembers, ScopedWorkers, find_members
from dynamo_es.services.dc_relay.publication import PoolPublication, next_life
from dynamo_es.services.dc_relay.settings import RelayScope
from dynamo_es.services.dc_relay.watched_index import IndexChanges, WatchedIndexFold
from schemas.columns import pack_u64
from schemas.dc_relay import DcStatus, PoolDelta, PoolSnapshot, RelayPool
from schemas.kv_events import (
    KV_EVENTS,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    SourceRetired,
    key_kv_events,
)
from schemas.registry import ModelCard, key_model
from streams.dc_relay import DcRelayFold
from streams.kv_index_state import KvIndexState
from streams.registry import RegistryState
from streams.testing import FoldDriver
from tests.support.event_storm import EventStorm
from tests.support.relay_stream import status

ENDPOINTS = (("ns", "backend", "generate"), ("ns", "other", "generate"), ("elsewhere", "backend", "generate"))
FACTS = read_model_facts(BUILTIN_MODEL)


class Site:
    """A data centre without I/O: its index, its workers, its relay, and a reader of what that tells."""

    def __init__(self, max_blocks: int = 1_000_000, scope: RelayScope | None = None) -> None:
        self.changes = IndexChanges(max_blocks)
        self.index = FoldDriver(WatchedIndexFold(1, self.changes))
        self.registry, self.scope = RegistryState(), scope or RelayScope()
        self.relay = PoolPublication("x", 1)
        self.relay.begin(1)
        self.reader = FoldDriver(DcRelayFold())
        self.told: list[object] = []
        self._seqs: dict[int, int] = {}

    def worker(self, number: int, endpoint=ENDPOINTS[0], model: str = "m") -> ModelCard:
        card = make_card(FACTS, endpoint, number, name=model, block_size=4, runtime_config={})
        self.registry.models[key_model(*endpoint, number)] = card
        return card

    def leave(self, number: int) -> None:
        for key in [key for key, card in self.registry.models.items() if card.instance_id == number]:
            del self.registry.models[key]

    def events(self, number: int, *events: object, reset: bool = False, model: str = "m", skip: int = 0) -> None:
        seq = self._seqs.get(number, 0) + skip
        self._seqs[number] = seq + 1
        batch = KvEvents(1, model, number, 0, 1, seq, 4, reset or seq == 0, list(events))
        self.index.feed(batch, key_kv_events(model, number, 0))

    def counting(self) -> dict[RelayPool, PoolMembers]:
        found = find_members(self.index.state, ScopedWorkers(self.registry, self.scope))
        return {pool: members for pool, members in found.items() if members.exact}

    def publish(self, refresh: Iterable[RelayPool] = (), during: Callable[[], object] = lambda: None) -> list[object]:
        """One publication; the reader gets it through the wire's encoding. ``during``: happens amid large jobs."""
        records = [self.relay.number(status("x", 0, 0, *self.counting()))]

        async def off_loop(job):
            during()
            done = job()
            during()
            return done

        plan = self.relay.plan(lambda: (self.index.state, self.counting()), self.changes.take(), set(refresh), off_loop)
        with pytest.raises(StopIteration) as planned:
            plan.send(None)
        records += planned.value.value
        for record in records:
            self.relay.told(record, 5)
            self.reader.feed(record)
        assert not self.reader.rejected
        return records[1:]

    def read(self) -> dict[RelayPool, set[int]]:
        """What the reader holds."""
        return {each.pool: set(self.reader.state.blocks_of(each).tolist()) for each in self.reader.state.pools()}

    def expected(self) -> dict[RelayPool, set[int]]:
        return {pool: union(self.index.state, members) for pool, members in self.counting().items()}


def union(index: KvIndexState, members: PoolMembers) -> set[int]:
    found: set[int] = set()
    for source in members.exact:
        for tier in range(4):
            found |= set(index.models[members.pool.model].blocks_of(source.slot, tier).tolist())
    return found


def stored(*hashes: int, tier: str = "device") -> BlocksStored:
    return BlocksStored(tier, None, pack_u64(hashes), pack_u64(hashes))


def removed(*hashes: int, tier: str = "device") -> BlocksRemoved:
    return BlocksRemoved(tier, pack_u64(hashes))


def only(records: list[object]) -> object:
    assert len(records) == 1
    return records[0]


@pytest.mark.parametrize("seed", range(5))
def test_after_any_history_readers_hold_the_union_of_the_workers_that_count(seed: int) -> None:
    rng = random.Random(seed)
    # Small bounds, so that every way to tell something is taken.
    site = Site(max_blocks=rng.choice([5, 60, 1_000_000]))
    storm = iter(EventStorm(seed, [KV_EVENTS]))
    for _ in range(80):
        for _, key, value in itertools.islice(storm, rng.randint(1, 12)):
            site.index.feed(value, key)
        if rng.random() < 0.2:
            number = rng.randrange(6)
            site.leave(number)
            if rng.random() < 0.7:
                site.worker(number, rng.choice(ENDPOINTS))
        while rng.random() < 0.5 and site.index.fold.housekeep(site.index.state):
            pass
        if rng.random() < 0.05:
            site.relay.begin(site.relay.relay + 1 + rng.getrandbits(40))
        site.publish(rng.sample(sorted(site.counting(), key=repr), len(site.counting()) // 3))
        assert site.read() == site.expected()
    assert site.reader.state.counters.gaps == 0


def test_a_block_that_two_workers_hold_is_told_once_and_withdrawn_with_the_last_copy() -> None:
    site = Site()
    site.worker(1)
    site.worker(2)
    site.events(1, stored(10, 11))
    first = only(site.publish())
    assert isinstance(first, PoolSnapshot)
    site.events(2, stored(10, 12))
    change = only(site.publish())
    # Worker 2's first event makes it a rank whose blocks count; only what is new is told.
    assert isinstance(change, PoolDelta)
    assert (change.added, change.removed) == (pack_u64([12]), b"")
    site.events(1, removed(10))
    assert site.publish() == []
    site.events(2, removed(10), stored(10, tier="disk"))
    assert site.publish() == []
    site.events(2, removed(10, tier="disk"))
    assert only(site.publish()).removed == pack_u64([10])
    assert site.read() == site.expected()


def test_what_comes_and_goes_between_two_publications_is_not_told() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(1))
    site.publish()
    site.events(1, stored(2), removed(2), removed(1), stored(1))
    assert site.publish() == []


def test_a_source_that_starts_over_costs_only_what_differs() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(*range(1, 101)))
    site.publish()
    site.events(1, stored(*range(2, 102)), reset=True)
    change = only(site.publish())
    assert (change.added, change.removed) == (pack_u64([101]), pack_u64([1]))
    site.events(1, AllBlocksCleared())
    assert isinstance(only(site.publish()), PoolSnapshot)
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): set()}


def test_a_source_that_started_over_twice_and_has_its_old_place_again_is_compared_as_a_whole() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(1))
    site.publish()
    place = site.index.state.sources["m", 1, 0].slot
    for block in (2, 3):
        site.events(1, stored(block), reset=True)
        while site.index.fold.housekeep(site.index.state):
            pass
    assert site.index.state.sources["m", 1, 0].slot == place
    site.publish()
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): {3}}


def test_a_source_with_a_gap_leaves_its_pool_until_it_is_repaired() -> None:
    site = Site()
    site.worker(1)
    site.worker(2)
    site.events(1, stored(1))
    site.events(2, stored(2))
    site.publish()
    site.events(1, stored(3), skip=1)
    site.publish()
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): {2}}
    site.events(2, stored(4), skip=2)
    site.publish()
    assert site.read() == {}
    site.events(1, stored(1, 3), reset=True)
    site.publish()
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): {1, 3}}


def test_a_retired_worker_and_one_without_a_card_are_in_no_pool() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(1))
    site.events(7, stored(9))
    site.publish()
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): {1}}
    site.index.feed(KvEvents(1, "m", 1, 0, 1, 0, 4, False, [SourceRetired("gone")]))
    site.publish()
    assert site.read() == {}


def test_endpoints_and_models_make_pools_of_their_own_and_a_worker_on_two_endpoints_one() -> None:
    site = Site()
    site.worker(1)
    site.worker(2, ENDPOINTS[1])
    site.worker(2, ENDPOINTS[0])
    site.worker(3, ENDPOINTS[1], model="n")
    for number in (1, 2):
        site.events(number, stored(number))
    site.events(3, stored(3), model="n")
    site.publish()
    assert site.read() == {
        RelayPool(*ENDPOINTS[0], "m", 4): {1, 2},
        RelayPool(*ENDPOINTS[1], "n", 4): {3},
    }


def test_long_lists_are_cut_into_records_that_a_topic_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "CHUNK_BLOCKS", 10)
    site = Site()
    site.worker(1)
    site.events(1, stored(*range(1, 26)))
    assert [(each.chunk, each.chunks) for each in site.publish()] == [(0, 3), (1, 3), (2, 3)]
    site.events(1, removed(*range(1, 13)), stored(*range(30, 39)))
    parts = site.publish()
    assert [(len(each.added) // 8, len(each.removed) // 8) for each in parts] == [(0, 10), (8, 2), (1, 0)]
    assert site.read() == site.expected()


def test_the_scope_leaves_out_other_endpoints() -> None:
    site = Site(scope=RelayScope(("ns",), ("ns.backend",)))
    for number, endpoint in enumerate(ENDPOINTS):
        site.worker(number, endpoint)
        site.events(number, stored(number + 1))
    site.publish()
    assert site.read() == {RelayPool(*ENDPOINTS[0], "m", 4): {1}}


def test_a_rank_is_fenced_once_it_was_given_its_time_and_freed_when_it_is_repaired() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(1))
    site.events(1, stored(2), skip=1)
    fences = Fences(patience_s=32.0)

    def look(now: float) -> list[int]:
        members = find_members(site.index.state, ScopedWorkers(site.registry, site.scope))
        return [key.worker_id for key in fences.look(members, now)]

    assert [look(100.0), look(131.9), look(132.0), look(500.0)] == [[], [], [1], [1]]
    site.events(1, stored(1), reset=True)
    assert look(501.0) == []
    site.events(1, stored(2), skip=1)
    assert [look(502.0), look(533.0), look(534.0)] == [[], [], [1]]


def test_a_status_is_numbered_with_the_blocks() -> None:
    site = Site()
    site.worker(1)
    site.events(1, stored(1))
    site.publish()
    numbered = site.relay.number(status("anything", 77, 99))
    assert isinstance(numbered, DcStatus)
    assert (numbered.dc_id, numbered.relay, numbered.seq) == ("x", 1, 2)
    assert site.relay.blocks_told(RelayPool(*ENDPOINTS[0], "m", 4)) == 1
    assert site.relay.blocks_told(RelayPool(*ENDPOINTS[1], "m", 4)) == 0


def test_lives_rise_with_the_time_they_began_at_and_with_each_other() -> None:
    rng = random.Random(1)
    first = next_life(0, 1_700_000_000_000, rng)
    assert first >> 20 == 1_700_000_000_000
    assert next_life(first, 1_700_000_000_001, rng) > first
    # The clock went back: within a process the order holds all the same.
    assert next_life(first, 1_600_000_000_000, rng) == first + 1
    assert next_life(0, 2**43, rng) < 2**64


@pytest.mark.parametrize("seed", range(2))
def test_what_changes_amid_a_publication_is_told_with_the_next(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "CHUNK_BLOCKS", 3)
    rng = random.Random(seed)
    site = Site(max_blocks=rng.choice([5, 1_000_000]))
    storm = iter(EventStorm(seed, [KV_EVENTS]))
    for number in range(4):
        site.worker(number, rng.choice(ENDPOINTS))
    amid = 0

    def happen() -> None:
        nonlocal amid
        for _, key, value in itertools.islice(storm, rng.randint(0, 4)):
            site.index.feed(value, key)
            amid += 1
        if rng.random() < 0.1:
            number = rng.randrange(6)
            site.leave(number)
            site.worker(number, rng.choice(ENDPOINTS))
        while rng.random() < 0.7 and site.index.fold.housekeep(site.index.state):
            pass

    for _ in range(25):
        happen()
        site.publish(rng.sample(sorted(site.counting(), key=repr), len(site.counting()) // 3), during=happen)
        site.publish()
        assert site.read() == site.expected()
    assert amid > 20


def test_a_place_that_another_worker_takes_amid_a_publication_is_not_told_as_the_pool_that_had_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publication, "CHUNK_BLOCKS", 1)
    site = Site()
    for number, endpoint in enumerate(ENDPOINTS[:2], 1):
        site.worker(number, endpoint)
        site.events(number, stored(10 * number, 10 * number + 1))
    first, second = (RelayPool(*endpoint, "m", 4) for endpoint in ENDPOINTS[:2])

    def happen() -> None:
        # Worker 2's place goes to worker 3, which is in no pool, while the first pool is sorted.
        if len(site.registry.models) == 2:
            site.leave(2)
            site.events(2, SourceRetired("gone"))
            while site.index.fold.housekeep(site.index.state):
                pass
            site.events(3, stored(30, 31))

    site.publish(during=happen)
    assert site.read()[first] == {10, 11}
    assert not site.read().get(second)
    site.publish()
    assert site.read() == site.expected() == {first: {10, 11}}


def test_a_pool_that_readers_do_not_take_is_not_told_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.dc_relay.MAX_BLOCKS", 5)
    site = Site()
    for number, endpoint in enumerate(ENDPOINTS[:2], 1):
        site.worker(number, endpoint)
        site.events(number, stored(*range(10 * number, 10 * number + 3)))
    first, second = (RelayPool(*endpoint, "m", 4) for endpoint in ENDPOINTS[:2])
    assert len(site.publish()) == 2
    assert (site.relay.pools_told(), set(site.relay.given_up)) == ({first}, {second})
    assert not site.relay.owes(site.counting())
    site.events(2, stored(30))
    assert site.publish() == []
    assert len(site.publish([second])) == 1
    site.events(2, removed(30, 20, 21))
    site.publish([second])
    assert site.relay.pools_told() == {first, second}
    assert site.read() == site.expected()
    monkeypatch.setattr(publication, "MAX_POOL_BLOCKS", 2)
    assert site.publish([first]) == []
