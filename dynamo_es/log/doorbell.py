"""Wakes readers in other processes: a small file per partition, rewritten with its end offset AFTER each commit.

Watching the database file itself would wake readers before the commit can be seen. inotify tells of the write; where
it is missing (or its limits are used up) the files are compared every few milliseconds. A ring may be lost (overflow,
file systems that do not report), so readers look by themselves now and then.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

logger = logging.getLogger(__name__)

_OFFSET = struct.Struct("<Q")
POLL_INTERVAL_S = 0.003


class Doorbell:
    """The ringing side of one partition. Used by one thread, with the partition's lock held, so that it never runs
    backwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def ring(self, end_offset: int) -> None:
        """Tell that the partition now ends at ``end_offset``. What cannot be told is found by the readers' own look."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.pwrite(self._descriptor, _OFFSET.pack(end_offset), 0)
        except OSError as error:
            logger.debug("doorbell %s: %s", self._path, error)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class BellWatcher(Protocol):
    """The listening side, for one event loop."""

    def watch(self, path: Path, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the loop after each ring of ``path``; several rings may become one call."""

    def unwatch(self, path: Path, callback: Callable[[], None]) -> None:
        """Stop calling ``callback``."""

    def close(self) -> None:
        """Release everything."""


class InotifyWatcher:
    """``BellWatcher`` over one inotify instance."""

    def __init__(self, library: ModuleType, loop: asyncio.AbstractEventLoop) -> None:
        """Raises OSError when no inotify instance is left."""
        self._library = library
        self._loop = loop
        self._callbacks: dict[Path, list[Callable[[], None]]] = {}
        self._watches: dict[Path, Any] = {}
        self._inotify = library.Inotify(sync_timeout=0)
        self._descriptor: int = self._inotify.fd
        loop.add_reader(self._descriptor, self._drain)

    def watch(self, path: Path, callback: Callable[[], None]) -> None:
        self._callbacks.setdefault(path, []).append(callback)
        if path not in self._watches:
            try:
                self._watches[path] = self._inotify.add_watch(path, self._library.Mask.MODIFY)
            except OSError as error:
                logger.warning("no inotify watch on %s (%s): new records are seen by polling", path, error.strerror)

    def unwatch(self, path: Path, callback: Callable[[], None]) -> None:
        callbacks = self._callbacks.get(path, [])
        if callback in callbacks:
            callbacks.remove(callback)
        if not callbacks:
            self._callbacks.pop(path, None)
            watch = self._watches.pop(path, None)
            if watch is not None:
                try:
                    self._inotify.rm_watch(watch)
                except OSError as error:
                    logger.debug("inotify watch on %s is gone: %s", path, error)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._inotify.close()
        self._watches.clear()
        self._callbacks.clear()

    def _drain(self) -> None:
        mask = self._library.Mask
        rung: set[Path] = set()
        while (event := self._inotify.sync_get()) is not None:
            if mask.Q_OVERFLOW in event.mask:
                rung.update(self._callbacks)
            elif event.watch is not None:
                path = event.watch.path
                rung.add(path)
                if mask.IGNORED in event.mask and self._watches.get(path) is event.watch:
                    del self._watches[path]
        for path in rung:
            for callback in self._callbacks.get(path, ()):
                callback()


class PollingWatcher:
    """``BellWatcher`` that reads the files every few milliseconds (about 1 µs a file)."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = POLL_INTERVAL_S) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._callbacks: dict[Path, list[Callable[[], None]]] = {}
        self._seen: dict[Path, bytes] = {}
        self._descriptors: dict[Path, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, path: Path, callback: Callable[[], None]) -> None:
        self._callbacks.setdefault(path, []).append(callback)
        if path not in self._descriptors:
            try:
                self._descriptors[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                logger.debug("doorbell %s: %s", path, error)
            else:
                self._seen[path] = self._read(path)
        if self._timer is None:
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def unwatch(self, path: Path, callback: Callable[[], None]) -> None:
        callbacks = self._callbacks.get(path, [])
        if callback in callbacks:
            callbacks.remove(callback)
        if not callbacks:
            self._callbacks.pop(path, None)
            self._seen.pop(path, None)
            descriptor = self._descriptors.pop(path, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._callbacks.clear()

    def _look(self) -> None:
        self._timer = None
        for path in list(self._descriptors):
            content = self._read(path)
            if content != self._seen.get(path):
                self._seen[path] = content
                for callback in self._callbacks.get(path, ()):
                    callback()
        if self._callbacks:
            self._timer = self._loop.call_later(self._interval_s, self._look)

    def _read(self, path: Path) -> bytes:
        try:
            return os.pread(self._descriptors[path], _OFFSET.size, 0)
        except OSError:
            return b""


def make_watcher(loop: asyncio.AbstractEventLoop) -> BellWatcher:
    """inotify where it is there, else polling."""
    try:
        import asyncinotify
    except (ImportError, OSError, AttributeError) as error:
        logger.info("no inotify here (%s): new records are looked for every %g ms", error, POLL_INTERVAL_S * 1000)
        return PollingWatcher(loop)
    try:
        return InotifyWatcher(asyncinotify, loop)
    except OSError as error:
        logger.warning(
            "no inotify instance left (%s; see fs.inotify.max_user_instances): new records are looked for every %g ms",
            error.strerror,
            POLL_INTERVAL_S * 1000,
        )
        return PollingWatcher(loop)
