"""Random events for all folds, good and bad, for tests that kill processes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from schemas.columns import pack_u64
from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from schemas.kv_events import (
    KV_EVENTS,
    AllBlocksCleared,
    BlocksRemoved,
    BlocksStored,
    KvEvents,
    SourceRetired,
    key_kv_events,
)
from schemas.registry import REGISTRY, Instance, Lease, LeaseEnded, key_instance, key_lease, key_lease_end
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed, RouterLost
from schemas.topic import TopicSpec
from schemas.worker_load import WORKER_LOAD, WorkerLoad

Event = tuple[TopicSpec, bytes, msgspec.Struct | None]
ALL = (KV_EVENTS, REQUESTS, REGISTRY, WORKER_LOAD, FORWARD_PASS)
BLOCKS = range(1 << 12)


class EventStorm:
    """An endless stream of plausible events, with duplicates, gaps, restarts, resets and late endings."""

    def __init__(self, seed: int, topics: Sequence[TopicSpec] = ALL) -> None:
        """``topics``: there are events of these only."""
        self._rng = random.Random(seed)
        self._topics = topics
        makers = {
            self._kv_event: (0.6, (KV_EVENTS,)),
            self._request: (0.2, (REQUESTS,)),
            self._registry: (0.12, (REGISTRY,)),
            self._load: (0.08, (WORKER_LOAD, FORWARD_PASS)),
        }
        wanted = {make: share for make, (share, made) in makers.items() if any(topic in topics for topic in made)}
        self._makers, self._shares = list(wanted), list(wanted.values())
        self._sources = {number: [1, 0] for number in range(6)}
        self._requests: list[tuple[str, int]] = []
        self._leases: dict[int, int] = {}
        self._number = 0

    def __iter__(self) -> Iterator[Event]:
        while True:
            (make,) = self._rng.choices(self._makers, self._shares)
            event = make()
            if event[0] in self._topics:
                yield event

    def _kv_event(self) -> Event:
        rng = self._rng
        worker = rng.randrange(6)
        source = self._sources[worker]
        roll = rng.random()
        reset = False
        events: list = []
        if roll < 0.02:
            source[0], source[1] = source[0] + 1, 0
        elif roll < 0.04:
            source[1] += rng.randrange(3)
        elif roll < 0.07:
            reset = True
        elif roll < 0.08:
            events = [SourceRetired("storm")]
        seq = source[1] - 1 if 0.08 <= roll < 0.1 and source[1] else source[1]
        if not events:
            for _ in range(rng.randint(1, 4)):
                column = pack_u64([number << 50 for number in rng.choices(BLOCKS, k=rng.randint(1, 12))])
                tier = rng.choice(["device", "device", "host_pinned", "disk"])
                kind = rng.random()
                if kind < 0.65:
                    events.append(BlocksStored(tier, None, column, column))
                elif kind < 0.97:
                    events.append(BlocksRemoved(tier, column))
                else:
                    events.append(AllBlocksCleared())
            source[1] = max(source[1], seq + 1)
        batch = KvEvents(1, "m", worker, 0, source[0], seq, 4, reset or seq == 0, events)
        return KV_EVENTS, key_kv_events("m", worker, 0), batch

    def _request(self) -> Event:
        rng = self._rng
        if rng.random() < 0.01:
            router = rng.randrange(3)
            return REQUESTS, f"router/{router}".encode(), RouterLost(1, 100 + self._number)
        if rng.random() < 0.45 or not self._requests:
            self._number += 1
            request = (f"r{self._number}", rng.randrange(3))
            self._requests.append(request)
            column = pack_u64([rng.getrandbits(64) for _ in range(rng.randint(0, 8))])
            event = Routed(
                1, request[0], 1, request[1], "m", "kv", rng.randrange(6), 0, 4, 32, column, column, 1, 4, 28, [], "d",
                [], 10,
            )  # fmt: skip
        elif rng.random() < 0.4:
            request = rng.choice(self._requests)
            event = PrefillCompleted(1, request[0], 1, request[1])
        else:
            request = self._requests.pop(rng.randrange(len(self._requests)))
            event = Finished(1, request[0], 1, request[1], "ok", 3, 5, 9)
        return REQUESTS, request[0].encode(), event

    def _registry(self) -> Event:
        rng = self._rng
        lease = rng.randrange(20)
        roll = rng.random()
        if roll < 0.5:
            self._leases[lease] = self._leases.get(lease, -1) + 1
            return REGISTRY, key_lease(lease), Lease(1, lease, "worker", lease, 1000, self._leases[lease])
        if roll < 0.55:
            renewal = self._leases.get(lease, 0) - rng.randrange(2)
            return REGISTRY, key_lease_end(lease), LeaseEnded(1, lease, max(renewal, 0), "expired", "storm")
        if roll < 0.57:
            return REGISTRY, key_lease(lease), None
        key = key_instance("n", "c", "e", lease)
        if roll < 0.65:
            return REGISTRY, key, None
        return REGISTRY, key, Instance(1, "n", "c", "e", lease, lease, "zmq", f"tcp://h:{rng.randrange(9999)}")

    def _load(self) -> Event:
        rng = self._rng
        worker = rng.randrange(6)
        key = key_kv_events("m", worker, 0)
        if rng.random() < 0.5:
            return WORKER_LOAD, key, WorkerLoad(1, "m", worker, 0, 1, rng.randrange(99), None, 100, 1, 0, 5)
        passed = ForwardPass(1, "m", worker, 0, 1, rng.randrange(99), 0.1, ScheduledRequests(), QueuedRequests())
        return FORWARD_PASS, key, passed
