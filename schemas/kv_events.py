"""Topic ``kv-events``: which blocks an engine's KV cache holds.

One record is one batch of one source: (model, worker, data-parallel rank). A block is named by its sequence hash
(the rolling hash that commits to the whole prefix) and its tokens hash (its own tokens, LoRA, cache namespace and
multimodal keys); never by token ids, never by text. The publisher maps the engine's own hashes to these and counts
duplicates, so a reader needs no map per worker: a block that is removed here is gone from that tier of that source.
The hash functions belong to the version of the topic: other ones are another version, which older readers refuse.

``seq`` is dense per (source, incarnation) and starts at 0. A reader that sees a gap must not apply what follows it
until a record with ``reset`` set: that record starts from an empty cache and the publisher sends everything it holds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from schemas.columns import check_columns
from schemas.numbers import Positive, Unsigned
from schemas.topic import DAY_MS, Cleanup, TopicSpec

Tier = Literal["device", "host_pinned", "disk", "external"]
TIERS: tuple[Tier, ...] = ("device", "host_pinned", "disk", "external")


class BlocksStored(msgspec.Struct, tag="stored", array_like=True, gc=False):
    """Blocks that form one chain are now in the cache of ``tier``.

    Attributes:
        tier: Where the blocks are.
        parent: Sequence hash of the block before the first one; None at the start of a prompt.
        sequence_hashes: Packed u64 column, one value a block, in chain order.
        tokens_hashes: Packed u64 column of the same length.
    """

    tier: Tier
    parent: int | None
    sequence_hashes: bytes
    tokens_hashes: bytes

    def __post_init__(self) -> None:
        size = len(self.sequence_hashes)
        if size & 7 or len(self.tokens_hashes) != size:
            check_columns((("sequence_hashes", self.sequence_hashes), ("tokens_hashes", self.tokens_hashes)))


class BlocksRemoved(msgspec.Struct, tag="removed", array_like=True, gc=False):
    """Blocks left the cache of ``tier``, one by one: what follows a removed block in a chain stays."""

    tier: Tier
    sequence_hashes: bytes

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) & 7:
            check_columns((("sequence_hashes", self.sequence_hashes),))


class AllBlocksCleared(msgspec.Struct, tag="cleared", array_like=True, gc=False):
    """The source's cache is empty, all tiers of this rank; other ranks and loads are untouched."""


class SourceRetired(msgspec.Struct, tag="retired", array_like=True, gc=False):
    """The worker is gone (its lease ended). Appended by whoever notices first; applying it twice changes nothing."""

    reason: str


KvEvent = BlocksStored | BlocksRemoved | AllBlocksCleared | SourceRetired


class KvEvents(msgspec.Struct, tag="kv-events", array_like=True, gc=False):
    """One batch of one source.

    Attributes:
        version: Layout version, inside the value so that a record without headers is still readable.
        model: Served model name.
        worker_id: Instance id of the worker (u64).
        dp_rank: Data-parallel rank (u32).
        incarnation: Changes whenever the engine's cache starts empty (u64, compared for equality only).
        seq: Dense number of the batch within the incarnation, from 0.
        block_size: Tokens a block.
        reset: The state before this batch is void; the batch starts from an empty cache.
        events: In the order in which they happened.
    """

    version: int
    model: str
    worker_id: Unsigned
    dp_rank: Unsigned
    incarnation: Unsigned
    seq: Unsigned
    block_size: Positive
    reset: bool
    events: list[KvEvent]


KV_EVENTS = TopicSpec(
    name="kv-events",
    version=1,
    value=KvEvents,
    key="<model>/<worker_id>:<dp_rank>",
    partitions=8,
    cleanup=Cleanup.RETENTION,
    retention_ms=7 * DAY_MS,
    trim_needs_snapshot=True,
    description="KV blocks stored, removed and cleared, in batches, one ordered stream for each (model, worker, rank).",
)


def key_kv_events(model: str, worker_id: int, dp_rank: int) -> bytes:
    """Record key of a source: all its records share a partition, so they stay in order."""
    return f"{model}/{worker_id}:{dp_rank}".encode()
