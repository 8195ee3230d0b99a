"""Topic ``requests``: every routing decision and the life of the request after it. Hashes only, never the prompt."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from schemas.columns import check_columns
from schemas.numbers import Positive, Unsigned
from schemas.topic import DAY_MS, Cleanup, TopicSpec

Outcome = Literal["ok", "cancelled", "error", "migrated"]
Stage = Literal["", "prefill", "decode"]
SESSION_BYTES = 16


class Candidate(msgspec.Struct, array_like=True, gc=False):
    """What the router knew of one (worker, rank) when it chose.

    Attributes:
        device_blocks: Leading blocks of the prompt in device memory there.
        host_blocks, disk_blocks: Blocks by which host memory, then disk or external, extend that prefix.
        prefill_tokens: Prompt tokens booked there and not yet computed, before this request.
        decode_blocks: Blocks active there with this request's new blocks added.
        active_requests: Requests booked there.
        cost: In blocks; the lowest wins.
    """

    worker_id: Unsigned
    dp_rank: Unsigned
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    prefill_tokens: float
    decode_blocks: float
    active_requests: int
    cost: float


class ReadPosition(msgspec.Struct, array_like=True, gc=False):
    """The decision had seen all records of this topic partition below ``next_offset``."""

    topic: str
    partition: Unsigned
    next_offset: Unsigned


class Routed(msgspec.Struct, tag="routed", array_like=True, gc=False):
    """A decision, and the booking that it made.

    Attributes:
        version: Layout version.
        request_id, attempt: The booking's identity; a request that is sent again has a higher attempt.
        router_id: Process that decided (u64, new at each start).
        model: Served model name.
        mode: Router mode, Dynamo's name (``kv``, ``round-robin``, ...).
        worker_id, dp_rank: The choice.
        block_size: Tokens a block.
        isl_tokens: Prompt length in tokens.
        sequence_hashes, tokens_hashes: Packed u64 columns over the complete blocks of the prompt.
        overlap_blocks: Cached leading blocks at the choice, weighted by tier, rounded.
        cached_tokens: The same in tokens.
        prefill_tokens: Prompt tokens booked as still to compute (0 if prefill is not tracked).
        candidates: All eligible workers; empty in modes that do not compare them.
        config_digest: Of the router configuration that was in force, overrides included.
        positions: How far the views were.
        decided_us: Time that the decision took, in microseconds.
        tracking_hashes: Packed u64 column: identities under which the prompt's blocks are booked; empty: the sequence
            hashes.
        session: Digest of the session that the worker is bound to from now on; empty: of none.
        expected_prefill_ms: How long the worker was expected to compute those prompt tokens; -1: nobody said.
        stage: ``prefill`` or ``decode``: which of the two hops of a disaggregated request this is; empty: the only one.
        lease_id: Lease of the router when it announced the booking; 0: it has none. A router that lost its lease and
            lives announces its open bookings again under the next one, with the prompt tokens that are left.
    """

    version: int
    request_id: str
    attempt: Unsigned
    router_id: Unsigned
    model: str
    mode: str
    worker_id: Unsigned
    dp_rank: Unsigned
    block_size: Positive
    isl_tokens: Unsigned
    sequence_hashes: bytes
    tokens_hashes: bytes
    overlap_blocks: int
    cached_tokens: int
    prefill_tokens: int
    candidates: list[Candidate]
    config_digest: str
    positions: list[ReadPosition]
    decided_us: int
    tracking_hashes: bytes = b""
    session: bytes = b""
    expected_prefill_ms: float = -1.0
    stage: Stage = ""
    lease_id: Unsigned = 0

    def __post_init__(self) -> None:
        check_columns((("sequence_hashes", self.sequence_hashes), ("tokens_hashes", self.tokens_hashes)))
        if self.tracking_hashes:
            check_columns((("sequence_hashes", self.sequence_hashes), ("tracking_hashes", self.tracking_hashes)))
        if len(self.session) not in (0, SESSION_BYTES):
            raise ValueError(f"session has {len(self.session)} bytes, not {SESSION_BYTES}")
        if not math.isfinite(self.expected_prefill_ms):
            raise ValueError("expected_prefill_ms is not finite")


class PrefillCompleted(msgspec.Struct, tag="prefill-completed", array_like=True, gc=False):
    """The first token came: the prompt's tokens no longer count as load."""

    version: int
    request_id: str
    attempt: Unsigned
    router_id: Unsigned


class Finished(msgspec.Struct, tag="finished", array_like=True, gc=False):
    """The booking is released, exactly once, however the request ended.

    ``first_token_ms`` and ``duration_ms`` count from the decision; -1 if there was no token.
    """

    version: int
    request_id: str
    attempt: Unsigned
    router_id: Unsigned
    outcome: Outcome
    output_tokens: int
    first_token_ms: int
    duration_ms: int
    detail: str = ""


class RouterLost(msgspec.Struct, tag="router-lost", array_like=True, gc=False):
    """A router's lease ended: what it booked under that lease is released. Applying it twice changes nothing."""

    version: int
    router_id: Unsigned
    lease_id: Unsigned = 0


RequestEvent = Routed | PrefillCompleted | Finished | RouterLost

REQUESTS = TopicSpec(
    name="requests",
    version=1,
    value=RequestEvent,
    key="<request_id>; router/<router_id> for router-lost",
    partitions=4,
    cleanup=Cleanup.RETENTION,
    retention_ms=7 * DAY_MS,
    description="Routing decisions with what they rested on, and what became of each request.",
)
