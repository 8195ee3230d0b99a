"""What a fold is: a pure function from a log to state, with rows to restart from.

A fold has no clock, does no I/O and draws no random number; time comes from the records. Two folds of the same records
give the same state, wherever and whenever they run, and whatever batches the records came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, StateRows
from schemas.topic import TopicSpec

S = TypeVar("S")


class RecordRejected(ValueError):
    """A record is well formed but means nothing sensible; it goes to dead letters and changes nothing."""


class Fold(Protocol[S]):
    """One view of the log.

    Calls come in this order: ``new_state`` or ``load``, then any number of ``apply`` and ``housekeep``, with
    ``changes`` in between. All of them run on one thread.
    """

    @property
    def name(self) -> str:
        """Owner of positions in a store; fit for a metric label."""

    @property
    def version(self) -> int:
        """Rises when rows or their meaning change: a store of another version is wiped and folded anew."""

    @property
    def topics(self) -> Sequence[TopicSpec]:
        """What it folds."""

    @property
    def horizon_ms(self) -> int | None:
        """Without state, records older than this (by their timestamps) are not read; None reads all there are."""

    @property
    def families(self) -> Sequence[str]:
        """Families of rows that it owns."""

    def new_state(self) -> S:
        """State before the first record."""

    def apply(self, state: S, record: Record, value: Any) -> None:
        """Fold one record into ``state``. ``value`` is the decoded Struct, None for a deleted key.

        Applying a record again after a restart from older rows must be harmless.

        Raises:
            RecordRejected: The state is unchanged.
        """

    def changes(self, state: S) -> list[Change]:
        """Rows that changed since the last call. The caller must not lose them: they are not given twice."""

    def mark_all(self, state: S) -> Iterator[None]:
        """Let the next ``changes`` give every row of the state, for a store that has none.

        It yields between pieces of work that take long; records may be applied there, ``changes`` comes after its end.
        Used when a store refused so much that the single changes were let go (``StateWriter``).
        """

    def load(self, rows: StateRows) -> S:
        """State from committed rows."""

    def adopt(self, previous: S, state: S) -> None:
        """``state``, just loaded, replaces ``previous``: carry over what is not meaning, such as observers."""

    def digest(self, state: S) -> str:
        """Hash of everything that the state means; equal states have equal digests however they came to be."""

    def housekeep(self, state: S) -> bool:
        """Do a small piece (well under 5 ms) of work that changes no meaning; True if there is more to do."""

    def compaction(self, state: S) -> Callable[[StateRows], list[Change]] | None:
        """A job that makes committed rows smaller without changing their meaning, or None.

        The job runs on another thread after a commit and before the next one; it must not touch the state.
        """
