"""A disk that takes as long for a commit as the test says: under the embedded log, and under RocksDB stores."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamo_es.log import embedded_partition
from dynamo_es.store.rocks import RocksStore

_LIMIT_S = 120.0


class SlowDisk:
    """Commits of what is opened from now on wait while it ``hangs``; that is where fsync is.

    Attributes:
        waiting: Commits that wait.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waiting = 0
        self._concerns: Callable[[Path], bool] = lambda path: False
        self._go_on = threading.Event()
        self._go_on.set()
        open_segment, commit = embedded_partition.open_segment, RocksStore.commit

        def open_slowly(path: Path, **options: Any) -> Any:
            return _SlowConnection(open_segment(path, **options), lambda: self.wait(path))

        def commit_slowly(store: RocksStore, *arguments: Any) -> None:
            self.wait(Path(store.path))
            commit(store, *arguments)

        patch.setattr(embedded_partition, "open_segment", open_slowly)
        patch.setattr(RocksStore, "commit", commit_slowly)

    def hang(self, concerns: Callable[[Path], bool] = lambda path: True) -> None:
        """``concerns``: which files (of a store: its folder)."""
        self._concerns = concerns
        self._go_on.clear()

    def go_on(self) -> None:
        """All commits go through."""
        self._go_on.set()

    def wait(self, path: Path) -> None:
        """Called by a commit."""
        if not self._go_on.is_set() and self._concerns(path):
            self.waiting += 1
            assert self._go_on.wait(_LIMIT_S), "the test let the disk hang"
            self.waiting -= 1


class _SlowConnection:
    def __init__(self, connection: sqlite3.Connection, wait: Callable[[], None]) -> None:
        self._connection = connection
        self._wait = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, statement: str, *arguments: Any) -> sqlite3.Cursor:
        if statement == "COMMIT":
            self._wait()
        return self._connection.execute(statement, *arguments)
