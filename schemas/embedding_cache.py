"""Topic ``embedding-cache``: which multimodal embeddings a worker keeps."""

from __future__ import annotations

import msgspec

from schemas.numbers import Unsigned
from schemas.topic import DAY_MS, Cleanup, TopicSpec


class EmbeddingCacheDelta(msgspec.Struct, tag="embedding-cache", array_like=True):
    """Keys that came and went, each list sorted and without duplicates. ``seq`` is dense per incarnation."""

    version: int
    worker_id: Unsigned
    incarnation: Unsigned
    seq: Unsigned
    added_keys: list[str]
    removed_keys: list[str]


EMBEDDING_CACHE = TopicSpec(
    name="embedding-cache",
    version=1,
    value=EmbeddingCacheDelta,
    key="<worker_id>",
    partitions=4,
    cleanup=Cleanup.RETENTION,
    retention_ms=DAY_MS,
    description="Keys added to and removed from each worker's multimodal embedding cache.",
)
