from __future__ import annotations

import msgspec
import pytest

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.replica_events import ReplicaEvent, ReplicatedBooking, decode_event, encode_event
from dynamo_es.router.selection_requests import PartitionKey

TOPIC = b"dynamo.slot-tracker.v1"


def event(change, lora_name=None) -> ReplicaEvent:
    return ReplicaEvent(PartitionKey("m", "g"), 16, "r1", WorkerRank(2**64 - 1, 3), change, 77, lora_name)


def wire(data, **members):
    worker = {"worker_id": 2**64 - 1, "dp_rank": 3}
    inner = {"request_id": "r1", "worker": worker, "data": data, "router_id": 77, "lora_name": None, **members}
    return {"model_name": "m", "routing_group": "g", "block_size": 16, "event": inner}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("freed", wire("Free")),
        ("prefill_completed", wire("MarkPrefillCompleted")),
        (
            ReplicatedBooking([1, 2**64 - 1], 12, 50),
            wire(
                {
                    "AddRequest": {
                        "token_sequence": [1, 2**64 - 1],
                        "track_prefill_tokens": True,
                        "expected_output_tokens": 50,
                        "prefill_load_hint": {
                            "initial_effective_prefill_tokens": 12,
                            "expected_prefill_duration": None,
                        },
                    }
                }
            ),
        ),
        (
            ReplicatedBooking([], 0),
            wire(
                {
                    "AddRequest": {
                        "token_sequence": [],
                        "track_prefill_tokens": False,
                        "expected_output_tokens": None,
                        "prefill_load_hint": None,
                    }
                }
            ),
        ),
    ],
)
def test_events_have_the_layout_of_the_reference(change, message):
    frames = encode_event(event(change))
    assert frames[0] == TOPIC
    assert msgspec.msgpack.decode(frames[1]) == message
    assert decode_event([TOPIC, msgspec.msgpack.encode(message)]) == event(change)


def test_what_may_be_missing_may_be_missing():
    message = wire({"AddRequest": {"token_sequence": None, "track_prefill_tokens": True, "new": 1}}, lora_name="ad")
    decoded = decode_event([TOPIC, msgspec.msgpack.encode(message)])
    assert decoded == event(ReplicatedBooking([], 0), "ad")


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [TOPIC],
        [b"other", b"\x80"],
        [TOPIC, b"\x80"],
        [TOPIC, b"\xc1"],
        [TOPIC, msgspec.msgpack.encode(wire("Stop"))],
        [TOPIC, msgspec.msgpack.encode({**wire("Free"), "block_size": "x"})],
    ],
)
def test_what_is_no_event_is_refused(frames):
    with pytest.raises(ValueError):
        decode_event(frames)
