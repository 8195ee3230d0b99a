"""Topic ``dc-relay``: what one data centre tells routers of others about its KV caches, its load and its readiness.

Its relay folds the local topics and writes here. All records of a data centre have its id as key: one partition, one
order, numbered densely by ``seq`` within one life of the relay (``relay``). A pool is the workers of one endpoint that
serve one model with one block size; its blocks are the union over its workers, all tiers, named by sequence hash. They
come as a snapshot in chunks, whole with the last one, and as changes from then on. ``DcStatus`` comes every few seconds
and is complete: a pool that it does not name is gone.

A reader that misses a ``seq`` knows nothing of the data centre's blocks any more, until each pool's next snapshot.
These come again and again, so that a reader need not begin at the start of the topic, only ``SNAPSHOTS_WITHIN_MS``
back. Lives are ordered: a reader goes by the greatest that it has seen, and drops records of a lower one, be it a
straggler or a second relay with the same id.
"""

from __future__ import annotations

import msgspec

from schemas.columns import check_columns
from schemas.numbers import Positive, Unsigned
from schemas.topic import HOUR_MS, Cleanup, TopicSpec

SNAPSHOTS_WITHIN_MS = HOUR_MS // 2
"""A snapshot of every pool is at most half as old, so that so much of the topic always has a whole one."""
CHUNK_BLOCKS = 65_536
"""Blocks of a record, at most: half of what it may hold."""


class RelayPool(msgspec.Struct, array_like=True, frozen=True):
    """The workers of one endpoint that serve one model.

    Attributes:
        namespace, component, endpoint: The endpoint's path.
        model: Name under which its KV events stand: that of the base model.
        block_size: Tokens a block.
    """

    namespace: str
    component: str
    endpoint: str
    model: str
    block_size: Positive

    @property
    def path(self) -> str:
        """``namespace.component.endpoint``."""
        return f"{self.namespace}.{self.component}.{self.endpoint}"


class LoadSignal(msgspec.Struct, array_like=True, gc=False):
    """One measure: the sum over the ranks that told it lately, and how many they are. Nobody told: both are 0."""

    total: Unsigned
    ranks: Unsigned


class PoolStatus(msgspec.Struct, array_like=True):
    """A pool as it is now.

    Attributes:
        pool: Which.
        roles: Worker types of its workers, sorted.
        is_eagle: Its blocks are hashed with the token behind each, as EAGLE's draft model needs.
        ranks: Ranks whose blocks count.
        fenced_ranks: Ranks that are left out, as their events are missing and they did not announce themselves anew.
        blocks: Blocks that the pool holds.
        kv_used_blocks, kv_total_blocks, active_decode_blocks, running, waiting: Measured load, as in ``worker-load``.
    """

    pool: RelayPool
    roles: list[str]
    is_eagle: bool
    ranks: Unsigned
    fenced_ranks: Unsigned
    blocks: Unsigned
    kv_used_blocks: LoadSignal
    kv_total_blocks: LoadSignal
    active_decode_blocks: LoadSignal
    running: LoadSignal
    waiting: LoadSignal


class ModelReadiness(msgspec.Struct, array_like=True):
    """Whether a namespace of the data centre can serve a model.

    Attributes:
        namespace, model: Which; LoRA adapters have no entry of their own.
        ready: A worker takes requests, every declared role has one, and every worker's needs are met.
        workers: Workers that take requests.
        present, missing: Roles with such a worker, and declared or needed ones without.
        aliases: Other names of the model.
        adapters: LoRA adapters that can be served, sorted.
    """

    namespace: str
    model: str
    ready: bool
    workers: Unsigned
    present: list[str]
    missing: list[str]
    aliases: list[str]
    adapters: list[str]


class DcStatus(msgspec.Struct, tag="dc-status", array_like=True):
    """The data centre as a whole.

    Attributes:
        version: Layout version.
        dc_id: Data centre.
        relay: Life of its relay, greater with every start: Unix time of the start in ms in the upper 44 bits, random
            bits below. Of two relays with one id readers go by the one that started last; if a clock ran ahead at a
            start, by that one until the time has come, or the readers start anew half an hour after it stopped.
        seq: Dense number of the record within ``relay``, from 0.
        at_ms: When it was made, relay's clock.
        window_ms: The next one follows within this time.
        endpoints, active_endpoints, fenced_endpoints: With a model; with a rank that counts; with a fenced rank.
        pools: All pools.
        models: All models.
    """

    version: int
    dc_id: str
    relay: Unsigned
    seq: Unsigned
    at_ms: Unsigned
    window_ms: Positive
    endpoints: Unsigned
    active_endpoints: Unsigned
    fenced_endpoints: Unsigned
    pools: list[PoolStatus]
    models: list[ModelReadiness]


class PoolSnapshot(msgspec.Struct, tag="pool-snapshot", array_like=True, gc=False):
    """Chunk ``chunk`` (from 0) of ``chunks`` of all blocks of a pool; they follow each other without a record between.

    Attributes:
        version, dc_id, relay, seq: As in ``DcStatus``.
        pool: Which.
        sequence_hashes: Packed u64 column, each block once, in any order.
        checksum: XXH3-64 over ``sequence_hashes``.
    """

    version: int
    dc_id: str
    relay: Unsigned
    seq: Unsigned
    pool: RelayPool
    chunk: Unsigned
    chunks: Positive
    sequence_hashes: bytes
    checksum: Unsigned

    def __post_init__(self) -> None:
        if len(self.sequence_hashes) & 7:
            check_columns((("sequence_hashes", self.sequence_hashes),))


class PoolDelta(msgspec.Struct, tag="pool-delta", array_like=True, gc=False):
    """What changed in a pool since the record before it: no block is in both columns.

    Attributes:
        version, dc_id, relay, seq: As in ``DcStatus``.
        pool: Which.
        added, removed: Sequence hashes, packed u64 columns.
    """

    version: int
    dc_id: str
    relay: Unsigned
    seq: Unsigned
    pool: RelayPool
    added: bytes
    removed: bytes

    def __post_init__(self) -> None:
        if (len(self.added) | len(self.removed)) & 7:
            check_columns((("added", self.added),))
            check_columns((("removed", self.removed),))


DcRelayRecord = DcStatus | PoolSnapshot | PoolDelta

DC_RELAY = TopicSpec(
    name="dc-relay",
    version=1,
    value=DcRelayRecord,
    key="<dc_id>",
    partitions=4,
    cleanup=Cleanup.RETENTION,
    retention_ms=2 * HOUR_MS,
    description="KV blocks, load and readiness of one data centre or several, for routers of other data centres.",
)


def key_dc_relay(dc_id: str) -> bytes:
    """Record key: all records of a data centre share a partition, so they stay in order."""
    return dc_id.encode()
