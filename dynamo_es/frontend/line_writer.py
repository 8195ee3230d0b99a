"""Appends lines to a file or to standard output on a thread of its own, so that no request ever waits for a disk.

Processes may share the file: each batch goes out in as few writes as the system needs, in append mode. A file that was
moved away (log rotation) is made anew within a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque

from dynamo_es.errors import ConfigError

logger = logging.getLogger(__name__)

STANDARD_OUTPUT = "-"
_PAUSE_S = 0.1
"""Time between two writes: a thread that were woken for each line would take the interpreter from the event loop."""
_BATCH_LINES = 1000
_LOOK_S = 1.0
_CLOSE_S = 5.0


class LineWriter:
    """``offer`` from one thread, ``close`` at the end. What is offered appears within a fraction of a second.

    Attributes:
        written: Lines that the system took.
        dropped_full: Lines that found no room.
        dropped_failed: Lines that could not be written.
    """

    def __init__(self, path: str, max_lines: int) -> None:
        """``path``: a file, or ``-``. ``max_lines``: how many may wait. Raises ``ConfigError``: it cannot be opened."""
        self._path = path
        self._limit = max_lines
        self._lines: deque[bytes] = deque()
        self.written = self.dropped_full = self.dropped_failed = 0
        self._problem: str | None = None
        self._torn = False
        self._looked_at = time.monotonic()
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"--access-log {path} cannot be opened: {error.strerror or error}") from error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Lines that are not written yet."""
        return len(self._lines)

    def offer(self, line: bytes) -> None:
        """Take a line, without its line feed; dropped and counted if there is no room. Never blocks."""
        if len(self._lines) >= self._limit:
            self.dropped_full += 1
        else:
            self._lines.append(line)

    def close(self) -> None:
        """Write what waits, for a few seconds at most. Safe to call twice."""
        self._stop.set()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.error("access log %s takes no more: %d lines are lost", self._path, self.waiting)
        elif self._file >= 0 and self._path != STANDARD_OUTPUT:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        if self._path == STANDARD_OUTPUT:
            return 1
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _run(self) -> None:
        while not self._stop.wait(_PAUSE_S):
            self._write_all()
        self._write_all()

    def _write_all(self) -> None:
        while self._lines:
            batch = [self._lines.popleft() for _ in range(min(len(self._lines), _BATCH_LINES))]
            try:
                self._follow_rotation()
                self._write((b"\n" if self._torn else b"") + b"\n".join(batch) + b"\n")
            except OSError as error:
                self.dropped_failed += len(batch)
                self._tell(error.strerror or str(error))
            else:
                self.written += len(batch)
                self._tell(None)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            done = os.write(self._file, rest)
            rest = rest[done:]
            # A line that is cut off by a full disk must not run into the next one.
            self._torn = bool(rest)

    def _follow_rotation(self) -> None:
        now = time.monotonic()
        if self._path == STANDARD_OUTPUT or (self._file >= 0 and now - self._looked_at < _LOOK_S):
            return
        self._looked_at = now
        if self._file >= 0:
            held = os.fstat(self._file)
            try:
                found = os.stat(self._path)
            except FileNotFoundError:
                pass
            else:
                if (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino):
                    return
            os.close(self._file)
            self._file = -1
        self._file = self._open()
        self._torn = False

    def _tell(self, problem: str | None) -> None:
        if problem != self._problem:
            if problem is None:
                logger.info("access log %s is written again", self._path)
            else:
                logger.error("access log %s cannot be written, lines are lost: %s", self._path, problem)
            self._problem = problem
