"""Forward passes as Dynamo's bytes, version 1: a msgpack map with text keys (spec/services b.1). Pure.

``pack_pass`` writes what ``FpmDirectPublisher`` of Dynamo writes, bit for bit; ``unpack_pass`` reads what an engine's
scheduler publishes, whatever the order of its keys, and takes nothing on trust.
"""

from __future__ import annotations

import msgspec

from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from schemas.numbers import Unsigned

PAYLOAD_VERSION = 1
MAX_PAYLOAD_BYTES = 64 * 1024
_MAX_RANK = 2**32 - 1


class PassError(ValueError):
    """Bytes that are no forward pass of a version known here. The message says what is wrong, without the bytes."""


class ScheduledPayload(msgspec.Struct, gc=False):
    """``scheduled_requests`` of the payload, in Dynamo's field order."""

    num_prefill_requests: Unsigned = 0
    sum_prefill_tokens: Unsigned = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: Unsigned = 0
    num_decode_requests: Unsigned = 0
    sum_decode_kv_tokens: Unsigned = 0
    var_decode_kv_tokens: float = 0.0


class QueuedPayload(msgspec.Struct, gc=False):
    """``queued_requests`` of the payload, in Dynamo's field order."""

    num_prefill_requests: Unsigned = 0
    sum_prefill_tokens: Unsigned = 0
    var_prefill_length: float = 0.0
    num_decode_requests: Unsigned = 0
    sum_decode_kv_tokens: Unsigned = 0
    var_decode_kv_tokens: float = 0.0


class PassPayload(msgspec.Struct):
    """The whole payload, in Dynamo's field order; what is missing has these defaults, unknown keys are ignored."""

    version: int = PAYLOAD_VERSION
    worker_id: str = ""
    dp_rank: Unsigned = 0
    counter_id: Unsigned = 0
    wall_time: float = 0.0
    scheduled_requests: ScheduledPayload = msgspec.field(default_factory=ScheduledPayload)
    queued_requests: QueuedPayload = msgspec.field(default_factory=QueuedPayload)


def pack_pass(value: ForwardPass) -> bytes:
    """The payload that Dynamo's subscribers get; ``worker_id`` becomes decimal text."""
    scheduled, queued = value.scheduled, value.queued
    payload = PassPayload(
        PAYLOAD_VERSION,
        str(value.worker_id),
        value.dp_rank,
        value.counter,
        value.wall_time_s,
        ScheduledPayload(*msgspec.structs.astuple(scheduled)),
        QueuedPayload(*msgspec.structs.astuple(queued)),
    )
    return msgspec.msgpack.encode(payload)


def unpack_pass(data: bytes) -> PassPayload:
    """Read a payload.

    Raises:
        PassError: Longer than 64 KiB, not msgpack, not this map, a number out of range, or another version.
    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise PassError(f"{len(data)} bytes, at most {MAX_PAYLOAD_BYTES} are read")
    try:
        payload = msgspec.msgpack.decode(data, type=PassPayload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PassError(f"no forward pass: {error}") from error
    if payload.version != PAYLOAD_VERSION:
        raise PassError(f"version {payload.version}, this version reads {PAYLOAD_VERSION}")
    if payload.dp_rank > _MAX_RANK:
        raise PassError("dp_rank is larger than a rank can be")
    return payload


def to_record(payload: PassPayload, model: str, worker_id: int, incarnation: int) -> ForwardPass:
    """The record of the topic ``forward-pass``; every figure of the payload is kept."""
    return ForwardPass(
        FORWARD_PASS.version,
        model,
        worker_id,
        payload.dp_rank,
        incarnation,
        payload.counter_id,
        payload.wall_time,
        ScheduledRequests(*msgspec.structs.astuple(payload.scheduled_requests)),
        QueuedRequests(*msgspec.structs.astuple(payload.queued_requests)),
    )
