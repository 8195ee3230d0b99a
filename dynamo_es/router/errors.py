"""Errors of the router."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_es.errors import DynamoException, InvalidArgument, StreamIncomplete
from dynamo_es.runtime.errors import Overloaded


class NoEligibleWorker(DynamoException):
    """No worker may take the request."""

    retriable = True


class PinNotAllowed(InvalidArgument):
    """The request is pinned to a worker that its allowed set leaves out."""

    def __init__(self, worker_id: int) -> None:
        super().__init__(f"pinned worker {worker_id} is not in allowed worker set")
        self.worker_id = worker_id


class SessionElsewhere(InvalidArgument):
    """The request is pinned to another rank than its session is bound to."""

    def __init__(self, worker_id: int, dp_rank: int) -> None:
        super().__init__(f"the session is bound to worker {worker_id}, rank {dp_rank}; the request is pinned elsewhere")
        self.worker_id = worker_id
        self.dp_rank = dp_rank


class AllWorkersOverloaded(Overloaded):
    """Every worker that may take the request is above a busy threshold."""


class PrefillFailed(StreamIncomplete):
    """The prompt was not computed, or not handed over, by the worker that should; nobody else was asked."""


class BookingConflict(DynamoException):
    """The request id is booked already."""


class IndexElsewhere(DynamoException):
    """This process keeps no KV index to read; it asks others (``use_remote_indexer``)."""


class UnknownRequest(DynamoException):
    """No booking has this request id."""


class RouterQueueLimitExceeded(DynamoException):
    """A policy class has as much waiting as it may; the request was not queued (Dynamo's class).

    Attributes:
        policy_class: Name of the class.
        limit_kind: What is full: ``requests``, ``raw_isl_tokens`` or ``cached_tokens``.
        current: How much of it was waiting.
        limit: How much may wait: the limit per worker times the workers.
    """

    retriable = True

    def __init__(self, policy_class: str, limit_kind: str, current: int, limit: int) -> None:
        super().__init__(
            f'router policy class "{policy_class}" queue {limit_kind} limit reached (current={current}, limit={limit})'
        )
        self.policy_class = policy_class
        self.limit_kind = limit_kind
        self.current = current
        self.limit = limit


class SelectionServiceError(DynamoException):
    """The selection service did not do what it was asked (Dynamo's class). Malformed input is a ValueError instead.

    Attributes:
        kind: ``not_ready``, ``not_found``, ``scheduler``, ``sequence``, ``conflict`` or ``internal``; does not change.
        status_code: The HTTP status that goes with it.
        details: More about a full queue: ``policy_class``, ``limit_kind``, ``current``, ``limit``; empty otherwise.
    """

    def __init__(
        self, kind: str, status_code: int, message: str, details: Mapping[str, str | int] | None = None
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.status_code = status_code
        self.details: Mapping[str, str | int] = details if details is not None else {}
