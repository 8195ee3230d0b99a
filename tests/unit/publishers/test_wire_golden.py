"""Engine batches recorded with Dynamo's indexer: the same blocks must come out, but for the departures listed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.clock import ManualClock
from dynamo_es.publishers.kv_sources import KvSources, KvSourceSettings
from dynamo_es.publishers.rejections import RejectionReporter
from dynamo_es.publishers.zmq_relay import Arrival, SequenceTracker
from dynamo_es.router.hashing import compute_sequence_hashes
from schemas.columns import unpack_u64
from schemas.kv_events import BlocksStored, KvEvents
from tests.unit.publishers.support import ListSink, Reader

CASES = json.loads((Path(__file__).parents[2] / "data/golden/router/wire.json").read_text())["cases"]
# The reference refuses bytes, loses what follows a restart, or matches what it should not (keys, adapters).
DEPARTURES = {
    "bytes8_block_hash", "seq_restart_zero", "seq_stale_dropped", "list_lora_id_only", "map_lora_id_only",
    "list_full_prefix", "extra_keys_untagged_string", "extra_keys_mm_hex64", "extra_keys_mm_hex64_tuple",
    "extra_keys_mm_opaque_tuple",
    "extra_keys_two_mm", "extra_keys_odd_types", "extra_keys_short", "list_extra_keys_mm",
}  # fmt: skip
# Frames and replay belong to the relay; a redefined hash keeps one meaning here; a rank that is missing where there
# are several is refused; and one dump names parents that it does not hold.
NOT_HERE = {
    "frames_two", "frames_four", "seq_short", "replay_4frame", "replay_3frame_legacy", "replay_from_start",
    "replay_past_target", "replay_empty", "map_cache_salt_conflict", "payload_garbage", "payload_trailing_bytes",
    "topic_ignored", "dp_rank_registered", "lower_tier_remove_and_clear",
}  # fmt: skip


def as_message(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bytes"]) if set(value) == {"$bytes"} else {k: as_message(v) for k, v in value.items()}
        )
    return [as_message(item) for item in value] if isinstance(value, list) else value


def expected(events: list[dict[str, Any]]) -> dict[tuple[int, str], set[int]]:
    """Sequence hashes by rank and tier that an index dump stands for."""
    found: dict[tuple[int, str], set[int]] = {}
    names: dict[tuple[int, int], int] = {}
    todo = list(events)
    for _ in range(len(todo) ** 2 + 1):
        if not todo:
            break
        event = todo.pop(0)
        rank, stored = event["event"]["dp_rank"], event["event"]["data"]["stored"]
        parent = stored["parent_hash"]
        if parent is not None and (rank, parent) not in names:
            todo.append(event)
            continue
        blocks = stored["blocks"]
        sequences = compute_sequence_hashes(
            [block["tokens_hash"] for block in blocks], None if parent is None else names[rank, parent]
        )
        found.setdefault((rank, event["storage_tier"]), set()).update(sequences)
        names.update({(rank, block["block_hash"]): seq for block, seq in zip(blocks, sequences, strict=True)})
    assert not todo, "the dump names parents that it does not hold"
    return found


def replayed(case: dict[str, Any]) -> dict[tuple[int, str], set[int]]:
    register = case["register"]
    sink, clock = ListSink(), ManualClock()
    numbers = iter(range(1, 1000))
    settings = KvSourceSettings(
        sink=sink,
        clock=clock,
        model_name=lambda: "m",
        worker_id=register["instance_id"],
        block_size=register["block_size"],
        new_incarnation=lambda: next(numbers),
        rank_count=lambda: 1,
    )
    sources = KvSources(settings, 0, RejectionReporter(sink, clock, "test"))
    sources.flush()
    tracker = SequenceTracker()
    for item in case["batches"]:
        seq, payload = item["seq"], msgspec.msgpack.encode(as_message(item["batch"]))
        if tracker.classify(seq, payload) is Arrival.RESTART:
            sources.restart()
            tracker.classify(seq, payload)
        tracker.advance(seq)
        sources.apply_payload(payload, seq)
        sources.flush()
    blocks = Reader().apply_all(sink.kv).blocks
    parents = parents_of(sink.kv)
    return {key: found for key, held in blocks.items() if (found := reachable(held, parents, key[1]))}


def parents_of(records: list[KvEvents]) -> dict[int, int | None]:
    parents: dict[int, int | None] = {}
    for record in records:
        for event in record.events:
            if isinstance(event, BlocksStored):
                sequences = unpack_u64(event.sequence_hashes)
                parents.update(zip(sequences, (event.parent, *sequences), strict=False))
    return parents


def reachable(held: set[int], parents: dict[int, int | None], tier: str) -> set[int]:
    """The reference's device tree prunes what hangs under a removed block; here it stays and counts for nothing."""
    if tier != "device":
        return held
    found: set[int] = set()
    for block in held:
        ancestor: int | None = block
        while ancestor in held:
            ancestor = parents[ancestor]
        if ancestor is None:
            found.add(block)
    return found


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["name"] not in DEPARTURES | NOT_HERE], ids=lambda case: case["name"]
)
def test_holds_the_blocks_that_the_reference_holds(case: dict[str, Any]) -> None:
    assert replayed(case) == expected(case["dump_events"])


@pytest.mark.parametrize("case", [case for case in CASES if case["name"] in DEPARTURES], ids=lambda case: case["name"])
def test_departures_are_still_departures(case: dict[str, Any]) -> None:
    assert replayed(case) != expected(case["dump_events"])
