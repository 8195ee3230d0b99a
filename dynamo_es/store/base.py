"""The contract of a state store. ``tests/contract/store_suite.py`` holds every backend to it.

A store keeps what folds produced, as families of byte keys in byte order, together with the log positions that the
state covers. The two change in one atomic batch or not at all: after SIGKILL at any instant the state equals the fold
of the log up to the stored positions. It is a cache of the log: a store that does not fit its log is wiped and folded
anew, never repaired.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from dynamo_es.log.base import TopicPartition


class Put(NamedTuple):
    """Set a key."""

    family: str
    key: bytes
    value: bytes


class Delete(NamedTuple):
    """Remove a key; no error if it is not there."""

    family: str
    key: bytes


class DeleteRange(NamedTuple):
    """Remove all keys in ``[start, end)``."""

    family: str
    start: bytes
    end: bytes


Change = Put | Delete | DeleteRange


class StateRows(Protocol):
    """Read access to committed rows. Never reads a batch that is being built."""

    def get(self, family: str, key: bytes) -> bytes | None:
        """The committed value, or None."""

    def scan(self, family: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Committed rows whose key starts with ``prefix``, in key order. Exhaust or close the iterator."""


class StateStore(StateRows, Protocol):
    """Families of rows, with positions. All calls block; not to be called while another call runs.

    ``owner`` is the name of a fold: each owner has its own positions in a store that several folds share.
    """

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    def positions(self, owner: str) -> Mapping[TopicPartition, int]:
        """Next offset to fold, for each partition that ``owner`` ever committed."""

    def identity(self, owner: str) -> Mapping[str, str]:
        """What ``owner`` recorded about the log it folds: ``log_id``, ``topic_id:<topic>``, ``fold_version``."""

    def commit(
        self,
        owner: str,
        changes: Sequence[Change],
        positions: Mapping[TopicPartition, int],
        identity: Mapping[str, str] | None = None,
    ) -> None:
        """Apply changes in order and move positions, in one atomic batch.

        On return the batch survives SIGKILL. Changes later in the sequence win over earlier ones, ranges included.

        Raises:
            StoreFull: Nothing was applied.
        """

    def wipe(self, owner: str, families: Sequence[str]) -> None:
        """Remove all rows of ``families`` and the positions and identity of ``owner``, in one atomic batch."""

    def close(self) -> None:
        """Release it. Safe to call twice."""
