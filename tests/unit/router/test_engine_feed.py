"""Engine batches recorded with Dynamo's indexer: the same index must come out, but for the departures listed here."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dynamo_es.publishers.zmq_relay import Arrival, SequenceTracker
from dynamo_es.router.engine_feed import EngineFeed
from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.reports import dump_events

DATA = Path(__file__).parents[2] / "data"
CASES = json.loads((DATA / "golden/router/wire.json").read_text())["cases"]
# One line each: what is done differently on purpose, or done elsewhere.
DEPARTURES = {
    "extra_keys_untagged_string": "a key that is not understood enters the hash",
    "extra_keys_mm_hex64": "keys of multimodal objects enter the hash",
    "extra_keys_mm_hex64_tuple": "as above",
    "extra_keys_mm_opaque_tuple": "as above",
    "extra_keys_two_mm": "as above",
    "extra_keys_odd_types": "as above",
    "extra_keys_short": "as above",
    "list_extra_keys_mm": "as above",
    "list_full_prefix": "as above",
    "list_lora_id_only": "an adapter without a name is refused, as its blocks would match prompts without one",
    "map_lora_id_only": "as above",
    "bytes_block_hash": "hashes may be bytes",
    "bytes8_block_hash": "as above",
    "seq_restart_zero": "a sequence that falls is an engine that restarted, and is listened to",
    "seq_stale_dropped": "as above",
}
# Frames and replay are the relay's (tests/integration/test_zmq_relay.py).
RELAY = {
    "frames_two", "frames_four", "seq_short", "replay_4frame", "replay_3frame_legacy", "replay_from_start",
    "replay_past_target", "replay_empty",
}  # fmt: skip


def as_message(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            bytes.fromhex(value["$bytes"]) if set(value) == {"$bytes"} else {k: as_message(v) for k, v in value.items()}
        )
    return [as_message(item) for item in value] if isinstance(value, list) else value


def payload_of(item: dict[str, Any]) -> tuple[int, bytes]:
    if "raw_frames" in item:
        _, seq, payload = (bytes.fromhex(frame["$bytes"]) for frame in item["raw_frames"])
        return int.from_bytes(seq, "big"), payload
    return item["seq"], msgspec.msgpack.encode(as_message(item["batch"]))


def multiset(events: list[dict[str, Any]]) -> Counter[str]:
    """A dump without event ids and without its order; lower tiers' blocks one by one."""
    for event in events:
        event["event"].pop("event_id", None)
    return Counter(json.dumps(event, sort_keys=True) for event in events)


def recorded_batches() -> Iterator[tuple[int, bytes]]:
    for item in map(json.loads, (DATA / "vllm-0.32.0-chat.jsonl").read_text().splitlines()):
        if item["kind"] == "frame":
            yield item["seq"], base64.b64decode(item["payload_b64"])


def replay(case: dict[str, Any]) -> list[dict[str, Any]]:
    register = case["register"]
    index = EngineIndex()
    feed = EngineFeed(index, register["instance_id"], register["dp_rank"], register["block_size"])
    tracker = SequenceTracker()
    for item in case["batches"]:
        seq, payload = payload_of(item)
        if tracker.classify(seq, payload) is Arrival.RESTART:
            feed.on_restart()
            tracker.classify(seq, payload)
        tracker.advance(seq)
        feed.on_batch(seq, payload)
    return list(dump_events(index.dump()))


@pytest.mark.parametrize(
    "case", [case for case in CASES if case["name"] not in DEPARTURES.keys() | RELAY], ids=lambda case: case["name"]
)
def test_the_index_holds_what_the_reference_holds(case: dict[str, Any]) -> None:
    assert multiset(replay(case)) == multiset(case["dump_events"])


@pytest.mark.parametrize("case", [case for case in CASES if case["name"] in DEPARTURES], ids=lambda case: case["name"])
def test_departures_are_still_departures(case: dict[str, Any]) -> None:
    assert multiset(replay(case)) != multiset(case["dump_events"])


def test_a_recording_of_a_real_engine_gives_the_dumps_of_the_reference() -> None:
    recorded = json.loads((DATA / "golden/router/wire_recording_a.json").read_text())
    marks = {mark["after_seq"]: mark["dump_events"] for mark in recorded["marks"]}
    index = EngineIndex()
    feed = EngineFeed(index, 7, 0, recorded["block_size"])
    compared = 0
    for seq, payload in recorded_batches():
        feed.on_batch(seq, payload)
        if seq in marks:
            assert multiset(list(dump_events(index.dump()))) == multiset(marks[seq])
            compared += 1
    assert compared == len(marks)
    assert not feed.dropped


def test_the_listed_cases_exist() -> None:
    assert DEPARTURES.keys() | RELAY <= {case["name"] for case in CASES}
