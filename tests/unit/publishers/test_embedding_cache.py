from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dynamo_es.publishers.embedding_cache import MAX_RECORD_KEYS, MultimodalEmbeddingCachePublisher
from schemas.embedding_cache import EMBEDDING_CACHE, EmbeddingCacheDelta
from tests.unit.publishers.support import Scope

FRAMES = json.loads((Path(__file__).parents[2] / "data/golden/services/event_plane_frames.json").read_text())
NOT_READY = r"^multimodal embedding cache publisher not initialized$"


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope(worker_id=7)
    yield scope
    await scope.close()


def deltas(scope: Scope) -> list[EmbeddingCacheDelta]:
    return scope.sink.values(EMBEDDING_CACHE)


async def test_keys_are_sorted_and_told_once(scope: Scope) -> None:
    """golden/services/kv_publisher_errors.json ``mm_pre`` and ``mm_post``."""
    publisher = MultimodalEmbeddingCachePublisher()
    publisher.publish_delta([], [])
    with pytest.raises(Exception, match=NOT_READY):
        publisher.publish_delta(["a"], [])
    await publisher.create_endpoint(scope)
    publisher.publish_delta(["b", "a", "b"], ["z"])
    publisher.publish_delta([], [])
    publisher.publish_delta([], ("a",))
    assert [(d.worker_id, d.seq, d.added_keys, d.removed_keys) for d in deltas(scope)] == [
        (7, 0, ["a", "b"], ["z"]), (7, 1, [], ["a"]),
    ]  # fmt: skip
    assert scope.sink.records[0][1] == b"7"
    envelope = msgspec.msgpack.decode(bytes.fromhex(FRAMES["multimodal_embedding_cache"][0][1])[5:])
    recorded = msgspec.msgpack.decode(envelope["payload"])["update"]
    assert sorted(recorded["added_keys"]) == deltas(scope)[0].added_keys
    assert recorded["removed_keys"] == deltas(scope)[0].removed_keys


async def test_arguments_are_refused_as_recorded(scope: Scope) -> None:
    publisher = MultimodalEmbeddingCachePublisher()
    await publisher.create_endpoint(scope)
    with pytest.raises(TypeError, match=r"^argument 'added_keys': Can't extract `str` to `Vec`$"):
        publisher.publish_delta("ab", [])
    with pytest.raises(TypeError, match=r"^argument 'added_keys': 'int' object cannot be converted to 'PyString'$"):
        publisher.publish_delta([1], [])  # type: ignore[list-item]
    assert deltas(scope) == []


async def test_a_large_change_is_told_in_records_that_fit(scope: Scope) -> None:
    publisher = MultimodalEmbeddingCachePublisher()
    await publisher.create_endpoint(scope)
    added = [f"{number:08d}" for number in range(2 * MAX_RECORD_KEYS + 1)]
    publisher.publish_delta(added, ["gone"])
    assert [delta.seq for delta in deltas(scope)] == [0, 1, 2]
    assert [key for delta in deltas(scope) for key in delta.added_keys] == added
    assert [delta.removed_keys for delta in deltas(scope)] == [["gone"], [], []]


async def test_a_change_that_the_log_did_not_take_leaves_a_hole(scope: Scope) -> None:
    publisher = MultimodalEmbeddingCachePublisher()
    await publisher.create_endpoint(scope)
    scope.sink.room = 0
    publisher.publish_delta(["a"], [])
    scope.sink.room = None
    publisher.publish_delta(["b"], [])
    assert [delta.seq for delta in deltas(scope)] == [1]
    assert [counts() for counts in scope.counts] == [{"embedding_changes_lost": 1}]


async def test_a_second_endpoint_begins_a_new_incarnation(scope: Scope) -> None:
    publisher = MultimodalEmbeddingCachePublisher()
    for key in ("a", "b"):
        await publisher.create_endpoint(scope)
        publisher.publish_delta([key], [])
    first, second = deltas(scope)
    assert first.incarnation != second.incarnation
    assert second.seq == 0


async def test_changes_from_another_thread_keep_their_order(scope: Scope) -> None:
    publisher = MultimodalEmbeddingCachePublisher()
    await publisher.create_endpoint(scope)
    thread = threading.Thread(target=lambda: [publisher.publish_delta([str(n)], []) for n in range(100)])
    thread.start()
    async with asyncio.timeout(60):
        while len(deltas(scope)) < 100:
            await asyncio.sleep(0.001)
    thread.join()
    assert [delta.added_keys for delta in deltas(scope)] == [[str(number)] for number in range(100)]
