"""A publisher that numbers its batches and notes what was acknowledged, until it is killed.

``python -m tests.support.chaos_publisher URL NAMESPACE WORKER NOTES PAUSE``. Each life is a new incarnation, as when an
engine is started again. A batch that was not acknowledged is appended again: it may be in the log twice.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import Entry
from dynamo_es.log.errors import LogUnavailable
from dynamo_es.log.open import open_log
from schemas.codec import TopicCodec
from schemas.kv_events import KV_EVENTS, BlocksRemoved, BlocksStored, KvEvent, KvEvents, key_kv_events

BATCH = 8


def batch(worker: int, incarnation: int, seq: int, rng: random.Random, held: list[bytes]) -> KvEvents:
    events: list[KvEvent] = []
    for _ in range(4):
        if held and rng.random() < 0.3:
            events.append(BlocksRemoved("device", held.pop(rng.randrange(len(held)))))
        else:
            column = rng.randbytes(8 * 16)
            held.append(column)
            events.append(BlocksStored("device", None, column, column))
    return KvEvents(1, "m", worker, 0, incarnation, seq, 16, seq == 0, events)


async def main(url: str, namespace: str, worker: int, notes: Path, pause_s: float) -> None:
    incarnation = time.time_ns()
    rng = random.Random(incarnation)
    codec = TopicCodec(KV_EVENTS)
    topic, key = KV_EVENTS.qualified(namespace), key_kv_events("m", worker, 0)
    log = open_log(url, SystemClock(), rng=rng)
    await log.start()
    held: list[bytes] = []
    seq = 0
    with notes.open("a", buffering=1) as noted:
        while True:
            values = [batch(worker, incarnation, seq + number, rng, held) for number in range(BATCH)]
            entries = [Entry(codec.encode(value), key, codec.headers) for value in values]
            while True:
                try:
                    await log.append_all(topic, entries)
                except LogUnavailable:
                    await asyncio.sleep(0.1)
                else:
                    break
            seq += BATCH
            noted.write(f"{worker} {incarnation} {seq}\n")
            await asyncio.sleep(pause_s)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), float(sys.argv[5])))
