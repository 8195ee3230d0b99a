"""One value or more of every Struct that a topic can hold, with its topic."""

from __future__ import annotations

import msgspec

from schemas.aggregates import (
    AGGREGATES,
    KvSourceCounts,
    MeasuredLoad,
    PassLoad,
    Progress,
    RejectedRecords,
    RequestLoad,
)
from schemas.columns import pack_u64
from schemas.dc_relay import (
    DC_RELAY,
    DcStatus,
    LoadSignal,
    ModelReadiness,
    PoolDelta,
    PoolSnapshot,
    PoolStatus,
    RelayPool,
)
from schemas.dead_letters import DEAD_LETTERS, DeadLetter
from schemas.embedding_cache import EMBEDDING_CACHE, EmbeddingCacheDelta
from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from schemas.kv_events import KV_EVENTS, AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvents, SourceRetired
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotChunk, KvSnapshotManifest, SnapshotTier, SourceState
from schemas.registry import REGISTRY, Instance, Lease, LeaseEnded, ModelCard, ResyncAsked
from schemas.requests import REQUESTS, Candidate, Finished, PrefillCompleted, ReadPosition, Routed, RouterLost
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD, WorkerLoad

U64 = 2**64 - 1
COLUMN = pack_u64([0, 1, U64])
POOL = RelayPool("ns", "backend", "generate", "org/model:é", 16)
SIGNALS = [LoadSignal(100, 2), LoadSignal(400, 2), LoadSignal(0, 0), LoadSignal(3, 1), LoadSignal(0, 1)]

SAMPLES: tuple[tuple[TopicSpec, msgspec.Struct], ...] = (
    (
        KV_EVENTS,
        KvEvents(
            1, "org/model:é", U64, 3, U64, 0, 16, True,
            [
                BlocksStored("device", None, COLUMN, COLUMN),
                BlocksStored("host_pinned", U64, b"", b""),
                BlocksRemoved("disk", COLUMN),
                AllBlocksCleared(),
                SourceRetired("lease expired"),
            ],
        ),
    ),
    (KV_EVENTS, KvEvents(1, "", 0, 0, 0, 0, 1, False, [])),
    (
        KV_SNAPSHOTS,
        KvSnapshotChunk(1, "m", 1, 0, U64, "s-1", 0, 2, [SnapshotTier("external", COLUMN)], U64),
    ),
    (
        KV_SNAPSHOTS,
        KvSnapshotManifest(
            1, 3, 77, "topic", 1, "frontend/7",
            [SourceState("m", 1, 0, U64, 16, 9, True, False, [3, U64], "s-1", 1, 2, U64)],
        ),
    ),
    (FORWARD_PASS, ForwardPass(1, "m", 1, 0, 2, 3, 0.25, ScheduledRequests(1, 2, 0.5), QueuedRequests())),
    (WORKER_LOAD, WorkerLoad(1, "m", 1, 0, 2, None, 4, 100, None, 0, 1_700_000_000_000)),
    (REGISTRY, Lease(1, U64, "worker", 7, 10_000, 0)),
    (REGISTRY, LeaseEnded(1, U64, 4, "expired", "router 9")),
    (REGISTRY, ResyncAsked(1, "org/m", U64, 1, 2, 9, 1, "frontend/7")),
    (
        REGISTRY,
        Instance(
            1, "ns", "backend", "generate", 7, U64, "zmq", "tcp://10.0.0.7:40123",
            state="draining", runtime_data={"a": "b"}, public_key="k",
        ),
    ),
    (REGISTRY, Instance(1, "ns", "backend", "generate", 7, 8, "zmq", "tcp://10.0.0.7:40123")),
    (
        REGISTRY,
        ModelCard(
            1, "ns", "backend", "generate", 7, 8, "", "model", "org/model", "Tokens", "Chat | Completions",
            "aggregated", [["decode", "prefill"], ["aggregated"]], 8192, 16,
            runtime_config={"total_kv_blocks": 100, "taints": ["a"]}, checksums={"tokenizer.json": "blake3:00"},
            user_data={"nested": [1, {"x": None}]}, details={"media_decoder": {"image": {}}, "file_sizes": {"a": 1}},
        ),
    ),
    (
        REQUESTS,
        Routed(
            1, "r-1", 0, U64, "m", "kv", 7, 0, 16, 50, COLUMN, COLUMN, 2, 32, 18,
            [Candidate(7, 0, 2, 0, 1, 18.0, 4.5, 3, 5.625)], "digest", [ReadPosition("dynamo.kv-events", 3, 900)], 210,
        ),
    ),
    (REQUESTS, PrefillCompleted(1, "r-1", 0, 5)),
    (REQUESTS, Finished(1, "r-1", 0, 5, "cancelled", 0, -1, 30)),
    (REQUESTS, RouterLost(1, 5)),
    (EMBEDDING_CACHE, EmbeddingCacheDelta(1, 7, 2, 0, ["a", "b"], [])),
    (AGGREGATES, RequestLoad(1, 3, 901, 1_700_000_040_000, 9, "m", U64, 0, 5, 90, 16, 1, 1, 1, 1, 1, 7, 2, 30, 20, 9)),
    (AGGREGATES, PassLoad(1, 3, 901, 1_700_000_040_000, 60_000, "m", 7, 0, U64, 12, 9, 3, 1, 2, 0.25, 4096, 17, 4)),
    (AGGREGATES, MeasuredLoad(1, 0, 1, 0, 1000, "m", 7, 0, 8, 1_700_000_000_000, 4, 3, 700, 300, 1000, 12, 4)),
    (AGGREGATES, KvSourceCounts(1, 0, 1, 1_700_000_040_000, 60_000, "org/model:é", 7, 0, 20, 1, 2, 1, 3, 4)),
    (AGGREGATES, RejectedRecords(1, "kv-events", 0, 12, 1_700_000_040_000, 60_000, "undecodable", 2)),
    (AGGREGATES, Progress(1, "kv-events", 0, "id", 1001, 900, 870, 1_700_000_041_000, "streams host/7")),
    (
        DC_RELAY,
        DcStatus(
            1, "eu-west", U64, 0, 1_700_000_000_000, 1000, 2, 1, 1,
            [PoolStatus(POOL, ["decode", "prefill"], False, 2, 1, 9, *SIGNALS)],
            [ModelReadiness("ns", "org/model:é", True, 3, ["decode", "prefill"], [], ["m"], ["lora"])],
        ),
    ),
    (DC_RELAY, PoolSnapshot(1, "eu-west", U64, 1, POOL, 0, 2, COLUMN, U64)),
    (DC_RELAY, PoolDelta(1, "eu-west", U64, 2, POOL, COLUMN, b"")),
    (DEAD_LETTERS, DeadLetter(1, "dynamo.requests", -1, 0, 5, "undecodable", "why", "index", None, b"\xff\x00", 2)),
)  # fmt: skip

IDS = [f"{spec.name}-{type(value).__name__}-{index}" for index, (spec, value) in enumerate(SAMPLES)]
