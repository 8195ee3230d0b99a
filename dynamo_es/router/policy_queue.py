"""The router's queue: who waits, and who is released next (spec: router-core D.11, D.12). Pure: time is passed in.

Requests wait while every worker that may take them has so much prompt work booked that one more would only wait there.
They are sorted into policy classes; each class has its own order, its own idea of busy, and its own limits. A request
waits if others of its class do already, so that nobody is overtaken within a class except by the class's own order:

    fcfs  max(jump, 0) - t        first come, first served, ``jump`` seconds earlier
    lcfs  max(jump, 0) + t        last come, first served
    wspt  (1 + max(jump, 0)) / max(uncached tokens, 1)     the shortest prompt work first

with ``t`` the time of enqueueing; a higher strict priority goes before all of that, and equals go by their arrival.

Classes take turns by deficit round robin: serving a request costs its uncached tokens, a class earns ``quantum`` tokens
when its turn comes, and what it did not spend it keeps until it is empty. While workers are free a class is served on
for what it has left; when nobody can be placed its turn is over. A class whose first request cannot be placed is passed
over; the others are not held up by it. Within a class, requests that are pinned to a worker have a lane of their own:
they hold up nobody but others with the same pin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynamo_es.router.errors import RouterQueueLimitExceeded
from dynamo_es.router.overload import UNKNOWN_MAX_BATCHED_TOKENS
from dynamo_es.router.policy_config import CacheBucket, PolicyClass, PolicyProfile

T = TypeVar("T")
DEFAULT_CLASS = "default"
# Requests that a class without a limit of its own lets wait; a prompt that waits costs about 10 kB.
MAX_WAITING = 100_000
# Given-up requests that stay in a heap before it is rebuilt without them.
_MAX_GIVEN_UP = 64


def queue_profile(
    policy: PolicyProfile | None, queue_threshold: float | None, queue_policy: str
) -> PolicyProfile | None:
    """The classes that a router queues by; None: nothing ever waits.

    Without a policy there is one class that holds back by ``queue_threshold``, a multiple of what a worker computes in
    one step.
    """
    if policy is None and queue_threshold is not None:
        only = PolicyClass(
            name=DEFAULT_CLASS,
            policy_family=DEFAULT_CLASS,
            cache_bucket=DEFAULT_CLASS,
            quantum=1,
            queue_policy=queue_policy,
            prefill_busy_threshold_frac=queue_threshold,
        )
        policy = PolicyProfile(DEFAULT_CLASS, (CacheBucket(0, DEFAULT_CLASS),), (only,))
    if policy is None or not any(can_queue(item) for item in policy.classes):
        return None
    return policy


def can_queue(policy: PolicyClass) -> bool:
    """Whether requests of the class ever wait."""
    return policy.prefill_busy_threshold is not None or policy.prefill_busy_threshold_frac is not None


def is_rank_busy(policy: PolicyClass, prefill_tokens: int, max_num_batched_tokens: int | None) -> bool:
    """Whether a rank with so many booked prompt tokens should get no more of the class."""
    if policy.prefill_busy_threshold is not None and prefill_tokens > policy.prefill_busy_threshold:
        return True
    fraction = policy.prefill_busy_threshold_frac
    if fraction is None:
        return False
    return prefill_tokens > fraction * (max_num_batched_tokens or UNKNOWN_MAX_BATCHED_TOKENS)


@dataclass(eq=False, slots=True)
class Waiting(Generic[T]):
    """A request in the queue.

    Attributes:
        item: Whatever the caller needs to place it.
        cached_tokens: Of its prompt, at the worker that has most of it, when it came.
        lane: Requests of a class that may only be placed together, such as those for one pinned worker; None: anywhere.
        waits: Until it is taken out or given up.
    """

    item: T
    policy: PolicyClass
    isl_tokens: int
    cached_tokens: int
    lane: Hashable = None
    waits: bool = True

    @property
    def cost(self) -> int:
        """What serving it takes from its class's deficit."""
        return max(self.isl_tokens - self.cached_tokens, 1)


_Entry = tuple[int, float, int, Waiting[T]]


class _ClassQueue(Generic[T]):
    """The waiting requests of one class, in lanes: only the first of each lane can be next."""

    def __init__(self, policy: PolicyClass) -> None:
        self.policy = policy
        self.deficit = 0
        self.requests = 0
        self.isl_tokens = 0
        self.cached_tokens = 0
        self._lanes: dict[Hashable, list[_Entry[T]]] = {}
        self._given_up = 0

    def push(self, strict_priority: int, score: float, number: int, waiting: Waiting[T]) -> None:
        lane = self._lanes.setdefault(waiting.lane, [])
        heapq.heappush(lane, (-strict_priority, -score, number, waiting))
        self._count(waiting, 1)

    def next(self, can_place: Callable[[Waiting[T]], bool]) -> Waiting[T] | None:
        """The first in order of those that are first in their lane and can be placed."""
        best: _Entry[T] | None = None
        for name in list(self._lanes):
            lane = self._lanes[name]
            while lane and not lane[0][3].waits:
                heapq.heappop(lane)
                self._given_up -= 1
            if not lane:
                del self._lanes[name]
            elif (best is None or lane[0][:3] < best[:3]) and can_place(lane[0][3]):
                best = lane[0]
        return best[3] if best is not None else None

    def take(self, waiting: Waiting[T]) -> None:
        """Take out what ``next`` gave."""
        heapq.heappop(self._lanes[waiting.lane])
        self._leave(waiting)

    def give_up(self, waiting: Waiting[T]) -> None:
        if not waiting.waits:
            return
        self._leave(waiting)
        self._given_up += 1
        if self._given_up > max(_MAX_GIVEN_UP, self.requests):
            self._lanes = {name: kept for name, lane in self._lanes.items() if (kept := _still_waiting(lane))}
            self._given_up = 0

    def drain(self) -> Iterable[Waiting[T]]:
        while (waiting := self.next(lambda item: True)) is not None:
            self.take(waiting)
            yield waiting

    def _leave(self, waiting: Waiting[T]) -> None:
        waiting.waits = False
        self._count(waiting, -1)
        if not self.requests:
            self.deficit = 0

    def _count(self, waiting: Waiting[T], sign: int) -> None:
        self.requests += sign
        self.isl_tokens += sign * waiting.isl_tokens
        self.cached_tokens += sign * waiting.cached_tokens


def _still_waiting(lane: list[_Entry[T]]) -> list[_Entry[T]]:
    kept = [entry for entry in lane if entry[3].waits]
    heapq.heapify(kept)
    return kept


class PolicyQueue(Generic[T]):
    """The queues of all classes of a profile. Belongs to one thread.

    The caller decides whether anybody who may take a request is free; this decides what that means. Order of calls for
    a request: ``classify``; then, if ``has_backlog`` or nobody is free, ``enqueue``; and whenever load went down,
    ``pop_next`` until it gives None, with each request placed before the next call.
    """

    def __init__(self, profile: PolicyProfile) -> None:
        self._profile = profile
        self._queues = {policy.name: _ClassQueue[T](policy) for policy in profile.classes}
        self._explicit = {policy.name: policy for policy in profile.classes if policy.is_explicit}
        self._matrix = {
            (policy.policy_family, policy.cache_bucket): policy for policy in profile.classes if not policy.is_explicit
        }
        self._families = {policy.policy_family for policy in profile.classes}
        self._ring = [queue for queue in self._queues.values() if can_queue(queue.policy)]
        self._last = len(self._ring) - 1
        # Whether the class that was served last may go on: until nobody can be placed.
        self._goes_on = False
        self._number = 0
        self.rejected: dict[tuple[str, str], int] = {}

    def __len__(self) -> int:
        return sum(queue.requests for queue in self._ring)

    @property
    def isl_tokens(self) -> int:
        """Prompt tokens that wait."""
        return sum(queue.isl_tokens for queue in self._ring)

    def usage(self) -> dict[str, tuple[int, int, int]]:
        """By class: requests, prompt tokens and cached prompt tokens that wait; for metrics."""
        return {name: (queue.requests, queue.isl_tokens, queue.cached_tokens) for name, queue in self._queues.items()}

    def classify(self, wanted: str | None, uncached_tokens: int) -> PolicyClass:
        """The class of a request: ``wanted`` names an explicit class or a family, anything else the default family."""
        if wanted is not None and (explicit := self._explicit.get(wanted)) is not None:
            return explicit
        family = wanted if wanted is not None and wanted in self._families else self._profile.default_policy_family
        bucket = self._profile.buckets[0]
        for other in self._profile.buckets:
            if other.min_tokens <= uncached_tokens:
                bucket = other
        return self._matrix[family, bucket.bucket]

    def has_backlog(self, policy: PolicyClass) -> bool:
        """Whether requests of the class wait: then a new one waits too."""
        return bool(self._queues[policy.name].requests)

    def enqueue(
        self, waiting: Waiting[T], *, now: float, priority_jump: float, strict_priority: int, workers: int
    ) -> None:
        """Let a request wait. ``now``: seconds, of any clock that does not run backwards.

        Raises:
            RouterQueueLimitExceeded: The class has as much waiting as it may with so many ``workers``.
        """
        policy = waiting.policy
        queue = self._queues[policy.name]
        self._check_limits(queue, workers)
        jump = priority_jump if priority_jump > 0 else 0.0
        if policy.queue_policy == "wspt":
            score = (1 + jump) / waiting.cost
        elif policy.queue_policy == "lcfs":
            score = jump + now
        else:
            score = jump - now
        self._number += 1
        queue.push(strict_priority, score, self._number, waiting)

    def give_up(self, waiting: Waiting[T]) -> None:
        """Its caller does not want it any more; nothing happens if it was taken out already."""
        self._queues[waiting.policy.name].give_up(waiting)

    def pop_next(self, can_place: Callable[[Waiting[T]], bool]) -> Waiting[T] | None:
        """Take the request out whose turn it is. ``can_place``: whether somebody who may take it is free."""
        ready: list[tuple[_ClassQueue[T], Waiting[T]]] = []
        for offset in range(len(self._ring)):
            queue = self._ring[(self._last + 1 + offset) % len(self._ring)]
            waiting = queue.next(can_place)
            if waiting is not None:
                ready.append((queue, waiting))
        if not ready:
            self._goes_on = False
            return None
        queue, waiting = self._whose_turn(ready)
        queue.take(waiting)
        if queue.requests:
            queue.deficit -= waiting.cost
        self._last, self._goes_on = self._ring.index(queue), True
        return waiting

    def drain(self) -> list[Waiting[T]]:
        """Take everything out, for a shutdown."""
        return [waiting for queue in self._ring for waiting in queue.drain()]

    def _whose_turn(self, ready: list[tuple[_ClassQueue[T], Waiting[T]]]) -> tuple[_ClassQueue[T], Waiting[T]]:
        # The ring begins after the last class that was served, so that one stands last if it is ready.
        last, next_of_last = ready[-1]
        if self._goes_on and last is self._ring[self._last] and next_of_last.cost <= last.deficit:
            return ready[-1]
        for queue, waiting in ready:
            if waiting.cost <= queue.deficit:
                return queue, waiting
            queue.deficit += queue.policy.quantum
            if waiting.cost <= queue.deficit:
                return queue, waiting
        rounds = min(math.ceil((waiting.cost - queue.deficit) / queue.policy.quantum) for queue, waiting in ready)
        for queue, _ in ready:
            queue.deficit += rounds * queue.policy.quantum
        return next((queue, waiting) for queue, waiting in ready if waiting.cost <= queue.deficit)

    def _check_limits(self, queue: _ClassQueue[T], workers: int) -> None:
        policy = queue.policy
        for kind, current, limit in (
            ("requests", queue.requests, policy.request_queue_limit_per_worker),
            ("raw_isl_tokens", queue.isl_tokens, policy.raw_isl_token_queue_limit_per_worker),
            ("cached_tokens", queue.cached_tokens, policy.cached_token_queue_limit_per_worker),
        ):
            if limit is not None and current >= limit * workers:
                self._reject(policy.name, kind, current, limit * workers)
        if queue.requests >= MAX_WAITING:
            self._reject(policy.name, "requests", queue.requests, MAX_WAITING)

    def _reject(self, name: str, kind: str, current: int, limit: int) -> None:
        self.rejected[name, kind] = self.rejected.get((name, kind), 0) + 1
        raise RouterQueueLimitExceeded(name, kind, current, limit)
