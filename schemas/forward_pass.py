"""Topic ``forward-pass``: what each engine step did. Field meanings are those of Dynamo's ForwardPassMetrics."""

from __future__ import annotations

import msgspec

from schemas.numbers import Unsigned
from schemas.topic import HOUR_MS, Cleanup, TopicSpec


class ScheduledRequests(msgspec.Struct, array_like=True, gc=False):
    """What ran in the pass. Token counts; variances are population variances of lengths in tokens²."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    sum_prefill_kv_tokens: int = 0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class QueuedRequests(msgspec.Struct, array_like=True, gc=False):
    """What waited: prompts not started (raw lengths) and preempted requests (context lengths)."""

    num_prefill_requests: int = 0
    sum_prefill_tokens: int = 0
    var_prefill_length: float = 0.0
    num_decode_requests: int = 0
    sum_decode_kv_tokens: int = 0
    var_decode_kv_tokens: float = 0.0


class ForwardPass(msgspec.Struct, tag="forward-pass", array_like=True, gc=False):
    """One forward pass of one rank; ``wall_time_s`` is 0.0 in an idle heartbeat.

    ``counter`` rises by one for each message of a rank, heartbeats included.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    counter: Unsigned
    wall_time_s: float
    scheduled: ScheduledRequests
    queued: QueuedRequests


FORWARD_PASS = TopicSpec(
    name="forward-pass",
    version=1,
    value=ForwardPass,
    key="<model>/<worker_id>:<dp_rank>",
    partitions=4,
    cleanup=Cleanup.RETENTION,
    retention_ms=HOUR_MS,
    description="Forward-pass metrics of each rank, one record a pass, with a heartbeat while idle.",
)
