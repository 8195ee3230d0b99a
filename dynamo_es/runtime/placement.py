"""Where a request went, noted for a caller that wants to know. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Placement:
    """Put into a ``Context`` by who asks; filled by the routers, anew when the request goes to another worker.

    Attributes:
        decode_worker_id, decode_dp_rank: Who answers; the rank is None where the router does not choose one.
        prefill_worker_id, prefill_dp_rank: Who computes the prompt; often the same.
        sent_at: When the request first went to a worker; the router's monotonic seconds. None: it did not yet.
        hit_rate: Part of the prompt's blocks that the chosen worker had, 0 to 1; None: the router does not look.
        overlap_blocks: Leading blocks of the prompt that it had, weighted by tier; None likewise.
        queue_depth: Requests that waited at the router then; None likewise.
    """

    decode_worker_id: int | None = None
    decode_dp_rank: int | None = None
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    sent_at: float | None = None
    hit_rate: float | None = None
    overlap_blocks: int | None = None
    queue_depth: int | None = None

    def note_worker(self, stage: str, worker_id: int, dp_rank: int | None) -> None:
        """A worker was chosen for ``stage``: ``prefill``, ``decode``, or empty: both."""
        if stage != "prefill":
            self.decode_worker_id, self.decode_dp_rank = worker_id, dp_rank
        if stage != "decode":
            self.prefill_worker_id, self.prefill_dp_rank = worker_id, dp_rank

    def workers(self) -> dict[str, int]:
        """Ids and ranks by Dynamo's names; what is not known is left out."""
        known = {
            "prefill_worker_id": self.prefill_worker_id,
            "prefill_dp_rank": self.prefill_dp_rank,
            "decode_worker_id": self.decode_worker_id,
            "decode_dp_rank": self.decode_dp_rank,
        }
        return {name: value for name, value in known.items() if value is not None}
