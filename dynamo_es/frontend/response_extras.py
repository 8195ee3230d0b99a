"""What ``nvext.extra_fields`` asks to see beside an answer (spec/frontend.md 3.3). Pure but for the clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec

from dynamo_es.clock import Clock
from dynamo_es.frontend.pipeline import Delta
from dynamo_es.frontend.requests import NvExt
from dynamo_es.runtime.placement import Placement

WORKER, TIMING, TOKENS, STOP = "worker_id", "timing", "completion_token_ids", "stop_reason"
_OF_WORKERS = ("engine_data", "routed_experts", "prompt_logprobs")
"""Members of a worker's frames that are shown as they are."""
_QUERY = "query_instance_id:"
FIELDS = frozenset((WORKER, TIMING, TOKENS, STOP, *_OF_WORKERS))


def wanted_extras(extension: NvExt | None) -> frozenset[str]:
    """Fields that a request asks for, of those that there are."""
    if extension is None:
        return frozenset()
    wanted = FIELDS.intersection(extension.extra_fields or ())
    return wanted | {WORKER} if asks_where(extension) else wanted


def asks_where(extension: NvExt | None) -> bool:
    """Whether a request only asks where it would go."""
    annotations = extension.annotations if extension is not None else None
    return any(name.startswith(_QUERY) for name in annotations or ())


class Extras(Protocol):
    """Gives the member ``nvext`` of an answer, as ``,"nvext":{...}``; empty: it has none."""

    def chunk(self, delta: Delta) -> bytes:
        """Of the chunk that tells ``delta``."""

    def body(self) -> bytes:
        """Of a unary answer."""


class ResponseExtras:
    """Those of one worker request. Belongs to the request.

    Args:
        fields: What is asked for, of ``FIELDS``.
        placement: Filled while the request is routed.
        received_ms: When the request came, Unix milliseconds.
        start: The same by ``clock``, monotonic seconds.
        clock: Time.
    """

    def __init__(
        self, fields: Collection[str], placement: Placement, received_ms: int, start: float, clock: Clock
    ) -> None:
        self._fields = fields
        self._placement = placement
        self._received_ms = received_ms
        self._start = start
        self._clock = clock
        self._first_at: float | None = None
        self._token_ids: list[int] = []
        self._of_worker: dict[str, Any] = {}
        self._stop: Any = None

    def take(self, frame: Mapping[str, Any], used: int, delta: Delta | None) -> None:
        """A worker's frame, of whose tokens ``used`` became part of the answer, and what it added to it."""
        if used and self._first_at is None:
            self._first_at = self._clock.monotonic()
        if TOKENS in self._fields:
            self._token_ids += (frame.get("token_ids") or ())[:used]
        for name in _OF_WORKERS:
            if name in self._fields and frame.get(name) is not None:
                self._of_worker[name] = frame[name]
        if frame.get("stop_reason") is not None:
            self._stop = frame["stop_reason"]
        if delta is not None and delta.stop is not None:
            self._stop = delta.stop

    def chunk(self, delta: Delta) -> bytes:
        shown: dict[str, Any] = {}
        if WORKER in self._fields:
            shown[WORKER] = self._placement.workers()
        if delta.finish_reason is not None:
            self._add_end(shown)
        return encoded(shown)

    def body(self) -> bytes:
        shown: dict[str, Any] = {}
        if WORKER in self._fields:
            shown[WORKER] = self._placement.workers()
        self._add_end(shown)
        if TOKENS in self._fields:
            shown[TOKENS] = self._token_ids
        return encoded(shown)

    def _add_end(self, shown: dict[str, Any]) -> None:
        if TIMING in self._fields:
            shown[TIMING] = self._timing()
        shown |= self._of_worker
        if STOP in self._fields and self._stop is not None:
            shown[STOP] = self._stop

    def _timing(self) -> dict[str, Any]:
        now = self._clock.monotonic()
        first = now if self._first_at is None else self._first_at
        placement = self._placement
        sent = self._start if placement.sent_at is None else placement.sent_at
        timing: dict[str, Any] = {
            "request_received_ms": self._received_ms,
            "prefill_wait_time_ms": (sent - self._start) * 1000,
            "prefill_time_ms": (first - sent) * 1000,
            "ttft_ms": (first - self._start) * 1000,
            "total_time_ms": (now - self._start) * 1000,
        }
        if placement.hit_rate is not None:
            timing["kv_hit_rate"] = placement.hit_rate
        if placement.queue_depth is not None:
            timing["router_queue_depth"] = placement.queue_depth
        return timing


class LocatedExtras:
    """Those of a request that only asks where it would go (``query_instance_id:``)."""

    def __init__(self, placement: Placement, token_ids: list[int]) -> None:
        self._shown = encoded({WORKER: placement.workers(), "token_ids": token_ids})

    def chunk(self, delta: Delta) -> bytes:
        return self._shown

    def body(self) -> bytes:
        return self._shown


def encoded(shown: Mapping[str, Any]) -> bytes:
    """The member with these fields; nothing without any. A field that JSON cannot hold is left out."""
    members = {}
    for name, value in shown.items():
        try:
            members[name] = msgspec.Raw(msgspec.json.encode(value))
        except (TypeError, ValueError):
            continue
    return b',"nvext":' + msgspec.json.encode(members) if members else b""
