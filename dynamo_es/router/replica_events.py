"""What selection services and slot trackers tell each other of bookings (spec: router-core D.15). Pure.

Two frames: a topic, and a msgpack map. Output blocks are not told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.selection_requests import PartitionKey

TOPIC = b"dynamo.slot-tracker.v1"


class _PrefillHint(msgspec.Struct):
    initial_effective_prefill_tokens: int
    expected_prefill_duration: Any = None


class _AddRequest(msgspec.Struct):
    token_sequence: list[int] | None
    track_prefill_tokens: bool
    expected_output_tokens: int | None = None
    prefill_load_hint: _PrefillHint | None = None


class _Worker(msgspec.Struct):
    worker_id: int
    dp_rank: int


class _Data(msgspec.Struct):
    add: _AddRequest = msgspec.field(name="AddRequest")


class _Event(msgspec.Struct):
    request_id: str
    worker: _Worker
    data: _Data | Literal["MarkPrefillCompleted", "Free"]
    router_id: int
    lora_name: str | None = None


class _Message(msgspec.Struct):
    model_name: str
    routing_group: str
    block_size: int
    event: _Event


_DECODER = msgspec.msgpack.Decoder(_Message)


@dataclass(frozen=True, slots=True)
class ReplicatedBooking:
    """A request was booked. ``prefill_tokens``: 0 if its prompt is not tracked."""

    hashes: Sequence[int]
    prefill_tokens: int
    expected_output_tokens: int | None = None


ReplicatedChange = ReplicatedBooking | Literal["prefill_completed", "freed"]


@dataclass(frozen=True, slots=True)
class ReplicaEvent:
    """One change of one request, made by the process ``router_id``."""

    partition: PartitionKey
    block_size: int
    request_id: str
    rank: WorkerRank
    change: ReplicatedChange
    router_id: int
    lora_name: str | None = None


def encode_event(event: ReplicaEvent) -> list[bytes]:
    """The frames of an event."""
    change = event.change
    data: _Data | Literal["MarkPrefillCompleted", "Free"]
    if isinstance(change, ReplicatedBooking):
        tokens = change.prefill_tokens
        hint = _PrefillHint(tokens) if tokens else None
        data = _Data(_AddRequest(list(change.hashes), bool(tokens), change.expected_output_tokens, hint))
    else:
        data = "Free" if change == "freed" else "MarkPrefillCompleted"
    worker = _Worker(event.rank.worker_id, event.rank.dp_rank)
    message = _Message(
        event.partition.model_name,
        event.partition.routing_group,
        event.block_size,
        _Event(event.request_id, worker, data, event.router_id, event.lora_name),
    )
    return [TOPIC, msgspec.msgpack.encode(message)]


def decode_event(frames: Sequence[bytes]) -> ReplicaEvent:
    """The event of two frames.

    Raises:
        ValueError: They hold none.
    """
    if len(frames) != 2 or frames[0] != TOPIC:
        raise ValueError(f"{len(frames)} frames, not a {TOPIC.decode()} message")
    try:
        message = _DECODER.decode(frames[1])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error
    event = message.event
    change: ReplicatedChange
    if isinstance(event.data, _Data):
        add = event.data.add
        hint = add.prefill_load_hint
        tokens = hint.initial_effective_prefill_tokens if hint is not None and add.track_prefill_tokens else 0
        change = ReplicatedBooking(add.token_sequence or [], max(tokens, 0), add.expected_output_tokens)
    else:
        change = "freed" if event.data == "Free" else "prefill_completed"
    return ReplicaEvent(
        partition=PartitionKey(message.model_name, message.routing_group),
        block_size=message.block_size,
        request_id=event.request_id,
        rank=WorkerRank(event.worker.worker_id, event.worker.dp_rank),
        change=change,
        router_id=event.router_id,
        lora_name=event.lora_name,
    )
