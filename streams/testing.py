"""Testing a fold without a log: feed values, look at the state, restart it from rows.

driver = FoldDriver(KvIndexFold())
driver.feed(key, value)
assert driver.state...
assert driver.restarted().digest() == driver.replayed().digest() == driver.digest()
"""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from dynamo_es.log.base import Record, TopicPartition
from dynamo_es.store.memory import MemoryStore
from schemas.codec import SchemaError, TopicCodec
from schemas.topic import TopicSpec
from streams.fold import Fold, RecordRejected

S = TypeVar("S")


class FoldDriver(Generic[S]):
    """Runs one fold synchronously, through the real encoding. ``rejected`` has the reasons of refused records."""

    def __init__(self, fold: Fold[S], store: MemoryStore | None = None, now_ms: int = 1_700_000_000_000) -> None:
        self.fold = fold
        self.store = store if store is not None else MemoryStore()
        self.state = fold.load(self.store)
        self.now_ms = now_ms
        self.rejected: list[str] = []
        self._codecs = {spec.name: TopicCodec(spec) for spec in fold.topics}
        self._records: list[Record] = []
        self._committed = 0

    def feed(self, value: msgspec.Struct | None, key: bytes | None = b"key", topic: TopicSpec | None = None) -> None:
        """Fold one event, as a record of the fold's (first) topic."""
        spec = topic if topic is not None else self.fold.topics[0]
        data = None if value is None else self._codecs[spec.name].encode(value)
        self.feed_record(
            Record(spec.name, 0, len(self._records), self.now_ms, key, data, self._codecs[spec.name].headers)
        )

    def feed_record(self, record: Record) -> None:
        """Fold a record as it stands."""
        self._records.append(record)
        self._apply(record)

    def commit(self) -> None:
        """Write rows and the position, as a runner does."""
        position = TopicPartition(self.fold.topics[0].name, 0)
        self.store.commit(self.fold.name, self.fold.changes(self.state), {position: len(self._records)})
        self._committed = len(self._records)
        job = self.fold.compaction(self.state)
        if job is not None:
            self.store.commit(self.fold.name, job(self.store), {})

    def digest(self) -> str:
        """Digest of the state."""
        return self.fold.digest(self.state)

    def replayed(self) -> FoldDriver[S]:
        """Another driver, fed all records from the first on."""
        other = FoldDriver(self.fold, now_ms=self.now_ms)
        for record in self._records:
            other.feed_record(record)
        return other

    @property
    def committed(self) -> int:
        """Records that the last commit covers."""
        return self._committed

    def restarted(self, store: MemoryStore | None = None) -> FoldDriver[S]:
        """Another driver on the committed rows, fed the records after the last commit: as after SIGKILL.

        ``store``: rows that mean the same, for example restored from a snapshot.
        """
        other = FoldDriver(self.fold, store if store is not None else self.store, self.now_ms)
        other._records = self._records[: self._committed]
        for record in self._records[self._committed :]:
            other.feed_record(record)
        return other

    def rewritten(self) -> FoldDriver[S]:
        """Another driver on a store that got the whole state at once: as after a long failure of the disk."""
        for _ in self.fold.mark_all(self.state):
            pass
        whole = MemoryStore()
        position = TopicPartition(self.fold.topics[0].name, 0)
        whole.commit(self.fold.name, self.fold.changes(self.state), {position: len(self._records)})
        other = FoldDriver(self.fold, whole, self.now_ms)
        other._records = list(self._records)
        other._committed = len(self._records)
        return other

    def _apply(self, record: Record) -> None:
        try:
            value = None
            if record.value is not None:
                value = self._codecs[record.topic].decode(record.value, record.headers)
            self.fold.apply(self.state, record, value)
        except (SchemaError, RecordRejected) as error:
            self.rejected.append(str(error))
