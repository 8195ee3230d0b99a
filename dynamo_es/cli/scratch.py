"""Temporary folders of demos. One that was killed leaves its folder behind; a later demo removes it, and nothing else.

Each folder holds a lock file, and ``flock`` on it lasts as long as any process of the demo, since the children inherit
the descriptor. The file gets its name when it is locked already: a folder with a lock that can be had is abandoned.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PREFIX = "dynamo-es-demo-"
LOCK_NAME = "demo.lock"


@dataclass(frozen=True, slots=True)
class ScratchFolder:
    """A folder that is gone after use. ``lock``: descriptor that every process which uses it must hold open."""

    path: Path
    lock: int


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[ScratchFolder]:
    """A new folder in ``parent``, removed at the end. Raises OSError."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    try:
        unnamed = path / f".{LOCK_NAME}"
        lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(path / LOCK_NAME)
            yield ScratchFolder(path, lock)
        finally:
            os.close(lock)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_abandoned(parent: Path) -> list[Path]:
    """Remove the folders in ``parent`` whose demo is dead; those that were removed.

    A folder is touched only if it is this user's, has a demo's name and lock file, and nobody holds the lock.
    """
    try:
        with os.scandir(parent) as entries:
            found = [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX)]
    except OSError:
        return []
    return [path for path in sorted(found) if _remove_if_abandoned(path)]


def _remove_if_abandoned(path: Path) -> bool:
    try:
        if not _is_own(path.lstat(), stat.S_IFDIR):
            return False
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        if not _is_own(os.fstat(lock), stat.S_IFREG):
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Another demo may have removed it, lock and all, between the opening and the locking.
        if not os.path.samestat(os.fstat(lock), os.stat(path / LOCK_NAME, follow_symlinks=False)):
            return False
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(lock)
    return not path.exists()


def _is_own(found: os.stat_result, kind: int) -> bool:
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.getuid()
