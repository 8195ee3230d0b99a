"""Where a fold starts from that has no state of its own: the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo_es.log.base import Bounds, TopicPartition
from dynamo_es.store.base import Change


@dataclass(frozen=True, slots=True)
class Restored:
    """Rows for an empty store, and the position that each restored partition is to be read from."""

    changes: list[Change]
    positions: Mapping[TopicPartition, int]
    sources: int
    blocks: int


class SnapshotSource(Protocol):
    """Where a fold starts from that has no state of its own."""

    async def restore(self, bounds: Mapping[TopicPartition, Bounds], progress: Callable[[int, int], None]) -> Restored:
        """Rows and positions of all partitions that have a snapshot.

        ``bounds``: of the topic that is folded. ``progress`` is told how many partitions of how many are read. A
        snapshot that is torn, stale or foreign is refused with a warning, and the one before it is tried.

        Raises ``LogError``.
        """
