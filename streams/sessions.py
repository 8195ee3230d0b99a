"""Which worker each session was sent to last. Pure.

Routers of all processes feed one table each with the same events, in whatever order these come out of the partitions
of a topic, and must end with the same table. So a session's worker is the one of its latest dispatch (a draw goes to
the higher worker, then rank), and a full table keeps the sessions with the latest signs of life: both depend on the
events alone, not on their order.

How long an idle session keeps its worker is for routers to say; the table knows no such time.
"""

from __future__ import annotations

import heapq

import msgspec

# Dynamo's bound.
MAX_SESSIONS = 65_536
_NO_WORKER = (-1, -1, -1)


class Session(msgspec.Struct, array_like=True):
    """Where a session is.

    Attributes:
        worker_id, dp_rank: Of its latest dispatch.
        routed_at_ms: When that was.
        seen_at_ms: Its last sign of life: a dispatch, or the end of a request.
    """

    worker_id: int
    dp_rank: int
    routed_at_ms: int
    seen_at_ms: int

    @property
    def dispatch(self) -> tuple[int, int, int]:
        """What orders dispatches."""
        return self.routed_at_ms, self.worker_id, self.dp_rank


class SessionTable:
    """Sessions by digest, at most ``limit``; the one that has been silent for longest goes first, counted.

    Attributes:
        sessions: Read only.
        dirty: Digests whose session changed or went since somebody emptied it; stays empty unless ``tracks_changes``.
        dropped: Sessions that had to go for others.
    """

    def __init__(self, limit: int = MAX_SESSIONS, *, tracks_changes: bool = False) -> None:
        self.sessions: dict[bytes, Session] = {}
        self.dirty: set[bytes] = set()
        self.dropped = 0
        self._limit = limit
        self._tracks = tracks_changes
        self._open: dict[bytes, int] = {}
        # (last sign of life, digest), the earliest first; entries that a later sign overtook are skipped.
        self._ages: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self.sessions)

    def get(self, digest: bytes) -> Session | None:
        """A session; None: unknown, or dropped."""
        return self.sessions.get(digest)

    def has_open(self, digest: bytes) -> bool:
        """Whether requests of the session are under way."""
        return digest in self._open

    def restore(self, digest: bytes, session: Session) -> None:
        """Put back what a store kept."""
        self.sessions[digest] = session
        self._note_age(digest, session)

    def dispatched(self, digest: bytes, worker_id: int, dp_rank: int, at_ms: int) -> None:
        """A request of the session was sent to a worker."""
        session = self.sessions.get(digest)
        if session is None:
            session = self.sessions[digest] = Session(*_NO_WORKER, -1)
        if (at_ms, worker_id, dp_rank) > session.dispatch:
            session.worker_id, session.dp_rank, session.routed_at_ms = worker_id, dp_rank, at_ms
        self._see(digest, session, at_ms)

    def opened(self, digest: bytes) -> None:
        """One more request of the session is under way."""
        self._open[digest] = self._open.get(digest, 0) + 1

    def closed(self, digest: bytes, at_ms: int | None) -> None:
        """One that was is over. ``at_ms`` None: nobody knows since when, so that it is no sign of life."""
        left = self._open.get(digest, 0) - 1
        if left > 0:
            self._open[digest] = left
        else:
            self._open.pop(digest, None)
        session = self.sessions.get(digest)
        if session is not None and at_ms is not None:
            self._see(digest, session, at_ms)

    def _see(self, digest: bytes, session: Session, at_ms: int) -> None:
        if at_ms > session.seen_at_ms:
            session.seen_at_ms = at_ms
            self._note_age(digest, session)
        if self._tracks:
            self.dirty.add(digest)
        while len(self.sessions) > self._limit:
            self._drop_oldest()

    def _note_age(self, digest: bytes, session: Session) -> None:
        heapq.heappush(self._ages, (session.seen_at_ms, digest))
        if len(self._ages) > 4 * max(self._limit, len(self.sessions)):
            self._ages = [(known.seen_at_ms, name) for name, known in self.sessions.items()]
            heapq.heapify(self._ages)

    def _drop_oldest(self) -> None:
        while True:
            seen_at_ms, digest = heapq.heappop(self._ages)
            session = self.sessions.get(digest)
            if session is not None and session.seen_at_ms == seen_at_ms:
                break
        del self.sessions[digest]
        self.dropped += 1
        if self._tracks:
            self.dirty.add(digest)
