"""One request on its way through a router: what goes with it, who failed it, and what becomes of it then. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_es.errors import CannotConnect
from dynamo_es.router.booked import Booked
from dynamo_es.router.choosers import Choice
from dynamo_es.router.eligibility import NOBODY
from dynamo_es.router.routing_request import RoutingRequest
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.errors import Overloaded
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.placement import Placement
from schemas.requests import Outcome

# A request whose instance could not be reached is sent elsewhere; nothing of it had started.
MAX_ATTEMPTS = 3


@dataclass(slots=True)
class Course:
    """A request while a router has it.

    Attributes:
        routing: What it asks of the router.
        payload: What workers get, but for the choice.
        context: Whether it is still wanted.
        on_choice: Gives more of the payload when a worker is chosen; may raise.
        lane: By which a worker's items may go.
        failed: Workers that failed it here.
        begun: The worker that has it now sent something.
        tries_again: The router sends it to another worker by itself.
    """

    routing: RoutingRequest
    payload: dict[str, Any]
    context: Context
    on_choice: Callable[[Choice], Mapping[str, Any]]
    lane: Lane | None = None
    failed: frozenset[int] = NOBODY
    begun: bool = False
    tries_again: bool = False

    def payload_for(self, booked: Booked) -> dict[str, Any]:
        """What the chosen worker gets, but for what ``on_choice`` adds; one that takes text gets it as it is."""
        if "token_ids" not in self.payload and "routing" not in self.payload:
            return dict(self.payload)
        rank = booked.choice.rank
        routing = self.payload.get("routing")
        return {
            **self.payload,
            "request_id": booked.key.request_id,
            "routing": {
                **(routing if isinstance(routing, dict) else {}),
                "worker_id": rank.worker_id,
                "dp_rank": rank.dp_rank,
                "overlap_blocks": booked.choice.overlap_blocks,
            },
        }

    def fail(
        self, error: Exception, booked: Booked, *, keeps_hard: bool, has_other: Callable[[frozenset[int]], bool]
    ) -> tuple[Outcome, str]:
        """Its worker failed it: the end of the booking, with what it says of the failure.

        ``keeps_hard``: a session stays with its worker whatever happens. ``has_other``: whether a worker that
        is none of these may take it.
        """
        worker_id = booked.choice.rank.worker_id
        self.failed |= {worker_id}
        self.tries_again = False
        # The class only: a worker's text may quote the prompt, and prompts never reach the log.
        detail = type(error).__name__
        is_overloaded = isinstance(error, Overloaded)
        if not self.begun and isinstance(error, (CannotConnect, Overloaded)):
            detail = str(error)
        if self.routing.worker_id is not None or (booked.session and keeps_hard and is_overloaded):
            return "error", detail
        if self.context.is_stopped() or not has_other(self.failed | self.routing.excluded):
            return "error", detail
        last = self.routing.first_attempt + MAX_ATTEMPTS - 1
        if not self.begun and isinstance(error, (CannotConnect, Overloaded)) and booked.key.attempt < last:
            self.tries_again = True
            return "migrated", detail
        resumption = self.routing.resumption
        if resumption is not None and resumption.resumes(error, worker_id, booked.key.attempt):
            return "migrated", detail
        return "error", detail


def note_choice(placement: Placement, choice: Choice, stage: str, isl_tokens: int, block_size: int) -> None:
    """Note where a request goes; ``block_size`` 0: the router goes neither by ranks nor by blocks."""
    placement.note_worker(stage, choice.rank.worker_id, choice.rank.dp_rank if block_size else None)
    if block_size and stage != "decode":
        blocks = -(-isl_tokens // block_size)
        placement.overlap_blocks = choice.overlap_blocks
        placement.hit_rate = choice.overlap_blocks / blocks if blocks else 0.0


def count_tokens(batch: Sequence[Any]) -> int:
    """Tokens in the frames of a batch."""
    count = 0
    for item in batch:
        if isinstance(item, dict):
            count += len(item.get("token_ids") or ())
    return count
