"""Group commit: one thread a handle that takes whatever appends are waiting and commits them partition by partition.

An append alone costs one transaction; a hundred that wait together cost one as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import Empty, SimpleQueue

from dynamo_es.log.base import Position, TopicPartition
from dynamo_es.log.embedded_layout import EmbeddedOptions
from dynamo_es.log.embedded_partition import PartitionWriter, Row
from dynamo_es.log.errors import LogClosed, LogError, LogUnavailable

logger = logging.getLogger(__name__)

# One transaction holds the partition for at most about 20 ms.
_GROUP_RECORDS = 4_096
_GROUP_BYTES = 8 * 1024 * 1024
# Appends that hang are found so much late at most, and no more than a tenth of ``append_timeout_s``.
_WATCH_INTERVAL_S = 1.0


async def close_queues(queues: Collection[AppendQueue]) -> bool:
    """Finish what they accepted and stop their threads, all within one ``append_timeout_s``. False: some hang and were
    left behind. Safe to call twice.
    """
    threads = [queue.finish() for queue in queues]
    timeout_s = max((queue.append_timeout_s for queue in queues), default=0.0)
    # One thread for all: the loop's are few, and others want them too.
    await asyncio.to_thread(_join, threads, timeout_s)
    ended = [queue.end() for queue in queues]
    return all(ended)


def _join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class AppendWork:
    """One call of ``append`` or ``append_all`` on its way through the writer thread.

    Attributes:
        rows: One for each entry, with its partition.
        positions: Filled by the writer thread.
        error: Set by the writer thread if any of its partitions failed.
        abandoned: Its caller was already told that it failed; not to be started any more.
    """

    __slots__ = ("abandoned", "deadline", "error", "future", "positions", "rows", "size", "topic")

    def __init__(self, topic: str, rows: Sequence[tuple[int, Row]], size: int) -> None:
        self.topic = topic
        self.rows = rows
        self.size = size
        self.positions: list[Position | None] = [None] * len(rows)
        self.error: LogError | None = None
        self.abandoned = False
        self.deadline = 0.0
        self.future: asyncio.Future[Sequence[Position]]


class AppendQueue:
    """Bounded queue and writer thread of one log handle. All methods are for the event loop.

    When it is full (``queue_records``, ``queue_bytes``), ``submit`` waits for room. An append that is not done within
    ``append_timeout_s`` fails with ``LogUnavailable``, whatever the thread hangs in (a stopped process that holds the
    partition, a dead disk); it may still arrive later.
    """

    def __init__(
        self,
        make_writer: Callable[[TopicPartition], PartitionWriter],
        options: EmbeddedOptions,
        loop: asyncio.AbstractEventLoop,
        name: str,
    ) -> None:
        self._make_writer = make_writer
        self._options = options
        self._loop = loop
        self._name = name
        self._queue: SimpleQueue[AppendWork | None] = SimpleQueue()
        self._pending: deque[AppendWork] = deque()
        self._records = 0
        self._bytes = 0
        self._waiters: deque[tuple[asyncio.Future[None], int, int]] = deque()
        self._watch: asyncio.TimerHandle | None = None
        self._watch_interval_s = min(_WATCH_INTERVAL_S, options.append_timeout_s / 10)
        self._closed = False
        self._failed = False
        # A daemon: a thread that hangs in the kernel must not keep the interpreter from ending.
        self._thread = threading.Thread(target=self._run, name=f"log-writer {name}", daemon=True)

    @property
    def append_timeout_s(self) -> float:
        """As in ``EmbeddedOptions``."""
        return self._options.append_timeout_s

    def start(self) -> None:
        self._thread.start()

    async def submit(self, work: AppendWork) -> Sequence[Position]:
        """Positions of all rows once they are durable. Raises as ``EventLog.append``."""
        count = len(work.rows)
        work.deadline = self._loop.time() + self._options.append_timeout_s
        if self._waiters or not self._has_room(count, work.size):
            await self._wait_for_room(count, work)
        self._check_usable()
        self._records += count
        self._bytes += work.size
        work.future = self._loop.create_future()
        self._pending.append(work)
        self._queue.put(work)
        if self._watch is None:
            self._watch = self._loop.call_later(self._watch_interval_s, self._fail_overdue)
        return await work.future

    async def close(self) -> bool:
        """Finish what was accepted and stop the thread. False: it hangs and was left behind."""
        return await close_queues([self])

    def finish(self) -> threading.Thread:
        """Take no more. The thread ends when it is done; see ``close_queues``."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._admit()
        return self._thread

    def end(self) -> bool:
        """Whether the thread has ended; appends that it has not done fail."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        stopped = not self._thread.is_alive()
        if not stopped:
            logger.error(
                "the log writer %s hangs for over %g s and was left behind", self._name, self._options.append_timeout_s
            )
        self._fail_all(LogClosed("the log was closed before this append was done"))
        return stopped

    def _check_usable(self) -> None:
        if self._closed:
            raise LogClosed(f"{self._name} was closed")
        if self._failed:
            raise LogUnavailable(f"the writer thread of {self._name} ended with an error (see the log output); restart")

    def _has_room(self, count: int, size: int) -> bool:
        if not self._pending:
            return True
        return self._records + count <= self._options.queue_records and self._bytes + size <= self._options.queue_bytes

    async def _wait_for_room(self, count: int, work: AppendWork) -> None:
        turn = self._loop.create_future()
        self._waiters.append((turn, count, work.size))
        try:
            async with asyncio.timeout_at(work.deadline):
                await turn
        except TimeoutError as error:
            self._leave(turn)
            self._admit()
            raise LogUnavailable(
                f"{self._name}: no room for an append within {self._options.append_timeout_s:g} s; "
                "the disk is slow or another process holds the log"
            ) from error
        except asyncio.CancelledError:
            # It may have been let in already: its room goes to the next one.
            self._leave(turn)
            self._admit()
            raise

    def _leave(self, turn: asyncio.Future[None]) -> None:
        self._waiters = deque(entry for entry in self._waiters if entry[0] is not turn)

    def _admit(self) -> None:
        """Let waiting appends in, in their order, while there is room (all of them once the queue is closed)."""
        records, size = self._records, self._bytes
        options = self._options
        while self._waiters:
            turn, wanted, wanted_bytes = self._waiters[0]
            fits = records + wanted <= options.queue_records and size + wanted_bytes <= options.queue_bytes
            if not fits and records and not self._closed:
                return
            self._waiters.popleft()
            records += wanted
            size += wanted_bytes
            if not turn.done():
                turn.set_result(None)

    def _resolve(self, group: Sequence[AppendWork]) -> None:
        for work in group:
            if not self._pending or self._pending[0] is not work:
                return
            self._pending.popleft()
            self._records -= len(work.rows)
            self._bytes -= work.size
            future = work.future
            if future.done():
                continue
            if work.error is not None:
                future.set_exception(_own_copy(work.error))
            else:
                future.set_result([position for position in work.positions if position is not None])
        self._admit()

    def _fail_overdue(self) -> None:
        self._watch = None
        now = self._loop.time()
        for work in self._pending:
            if work.deadline > now:
                break
            work.abandoned = True
            if not work.future.done():
                work.future.set_exception(
                    LogUnavailable(
                        f"{self._name}: an append was not done within {self._options.append_timeout_s:g} s (it may "
                        "still arrive); the disk hangs, or a stopped process holds the partition"
                    )
                )
        if self._pending:
            self._watch = self._loop.call_later(self._watch_interval_s, self._fail_overdue)

    def _fail_all(self, error: LogError) -> None:
        for work in self._pending:
            work.abandoned = True
            if not work.future.done():
                work.future.set_exception(_own_copy(error))
        self._pending.clear()
        self._records = self._bytes = 0
        self._admit()

    # ---- the writer thread ----

    def _run(self) -> None:
        writers: dict[TopicPartition, PartitionWriter] = {}
        finished = False
        try:
            while not finished:
                group, finished = self._next_group()
                if group:
                    self._commit(group, writers)
                    self._loop.call_soon_threadsafe(self._resolve, group)
            for writer in writers.values():
                writer.close()
        except RuntimeError as error:
            if not self._loop.is_closed():
                raise
            logger.debug("event loop closed before the log %s: %s", self._name, error)
        finally:
            # Reached without ``finished`` only through a defect: callers must not wait for a thread that is gone.
            if not finished and not self._loop.is_closed():
                self._failed = True
                ended = LogUnavailable(f"the writer thread of {self._name} ended with an error; restart")
                self._loop.call_soon_threadsafe(self._fail_all, ended)

    def _next_group(self) -> tuple[list[AppendWork], bool]:
        work = self._queue.get()
        group: list[AppendWork] = []
        records = size = 0
        while work is not None:
            group.append(work)
            records += len(work.rows)
            size += work.size
            if records >= _GROUP_RECORDS or size >= _GROUP_BYTES:
                return group, False
            try:
                work = self._queue.get_nowait()
            except Empty:
                return group, False
        return group, True

    def _commit(self, group: Sequence[AppendWork], writers: dict[TopicPartition, PartitionWriter]) -> None:
        batches: dict[TopicPartition, tuple[list[Row], list[tuple[AppendWork, int]]]] = {}
        for work in group:
            if work.abandoned or work.future.cancelled():
                continue
            for index, (partition, row) in enumerate(work.rows):
                position = TopicPartition(work.topic, partition)
                batch = batches.get(position)
                if batch is None:
                    batch = batches[position] = ([], [])
                batch[0].append(row)
                batch[1].append((work, index))
        for position, (rows, slots) in batches.items():
            self._append(writers, position, rows, slots)

    def _append(
        self,
        writers: dict[TopicPartition, PartitionWriter],
        position: TopicPartition,
        rows: list[Row],
        slots: list[tuple[AppendWork, int]],
    ) -> None:
        """One transaction for each few thousand rows; after an error the rest of the rows is not tried."""
        topic, partition = position
        begin = 0
        writer = writers.get(position)
        try:
            if writer is None:
                writer = writers[position] = self._make_writer(position)
            while begin < len(rows):
                end = _transaction_end(rows, begin)
                first = writer.append(rows[begin:end])
                for offset, (work, index) in enumerate(slots[begin:end], first):
                    work.positions[index] = Position(topic, partition, offset)
                begin = end
        except LogError as error:
            for work, index in slots:
                if work.positions[index] is None:
                    work.error = error


def _own_copy(error: LogError) -> LogError:
    """Each caller gets an exception of its own: a shared one would grow a traceback with every raise."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    return copy


def _transaction_end(rows: Sequence[Row], begin: int) -> int:
    """Index behind the rows that go into one transaction: bounded in rows and bytes, at least one row."""
    size = 0
    for index in range(begin, min(len(rows), begin + _GROUP_RECORDS)):
        _, key, value, headers = rows[index]
        size += len(key or b"") + len(value or b"") + len(headers or b"")
        if size >= _GROUP_BYTES:
            return index + 1
    return min(len(rows), begin + _GROUP_RECORDS)
