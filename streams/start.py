"""Where a fold starts: from its committed positions if they fit the log, else from the beginning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_es.log.base import Bounds, EventLog, TopicPartition
from dynamo_es.store.base import StateStore
from streams.fold import Fold


@dataclass(frozen=True, slots=True)
class StartPoint:
    """Positions to read from, the log's ends now, and what the state is tied to.

    ``wipe_reason`` is empty if the committed rows may be used. ``fresh``: there are none that may.
    """

    positions: Mapping[TopicPartition, int]
    ends: Mapping[TopicPartition, int]
    identity: Mapping[str, str]
    wipe_reason: str
    fresh: bool


async def find_start(
    log: EventLog,
    store: StateStore,
    fold: Fold[Any],
    namespace: str,
    now_ms: int | None = None,
    partitions: Collection[int] | None = None,
) -> StartPoint:
    """Compare what the store says with what the log is. Raises ``LogError`` and ``StoreError``.

    ``now_ms``: a fold with a horizon starts so long before it if there is no state. ``partitions``: those of each topic
    that are folded; None: all.
    """
    identity = {"log_id": log.log_id, "fold_version": str(fold.version)}
    bounds: dict[TopicPartition, Bounds] = {}
    for spec in fold.topics:
        topic = spec.qualified(namespace)
        description = await log.describe(topic)
        identity[f"topic_id:{topic}"] = description.topic_id
        for partition, limits in (await log.bounds(topic)).items():
            if partitions is None or partition in partitions:
                bounds[TopicPartition(topic, partition)] = limits
    stored = store.positions(fold.name)
    reason = _why_void(stored, store.identity(fold.name), identity, bounds)
    usable = {} if reason else stored
    positions = {position: usable.get(position, limits.start) for position, limits in bounds.items()}
    if not usable and fold.horizon_ms is not None and now_ms is not None:
        for position, start in positions.items():
            positions[position] = max(start, await log.offset_at(position, now_ms - fold.horizon_ms))
    ends = {position: limits.end for position, limits in bounds.items()}
    return StartPoint(positions, ends, identity, reason, not usable)


def _why_void(
    stored: Mapping[TopicPartition, int],
    recorded: Mapping[str, str],
    identity: Mapping[str, str],
    bounds: Mapping[TopicPartition, Bounds],
) -> str:
    if not stored:
        return "it has rows but no position" if recorded else ""
    for name, value in identity.items():
        if recorded.get(name) != value:
            return f"{name} is {value}, it was made from {recorded.get(name, 'none')}"
    for position, offset in stored.items():
        limits = bounds.get(position)
        if limits is None:
            return f"{position.topic}[{position.partition}] does not exist"
        if offset > limits.end:
            return f"it is at offset {offset} of {position.topic}[{position.partition}], which ends at {limits.end}"
        if offset < limits.start:
            return f"it is at offset {offset} of {position.topic}[{position.partition}], which starts at {limits.start}"
    return ""
