"""Topic ``worker-load``: the newest load that a worker measured on itself. Never mixed with what routers booked."""

from __future__ import annotations

import msgspec

from schemas.numbers import Unsigned
from schemas.topic import Cleanup, TopicSpec


class WorkerLoad(msgspec.Struct, tag="worker-load", array_like=True, gc=False):
    """Measured load of one rank; a value that the engine does not know is None.

    Attributes:
        kv_used_blocks, active_decode_blocks: Blocks of this rank in use.
        total_kv_blocks: Capacity of this rank (not of the whole worker).
        running, waiting: Requests in the engine.
        at_ms: When it was measured, worker's clock; load older than its time to live counts as unknown.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    kv_used_blocks: int | None
    active_decode_blocks: int | None
    total_kv_blocks: int | None
    running: int | None
    waiting: int | None
    at_ms: Unsigned


WORKER_LOAD = TopicSpec(
    name="worker-load",
    version=1,
    value=WorkerLoad,
    key="<model>/<worker_id>:<dp_rank>",
    partitions=4,
    cleanup=Cleanup.COMPACTION,
    description="Newest measured load of each rank.",
)
