"""A process with processors of some partitions of kv-events and requests, until it is killed.

``python -m tests.support.processor_process <log url> <state folder>``; it reads the log itself, as without a group.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from dynamo_es.clock import SystemClock
from dynamo_es.log.base import TopicPartition
from dynamo_es.log.open import open_log
from dynamo_es.log.partitioning import partition_for
from dynamo_es.store.rocks import RocksStore
from schemas.kv_events import KV_EVENTS, key_kv_events
from schemas.requests import REQUESTS
from streams.aggregate_log import AggregateOutlet
from streams.kv_partition import KvPartitionFold
from streams.partition_processor import PartitionProcessor
from streams.request_load import RequestLoadFold
from streams.windows import WindowSettings

NAMESPACE = "storm"
# Two partitions that have sources of the storm, and one of requests.
_BUSY = sorted({partition_for(key_kv_events("m", worker, 0), KV_EVENTS.partitions) for worker in range(6)})[:2]
PLACES: dict[TopicPartition, Any] = {
    **{TopicPartition(KV_EVENTS.qualified(NAMESPACE), number): KvPartitionFold for number in _BUSY},
    TopicPartition(REQUESTS.qualified(NAMESPACE), 0): RequestLoadFold,
}
WINDOWS = WindowSettings(window_ms=500)


class NoLetters:
    def offer_dead_letter(self, letter: object) -> None:
        return None


def folder_of(state_dir: Path, place: TopicPartition) -> Path:
    return state_dir / f"{place.topic}-{place.partition}"


async def main(url: str, state_dir: str) -> None:
    log = open_log(url, SystemClock(), rng=random.Random())
    await log.start()
    processors: list[PartitionProcessor[Any]] = []
    for place, make in PLACES.items():
        fold = make(WINDOWS)
        processor: PartitionProcessor[Any] = PartitionProcessor(
            fold, place, log, NAMESPACE,
            make_store=lambda place=place, fold=fold: RocksStore(folder_of(Path(state_dir), place), fold.families),
            clock=SystemClock(), rng=random.Random(), dead_letters=NoLetters(), lock_timeout_s=5,
            outlet=AggregateOutlet(fold, log, NAMESPACE, place, topic_id=lambda: "id", written_by="test"),
        )  # fmt: skip
        await processor.open()
        processors.append(processor)
    print("ready", flush=True)
    while True:
        for processor in processors:
            end = (await log.bounds(processor.place.topic))[processor.place.partition].end
            await processor.catch_up(end)
            await processor.commit()
            await processor.publish()
        await asyncio.sleep(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
