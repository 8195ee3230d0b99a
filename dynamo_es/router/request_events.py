"""The events of a routed request's life (topic ``requests``). Pure."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_es.log.base import TopicPartition
from dynamo_es.router.choosers import Choice
from schemas.columns import pack_u64
from schemas.requests import REQUESTS, Candidate, Finished, Outcome, ReadPosition, Routed, Stage
from streams.requests import BookingKey


def routed_event(
    key: BookingKey,
    choice: Choice,
    *,
    router_id: int,
    model: str,
    mode: str,
    block_size: int,
    isl_tokens: int,
    positions: Sequence[tuple[TopicPartition, int]],
    decided_us: int,
    session: bytes = b"",
    expected_prefill_s: float | None = None,
    stage: Stage = "",
    lease_id: int = 0,
) -> Routed:
    """A decision, with all that it rested on."""
    tracking = choice.tracking_hashes
    return Routed(
        version=REQUESTS.version,
        request_id=key.request_id,
        attempt=key.attempt,
        router_id=router_id,
        model=model,
        mode=mode,
        worker_id=choice.rank.worker_id,
        dp_rank=choice.rank.dp_rank,
        block_size=block_size,
        isl_tokens=isl_tokens,
        sequence_hashes=pack_u64(choice.sequence_hashes),
        tokens_hashes=pack_u64(choice.tokens_hashes),
        overlap_blocks=choice.overlap_blocks,
        cached_tokens=choice.cached_tokens,
        prefill_tokens=choice.prefill_tokens,
        candidates=[
            Candidate(
                item.candidate.rank.worker_id, item.candidate.rank.dp_rank, item.candidate.device,
                item.candidate.host, item.candidate.disk, item.candidate.load.prefill_tokens,
                item.decode_blocks, item.candidate.load.requests, item.cost,
            )
            for item in choice.costs
        ],
        config_digest=choice.config_digest,
        positions=[ReadPosition(position.topic, position.partition, offset) for position, offset in positions],
        decided_us=decided_us,
        tracking_hashes=b"" if tracking is choice.sequence_hashes else pack_u64(tracking),
        session=session,
        expected_prefill_ms=-1.0 if expected_prefill_s is None else expected_prefill_s * 1000,
        stage=stage,
        lease_id=lease_id,
    )  # fmt: skip


def finished_event(
    key: BookingKey,
    *,
    router_id: int,
    outcome: Outcome,
    output_tokens: int,
    first_token_s: float | None,
    duration_s: float,
    detail: str,
) -> Finished:
    """The end of a booking. Times count from the decision; None: no token came."""
    return Finished(
        version=REQUESTS.version,
        request_id=key.request_id,
        attempt=key.attempt,
        router_id=router_id,
        outcome=outcome,
        output_tokens=output_tokens,
        first_token_ms=-1 if first_token_s is None else int(first_token_s * 1000),
        duration_ms=int(duration_s * 1000),
        detail=detail[:200],
    )
