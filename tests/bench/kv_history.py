"""KV events as engines would send them, the same ones every time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

from dynamo_es.log.base import Entry, EventLog
from schemas.codec import TopicCodec
from schemas.columns import pack_u64
from schemas.kv_events import KV_EVENTS, BlocksRemoved, BlocksStored, KvEvent, KvEvents, key_kv_events

MODEL = "m"
BLOCK_SIZE = 16
REMOVALS = 0.2


class NoLetters:
    """None of this history is refused by a fold."""

    def offer_dead_letter(self, letter: object) -> None:
        raise AssertionError(letter)


class Batch(NamedTuple):
    """What one worker tells at once."""

    worker: int
    events: list[KvEvent]


def batches(count: int, *, workers: int, events: int, blocks: int, seed: int = 3) -> Iterator[Batch]:
    """``count`` batches of ``events`` events of ``blocks`` blocks; a fifth removes what was stored before."""
    rng = random.Random(seed)
    held: list[list[bytes]] = [[] for _ in range(workers)]
    for _ in range(count):
        worker = rng.randrange(workers)
        batch: list[KvEvent] = []
        for _ in range(events):
            if held[worker] and rng.random() < REMOVALS:
                batch.append(BlocksRemoved("device", held[worker].pop(rng.randrange(len(held[worker])))))
            else:
                column = pack_u64([rng.getrandbits(64) for _ in range(blocks)])
                held[worker].append(column)
                batch.append(BlocksStored("device", None, column, column))
        yield Batch(worker, batch)


def entries(count: int, *, workers: int, events: int, blocks: int) -> list[Entry]:
    """Such batches as records."""
    codec = TopicCodec(KV_EVENTS)
    seqs = [0] * workers
    made = []
    for worker, batch in batches(count, workers=workers, events=events, blocks=blocks):
        seq, seqs[worker] = seqs[worker], seqs[worker] + 1
        value = KvEvents(KV_EVENTS.version, MODEL, worker, 0, 1, seq, BLOCK_SIZE, seq == 0, batch)
        made.append(Entry(codec.encode(value), key_kv_events(MODEL, worker, 0), codec.headers))
    return made


async def append(log: EventLog, namespace: str, records: list[Entry], at_once: int = 500) -> None:
    """Append them, some at a time."""
    for start in range(0, len(records), at_once):
        await log.append_all(KV_EVENTS.qualified(namespace), records[start : start + at_once])
