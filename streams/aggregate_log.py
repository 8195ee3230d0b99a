"""Publishing windows in topic ``aggregates``, and starting a fold from what was published there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from dynamo_es.log.base import Bounds, Entry, EventLog, Record, TopicPartition
from schemas.aggregates import AGGREGATES, AggregateRecord, Progress, key_progress
from schemas.codec import TopicCodec
from streams.compacted import CompactedTopic
from streams.restoring import Restored, SnapshotSource
from streams.windowed_fold import WindowedFold

logger = logging.getLogger(__name__)
S = TypeVar("S")
_BATCH = 1000


class AggregateOutlet(Generic[S]):
    """The ``Outlet`` of a ``WindowedFold``: windows that changed, then how far they go.

    A crash in between leaves windows that cover more than the progress says; each window knows what it covers.
    """

    def __init__(
        self,
        fold: WindowedFold[S],
        log: EventLog,
        namespace: str,
        place: TopicPartition,
        *,
        topic_id: Callable[[], str],
        written_by: str,
    ) -> None:
        """``topic_id``: of the source, as the state was made from."""
        self.published = 0
        self._fold = fold
        self._log = log
        self._topic = AGGREGATES.qualified(namespace)
        self._place = place
        self._topic_id = topic_id
        self._written_by = written_by
        self._codec = TopicCodec(AGGREGATES)
        self._partition: int | None = None
        self._told: int | None = None

    def note_refused(self, state: S, record: Record, reason: str) -> None:
        self._fold.windows(state).reject(record, reason)

    async def publish(self, state: S, position: int) -> None:
        """As ``Outlet.publish``. Nothing is appended while nothing came in."""
        windows, source = self._fold.windows(state), self._place.partition
        if self._told == position and not windows.unpublished(source):
            return
        if self._partition is None:
            self._partition = source % len(await self._log.bounds(self._topic))
        entries = [self._entry(key, row) for key, row in windows.unpublished(source).items()]
        for start in range(0, len(entries), _BATCH):
            await self._log.append_all(self._topic, entries[start : start + _BATCH])
        topic = self._fold.topics[0].name
        progress = Progress(
            AGGREGATES.version, topic, source, self._topic_id(), self._fold.version, position,
            self._fold.replay_from(state, source, position), windows.newest_ms(source) or 0, self._written_by,
        )  # fmt: skip
        await self._log.append(self._topic, self._entry(key_progress(topic, source), progress))
        windows.confirm_published(source, position)
        self._told = position
        self.published += len(entries)

    def _entry(self, key: bytes, value: AggregateRecord | None) -> Entry:
        data = None if value is None else self._codec.encode(value)
        return Entry(data, key, self._codec.headers, None, self._partition)


class AggregateStart(Generic[S]):
    """The ``SnapshotSource`` of a ``WindowedFold``: the windows that were published, and how far they go.

    With ``snapshots`` (for a fold that is more than windows) the position comes from there: the newest snapshot that
    the windows cover. If the newest is beyond them, the records in between are not counted, which is logged.
    """

    def __init__(
        self,
        fold: WindowedFold[S],
        log: EventLog,
        aggregates: CompactedTopic,
        *,
        snapshots: SnapshotSource | None = None,
    ) -> None:
        """``aggregates``: the topic of that name on this log."""
        self._fold = fold
        self._log = log
        self._aggregates = aggregates
        self._snapshots = snapshots

    async def restore(self, bounds: Mapping[TopicPartition, Bounds], progress: Callable[[int, int], None]) -> Restored:
        """As ``SnapshotSource.restore``, for one partition."""
        ((place, limits),) = bounds.items()
        topic_id = (await self._log.describe(place.topic)).topic_id
        name = self._fold.topics[0].name
        records = await read_aggregates(self._aggregates, self._log, name, place.partition)
        known = records.pop(key_progress(name, place.partition), None)
        if not isinstance(known, Progress) or not self._fits(known, topic_id, limits, place):
            known = None
        found = await self._snapshot(place, limits, known.next_offset if known is not None else None, progress)
        state = self._fold.new_state()
        windows = self._fold.windows(state)
        positions: dict[TopicPartition, int] = dict(found.positions)
        if known is not None:
            rows = [row for row in records.values() if not isinstance(row, Progress)]
            windows.restore(place.partition, rows, floor=known.next_offset, newest_ms=known.newest_ms, void=())
            positions.setdefault(place, limits.start if self._snapshots else max(limits.start, known.replay_from))
        elif records:
            windows.restore(place.partition, (), floor=0, newest_ms=None, void=list(records))
            positions.setdefault(place, limits.start)
        changes = [*found.changes, *self._fold.changes(state)]
        return Restored(changes, positions, found.sources or len(records), found.blocks)

    def _fits(self, known: Progress, topic_id: str, limits: Bounds, place: TopicPartition) -> bool:
        reason = ""
        if known.topic_id != topic_id:
            reason = f"they are of topic {known.topic_id}, the log has {topic_id}"
        elif known.fold_version != self._fold.version:
            reason = f"they were made by fold version {known.fold_version}, this is {self._fold.version}"
        elif known.next_offset > limits.end:
            reason = f"they cover offsets below {known.next_offset}, the log ends at {limits.end}"
        if reason:
            logger.warning("%s[%d]: published windows are not used: %s", place.topic, place.partition, reason)
            return False
        if known.next_offset < limits.start:
            logger.warning(
                "%s[%d]: %d records were dropped from the log before they were counted",
                place.topic, place.partition, limits.start - known.next_offset,
            )  # fmt: skip
        return True

    async def _snapshot(
        self, place: TopicPartition, limits: Bounds, covered: int | None, progress: Callable[[int, int], None]
    ) -> Restored:
        nothing = Restored([], {}, 0, 0)
        if self._snapshots is None:
            return nothing
        if covered is not None and covered >= limits.start:
            found = await self._snapshots.restore({place: Bounds(limits.start, covered)}, progress)
            if found.positions:
                return found
        found = await self._snapshots.restore({place: limits}, progress)
        if found.positions and covered is not None:
            logger.warning(
                "%s[%d]: no snapshot that the published windows cover; %d records are not counted",
                place.topic, place.partition, found.positions[place] - covered,
            )  # fmt: skip
        return found


async def read_aggregates(aggregates: CompactedTopic, log: EventLog, topic: str, partition: int) -> dict[bytes, Any]:
    """The newest records of a source partition, by key. ``topic``: the source, without namespace.

    Raises ``LogError``.
    """
    partitions = len(await log.bounds(aggregates.topic))
    return await aggregates.read(partition % partitions, f"{topic}/{partition}/".encode())
