"""Snapshots in tests: their topic, and a fold driver that starts from one of another driver's committed rows."""

from __future__ import annotations

from dynamo_es.log.base import Bounds, EventLog, TopicPartition
from dynamo_es.store.memory import MemoryStore
from schemas.codec import TopicCodec
from schemas.dead_letters import DeadLetter
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotRecord
from streams.compacted import CompactedTopic
from streams.kv_index_state import KvIndexState
from streams.snapshots import check_snapshot, plan_snapshot, restored_rows
from streams.testing import FoldDriver


class KeptLetters:
    """Keeps the dead letters that it gets."""

    def __init__(self) -> None:
        self.kept: list[DeadLetter] = []

    def offer_dead_letter(self, letter: DeadLetter) -> None:
        self.kept.append(letter)


def snapshot_topic(log: EventLog, namespace: str, letters: KeptLetters | None = None) -> CompactedTopic:
    """The topic ``kv-snapshots``; what is refused there goes to ``letters``."""
    return CompactedTopic(KV_SNAPSHOTS, log, namespace, letters or KeptLetters())


def from_snapshot(driver: FoldDriver[KvIndexState]) -> FoldDriver[KvIndexState]:
    """Another driver: from a snapshot (through its encoding) of the rows that ``driver`` committed, then the tail."""
    plan = plan_snapshot(
        driver.store, partition=0, partitions=1, next_offset=driver.committed, topic_id="t", fold_version=1,
        snapshot_id="s", written_by="test", previous=None,
    )  # fmt: skip
    codec = TopicCodec(KV_SNAPSHOTS)
    records: dict[bytes, KvSnapshotRecord] = {key: codec.decode(codec.encode(chunk)) for key, chunk in plan.chunks}
    manifest = codec.decode(codec.encode(plan.manifest))
    bounds = Bounds(0, driver.committed)
    changes, _ = restored_rows(
        check_snapshot(manifest, records, topic_id="t", fold_version=1, bounds=bounds), 0
    )  # fmt: skip
    store = MemoryStore()
    store.commit(driver.fold.name, changes, {TopicPartition("kv-events", 0): driver.committed})
    return driver.restarted(store)
