"""Reading a partition of ``kv-snapshots``, and starting a fold from the newest snapshots that hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dynamo_es.log.base import Bounds, EventLog, TopicPartition
from dynamo_es.store.base import Change
from schemas.codec import SchemaError, TopicCodec
from schemas.kv_events import KV_EVENTS
from schemas.kv_snapshots import KV_SNAPSHOTS, KvSnapshotRecord
from streams.runner import Restored
from streams.snapshots import SnapshotRefused, check_snapshot, manifests_in, restored_rows

logger = logging.getLogger(__name__)
_POLL_RECORDS = 256


async def read_snapshot_records(log: EventLog, namespace: str, partition: int) -> dict[bytes, KvSnapshotRecord]:
    """The newest record of each key of a partition. One that does not decode counts as missing.

    Raises ``LogError``.
    """
    topic = KV_SNAPSHOTS.qualified(namespace)
    bounds = (await log.bounds(topic))[partition]
    values: dict[bytes, tuple[bytes, tuple[tuple[str, bytes], ...]]] = {}
    if bounds.start < bounds.end:
        position = TopicPartition(topic, partition)
        reader = log.reader({position: bounds.start})
        try:
            while reader.positions()[position] < bounds.end:
                for records in (await reader.poll(max_records=_POLL_RECORDS, timeout_s=1.0)).values():
                    for record in records:
                        if record.key is not None and record.value is not None:
                            values[record.key] = (record.value, record.headers)
                        elif record.key is not None:
                            values.pop(record.key, None)
        finally:
            await reader.close()
    codec = TopicCodec(KV_SNAPSHOTS)
    decoded: dict[bytes, KvSnapshotRecord] = {}
    for key, (value, headers) in values.items():
        try:
            decoded[key] = codec.decode(value, headers)
        except SchemaError as error:
            logger.warning("snapshot record %r of %s[%d] is not readable: %s", key, topic, partition, error)
    return decoded


class SnapshotStart:
    """The ``SnapshotSource`` of the KV index: the newest snapshot of each partition of ``kv-events`` that holds."""

    def __init__(self, log: EventLog, namespace: str, fold_version: int) -> None:
        self._log = log
        self._namespace = namespace
        self._fold_version = fold_version

    async def restore(self, bounds: Mapping[TopicPartition, Bounds], progress: Callable[[int, int], None]) -> Restored:
        """As ``SnapshotSource.restore``."""
        topic = KV_EVENTS.qualified(self._namespace)
        topic_id = (await self._log.describe(topic)).topic_id
        changes: list[Change] = []
        positions: dict[TopicPartition, int] = {}
        sources = blocks = 0
        for done, (position, limits) in enumerate(sorted(bounds.items()), 1):
            records = await read_snapshot_records(self._log, self._namespace, position.partition)
            for _, manifest in manifests_in(records, position.partition):
                try:
                    found = check_snapshot(
                        manifest, records, topic_id=topic_id, fold_version=self._fold_version, bounds=limits
                    )
                except SnapshotRefused as error:
                    logger.warning("snapshot of %s[%d] not used: %s", topic, position.partition, error)
                    continue
                rows, count = restored_rows(found, sources)
                changes += rows
                positions[position] = manifest.next_offset
                sources += len(found)
                blocks += count
                break
            progress(done, len(bounds))
        return Restored(changes, positions, sources, blocks)
