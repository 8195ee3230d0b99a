"""What each call of ``KvEventPublisher`` publishes, beside what the reference published; departures are listed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.publishers.kv_events import KvEventPublisher
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksRemoved, BlocksStored
from tests.unit.publishers.support import Scope

GOLDEN = json.loads((Path(__file__).parents[2] / "data/golden/services/kv_publisher_events.json").read_text())
FOUR = [1, 2, 3, 4]


def mixed(publisher: KvEventPublisher) -> None:
    def stored(numbers: list[int], hashes: list[int], parent: int | None = None) -> dict[str, Any]:
        tokens = [number for number in numbers for _ in range(4)]
        return {
            "type": "stored", "token_ids": tokens, "num_block_tokens": [4] * len(hashes), "block_hashes": hashes,
            "parent_hash": parent,
        }  # fmt: skip

    removed = [{"type": "removed", "block_hashes": [name]} for name in (2, 3)]
    publisher.publish_batch(
        [stored([1], [1]), stored([2, 3], [2, 3], 1), *removed, stored([9], [9]), stored([8], [10], 1)]
    )


def twice(publisher: KvEventPublisher) -> None:
    for _ in range(2):
        publisher.publish_stored([5] * 4, [4], [60])
    for _ in range(3):
        publisher.publish_removed([60])


CALLS: dict[str, Callable[[KvEventPublisher], None]] = {
    "one_batch_mixed": mixed,
    "dup_store_remove": twice,
    "single300": lambda p: p.publish_stored([7] * 1200, [4] * 300, list(range(1000, 1300))),
    "hash_mismatch_more_counts": lambda p: p.publish_stored(FOUR, [4, 4], [1]),
    "tokens_short": lambda p: p.publish_stored([*FOUR, 5], [4, 4], [1, 2]),
    "lora": lambda p: p.publish_stored(FOUR, [4], [1], lora_name="l"),
    "salt": lambda p: p.publish_stored(FOUR, [4], [1], cache_salt="s"),
    "eagle5": lambda p: p.publish_stored([*FOUR, 5], [4], [1], is_eagle=True),
    "eagle4": lambda p: p.publish_stored(FOUR, [4], [1], is_eagle=True),
    "mm": lambda p: p.publish_stored(
        FOUR, [4], [1], block_mm_infos=[{"mm_objects": [{"mm_hash": 5, "offsets": [[0, 2]]}]}]
    ),
    "empty_removed": lambda p: p.publish_removed([]),
    "empty_batch": lambda p: p.publish_batch([]),
    "neg": lambda p: p.publish_stored(FOUR, [4], [-5], parent_hash=-6),
}
# A copy changes nothing for a reader, so only the first store and the last removal are told; a block whose parent is
# unknown has no place in any prompt, so it waits for its parent.
DEPARTURES = {"dup_store_remove", "neg"}


@pytest.fixture
async def scope() -> AsyncIterator[Scope]:
    scope = Scope(worker_id=77)
    yield scope
    await scope.close()


def recorded(case: dict[str, Any]) -> list[tuple[str, list[int] | int]]:
    """Stored: hashes of the blocks' tokens; removed: how many."""
    found: list[tuple[str, list[int] | int]] = []
    for event in case["events"]:
        if event == "--message--":
            continue
        data = event["event"]["data"]
        if "removed" in data:
            found.append(("removed", len(data["removed"]["block_hashes"])))
        elif data["stored"]["blocks"] == "<300 blocks>":
            found.append(("stored", 300))
        elif data["stored"]["blocks"]:
            found.append(("stored", [block["tokens_hash"] for block in data["stored"]["blocks"]]))
    return found


def published(scope: Scope) -> list[tuple[str, list[int] | int]]:
    found: list[tuple[str, list[int] | int]] = []
    for record in scope.sink.kv:
        for event in record.events:
            if isinstance(event, BlocksStored):
                hashes = unpack_u64(event.tokens_hashes)
                found.append(("stored", 300 if len(hashes) == 300 else list(hashes)))
            elif isinstance(event, BlocksRemoved):
                found.append(("removed", len(unpack_u64(event.sequence_hashes))))
    return found


def test_every_recorded_case_is_played() -> None:
    assert {case["case"] for case in GOLDEN["cases"]} == CALLS.keys()


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["case"])
async def test_the_same_blocks_come_and_go_as_in_the_reference(case: dict[str, Any], scope: Scope) -> None:
    publisher = KvEventPublisher(scope, kv_block_size=4)
    CALLS[case["case"]](publisher)
    assert (published(scope) == recorded(case)) is (case["case"] not in DEPARTURES)


async def test_copies_are_told_once_and_removed_with_the_last(scope: Scope) -> None:
    twice(KvEventPublisher(scope, kv_block_size=4))
    assert [kind for kind, _ in published(scope)] == ["stored", "removed"]
