"""The KV index of other processes: all that have a part of it are asked at once, with one deadline for all.

What is not answered by then counts as not cached: its workers are weighed by load alone in this decision, and nothing
is asked twice. A process that answers nothing in time for a quarter of a second is left alone for half a second, then
tried again, so that one that hangs delays a few decisions and not all of them. One whose connection is lost is left out
as long as the client's quarantine lasts. Where another process answers for the same partitions it is asked instead.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from dynamo_es.errors import DynamoException
from dynamo_es.log.base import TopicPartition
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.cost_selector import Lookup, TierOverlap
from dynamo_es.router.index_query import MAX_BLOCKS, BadAnswer, make_query, read_answer
from dynamo_es.runtime.client import Client
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.core import RuntimeCore
from dynamo_es.runtime.index_owners import INDEX_PATH, owner_of, plan_questions
from schemas.kv_events import KV_EVENTS
from schemas.registry import Instance

logger = logging.getLogger(__name__)
# On two cores that two indexers and a router shared with twice as much other work, half of the decisions took under
# 3 ms, 15 % over 5 ms, 2 % over 10 ms, 0.3 % over 20 ms. A prompt that goes to the wrong worker for want of an answer
# is computed anew, which costs far more than that; an indexer that hangs delays decisions for a moment only.
DEFAULT_DEADLINE_S = 0.02
# A pause of an indexer (a commit, another process on its core) makes all questions of that moment late: it takes both
# several of them and some time until it is taken for one that hangs.
MISSES_BEFORE_REST = 3
PATIENCE_S = 0.25
REST_S = 0.5
# The same indexer is told of at most this often.
_TELL_S = 60.0
# Steps of an event loop from a readable socket to the end of the task that waits for what is in it.
_LAST_LOOKS = 3
# What a question has beside the hashes, generously.
_QUERY_OVERHEAD_BYTES = 16_384
Result = Literal["answered", "late", "lost", "refused", "bad"]
Coverage = Literal["full", "partial", "none"]


@dataclass(slots=True)
class RemoteIndexCounters:
    """For metrics.

    Attributes:
        lookups: Prompts that were looked up, by whether all partitions were answered for.
        questions: To single processes, by what became of them: ``lost`` with the connection, ``refused`` by it.
        missing: Partitions that were not answered for, summed over lookups.
        waited_s: Seconds that lookups waited, summed.
    """

    lookups: dict[Coverage, int] = field(default_factory=lambda: {"full": 0, "partial": 0, "none": 0})
    questions: dict[Result, int] = field(
        default_factory=lambda: {"answered": 0, "late": 0, "lost": 0, "refused": 0, "bad": 0}
    )
    missing: int = 0
    waited_s: float = 0.0


class OwnerState(NamedTuple):
    """One process that answers, for people. ``resting``: it is left alone because it was late."""

    instance_id: int
    partitions: Sequence[int]
    resting: bool


@dataclass(slots=True)
class _Trust:
    """Deadlines that were missed in a row, since when, and until when nothing is asked (monotonic seconds)."""

    misses: int = 0
    late_since: float = 0.0
    rests_until: float = 0.0
    told_at: float = -_TELL_S


class _Answer(NamedTuple):
    positions: Mapping[int, int]
    overlaps: Mapping[WorkerRank, TierOverlap]


class RemoteIndex:
    """Asks the processes that answer for parts of the KV index. Belongs to one event loop; ``start`` first."""

    def __init__(self, core: RuntimeCore, *, deadline_s: float = DEFAULT_DEADLINE_S) -> None:
        """``deadline_s``: how long a decision waits for answers at most."""
        self.counters = RemoteIndexCounters()
        self.deadline_s = deadline_s
        self._core = core
        self._client = Client(core, *INDEX_PATH)
        self._topic = KV_EVENTS.qualified(core.settings.log.namespace)
        self._max_blocks = min(MAX_BLOCKS, max(0, core.settings.runtime.max_message_bytes - _QUERY_OVERHEAD_BYTES) // 8)
        self._trust: dict[int, _Trust] = {}
        self._numbers = itertools.count(1)
        self._seen: tuple[int, tuple[int, ...]] | None = None
        self._plan: Mapping[int, Sequence[int]] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._told_missing: Sequence[int] = ()
        self._closed = False

    async def start(self) -> None:
        """Connect to whoever answers now, and from now on to whoever comes, so that no decision waits for that."""
        self._core.registry.add_listener(self._on_registry)
        self._core.add_cleanup(self.close)
        self._on_registry()
        if self._connecting:
            await asyncio.wait(set(self._connecting.values()))

    async def close(self) -> None:
        """Safe to call twice."""
        self._closed = True
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def match(self, model: str, hashes: Sequence[int], block_size: int) -> Lookup:
        """What every rank holds of a prompt, as far as it was answered within the deadline.

        ``hashes``: sequence hashes of the prompt's complete blocks. The positions are those of the partitions that
        were answered for, and of no others.
        """
        if not hashes:
            return Lookup({}, {})
        began = self._core.clock.monotonic()
        plan = self._plan_now()
        answers = await self._ask_all(plan, model, hashes, block_size)
        overlaps: dict[WorkerRank, TierOverlap] = {}
        positions: dict[TopicPartition, int] = {}
        for answer in answers:
            overlaps.update(answer.overlaps)
            for partition, offset in answer.positions.items():
                positions[TopicPartition(self._topic, partition)] = offset
        missing = KV_EVENTS.partitions - len(positions)
        self.counters.lookups["full" if not missing else "partial" if positions else "none"] += 1
        self.counters.missing += missing
        self.counters.waited_s += self._core.clock.monotonic() - began
        return Lookup(overlaps, positions)

    def owners(self) -> Sequence[OwnerState]:
        """Whoever is asked now, or rests."""
        now = self._core.clock.monotonic()
        return [
            OwnerState(owner.instance_id, sorted(owner.partitions), self._rests(owner.instance_id, now))
            for owner in map(owner_of, self._client.routable())
        ]

    def missing(self) -> Sequence[int]:
        """Partitions that nobody can be asked for now."""
        planned = {partition for partitions in self._plan_now().values() for partition in partitions}
        return [partition for partition in range(KV_EVENTS.partitions) if partition not in planned]

    async def _ask_all(
        self, plan: Mapping[int, Sequence[int]], model: str, hashes: Sequence[int], block_size: int
    ) -> list[_Answer]:
        if not plan:
            return []
        loop = asyncio.get_running_loop()
        tasks = {
            loop.create_task(self._ask(number, partitions, model, hashes, block_size)): number
            for number, partitions in plan.items()
        }
        try:
            _, late = await asyncio.wait(tasks, timeout=self.deadline_s)
            for _ in range(_LAST_LOOKS):
                # What arrived while this process was busy waits in the socket: it is not late.
                if late:
                    await asyncio.sleep(0)
                    late = {task for task in late if not task.done()}
        finally:
            for task in tasks:
                task.cancel()
        for task in late:
            self._note_late(tasks[task])
        return [answer for task in tasks if task not in late and (answer := task.result()) is not None]

    async def _ask(
        self, number: int, partitions: Sequence[int], model: str, hashes: Sequence[int], block_size: int
    ) -> _Answer | None:
        """The answer of one process; None if there is none to be had from it, which is counted."""
        query = make_query(model, hashes, block_size, partitions, self._max_blocks)
        context = Context(f"index-{next(self._numbers)}")
        result: Result
        try:
            async with aclosing(self._client.stream(query, number, context)) as batches:
                async for batch in batches:
                    answer = _Answer(*read_answer(batch[0], partitions, len(query.sequence_hashes) // 8))
                    self._trust_of(number).misses = 0
                    self.counters.questions["answered"] += 1
                    return answer
            result, reason = "refused", "no answer"
        except BadAnswer as error:
            result, reason = "bad", str(error)
        except DynamoException as error:
            result, reason = ("lost" if error.retriable else "refused"), str(error)
        if not self.counters.questions[result]:
            logger.warning("indexer %x, told once: %s", number, reason)
        self.counters.questions[result] += 1
        if result != "lost":
            self._rest(number)
        return None

    def _note_late(self, number: int) -> None:
        self.counters.questions["late"] += 1
        trust, now = self._trust_of(number), self._core.clock.monotonic()
        if not trust.misses:
            trust.late_since = now
        trust.misses += 1
        if trust.misses < MISSES_BEFORE_REST or now - trust.late_since < PATIENCE_S:
            return
        self._rest(number)
        if now - trust.told_at >= _TELL_S:
            trust.told_at = now
            logger.warning(
                "indexer %x missed the deadline of %g ms %d times in a row: its workers are weighed by load alone "
                "until it answers in time", number, self.deadline_s * 1000, trust.misses,
            )  # fmt: skip

    def _trust_of(self, number: int) -> _Trust:
        return self._trust.setdefault(number, _Trust())

    def _rest(self, number: int) -> None:
        self._trust_of(number).rests_until = self._core.clock.monotonic() + REST_S

    def _rests(self, number: int, now: float) -> bool:
        trust = self._trust.get(number)
        return trust is not None and now < trust.rests_until

    def _plan_now(self) -> Mapping[int, Sequence[int]]:
        """Whom to ask for what; made anew when somebody came, went, rests, or answers for something else."""
        now = self._core.clock.monotonic()
        able = [instance for instance in self._client.routable() if not self._rests(instance.instance_id, now)]
        seen = (self._core.registry.state.revision, tuple(instance.instance_id for instance in able))
        if seen != self._seen:
            self._seen = seen
            self._plan = plan_questions(map(owner_of, able), self._core.instance_id)
        return self._plan

    def _on_registry(self) -> None:
        if self._closed:
            return
        self._connect()
        missing = self.missing()
        if missing != self._told_missing:
            self._told_missing = missing
            if missing:
                logger.warning(
                    "nobody answers for partitions %s of %s: workers whose KV events are there are weighed by load "
                    "alone; start an indexer", ", ".join(map(str, missing)), self._topic,
                )  # fmt: skip
            else:
                logger.info("all partitions of %s are answered for", self._topic)

    def _connect(self) -> None:
        """Begin to connect to processes that are new; forget those that are gone."""
        here = {instance.instance_id: instance for instance in self._client.routable()}
        for number in self._connecting.keys() - here.keys():
            self._connecting.pop(number).cancel()
        for number in self._trust.keys() - here.keys():
            del self._trust[number]
        for number, instance in here.items():
            if number not in self._connecting:
                task = asyncio.get_running_loop().create_task(self._connect_to(instance), name=f"connect-{number:x}")
                self._connecting[number] = task

    async def _connect_to(self, instance: Instance) -> None:
        try:
            await self._core.pool.connect(instance.address, instance.instance_id)
        except DynamoException as error:
            logger.warning("indexer %x cannot be reached: %s", instance.instance_id, error)
