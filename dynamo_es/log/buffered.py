"""Appends that never make their caller wait: a bounded buffer in front of any event log.

Serving goes on while the log is away: what is offered waits here, in order, and is appended when the log is back. When
the buffer is full the newest entry is dropped, counted and reported, so that its source can turn the loss into a gap.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.errors import DynamoException
from dynamo_es.log.base import Entry, EventLog, Position
from dynamo_es.log.checks import entry_size
from dynamo_es.log.errors import LogClosed, UnknownTopic
from dynamo_es.log.state import AppendWatch, LogCondition, LogState

logger = logging.getLogger(__name__)

# An empty entry still costs this much memory, about; it keeps the byte bound honest.
_ENTRY_OVERHEAD_BYTES = 256
_BATCH_RECORDS = 1_000
_BATCH_BYTES = 4 * 1024 * 1024
_LOG_INTERVAL_S = 5.0
# A broker that has just started may not know a topic yet. So many attempts (about five seconds) before it counts as
# gone; from then on one attempt is enough, until an append to it works again.
_MISSING_ATTEMPTS = 8
# Entries dropped for want of room are told by ``state`` for this long.
_DROPPING_S = 10.0


@dataclass(frozen=True, slots=True)
class BufferStats:
    """The buffer at one moment.

    Attributes:
        records, buffered_bytes: What waits, what is being appended included.
        appended: Entries that the log has acknowledged.
        dropped_full: Entries that were offered while the buffer was full or closed.
        dropped_refused: Entries that the log refused for good (too large, unknown topic).
        oldest_age_s: How long the oldest entry has waited; 0 when there is none.
        last_error: The last error of the log; None once an append worked again.
    """

    records: int
    buffered_bytes: int
    appended: int
    dropped_full: int
    dropped_refused: int
    oldest_age_s: float
    last_error: str | None


@dataclass(frozen=True, slots=True)
class BackoffPolicy:
    """Exponential backoff between attempts, in seconds; each wait is drawn between half of it and all of it."""

    initial_s: float = 0.05
    maximum_s: float = 2.0

    def wait_s(self, attempt: int, rng: random.Random) -> float:
        """Wait after the ``attempt``-th failure in a row (from 0)."""
        longest = min(self.maximum_s, self.initial_s * 2.0 ** min(attempt, 32))
        return longest * (0.5 + rng.random() / 2)


class _Waiting(NamedTuple):
    topic: str
    entry: Entry
    size: int
    offered_at: float


class BufferedAppender:
    """Appends in the background, in the order of the offers. Belongs to one event loop; does not own the log.

    Bounds: ``max_records`` and ``max_bytes``, what is under way included. An attempt that failed half way is repeated
    whole, so a record may be in the log twice; readers are idempotent anyway. Order per topic and key is kept, also
    over retries. While one topic fails, what came later in the buffer waits too. A topic that is not there is waited
    for some seconds, then its entries are refused.
    """

    def __init__(
        self,
        log: EventLog,
        clock: Clock,
        rng: random.Random,
        *,
        max_records: int = 100_000,
        max_bytes: int = 64 * 1024 * 1024,
        linger_s: float = 0.0,
        backoff: BackoffPolicy | None = None,
        on_loss: Callable[[str, bytes | None], None] | None = None,
        on_refused: Callable[[str, bytes | None], None] | None = None,
        on_appended: Callable[[str, Sequence[Position]], None] | None = None,
        watch: AppendWatch | None = None,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """Does nothing yet.

        Args:
            log: Started by its owner, closed after this was closed.
            clock: Stamps entries that have no time, measures ages.
            rng: Spreads retries.
            max_records: Bound in records.
            max_bytes: Bound in bytes: keys, values, headers and 256 for each record.
            linger_s: How long the first entry waits for others to go with it: fewer, larger appends.
            backoff: Between attempts while the log is away.
            on_loss: Called with topic and key of each entry that is dropped, also from within ``offer``; must not
                raise.
            on_refused: Called with topic and key of an entry that ``offer`` took and the log then refused for good,
                after ``on_loss``; must not raise.
            on_appended: Called with topic and positions after each acknowledged batch; must not raise.
            watch: Sees all appends of the process, these and others; None: one of its own.
            tasks: Is told if the task that appends dies.
        """
        self._log = log
        self._clock = clock
        self._rng = rng
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._linger_s = linger_s
        self._backoff = backoff or BackoffPolicy()
        self._on_loss = on_loss
        self._on_refused = on_refused
        self._on_appended = on_appended
        self._watch = watch or AppendWatch(clock)
        self._tasks = tasks or BackgroundTasks()
        self._waiting: deque[_Waiting] = deque()
        self._bytes = 0
        self._appended = 0
        self._dropped_full = 0
        self._dropped_full_at: float | None = None
        self._dropped_refused = 0
        self._accepted = 0
        self._done = 0
        self._last_error: str | None = None
        self._logged_at: dict[str, float] = {}
        self._missing: set[str] = set()
        self._wake = asyncio.Event()
        self._progress = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to append. Needs a running loop."""
        if self._task is None and not self._closing:
            self._task = self._tasks.spawn(self._run(), "buffered-appender")

    def offer(self, topic: str, entry: Entry) -> bool:
        """Take an entry; False if it was dropped. Never blocks, never raises.

        An entry without a timestamp gets the time of the offer, however long it waits.
        """
        size = entry_size(entry) + _ENTRY_OVERHEAD_BYTES
        full = len(self._waiting) >= self._max_records or self._bytes + size > self._max_bytes
        if self._closing or full:
            self._dropped_full += 1
            self._dropped_full_at = self._clock.monotonic()
            self._tell_loss(topic, entry.key)
            reason = "it is closed" if self._closing else f"{len(self._waiting)} records, {self._bytes} bytes wait"
            self._log_seldom("full", "event buffer drops new entries (%d so far): %s", self._dropped_full, reason)
            return False
        if entry.timestamp_ms is None:
            entry = entry._replace(timestamp_ms=self._clock.now_ms())
        self._waiting.append(_Waiting(topic, entry, size, self._clock.monotonic()))
        self._bytes += size
        self._accepted += 1
        self._wake.set()
        return True

    def stats(self) -> BufferStats:
        """A snapshot, for metrics and health."""
        oldest = self._clock.monotonic() - self._waiting[0].offered_at if self._waiting else 0.0
        return BufferStats(
            records=len(self._waiting),
            buffered_bytes=self._bytes,
            appended=self._appended,
            dropped_full=self._dropped_full,
            dropped_refused=self._dropped_refused,
            oldest_age_s=oldest,
            last_error=self._last_error,
        )

    def state(self) -> LogState:
        """How appends do: those of this buffer, and all others that its ``watch`` sees."""
        state = self._watch.state()
        dropped_at = self._dropped_full_at
        if state.ok and dropped_at is not None and self._clock.monotonic() - dropped_at < _DROPPING_S:
            reason = (
                f"the event buffer is full ({len(self._waiting)} records wait), {self._dropped_full} events were "
                "dropped so far; a larger --log-buffer-records helps if it does not last"
            )
            return LogState(LogCondition.DEGRADED, reason)
        return state

    async def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered so far is appended (or refused). False: not within ``timeout_s``."""
        goal = self._accepted
        try:
            async with asyncio.timeout(timeout_s):
                while self._done < goal:
                    self._progress.clear()
                    await self._progress.wait()
        except TimeoutError:
            return self._done >= goal
        return True

    async def close(self, timeout_s: float) -> int:
        """Take nothing more, append what waits, stop. How many entries were left after ``timeout_s``.

        Each of those is reported to ``on_loss``. Safe to call twice.
        """
        self._closing = True
        if self._task is not None:
            if not self._task.done():
                await self.flush(timeout_s)
            self._task.cancel()
            # If it died that was told; what waits is lost, and whoever closes more than this goes on.
            await asyncio.wait((self._task,))
            self._task = None
        left = len(self._waiting)
        if left:
            logger.error("event buffer closed with %d entries that were not appended: %s", left, self._last_error)
        while self._waiting:
            lost = self._waiting.popleft()
            self._tell_loss(lost.topic, lost.entry.key)
        self._bytes = 0
        return left

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                self._wake.clear()
                await self._wake.wait()
                if self._linger_s and not self._closing:
                    await asyncio.sleep(self._linger_s)
            batch = self._next_batch()
            by_topic: dict[str, list[Entry]] = {}
            for waiting in batch:
                by_topic.setdefault(waiting.topic, []).append(waiting.entry)
            results = await asyncio.gather(*(self._append(topic, entries) for topic, entries in by_topic.items()))
            if not all(results):
                logger.error("event buffer stops: the log was closed under it; close the buffer first")
                return
            self._finish(batch)

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = 0
        for waiting in self._waiting:
            size += waiting.size
            if batch and (len(batch) >= _BATCH_RECORDS or size > _BATCH_BYTES):
                break
            batch.append(waiting)
        return batch

    def _finish(self, batch: Sequence[_Waiting]) -> None:
        """Only now do they leave the buffer, so that a cancelled attempt leaves them in it."""
        for waiting in batch:
            self._waiting.popleft()
            self._bytes -= waiting.size
        self._done += len(batch)
        self._progress.set()

    async def _append(self, topic: str, entries: list[Entry]) -> bool:
        """Append with retries; False if the log is closed. Refused entries are dropped one by one."""
        attempt = 0
        while entries:
            try:
                with self._watch.appending(topic):
                    positions = await self._log.append_all(topic, entries)
            except LogClosed:
                return False
            except DynamoException as error:
                self._last_error = str(error)
                if error.retriable or self._may_come_back(topic, error, attempt):
                    wait_s = self._backoff.wait_s(attempt, self._rng)
                    self._log_seldom("away", "event buffer: %s; again in %.2f s", error, wait_s)
                    attempt += 1
                    await asyncio.sleep(wait_s)
                elif len(entries) == 1:
                    self._refuse(topic, entries[0], error)
                    return True
                else:
                    # One bad entry costs itself and not its batch.
                    half = len(entries) // 2
                    return await self._append(topic, entries[:half]) and await self._append(topic, entries[half:])
            else:
                self._last_error = None
                self._missing.discard(topic)
                self._appended += len(positions)
                if self._on_appended is not None:
                    self._on_appended(topic, positions)
                return True
        return True

    def _may_come_back(self, topic: str, error: DynamoException, attempt: int) -> bool:
        if not isinstance(error, UnknownTopic) or topic in self._missing:
            return False
        if attempt + 1 < _MISSING_ATTEMPTS:
            return True
        self._missing.add(topic)
        return False

    def _refuse(self, topic: str, entry: Entry, error: DynamoException) -> None:
        self._dropped_refused += 1
        self._tell_loss(topic, entry.key)
        if self._on_refused is not None:
            self._on_refused(topic, entry.key)
        self._log_seldom("refused", "event buffer dropped an entry for %s: %s", topic, error)

    def _tell_loss(self, topic: str, key: bytes | None) -> None:
        if self._on_loss is not None:
            self._on_loss(topic, key)

    def _log_seldom(self, kind: str, message: str, *arguments: object) -> None:
        now = self._clock.monotonic()
        last = self._logged_at.get(kind)
        if last is None or now - last >= _LOG_INTERVAL_S:
            self._logged_at[kind] = now
            logger.warning(message, *arguments)
