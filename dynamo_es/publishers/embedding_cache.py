"""Publishing which multimodal embeddings an encode worker keeps (Dynamo's ``MultimodalEmbeddingCachePublisher``;
spec/services c.3).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from dynamo_es.publishers.loop_handover import LoopHandover
from dynamo_es.publishers.scope import PublisherEndpoint, PublisherScope
from dynamo_es.router.config_arguments import to_texts
from schemas.embedding_cache import EMBEDDING_CACHE, EmbeddingCacheDelta

logger = logging.getLogger(__name__)

# Deltas from other threads that may wait for the loop.
MAX_WAITING_DELTAS = 10_000
# Keys that came, or went, in one record.
MAX_RECORD_KEYS = 1_024
Delta = tuple[list[str], list[str]]


class MultimodalEmbeddingCachePublisher:
    """Keys that came into and went out of this worker's embedding cache, as they change.

    ``publish_delta`` may be called from any thread. A delta that finds no room (10,000 from other threads, or the
    log's buffer) is lost and counted in ``lost``; the hole in ``seq`` shows it to readers.
    """

    def __init__(self) -> None:
        self._scope: PublisherScope | None = None
        self._handover: LoopHandover[Delta] | None = None
        self._incarnation = 0
        self._seq = 0
        self.lost = 0

    async def create_endpoint(self, endpoint: PublisherEndpoint) -> None:
        """Publish for ``endpoint`` from now on, as a new incarnation: an empty cache. A second call starts over."""
        scope = endpoint.publisher_scope()
        if self._scope is None:
            scope.add_counts(lambda: {"embedding_changes_lost": self.lost})
        self._scope = scope
        self._handover = LoopHandover(scope.loop, MAX_WAITING_DELTAS, self._on_handover)
        self._incarnation, self._seq = scope.rng.getrandbits(64), 0

    def publish_delta(self, added_keys: Sequence[str], removed_keys: Sequence[str]) -> None:
        """One change; each list is sorted and freed of duplicates. Both empty: nothing is published.

        Raises:
            TypeError: An argument is no list, or an item no text.
            Exception: Before ``create_endpoint`` (exactly this class, as in Dynamo).
        """
        delta = (
            sorted(set(to_texts("added_keys", added_keys))),
            sorted(set(to_texts("removed_keys", removed_keys))),
        )
        if not any(delta):
            return
        if self._handover is None:
            raise Exception("multimodal embedding cache publisher not initialized")
        if self._handover.is_on_loop():
            self._on_handover()
            self._send(*delta)
        else:
            self._handover.put(delta)

    def _on_handover(self) -> None:
        assert self._handover is not None
        deltas, dropped = self._handover.take()
        for added, removed in deltas:
            self._send(added, removed)
        if dropped:
            self._seq += dropped
            self._note_lost(dropped)

    def _send(self, added: list[str], removed: list[str]) -> None:
        """As many records as it takes; a record has to fit the topic's bound."""
        for start in range(0, max(len(added), len(removed)), MAX_RECORD_KEYS):
            stop = start + MAX_RECORD_KEYS
            self._append(added[start:stop], removed[start:stop])

    def _append(self, added: list[str], removed: list[str]) -> None:
        assert self._scope is not None
        worker_id = self._scope.worker_id
        value = EmbeddingCacheDelta(EMBEDDING_CACHE.version, worker_id, self._incarnation, self._seq, added, removed)
        self._seq += 1
        if not self._scope.sink.offer(EMBEDDING_CACHE, str(worker_id).encode(), value):
            self._note_lost(1)

    def _note_lost(self, changes: int) -> None:
        if not self.lost:
            logger.warning("changes of the embedding cache are lost: they come faster than the log takes them")
        self.lost += changes
