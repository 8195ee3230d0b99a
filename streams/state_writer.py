"""Bringing what a fold changed into its store: in batches with their positions, with a bound on what waits.

A store that refuses (a full or failing disk) or hangs does not stop the fold: changes wait, and are written when it
works again. Of more than ``MAX_UNWRITTEN_BYTES`` all are let go: the store stays at its last batch, which is a state of
its own, and once it works again it gets the whole state from memory, in one batch that replaces everything. So rows and
positions in the store belong together at every instant.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from enum import Enum
from typing import Generic, Protocol, TypeVar

from dynamo_es.clock import Clock
from dynamo_es.log.base import TopicPartition
from dynamo_es.store.base import Change, DeleteRange, Put, StateStore
from dynamo_es.store.errors import StoreError
from dynamo_es.store.layout import prefix_end
from streams.fold import Fold

logger = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")

# Of one fold, what waits for its store: an hour of a busy registry, or 8 million blocks.
MAX_UNWRITTEN_BYTES = 64 * 1024 * 1024
# What a change takes in memory beside its key and value.
_CHANGE_BYTES = 200
# A batch that takes longer hangs, whatever will become of it; usually it takes milliseconds.
SLOW_WRITE_S = 5.0
# Between tries to write a whole state, which is not made in vain all the time.
_WHOLE_FIRST_S = 1.0
_WHOLE_MAX_S = 60.0


async def in_thread(job: Callable[..., T], *arguments: object, executor: Executor | None = None) -> T:
    """Run ``job`` on a thread. Whoever is cancelled still waits for the end: a store takes one call at a time."""
    work = asyncio.get_running_loop().run_in_executor(executor, job, *arguments)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        if not work.cancelled():
            work.exception()
        raise


class StoreCondition(Enum):
    """How a fold's store does.

    WRITTEN: it took the last batch. HANGS: it has not answered for seconds. REFUSES: it did not take the last one, and
    changes wait. BEHIND: too many waited and were let go; the whole state is written when it works again.
    """

    WRITTEN = "written"
    HANGS = "hangs"
    REFUSES = "refuses"
    BEHIND = "behind"


class WriteCounters(Protocol):
    """What is counted of writing; the writer raises it."""

    commits: int
    failed_commits: int
    let_go: int


class StateWriter(Generic[S]):
    """Writes one fold's changes into its store. Belongs to one event loop, on which the fold runs.

    The store is used by one call at a time; the fold may go on meanwhile. Calls run on a thread of the writer's own, so
    that stores that hang leave the loop's few threads to those who serve. Call ``close`` at the end.
    """

    def __init__(
        self,
        fold: Fold[S],
        store: StateStore,
        label: str,
        *,
        clock: Clock,
        counters: WriteCounters,
        max_unwritten_bytes: int = MAX_UNWRITTEN_BYTES,
    ) -> None:
        """``label``: for messages. ``max_unwritten_bytes``: of changes that wait while the store refuses or hangs."""
        self.identity: Mapping[str, str] = {}
        self._fold = fold
        self._store = store
        self._label = label
        self._clock = clock
        self._counters = counters
        self._max_unwritten_bytes = max_unwritten_bytes
        self._lock = asyncio.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._waiting: list[Change] = []
        self._waiting_bytes = 0
        self._positions: dict[TopicPartition, int] = {}
        self._in_hand_bytes = 0
        self._busy_since: float | None = None
        self._marking = False
        self._epoch = 0
        self._condition = StoreCondition.WRITTEN
        self._whole_wait_s = _WHOLE_FIRST_S
        self._whole_at = 0.0

    @property
    def condition(self) -> StoreCondition:
        """As of the last batch, and of a call that is under way."""
        if self._condition is StoreCondition.WRITTEN and self._busy_since is not None:
            waited_s = self._clock.monotonic() - self._busy_since
            return StoreCondition.HANGS if waited_s > SLOW_WRITE_S else StoreCondition.WRITTEN
        return self._condition

    @property
    def unwritten_bytes(self) -> int:
        """What is in memory and not in the store: changes that wait, and the batch that is being written."""
        return self._waiting_bytes + self._in_hand_bytes

    @property
    def has_unwritten(self) -> bool:
        """Whether a commit has something to do although the fold did not go on."""
        return bool(self._waiting) or self._condition is not StoreCondition.WRITTEN

    def collect(self, state: S, positions: Mapping[TopicPartition, int]) -> None:
        """Take over what changed, for the next commit; called while one hangs, so that the bound holds meanwhile."""
        if not self._marking:
            self._collect(state, positions)
            if self._lock.locked() or self._condition is StoreCondition.REFUSES:
                self._hold_bound()

    async def commit(self, state: S, positions: Mapping[TopicPartition, int], *, patient: bool = False) -> bool:
        """Write what changed with ``positions`` (a live view of what ``state`` covers); False: the store refused.

        What was refused is kept for the next time, within the bound. ``patient``: a whole state is written only if the
        last try was long enough ago.
        """
        epoch = self._epoch
        async with self._lock:
            if self._epoch != epoch:
                # The state began anew while this waited: what it was to write is void.
                return False
            self._collect(state, positions)
            if self._condition is not StoreCondition.BEHIND:
                written = await self._write(self._take_waiting())
            elif patient and self._clock.monotonic() < self._whole_at:
                written = False
            else:
                written = await self._write_whole(state, positions)
            if written and not self._waiting and self._condition is StoreCondition.WRITTEN:
                await self._compact(state)
            return written

    async def read(self, job: Callable[[StateStore], T]) -> T:
        """Run ``job`` between two batches. Raises ``StoreError``."""
        async with self._lock:
            return await self._call(job, self._store)

    async def load(self) -> S:
        """The state that the store has. Raises ``StoreError``."""
        return await self.read(self._fold.load)

    async def fill(self, changes: Sequence[Change], positions: Mapping[TopicPartition, int]) -> None:
        """Rows for an empty store, with their positions. Raises ``StoreError``."""
        await self.read(lambda store: store.commit(self._fold.name, changes, positions, self.identity))

    async def wipe(self) -> None:
        """Remove all that the store has of the fold, and forget what waits. Raises ``StoreError``."""
        async with self._lock:
            await self._call(self._store.wipe, self._fold.name, self._fold.families)
            self.forget()

    def forget(self) -> None:
        """What waits is void: the state begins anew with what the store has."""
        self._epoch += 1
        self._waiting, self._waiting_bytes = [], 0
        self._condition = StoreCondition.WRITTEN

    def close(self) -> None:
        """Let go of the thread; the store stays open."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None

    async def _call(self, job: Callable[..., T], *arguments: object) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._busy_since = self._clock.monotonic()
        try:
            return await in_thread(job, *arguments, executor=self._thread)
        finally:
            self._busy_since = None

    def _collect(self, state: S, positions: Mapping[TopicPartition, int]) -> None:
        changes = self._fold.changes(state)
        if self._condition is not StoreCondition.BEHIND:
            self._positions = dict(positions)
            self._waiting += changes
            self._waiting_bytes += _size(changes)

    def _take_waiting(self) -> list[Change]:
        changes, self._waiting = self._waiting, []
        self._in_hand_bytes, self._waiting_bytes = self._waiting_bytes, 0
        return changes

    async def _write(self, changes: list[Change]) -> bool:
        try:
            written = await self._try(changes, self._positions)
        except BaseException:
            # Whoever is cancelled does not learn whether the store took it; what is written twice does no harm.
            self._put_back(changes)
            raise
        if written:
            self._note_written()
        else:
            self._put_back(changes)
        return written

    def _put_back(self, changes: list[Change]) -> None:
        if self._condition is not StoreCondition.BEHIND:
            self._condition = StoreCondition.REFUSES
            self._waiting[:0] = changes
            self._waiting_bytes += _size(changes)
            self._hold_bound()

    async def _write_whole(self, state: S, positions: Mapping[TopicPartition, int]) -> bool:
        """All rows of the state, in place of all that the store has."""
        self._marking = True
        try:
            for _ in self._fold.mark_all(state):
                await asyncio.sleep(0)
        finally:
            self._marking = False
        whole: list[Change] = [DeleteRange(family, b"", prefix_end(b"")) for family in self._fold.families]
        whole += self._fold.changes(state)
        self._positions = dict(positions)
        self._in_hand_bytes = _size(whole)
        # What changes from here on belongs behind this batch.
        self._condition = StoreCondition.REFUSES
        try:
            written = await self._try(whole, self._positions)
        except BaseException:
            self._let_go()
            raise
        if written:
            self._note_written()
            logger.warning("%s: the store works again and has the whole state", self._label)
            self._whole_wait_s = _WHOLE_FIRST_S
            return True
        self._let_go()
        self._whole_at = self._clock.monotonic() + self._whole_wait_s
        self._whole_wait_s = min(2 * self._whole_wait_s, _WHOLE_MAX_S)
        return False

    async def _try(self, changes: list[Change], positions: Mapping[TopicPartition, int]) -> bool:
        try:
            await self._call(self._store.commit, self._fold.name, changes, positions, self.identity)
        except StoreError as error:
            self._counters.failed_commits += 1
            logger.error("%s: state not written, will try again: %s", self._label, error)
            return False
        finally:
            self._in_hand_bytes = 0
        self._counters.commits += 1
        return True

    def _note_written(self) -> None:
        if self._condition is StoreCondition.REFUSES:
            self._condition = StoreCondition.WRITTEN

    def _hold_bound(self) -> None:
        if self._waiting_bytes > self._max_unwritten_bytes:
            self._counters.let_go += 1
            logger.error(
                "%s: %d bytes of changes wait for the store, more than %d: they are let go, and the whole state is "
                "written when the store works again", self._label, self._waiting_bytes, self._max_unwritten_bytes,
            )  # fmt: skip
            self._let_go()

    def _let_go(self) -> None:
        self._waiting, self._waiting_bytes = [], 0
        self._condition = StoreCondition.BEHIND

    async def _compact(self, state: S) -> None:
        job = self._fold.compaction(state)
        if job is None:
            return
        try:
            await self._call(lambda: self._store.commit(self._fold.name, job(self._store), {}))
        except StoreError as error:
            logger.error("%s: rows not compacted: %s", self._label, error)


def _size(changes: Sequence[Change]) -> int:
    total = _CHANGE_BYTES * len(changes)
    for change in changes:
        if isinstance(change, Put):
            total += len(change.key) + len(change.value)
    return total
