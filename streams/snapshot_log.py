"""Starting a fold from the newest snapshots that hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from dynamo_es.log.base import Bounds, EventLog, TopicPartition
from dynamo_es.store.base import Change
from schemas.kv_events import KV_EVENTS
from streams.compacted import CompactedTopic
from streams.restoring import Restored
from streams.snapshots import SnapshotRefused, check_snapshot, manifests_in, restored_rows

logger = logging.getLogger(__name__)


class SnapshotStart:
    """The ``SnapshotSource`` of the KV index: the newest snapshot of each partition of ``kv-events`` that holds."""

    def __init__(self, log: EventLog, namespace: str, fold_version: int, snapshots: CompactedTopic) -> None:
        """``snapshots``: the topic ``kv-snapshots`` of this log and namespace."""
        self._log = log
        self._namespace = namespace
        self._fold_version = fold_version
        self._snapshots = snapshots

    async def restore(self, bounds: Mapping[TopicPartition, Bounds], progress: Callable[[int, int], None]) -> Restored:
        """As ``SnapshotSource.restore``."""
        topic = KV_EVENTS.qualified(self._namespace)
        topic_id = (await self._log.describe(topic)).topic_id
        changes: list[Change] = []
        positions: dict[TopicPartition, int] = {}
        sources = blocks = 0
        for done, (position, limits) in enumerate(sorted(bounds.items()), 1):
            records = await self._snapshots.read(position.partition)
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
