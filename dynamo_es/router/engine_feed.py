"""From an engine's KV-event batches to an index over the engine's own hashes (spec: router-core C.2–C.8). Pure.

A batch is decoded as publishers decode it: what is wrong with one event costs that event. Blocks keep the engine's
names; names of bytes become numbers. A store that does not fit (unknown parent, another block size, a hash twice) is
dropped.
"""

from __future__ import annotations

import logging
from collections import Counter

from xxhash import xxh3_64_intdigest

from dynamo_es.publishers.block_normalizer import hash_stored
from dynamo_es.publishers.engine_events import EngineEvent, EngineEventDecoder, EngineHash, Removed, Stored
from dynamo_es.router.engine_index import EngineIndex
from dynamo_es.router.radix_model import BlockMismatch, Worker

logger = logging.getLogger(__name__)


class _Salts:
    """Which cache salt the blocks of a rank were stored under. A block under two salts has none that is certain."""

    def __init__(self) -> None:
        self._salts: dict[int, str | None] = {}

    def note(self, blocks: list[int], salt: str | None) -> None:
        for block in blocks:
            if block in self._salts:
                if self._salts[block] != salt:
                    self._salts[block] = None
            elif salt is not None:
                self._salts[block] = salt

    def inherited(self, parent: int | None) -> tuple[bool, str | None]:
        """Whether it is certain, and the salt of blocks behind ``parent``."""
        if parent is None or parent not in self._salts:
            return True, None
        salt = self._salts[parent]
        return salt is not None, salt

    def forget(self, blocks: list[int]) -> None:
        for block in blocks:
            self._salts.pop(block, None)


class EngineFeed:
    """Applies one engine's batches; a ``RelayHandler``. ``dropped`` counts, by reason, what was not applied."""

    def __init__(self, index: EngineIndex, worker_id: int, dp_rank: int, block_size: int) -> None:
        """``dp_rank``: of batches that name none."""
        self._index = index
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._decoder = EngineEventDecoder()
        self._salts: dict[Worker, _Salts] = {}
        self._ranks = {dp_rank}
        self.dropped: Counter[str] = Counter()

    def on_batch(self, seq: int, payload: bytes) -> None:
        batch = self._decoder.decode(payload)
        self.dropped.update(batch.filtered)
        for rejected in batch.rejected:
            self._drop(rejected.reason, rejected.detail)
        rank = self._dp_rank if batch.dp_rank is None else batch.dp_rank
        self._ranks.add(rank)
        for event in batch.events:
            self._apply((self._worker_id, rank), event)

    def on_restart(self) -> None:
        for rank in self._ranks:
            self._clear((self._worker_id, rank))

    def on_gap(self, first: int, end: int) -> None:
        """What was lost is not known, and there is nobody to ask: the index goes on with what it has."""

    def on_idle(self) -> None:
        """Every batch was applied at once."""

    def _apply(self, worker: Worker, event: EngineEvent) -> None:
        try:
            if isinstance(event, Stored):
                self._store(worker, event)
            elif isinstance(event, Removed):
                blocks = [_number(block) for block in event.block_hashes]
                self._salts_of(worker).forget(blocks)
                self._index.remove(worker, event.tier, blocks)
            else:
                self._clear(worker)
        except BlockMismatch as error:
            self._drop("mismatch", str(error))

    def _store(self, worker: Worker, event: Stored) -> None:
        if event.block_size != self._block_size:
            self._drop("block_size", f"block size {event.block_size}, the worker registered {self._block_size}")
            return
        blocks = [_number(block) for block in event.block_hashes]
        parent = None if event.parent is None else _number(event.parent)
        if len(set(blocks)) != len(blocks) or parent in blocks:
            self._drop("self_reference", "an event names a block twice")
            return
        salts, salt = self._salts_of(worker), event.cache_salt
        if salt is None:
            certain, salt = salts.inherited(parent)
            if not certain:
                self._drop("ambiguous_salt", "blocks behind one that was stored under several cache salts")
                return
        tokens = hash_stored(event, self._block_size, salt)
        count = min(len(blocks), len(tokens))
        self._index.store(worker, event.tier, parent, blocks[:count], tokens[:count])
        salts.note(blocks[:count], salt)

    def _clear(self, worker: Worker) -> None:
        self._salts.pop(worker, None)
        self._index.clear(worker)

    def _salts_of(self, worker: Worker) -> _Salts:
        return self._salts.setdefault(worker, _Salts())

    def _drop(self, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] == 1:
            logger.warning("KV events of worker %d: %s (told once; counted)", self._worker_id, detail)


def _number(block: EngineHash) -> int:
    return xxh3_64_intdigest(block) if isinstance(block, bytes) else block
