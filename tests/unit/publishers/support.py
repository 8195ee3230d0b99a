"""What publisher tests share: a sink that keeps records, a scope, and the simplest reader of ``kv-events``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock, ManualClock, SystemClock
from dynamo_es.router.hashing import block_seed, compute_sequence_hashes, hash_blocks
from schemas.codec import TopicCodec
from schemas.columns import unpack_u64
from schemas.dead_letters import DEAD_LETTERS
from schemas.kv_events import KV_EVENTS, AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvents
from schemas.topic import TopicSpec


class ListSink:
    """Keeps what it is offered, encoded and decoded as the log would. ``room``: how many more records it takes."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.records: list[tuple[TopicSpec, bytes, Any]] = []
        self.sizes: list[int] = []
        self.refused = 0

    def offer(self, topic: TopicSpec, key: bytes, value: msgspec.Struct) -> bool:
        if self.room is not None:
            if self.room <= 0:
                self.refused += 1
                return False
            self.room -= 1
        codec = TopicCodec(topic)
        data = codec.encode(value)
        self.sizes.append(len(data))
        self.records.append((topic, key, codec.decode(data, codec.headers)))
        return True

    def values(self, topic: TopicSpec) -> list[Any]:
        return [value for spec, _, value in self.records if spec is topic]

    @property
    def kv(self) -> list[KvEvents]:
        return self.values(KV_EVENTS)

    @property
    def dead_letters(self) -> list[Any]:
        return self.values(DEAD_LETTERS)


class Scope:
    """A ``PublisherScope`` that is its own endpoint."""

    def __init__(
        self,
        sink: ListSink | None = None,
        *,
        clock: Clock | None = None,
        model: str | None = "m",
        worker_id: int = 7,
        dp_size: int = 1,
    ) -> None:
        self.sink = sink if sink is not None else ListSink()
        self.clock: Clock = clock if clock is not None else SystemClock()
        self.rng = random.Random(1)
        self.tasks = BackgroundTasks()
        self.worker_id = worker_id
        self.model = model
        self.ranks = dp_size
        self.renewals: list[Callable[[], None]] = []
        self.cleanups: list[Callable[[], Awaitable[None]]] = []
        self.counts: list[Callable[[], Mapping[str, int]]] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def publisher_scope(self) -> Scope:
        return self

    def model_name(self) -> str | None:
        return self.model

    def dp_size(self) -> int:
        return self.ranks

    def add_renewal(self, callback: Callable[[], None]) -> None:
        self.renewals.append(callback)

    def add_counts(self, counts: Callable[[], Mapping[str, int]]) -> None:
        self.counts.append(counts)

    def add_cleanup(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.cleanups.append(callback)

    async def close(self) -> None:
        for cleanup in self.cleanups:
            await cleanup()


class Reader:
    """Folds ``kv-events`` of one worker into sets of sequence hashes; refuses gaps as every reader must."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str], set[int]] = {}
        self.next_seq: dict[int, int] = {}
        self.incarnation: dict[int, int] = {}
        self.gaps = 0

    def apply_all(self, batches: Iterable[KvEvents]) -> Reader:
        for batch in batches:
            self.apply(batch)
        return self

    def apply(self, batch: KvEvents) -> None:
        rank = batch.dp_rank
        if self.incarnation.get(rank) != batch.incarnation:
            self.incarnation[rank] = batch.incarnation
            self.next_seq[rank] = 0
            assert batch.reset, "an incarnation begins with a reset"
        if batch.seq != self.next_seq[rank] and not batch.reset:
            self.gaps += 1
            return
        self.next_seq[rank] = batch.seq + 1
        if batch.reset:
            self._clear(rank)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self.blocks.setdefault((rank, event.tier), set()).update(unpack_u64(event.sequence_hashes))
            elif isinstance(event, BlocksRemoved):
                self.blocks.setdefault((rank, event.tier), set()).difference_update(unpack_u64(event.sequence_hashes))
            elif isinstance(event, AllBlocksCleared):
                self._clear(rank)

    def depth(self, sequence_hashes: Iterable[int], rank: int = 0, tier: str = "device") -> int:
        held = self.blocks.get((rank, tier), set())
        depth = 0
        for sequence_hash in sequence_hashes:
            if sequence_hash not in held:
                break
            depth += 1
        return depth

    def held(self, rank: int = 0, tier: str = "device") -> set[int]:
        return self.blocks.get((rank, tier), set())

    def _clear(self, rank: int) -> None:
        for key in [key for key in self.blocks if key[0] == rank]:
            del self.blocks[key]


def chain(
    tokens: Iterable[int], block_size: int = 4, lora: str | None = None, salt: str | None = None, **kw: Any
) -> list[int]:
    """Sequence hashes of a prompt, as a router computes them."""
    return compute_sequence_hashes(hash_blocks(list(tokens), block_size, block_seed(lora, salt), **kw))


def manual_clock() -> ManualClock:
    return ManualClock()
