"""What a snapshot is made from: rows that are committed together with the position that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from dynamo_es.store.base import StateStore

T = TypeVar("T")


class RowsOwner(Protocol):
    """Whose rows they are."""

    @property
    def name(self) -> str:
        """Owner of the positions in the store."""

    @property
    def version(self) -> int:
        """Of the fold whose rows a snapshot holds."""


class CommittedRows(Protocol):
    """A fold with its store, as a ``FoldRunner`` or a ``PartitionProcessor`` keeps them."""

    @property
    def fold(self) -> RowsOwner:
        """Owner and version."""

    async def commit(self) -> None:
        """Write what changed, with the positions."""

    async def read_store(self, job: Callable[[StateStore], T]) -> T:
        """Run ``job`` on another thread between two commits. Raises ``StoreError``."""


@dataclass(frozen=True, slots=True)
class _Owner:
    name: str
    version: int


class KvIndexRows:
    """The ``CommittedRows`` of the KV index within the rows of a fold that has more, under that fold's positions."""

    def __init__(self, rows: CommittedRows, version: int) -> None:
        """``version``: of the index's fold."""
        self.fold = _Owner(rows.fold.name, version)
        self._rows = rows

    async def commit(self) -> None:
        await self._rows.commit()

    async def read_store(self, job: Callable[[StateStore], T]) -> T:
        return await self._rows.read_store(job)
