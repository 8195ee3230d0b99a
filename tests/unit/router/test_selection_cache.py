from __future__ import annotations

import pytest

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.config_selection import SelectionCacheConfig
from dynamo_es.router.replica_events import ReplicatedBooking
from dynamo_es.router.selection_cache import CachedSelection, SelectionCache
from dynamo_es.router.selection_requests import PartitionKey

HERE = PartitionKey()


def selection(blocks=4, worker=1) -> CachedSelection:
    return CachedSelection(WorkerRank(worker, 0), ReplicatedBooking(list(range(blocks)), 16))


def names(cache, now=0.0, among="abcdef"):
    return [name for name in among if cache.peek((HERE, name), now) is not None]


def test_the_newest_selection_of_an_id_counts_and_partitions_are_apart():
    cache = SelectionCache(SelectionCacheConfig())
    cache.put((HERE, "a"), selection(worker=1), 0.0)
    cache.put((HERE, "a"), selection(worker=2), 0.0)
    assert cache.peek((HERE, "a"), 0.0).rank.worker_id == 2
    assert cache.peek((PartitionKey("m"), "a"), 0.0) is None
    cache.discard((HERE, "a"))
    cache.discard((HERE, "a"))
    assert len(cache) == 0


@pytest.mark.parametrize(("now", "found"), [(10.0, ["a"]), (10.1, [])])
def test_selections_last_for_their_time(now, found):
    cache = SelectionCache(SelectionCacheConfig(ttl_secs=10.0))
    cache.put((HERE, "a"), selection(), 0.0)
    assert names(cache, now) == found


def test_the_oldest_go_when_there_are_too_many():
    cache = SelectionCache(SelectionCacheConfig(max_entries=2))
    for name in "abac":
        cache.put((HERE, name), selection(), 0.0)
    assert names(cache) == ["a", "c"]


def test_the_oldest_go_when_they_are_too_large():
    cache = SelectionCache(SelectionCacheConfig(max_bytes=100))
    for name in "abc":
        cache.put((HERE, name), selection(4), 0.0)
    assert names(cache) == ["a", "b", "c"]
    cache.put((HERE, "d"), selection(8), 0.0)
    assert names(cache) == ["c", "d"]
    cache.put((HERE, "e"), selection(1000), 0.0)
    assert names(cache) == []


def test_a_cache_without_room_remembers_nothing():
    cache = SelectionCache(SelectionCacheConfig(max_entries=0))
    cache.put((HERE, "a"), selection(), 0.0)
    assert len(cache) == 0
