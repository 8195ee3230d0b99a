"""Keeping the requests of a session on one worker (spec: router-core D.13). Time is passed in.

The first request of a session that is dispatched binds it to its rank; while requests of it are under way, and for
``ttl_s`` after the last of them ended, the others go there too. A rank that is not there any more (its worker left, or
could not be connected to just now) binds nothing, and the next dispatch binds the session anew.

*Hard*: the bound rank or nobody; a request that is pinned elsewhere is refused. *Soft*: the bound rank if it may take
the request, else whoever may, and the session moves there.

What binds is the latest dispatch in the log (``streams.sessions``), so all routers, and one that starts again, come to
the same answer; dispatches of this router count before the log has them. Where two routers bind a new session at the
same moment the later dispatch wins everywhere. A router that starts without stored state knows the sessions of the
last hour of the log. Both tables are bounded: of more than 65,536 sessions those are forgotten that were silent for
longest.

The log gets a digest of the session's name, never the name. The digest is keyed if the router's tracking hashes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import blake3

from dynamo_es.errors import InvalidArgument
from dynamo_es.router.active_sequences import WorkerRank
from dynamo_es.router.errors import SessionElsewhere
from dynamo_es.router.routing_request import RoutingRequest
from schemas.requests import SESSION_BYTES
from streams.sessions import Session, SessionTable

MAX_TTL_S = 31_536_000
MAX_ID_BYTES = 256
_CONTEXT = b"dynamo-es session v1\x00"


@dataclass(frozen=True, slots=True)
class AffinitySettings:
    """How sessions are kept together.

    Attributes:
        ttl_s: Seconds for which an idle session keeps its rank; 1 to 31,536,000.
        hard: Whether its requests may go nowhere else.
    """

    ttl_s: int
    hard: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if not 1 <= self.ttl_s <= MAX_TTL_S:
            raise ValueError(f"session_affinity_ttl_secs must be between 1 and {MAX_TTL_S}")


@dataclass(slots=True)
class AffinityCounters:
    """Dispatches of sessions, for metrics: bound by them, sent where they were bound, moved."""

    bound: int = 0
    kept: int = 0
    moved: int = 0


class SessionAffinity:
    """Sessions of one router. Belongs to one event loop."""

    def __init__(
        self,
        settings: AffinitySettings,
        folded: Callable[[], SessionTable],
        scope: Callable[[], str],
        key: bytes | None = None,
    ) -> None:
        """``folded`` gives the log's table as it is now. ``scope`` names what the router routes to: a session is bound
        in each scope for itself. ``key``: 32 bytes that all routers of the fleet share; None: none.
        """
        self.settings = settings
        self.counters = AffinityCounters()
        self._folded = folded
        self._key = key
        self._scope = scope
        # What this router did and the log may not have told back yet.
        self.own = SessionTable()

    def digest(self, session_id: str) -> bytes:
        """What stands for a session.

        Raises:
            InvalidArgument: Its name has more than 256 bytes of UTF-8.
        """
        name = session_id.encode("utf-8", "surrogatepass")
        if len(name) > MAX_ID_BYTES:
            raise InvalidArgument(f"session affinity ID must not exceed {MAX_ID_BYTES} bytes")
        text = _CONTEXT + self._scope().encode() + b"\x00" + name
        hasher = blake3.blake3(text) if self._key is None else blake3.blake3(text, key=self._key)
        return hasher.digest(SESSION_BYTES)

    def rank_of(self, digest: bytes, now_ms: int) -> WorkerRank | None:
        """Where a session is bound now; None: nowhere."""
        own, folded = self.own, self._folded()
        found = [session for table in (own, folded) if (session := table.get(digest)) is not None]
        if not found:
            return None
        latest: Session = max(found, key=lambda session: session.dispatch)
        if not (own.has_open(digest) or folded.has_open(digest)):
            seen_at_ms = max(session.seen_at_ms for session in found)
            if now_ms - seen_at_ms > self.settings.ttl_s * 1000:
                return None
        return WorkerRank(latest.worker_id, latest.dp_rank)

    def narrow(
        self,
        request: RoutingRequest,
        digest: bytes,
        ranks: Sequence[WorkerRank],
        eligible: Callable[[Sequence[WorkerRank]], Sequence[WorkerRank]],
        now_ms: int,
    ) -> Sequence[WorkerRank]:
        """The ranks that may take a request of a session; at least one.

        ``ranks``: all there are. ``eligible``: which of them may take the request, session or not; it raises if none.

        Raises:
            SessionElsewhere: The session is bound to another worker than the request is pinned to (hard).
            NoEligibleWorker, AllWorkersOverloaded: As ``eligible``; in hard mode also if only the bound rank may not.
        """
        bound = self.rank_of(digest, now_ms)
        if bound is None or bound not in ranks:
            return eligible(ranks)
        if not self.settings.hard:
            found = eligible(ranks)
            return [bound] if bound in found else found
        if request.worker_id not in (None, bound.worker_id) or request.dp_rank not in (None, bound.dp_rank):
            raise SessionElsewhere(bound.worker_id, bound.dp_rank)
        return eligible([bound])

    def dispatched(self, digest: bytes, rank: WorkerRank, now_ms: int) -> None:
        """A request of the session goes to ``rank``. Each call is followed by one of ``ended``."""
        bound = self.rank_of(digest, now_ms)
        if bound is None:
            self.counters.bound += 1
        elif bound == rank:
            self.counters.kept += 1
        else:
            self.counters.moved += 1
        self.own.dispatched(digest, rank.worker_id, rank.dp_rank, now_ms)
        self.own.opened(digest)

    def ended(self, digest: bytes, now_ms: int) -> None:
        """A request of the session is over."""
        self.own.closed(digest, now_ms)
