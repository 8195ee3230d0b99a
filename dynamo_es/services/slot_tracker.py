"""The slot tracker: what routers of several processes booked on workers; it chooses none (spec/services f.2). Pure.

Each tenant, a model in a routing group, has a tracker from its first worker to its last. Load is counted as by every
router here (``active_sequences``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_es.router.active_sequences import ActiveSequences, WorkerRank
from dynamo_es.router.booked import already_booked
from dynamo_es.router.replica_events import ReplicaEvent, ReplicatedBooking, ReplicatedChange
from dynamo_es.router.reports import load_row
from dynamo_es.router.selection_requests import PartitionKey
from dynamo_es.services.refusals import ServiceRefusal
from streams.requests import BookingKey

MAX_WORKERS = 100_000
"""Of all tenants together; one more is refused with 409."""
MAX_RANKS = 1024
"""Of one worker."""
MAX_BOOKINGS = 1_000_000
"""Of one tenant; one more is refused with 503."""
EXPIRY_S = 3600.0
"""Seconds after which a booking is taken for forgotten by its owner."""
REPLICA_EXPIRY_S = 300.0
"""The same for one that another replica told of."""
_EXPIRY_CHECK_S = 30.0
_RANK_LIMIT = 2**32


@dataclass(slots=True)
class _Tracker:
    block_size: int
    workers: dict[int, range] = field(default_factory=dict)
    sequences: ActiveSequences = field(default_factory=ActiveSequences)
    remote: dict[str, float] = field(default_factory=dict)
    checked_at: float = 0.0

    def ranks(self) -> Iterator[WorkerRank]:
        for worker_id in sorted(self.workers):
            for rank in self.workers[worker_id]:
                yield WorkerRank(worker_id, rank)

    def has(self, rank: WorkerRank) -> bool:
        return rank.dp_rank in self.workers.get(rank.worker_id, ())


class SlotTracker:
    """Bookings by tenant. Belongs to one event loop. Every refusal is a ``ServiceRefusal`` with Dynamo's text."""

    def __init__(self, now: Callable[[], float], publish: Callable[[ReplicaEvent], None], router_id: int) -> None:
        """``now``: seconds, monotonic. ``publish``: tells other replicas of what changed here, as ``router_id``."""
        self._now = now
        self._publish = publish
        self._router_id = router_id
        self._trackers: dict[PartitionKey, _Tracker] = {}

    def register(self, key: PartitionKey, worker_id: int, block_size: int, start: int, size: int) -> None:
        """A worker with ranks ``start`` to ``start + size - 1``. 400, 409."""
        if not block_size:
            raise ServiceRefusal(400, "block_size must be greater than 0")
        if not size:
            raise ServiceRefusal(400, "dp_size must be greater than 0")
        if start + size > _RANK_LIMIT:
            raise ServiceRefusal(400, f"dp range overflows u32: start={start} size={size}")
        if size > MAX_RANKS:
            raise ServiceRefusal(400, f"dp_size must be at most {MAX_RANKS}")
        tracker = self._trackers.get(key)
        if tracker is not None and tracker.block_size != block_size:
            raise ServiceRefusal(
                409, f"block_size mismatch for {key}: existing={tracker.block_size}, requested={block_size}"
            )
        if tracker is not None and worker_id in tracker.workers:
            raise ServiceRefusal(409, f"worker {worker_id} already registered for {key}")
        if sum(len(known.workers) for known in self._trackers.values()) >= MAX_WORKERS:
            raise ServiceRefusal(409, f"{MAX_WORKERS} workers are registered already")
        if tracker is None:
            tracker = self._trackers[key] = _Tracker(block_size, checked_at=self._now())
        tracker.workers[worker_id] = range(start, start + size)

    def unregister(self, key: PartitionKey, worker_id: int) -> None:
        """The worker is gone, with its bookings; the tenant's last one takes the tracker along. 404."""
        tracker = self._trackers.get(key)
        if tracker is None or worker_id not in tracker.workers:
            raise ServiceRefusal(404, f"worker {worker_id} not found for {key}")
        del tracker.workers[worker_id]
        for released in tracker.sequences.release_worker(worker_id):
            tracker.remote.pop(released.request_id, None)
        if not tracker.workers:
            del self._trackers[key]

    def workers(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """Workers of these tenants, sorted."""
        return [
            {
                "worker_id": worker_id,
                **_names(key),
                "block_size": tracker.block_size,
                "dp_start": tracker.workers[worker_id].start,
                "dp_size": len(tracker.workers[worker_id]),
            }
            for key, tracker in self._of(model_name, routing_group)
            for worker_id in sorted(tracker.workers)
        ]

    def loads(self, model_name: str | None = None, routing_group: str | None = None) -> list[dict[str, Any]]:
        """What is booked on each rank of these tenants' workers, sorted."""
        rows = []
        for key, tracker in self._of(model_name, routing_group):
            self._expire(tracker)
            for rank in tracker.ranks():
                load = tracker.sequences.load(rank)
                rows.append(
                    {
                        **_names(key),
                        "worker_id": rank.worker_id,
                        "dp_rank": rank.dp_rank,
                        "active_prefill_tokens": load.prefill_tokens,
                        "active_decode_blocks": load.blocks,
                    }
                )
        return rows

    def add(self, key: PartitionKey, request_id: str, rank: WorkerRank, hashes: Sequence[int], tokens: int) -> None:
        """Book a request: ``hashes`` (u64) of its blocks, ``tokens`` of its prompt to be computed. 404, 409, 503."""
        tracker = self._tracker(key)
        if not tracker.has(rank):
            worker = f"WorkerWithDpRank {{ worker_id: {rank.worker_id}, dp_rank: {rank.dp_rank} }}"
            raise ServiceRefusal(404, f"Worker {worker} not found")
        self._expire(tracker)
        booked = tracker.sequences.rank_of(BookingKey(request_id, 1))
        if booked is not None:
            raise ServiceRefusal(409, already_booked(request_id, booked))
        if len(tracker.sequences) >= MAX_BOOKINGS:
            raise ServiceRefusal(503, f"{MAX_BOOKINGS} requests are booked for {key} already")
        tracker.sequences.book(BookingKey(request_id, 1), rank, hashes, tokens, self._now())
        self._tell(key, tracker, request_id, rank, ReplicatedBooking(hashes, tokens))

    def prefill_complete(self, key: PartitionKey, request_id: str) -> None:
        """The request's prompt is computed; a second time changes nothing. 404."""
        tracker = self._tracker(key)
        rank = tracker.sequences.rank_of(BookingKey(request_id, 1))
        if rank is None:
            raise ServiceRefusal(404, f"Request {request_id} not found")
        tracker.sequences.complete_prefill(BookingKey(request_id, 1))
        self._tell(key, tracker, request_id, rank, "prefill_completed")

    def free(self, key: PartitionKey, request_id: str) -> None:
        """The request is over; one that is not known is fine. 404 for the tenant."""
        tracker = self._tracker(key)
        rank = tracker.sequences.rank_of(BookingKey(request_id, 1))
        if rank is not None:
            tracker.sequences.release(BookingKey(request_id, 1))
            tracker.remote.pop(request_id, None)
            self._tell(key, tracker, request_id, rank, "freed")

    def potential_loads(self, key: PartitionKey, hashes: Sequence[int], tokens: int) -> list[dict[str, int]]:
        """Load of each rank with a request added. 404."""
        tracker = self._tracker(key)
        self._expire(tracker)
        sequences = tracker.sequences
        return [
            load_row(rank, sequences.load(rank), tokens, sequences.new_blocks(rank, hashes)) for rank in tracker.ranks()
        ]

    def on_replica_event(self, event: ReplicaEvent) -> None:
        """Another replica booked or freed; what is not about workers that are known here is passed over."""
        tracker = self._trackers.get(event.partition)
        if tracker is None or tracker.block_size != event.block_size or not tracker.has(event.rank):
            return
        key, change = BookingKey(event.request_id, 1), event.change
        if isinstance(change, ReplicatedBooking):
            has_room = len(tracker.sequences) < MAX_BOOKINGS
            hashes, tokens = change.hashes, change.prefill_tokens
            if has_room and tracker.sequences.book(key, event.rank, hashes, tokens, self._now()):
                tracker.remote[event.request_id] = self._now()
            return
        if tracker.sequences.rank_of(key) != event.rank:
            return
        if change == "freed":
            tracker.sequences.release(key)
            tracker.remote.pop(event.request_id, None)
        else:
            tracker.sequences.complete_prefill(key)
            if event.request_id in tracker.remote:
                tracker.remote[event.request_id] = self._now()

    def _expire(self, tracker: _Tracker) -> None:
        """Take away bookings that nobody will end, if it is time to look."""
        now = self._now()
        if now - tracker.checked_at < _EXPIRY_CHECK_S:
            return
        tracker.checked_at = now
        for request_id, heard in list(tracker.remote.items()):
            if now - heard > REPLICA_EXPIRY_S:
                tracker.sequences.release(BookingKey(request_id, 1))
                del tracker.remote[request_id]
        tracker.sequences.release_older(now - EXPIRY_S)

    def _tell(
        self, key: PartitionKey, tracker: _Tracker, request_id: str, rank: WorkerRank, change: ReplicatedChange
    ) -> None:
        self._publish(ReplicaEvent(key, tracker.block_size, request_id, rank, change, self._router_id, None))

    def _tracker(self, key: PartitionKey) -> _Tracker:
        tracker = self._trackers.get(key)
        if tracker is None:
            raise ServiceRefusal(404, f"no slot tracker for {key}")
        return tracker

    def _of(self, model_name: str | None, routing_group: str | None) -> Iterator[tuple[PartitionKey, _Tracker]]:
        for key in sorted(self._trackers):
            if model_name in (None, key.model_name) and routing_group in (None, key.routing_group):
                yield key, self._trackers[key]


def _names(key: PartitionKey) -> dict[str, str]:
    return {"model_name": key.model_name, "routing_group": key.routing_group}
