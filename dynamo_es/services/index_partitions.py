"""Which partitions of ``kv-events`` an indexer follows and answers for, and how it hands them over.

Indexers that share find out by themselves, each from the registry, who is to have what (``index_owners.share_of``).
When that changes, the new owner follows the partition at once and registers that it answers for it when its state is
whole. The old owner registers that it yields the partition, and goes on until it sees one that keeps it; then it takes
its word back and answers for a little longer, so that routers which do not know yet are answered as well. An indexer
that ends does the same with all it has. Only one that dies leaves a gap: until its lease is over and another one has
made the state from snapshot and tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from dynamo_es.log.errors import LogError
from dynamo_es.router.index_server import IndexResponder, IndexServer, Shard
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.index_owners import IndexKind, IndexOwner, is_taken_over, owners_in, share_of
from dynamo_es.services.followed_partition import FollowedPartition
from dynamo_es.store.base import StateStore
from streams.kv_index_state import KvIndexState
from streams.snapshot_writer import SnapshotCounters

logger = logging.getLogger(__name__)
# How long a partition is answered for after its new owner is known here: routers learn of him from the same log.
LINGER_S = 2.0
LOOK_INTERVAL_S = 0.1
# Partitions whose state is made at a time: more would hold up answers, and need memory for all of them at once.
_OPENING = 1


class PartitionKeeper:
    """Follows what is this process's to follow, and serves it. Belongs to one event loop. A supervisor.

    Order of calls: ``start``, then ``leave`` if others shall take over, then ``close`` (or the runtime's).

    Attributes:
        settled: Set once it answers for all that it is to have.
    """

    def __init__(
        self,
        core: RuntimeCore,
        make_store: Callable[[int], StateStore],
        *,
        given: Collection[int] | None = None,
        linger_s: float = LINGER_S,
    ) -> None:
        """``make_store`` opens a partition's store, on another thread. ``given``: what to follow, whoever else is
        there; None: a share among all indexers that share.
        """
        self.settled = asyncio.Event()
        self.members: dict[int, FollowedPartition] = {}
        self.server = IndexServer(core, IndexResponder(self.shards))
        self._core = core
        self._make_store = make_store
        self._given = None if given is None else frozenset(given)
        self._linger_s = linger_s
        self._leaving = False
        self._left = asyncio.Event()
        self._gate = asyncio.Semaphore(_OPENING)
        # Partitions that another one answers for now; when (monotonic seconds) they are let go, once that is known.
        self._handed_over: dict[int, float | None] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Register, and begin to follow; ended with the runtime."""
        self.server.start(self._owner(frozenset(), frozenset()))
        self._task = self._core.tasks.spawn(self._run(), "index-partitions")
        self._core.add_cleanup(self.close)

    async def leave(self, timeout_s: float) -> None:
        """Hand over all that others will take, which they do from now on; at most ``timeout_s`` seconds."""
        self._leaving = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._left.wait()
        except TimeoutError:
            logger.warning("partitions %s are not taken over by another indexer yet", sorted(self.members))

    async def close(self) -> None:
        """Commit and close all. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for partition in list(self.members):
            self._let_go(partition)
        if self._ending:
            await asyncio.wait(set(self._ending))

    def shards(self) -> Mapping[int, Shard]:
        """What can be answered for now."""
        return {number: shard for number, member in self.members.items() if (shard := member.shard) is not None}

    def index_states(self) -> Mapping[int, KvIndexState]:
        """The states of these by partition."""
        return {number: shard.state for number, shard in self.shards().items()}

    def snapshots(self) -> Sequence[SnapshotCounters]:
        """What the partitions' snapshot writers count."""
        return [member.snapshots.counters for member in self.members.values() if member.snapshots is not None]

    def position(self, partition: int) -> int:
        """Next offset of a partition to fold; 0 if it is not followed."""
        member = self.members.get(partition)
        return member.position if member is not None else 0

    def wanted(self) -> Collection[int]:
        """What is this process's to follow now."""
        if self._leaving:
            return frozenset()
        return self._given if self._given is not None else share_of(self._core.registry.state, self._core.instance_id)

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except LogError as error:
                logger.debug("not registered what is answered for, the log is away: %s", error)
            except Exception:  # supervisor: one bad look must not be the last one
                logger.exception("looking after partitions failed, will look again")
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _look(self) -> None:
        wanted = self.wanted()
        for partition in sorted(set(wanted) - self.members.keys()):
            member = self.members[partition] = FollowedPartition(self._core, partition, self._make_store, self._gate)
            member.start()
        self._hand_over(set(self.members) - set(wanted))
        for partition in set(wanted) & self._handed_over.keys():
            del self._handed_over[partition]
        said = frozenset(self.shards().keys() - self._handed_over.keys())
        await self.server.say(self._owner(said, said.difference(wanted)))
        now = self._core.clock.monotonic()
        for partition, until in self._handed_over.items():
            if until is None:
                self._handed_over[partition] = now + self._linger_s
        if self._leaving:
            if not any(map(self._will_be_taken_over, self.members)):
                self._left.set()
        elif said.issuperset(wanted) and self._is_registered():
            self.settled.set()

    def _hand_over(self, unwanted: Collection[int]) -> None:
        """Let go what another one answers for since a while, and what nobody was ever told of."""
        now = self._core.clock.monotonic()
        for partition in unwanted:
            until = self._handed_over.get(partition)
            if not self.members[partition].is_whole or (until is not None and now >= until):
                self._let_go(partition)
            elif partition not in self._handed_over and self._is_taken_over(partition):
                logger.info("partition %d is answered for by another process from now on", partition)
                self._handed_over[partition] = None

    def _let_go(self, partition: int) -> None:
        self._handed_over.pop(partition, None)
        task = asyncio.get_running_loop().create_task(self.members.pop(partition).close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _will_be_taken_over(self, partition: int) -> bool:
        registry, own = self._core.registry.state, self._core.instance_id
        heirs = any(
            owner.kind == "shared" and not owner.leaving and owner.instance_id != own for owner in owners_in(registry)
        )
        return heirs or partition in self._handed_over or self._is_taken_over(partition)

    def _is_taken_over(self, partition: int) -> bool:
        said = self.server.said
        return said is not None and is_taken_over(self._core.registry.state, said, partition)

    def _is_registered(self) -> bool:
        return any(owner.instance_id == self._core.instance_id for owner in owners_in(self._core.registry.state))

    def _owner(self, partitions: frozenset[int], yielding: frozenset[int]) -> IndexOwner:
        kind: IndexKind = "shared" if self._given is None else "given"
        return IndexOwner(self._core.instance_id, partitions, kind, self._leaving, yielding)
