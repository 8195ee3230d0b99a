"""The fold of ``requests``: bookings that are open, on whichever router they were made.

A booking is (request id, attempt) of a router. It opens with ``routed`` and is released exactly once: by ``finished``,
or because its router's lease ended (``router-lost``). Age releases nothing: a request may generate for hours.

A lease may end by mistake, while the log is away. The router then announces its bookings again under its next lease:
they are the same bookings, and the loss of the old lease, which is read from another partition and so before or after,
does not touch them.

Beside them, which worker each session was sent to last: what routers that keep sessions together go by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import blake3
import msgspec

from dynamo_es.log.base import Record
from dynamo_es.store.base import Change, Delete, Put, StateRows
from schemas.requests import REQUESTS, Finished, PrefillCompleted, Routed, RouterLost
from schemas.topic import TopicSpec
from streams.fold import RecordRejected
from streams.sessions import Session, SessionTable

FAMILY = "bookings"
# Endings that are remembered so that a late ``routed`` of a lost router opens nothing.
MAX_LOST_LEASES = 4096

# A request that was routed longer ago is over, or its booking is not worth reading a week of requests for.
HORIZON_MS = 3_600_000


class BookingKey(NamedTuple):
    """Identity of a booking. ``router_id`` 0: of this process's own router."""

    request_id: str
    attempt: int
    router_id: int = 0


class Booking(msgspec.Struct, array_like=True):
    """An open booking. ``sequence_hashes``: packed u64 column of the identities under which its blocks are booked.
    ``prefill_tokens`` is 0 once prefill is complete. ``session``, ``expected_prefill_ms``, ``lease_id``: as in
    ``Routed``.
    """

    request_id: str
    attempt: int
    router_id: int
    model: str
    worker_id: int
    dp_rank: int
    isl_tokens: int
    sequence_hashes: bytes
    prefill_tokens: int
    routed_at_ms: int
    session: bytes = b""
    expected_prefill_ms: float = -1.0
    lease_id: int = 0

    @property
    def key(self) -> BookingKey:
        return BookingKey(self.request_id, self.attempt, self.router_id)


class BookingObserver(Protocol):
    """Told of each change after it happened; must not raise. Used to mirror other routers' bookings."""

    def booked(self, booking: Booking) -> None:
        """A booking opened."""

    def prefill_completed(self, booking: Booking) -> None:
        """Its prompt is computed; ``booking.prefill_tokens`` is 0 now."""

    def released(self, booking: Booking) -> None:
        """It is over."""

    def replaced(self, bookings: Iterable[Booking]) -> None:
        """All that was told before is void; these are the open bookings."""


@dataclass(slots=True)
class RequestCounters:
    """For metrics, not part of the state's meaning."""

    routed: int = 0
    finished: int = 0
    late: int = 0
    duplicates: int = 0


class RequestsState:
    """Open bookings, sessions, and what is gone: (router id, lease id)."""

    def __init__(self) -> None:
        self.bookings: dict[BookingKey, Booking] = {}
        self.sessions = SessionTable(tracks_changes=True)
        self.lost_leases: dict[tuple[int, int], None] = {}
        self.counters = RequestCounters()
        self.observers: list[BookingObserver] = []
        self.dirty: dict[BookingKey, Booking | None] = {}
        self.dirty_lost = False


class RequestsFold:
    """A ``Fold[RequestsState]``. Late and repeated events are no-ops with a counter."""

    name = "requests"
    version = 2
    horizon_ms: int | None = HORIZON_MS
    topics: Sequence[TopicSpec] = (REQUESTS,)
    families: Sequence[str] = (FAMILY,)

    def new_state(self) -> RequestsState:
        return RequestsState()

    def apply(self, state: RequestsState, record: Record, value: Any) -> None:
        if isinstance(value, Routed):
            _open(state, value, record.timestamp_ms)
        elif isinstance(value, PrefillCompleted):
            booking = state.bookings.get(BookingKey(value.request_id, value.attempt, value.router_id))
            if booking is None or not booking.prefill_tokens:
                state.counters.late += 1
                return
            booking.prefill_tokens = 0
            state.dirty[booking.key] = booking
            for observer in state.observers:
                observer.prefill_completed(booking)
        elif isinstance(value, Finished):
            state.counters.finished += 1
            _release(state, BookingKey(value.request_id, value.attempt, value.router_id), record.timestamp_ms)
        elif isinstance(value, RouterLost):
            _lose_router(state, value)
        else:
            raise RecordRejected("requests has no deletions")

    def changes(self, state: RequestsState) -> list[Change]:
        changes: list[Change] = []
        for key, booking in state.dirty.items():
            row_key = b"b" + msgspec.msgpack.encode(key)
            if booking is None:
                changes.append(Delete(FAMILY, row_key))
            else:
                changes.append(Put(FAMILY, row_key, msgspec.msgpack.encode(booking)))
        for digest in state.sessions.dirty:
            session = state.sessions.get(digest)
            row = None if session is None else msgspec.msgpack.encode(session)
            changes.append(Delete(FAMILY, b"s" + digest) if row is None else Put(FAMILY, b"s" + digest, row))
        state.sessions.dirty.clear()
        if state.dirty_lost:
            changes.append(Put(FAMILY, b"lost", msgspec.msgpack.encode(list(state.lost_leases))))
        state.dirty = {}
        state.dirty_lost = False
        return changes

    def mark_all(self, state: RequestsState) -> Iterator[None]:
        state.dirty = dict(state.bookings)
        state.sessions.dirty = set(state.sessions.sessions)
        state.dirty_lost = True
        return iter(())

    def load(self, rows: StateRows) -> RequestsState:
        state = RequestsState()
        decoder = msgspec.msgpack.Decoder(Booking)
        bookings = [decoder.decode(data) for _, data in rows.scan(FAMILY, b"b")]
        bookings.sort(key=lambda booking: booking.routed_at_ms)
        state.bookings = {booking.key: booking for booking in bookings}
        sessions = msgspec.msgpack.Decoder(Session)
        for key, data in rows.scan(FAMILY, b"s"):
            state.sessions.restore(key[1:], sessions.decode(data))
        for booking in bookings:
            if booking.session:
                state.sessions.opened(booking.session)
        lost = rows.get(FAMILY, b"lost")
        if lost is not None:
            state.lost_leases = dict.fromkeys(msgspec.msgpack.decode(lost, type=list[tuple[int, int]]))
        return state

    def adopt(self, previous: RequestsState, state: RequestsState) -> None:
        state.counters = previous.counters
        state.observers = previous.observers
        for observer in state.observers:
            observer.replaced(state.bookings.values())

    def digest(self, state: RequestsState) -> str:
        """Without the sessions: how far back they reach depends on when a store began (``HORIZON_MS``)."""
        lines = sorted(repr(booking) for booking in state.bookings.values())
        lines.append(repr(sorted(state.lost_leases)))
        return blake3.blake3("\n".join(lines).encode()).hexdigest()

    def housekeep(self, state: RequestsState) -> bool:
        return False

    def compaction(self, state: RequestsState) -> Callable[[StateRows], list[Change]] | None:
        return None


def _open(state: RequestsState, event: Routed, timestamp_ms: int) -> None:
    key = BookingKey(event.request_id, event.attempt, event.router_id)
    is_lost = (event.router_id, event.lease_id) in state.lost_leases
    if key in state.bookings:
        state.counters.duplicates += 1
        _announce_again(state, state.bookings[key], event, is_lost)
        return
    if event.session:
        # Before the check of lost routers: a table must not depend on which of the two events came first.
        state.sessions.dispatched(event.session, event.worker_id, event.dp_rank, timestamp_ms)
    if is_lost:
        state.counters.late += 1
        return
    state.counters.routed += 1
    booking = Booking(
        request_id=event.request_id,
        attempt=event.attempt,
        router_id=event.router_id,
        model=event.model,
        worker_id=event.worker_id,
        dp_rank=event.dp_rank,
        isl_tokens=event.isl_tokens,
        # Blocks of a prompt that is handed over stay where it goes.
        sequence_hashes=b"" if event.stage == "prefill" else event.tracking_hashes or event.sequence_hashes,
        prefill_tokens=event.prefill_tokens,
        routed_at_ms=timestamp_ms,
        session=event.session,
        expected_prefill_ms=event.expected_prefill_ms,
        lease_id=event.lease_id,
    )
    state.bookings[key] = booking
    state.dirty[key] = booking
    if booking.session:
        state.sessions.opened(booking.session)
    for observer in state.observers:
        observer.booked(booking)


def _announce_again(state: RequestsState, booking: Booking, event: Routed, is_lost: bool) -> None:
    """What counts is the lease under which a booking was announced last, whenever its loss is heard of."""
    if booking.lease_id == event.lease_id:
        return
    if is_lost:
        _release(state, booking.key, None)
        return
    booking.lease_id = event.lease_id
    state.dirty[booking.key] = booking


def _release(state: RequestsState, key: BookingKey, at_ms: int | None) -> None:
    booking = state.bookings.pop(key, None)
    if booking is None:
        state.counters.late += 1
        return
    state.dirty[key] = None
    if booking.session:
        state.sessions.closed(booking.session, at_ms)
    for observer in state.observers:
        observer.released(booking)


def _lose_router(state: RequestsState, event: RouterLost) -> None:
    lease = (event.router_id, event.lease_id)
    state.lost_leases.pop(lease, None)
    state.lost_leases[lease] = None
    if len(state.lost_leases) > MAX_LOST_LEASES:
        del state.lost_leases[next(iter(state.lost_leases))]
    state.dirty_lost = True
    for key, booking in list(state.bookings.items()):
        if (booking.router_id, booking.lease_id) == lease:
            _release(state, key, None)
