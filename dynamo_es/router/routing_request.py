"""What a routing decision needs of a request, and what it needs to know of workers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dynamo_es.router.active_sequences import WorkerRank
from schemas.requests import Stage


class Constraints(Protocol):
    """Taints that a request asks for; ``RoutingConstraints`` is one."""

    @property
    def required_taints(self) -> Collection[str]:
        """A worker must carry all of them."""

    @property
    def preferred_taints(self) -> Mapping[str, float]:
        """Weight of each taint: positive prefers workers that carry it, negative avoids them."""


class Resumption(Protocol):
    """Carries a request on when the worker that had it fails."""

    @property
    def is_resuming(self) -> bool:
        """Whether it is to be sent to another worker."""

    def resumes(self, error: Exception, worker_id: int, attempt: int) -> bool:
        """Whether the request is sent to another worker after this failure; the booking's end says so.

        Asked by a router only if there is another worker. Both hops of a disaggregated request may fail and ask.
        """


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request as the router sees it.

    Attributes:
        request_id: Names its booking.
        token_ids: The prompt as it is hashed (with multimodal placeholders where the engine has them).
        worker_id, dp_rank: Pins; either may be given alone.
        prefill_worker_id, prefill_dp_rank: The same for the worker that computes the prompt, if that is another one.
        allowed_worker_ids: Nobody else may take it; empty: nobody at all; None: anybody.
        constraints: Taints.
        priority_jump: Seconds by which it goes before others in its queue; negative counts as 0.
        strict_priority: Requests with a higher one leave their queue first, whatever else is said.
        policy_class: Explicit policy class or policy family, if the router has a policy configuration.
        update_indexer: Let an approximate index note the choice.
        expected_output_tokens: How long the answer will be, if somebody knows.
        session_id: Session whose requests stay together, if the router keeps sessions together.
        preferred: Taken if it may take the request.
        first_attempt: Number of its first booking; a request that takes several hops has each numbered on.
        stage: Which hop this is.
        prompt_computed: Somebody else computes the prompt: none of it is booked as work.
        excluded: Workers that failed it; it is not sent there again.
        resumption: Who sends it to another worker if its worker fails; None: nobody.
        trace: Its ``traceparent``; empty: it is in no trace.
    """

    request_id: str
    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_namespace: str | None = None
    block_mm_infos: Sequence[dict[str, Any] | None] | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    config_override: Mapping[str, Any] | None = None
    allowed_worker_ids: Collection[int] | None = None
    constraints: Constraints | None = None
    priority_jump: float = 0.0
    strict_priority: int = 0
    policy_class: str | None = None
    update_indexer: bool = False
    expected_output_tokens: int | None = None
    session_id: str | None = None
    preferred: WorkerRank | None = None
    first_attempt: int = 1
    stage: Stage = ""
    prompt_computed: bool = False
    excluded: frozenset[int] = frozenset()
    resumption: Resumption | None = None
    trace: str = ""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What a worker registered and routing asks for; None: it did not say.

    ``max_num_batched_tokens`` and ``total_kv_blocks`` are those of one rank. ``bootstrap``: host and port where decode
    workers fetch the KV blocks of prompts that it computes.
    """

    taints: frozenset[str] = field(default_factory=frozenset)
    max_num_batched_tokens: int | None = None
    total_kv_blocks: int | None = None
    device_type: str = "cuda"
    bootstrap: tuple[str, int] | None = None


UNKNOWN_WORKER = WorkerFacts()


class FactsSource(Protocol):
    """Gives the facts of a worker as they are now; ``UNKNOWN_WORKER`` for one that registered nothing."""

    def __call__(self, worker_id: int, /) -> WorkerFacts: ...
