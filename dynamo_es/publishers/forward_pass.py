"""Publishing what each engine step did (Dynamo's ``FpmDirectPublisher``; spec/services b.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynamo_es.publishers.event_arguments import read_u64
from dynamo_es.publishers.loop_handover import LoopHandover
from dynamo_es.publishers.scope import PublisherEndpoint
from dynamo_es.publishers.sink import EventSink
from schemas.forward_pass import FORWARD_PASS, ForwardPass, QueuedRequests, ScheduledRequests
from schemas.kv_events import key_kv_events

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 1.0
# Passes from other threads that may wait for the loop; further ones are dropped, the next one tells as much.
MAX_WAITING_PASSES = 1_000


class ForwardPassPublisher:
    """Passes of one rank, numbered from 1; a number that is missing on the topic was dropped. Never blocks."""

    def __init__(
        self, sink: EventSink, model_name: Callable[[], str | None], worker_id: int, dp_rank: int, incarnation: int
    ) -> None:
        self._sink = sink
        self._model_name = model_name
        self._model: str | None = None
        self._key = b""
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._incarnation = incarnation
        self.counter = 0
        self.dropped = 0

    def publish(self, wall_time_s: float, scheduled: ScheduledRequests, queued: QueuedRequests) -> bool:
        """One pass; ``wall_time_s`` 0.0 is a heartbeat. False: dropped, or the model is not registered yet."""
        if self._model is None:
            self._model = self._model_name()
            if self._model is None:
                return False
            self._key = key_kv_events(self._model, self._worker_id, self._dp_rank)
        self.counter += 1
        value = ForwardPass(
            FORWARD_PASS.version,
            self._model,
            self._worker_id,
            self._dp_rank,
            self._incarnation,
            self.counter,
            wall_time_s,
            scheduled,
            queued,
        )
        taken = self._sink.offer(FORWARD_PASS, self._key, value)
        self.dropped += not taken
        return taken


class FpmDirectPublisher:
    """Forward-pass metrics of one worker, a stream for each rank, with a heartbeat while a rank is idle.

    ``publish`` may be called from any thread. At most 1,000 passes wait for the event loop, further ones are dropped.
    """

    def __init__(
        self,
        endpoint: PublisherEndpoint,
        worker_id: str,
        dp_size: int = 1,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        *,
        first_rank: int = 0,
    ) -> None:
        """``worker_id`` is the decimal instance id; any other text stands for this process's. ``dp_size`` 0: no rank.
        ``first_rank``: what the worker's ranks begin with; ``publish`` counts them from 0. Not in Dynamo.

        Raises:
            TypeError, OverflowError: An argument is of the wrong type or out of range.
        """
        if not isinstance(worker_id, str):
            raise TypeError(
                f"argument 'worker_id': '{type(worker_id).__name__}' object cannot be converted to 'PyString'"
            )
        ranks = read_u64("dp_size", dp_size)
        scope = endpoint.publisher_scope()
        number = int(worker_id) if worker_id.isascii() and worker_id.isdecimal() else scope.worker_id
        if str(number) != worker_id:
            logger.warning("worker id %r is no instance id; forward passes carry %d", worker_id, number)
        incarnation = scope.rng.getrandbits(64)
        self._loop = scope.loop
        self._interval_s = heartbeat_interval_s
        self._ranks = [
            ForwardPassPublisher(scope.sink, scope.model_name, number, first_rank + rank, incarnation)
            for rank in range(ranks)
        ]
        self._due = [0.0] * ranks
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._handover: LoopHandover[tuple[int, float, ScheduledRequests, QueuedRequests]] = LoopHandover(
            scope.loop, MAX_WAITING_PASSES, self._on_handover
        )
        scope.add_cleanup(self._close)
        self._handover.call(self._start)

    def publish(
        self,
        *,
        scheduled_num_prefill_requests: int,
        scheduled_sum_prefill_tokens: int,
        scheduled_sum_prefill_kv_tokens: int,
        scheduled_num_decode_requests: int,
        scheduled_sum_decode_kv_tokens: int,
        queued_num_prefill_requests: int,
        queued_sum_prefill_tokens: int,
        queued_num_decode_requests: int,
        queued_sum_decode_kv_tokens: int,
        wall_time_secs: float,
        dp_rank: int,
    ) -> None:
        """One pass of one rank. Counts are requests and tokens; variances are not told.

        Raises:
            RuntimeError: ``dp_rank`` is not below ``dp_size``.
            OverflowError, TypeError: A count is negative or no integer.
            Exception: After ``shutdown`` (exactly this class, as in Dynamo).
        """
        scheduled = ScheduledRequests(
            num_prefill_requests=read_u64("scheduled_num_prefill_requests", scheduled_num_prefill_requests),
            sum_prefill_tokens=read_u64("scheduled_sum_prefill_tokens", scheduled_sum_prefill_tokens),
            sum_prefill_kv_tokens=read_u64("scheduled_sum_prefill_kv_tokens", scheduled_sum_prefill_kv_tokens),
            num_decode_requests=read_u64("scheduled_num_decode_requests", scheduled_num_decode_requests),
            sum_decode_kv_tokens=read_u64("scheduled_sum_decode_kv_tokens", scheduled_sum_decode_kv_tokens),
        )
        queued = QueuedRequests(
            num_prefill_requests=read_u64("queued_num_prefill_requests", queued_num_prefill_requests),
            sum_prefill_tokens=read_u64("queued_sum_prefill_tokens", queued_sum_prefill_tokens),
            num_decode_requests=read_u64("queued_num_decode_requests", queued_num_decode_requests),
            sum_decode_kv_tokens=read_u64("queued_sum_decode_kv_tokens", queued_sum_decode_kv_tokens),
        )
        rank = read_u64("dp_rank", dp_rank)
        if rank >= len(self._ranks):
            raise RuntimeError(
                f"dp_rank {rank} out of range; FpmDirectPublisher was constructed with dp_size={len(self._ranks)}"
            )
        if self._closed:
            raise Exception("FPM publisher channel closed")
        if self._handover.is_on_loop():
            self._on_handover()
            self._send(rank, float(wall_time_secs), scheduled, queued)
        else:
            self._handover.put((rank, float(wall_time_secs), scheduled, queued))

    def shutdown(self) -> None:
        """Stop, heartbeats included. Idempotent."""
        if not self._closed:
            self._closed = True
            self._handover.call(self._stop)

    def _start(self) -> None:
        if self._closed or not self._ranks:
            return
        self._due = [self._loop.time() + self._interval_s] * len(self._ranks)
        self._timer = self._loop.call_at(self._due[0], self._beat)

    def _beat(self) -> None:
        now = self._loop.time()
        for rank, due in enumerate(self._due):
            if due <= now:
                self._send(rank, 0.0, ScheduledRequests(), QueuedRequests())
        self._timer = self._loop.call_at(min(self._due), self._beat)

    def _send(self, rank: int, wall_time_s: float, scheduled: ScheduledRequests, queued: QueuedRequests) -> None:
        self._ranks[rank].publish(wall_time_s, scheduled, queued)
        self._due[rank] = self._loop.time() + self._interval_s

    def _on_handover(self) -> None:
        passes, dropped = self._handover.take()
        for rank, wall_time_s, scheduled, queued in passes:
            self._send(rank, wall_time_s, scheduled, queued)
        if dropped:
            logger.warning("%d forward passes came faster than they could be published", dropped)

    def _stop(self) -> None:
        self._on_handover()
        if self._timer is not None:
            self._timer.cancel()

    async def _close(self) -> None:
        self.shutdown()
