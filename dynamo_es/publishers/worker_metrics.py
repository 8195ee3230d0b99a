"""Publishing the load that a worker measures on itself (Dynamo's ``WorkerMetricsPublisher``; spec/services c.2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from dynamo_es.clock import Clock
from dynamo_es.publishers.event_arguments import read_u32, read_u64
from dynamo_es.publishers.loop_handover import LoopHandover
from dynamo_es.publishers.scope import PublisherEndpoint, PublisherScope
from dynamo_es.publishers.sink import EventSink
from schemas.kv_events import key_kv_events
from schemas.worker_load import WORKER_LOAD, WorkerLoad

logger = logging.getLogger(__name__)

DEBOUNCE_S = 0.001
RESEND_INTERVAL_S = 10.0
RETRY_S = 0.25
MAX_RANKS = 1024
MAX_WAITING_VALUES = 10_000


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """Load of one rank; None: the engine does not know."""

    kv_used_blocks: int | None = None
    active_decode_blocks: int | None = None
    total_kv_blocks: int | None = None
    running: int | None = None
    waiting: int | None = None


class LoadSlots:
    """Newest load of each rank of a worker, and which ranks have to be told. No timers.

    A value that was told is told again only when it changes or ``tell_all`` asks for it. At most 1,024 ranks.
    """

    def __init__(
        self, sink: EventSink, clock: Clock, model_name: Callable[[], str | None], worker_id: int, incarnation: int
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._model_name = model_name
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._loads: dict[int, MeasuredLoad] = {}
        self._changed: set[int] = set()

    def put(self, rank: int, load: MeasuredLoad) -> bool:
        """Keep a value; True if it is a new one, to be told."""
        if self._loads.get(rank) == load:
            return False
        if rank not in self._loads and len(self._loads) >= MAX_RANKS:
            logger.warning("load of rank %d is not published: %d ranks are", rank, MAX_RANKS)
            return False
        self._loads[rank] = load
        self._changed.add(rank)
        return True

    def tell(self) -> bool:
        """Publish what changed; False if something still has to be told."""
        model = self._model_name() if self._changed else None
        if model is not None:
            for rank in sorted(self._changed):
                if self._offer(model, rank):
                    self._changed.discard(rank)
        return not self._changed

    def tell_all(self) -> bool:
        """Publish every rank, so that readers know that the values still hold."""
        self._changed.update(self._loads)
        return self.tell()

    def _offer(self, model: str, rank: int) -> bool:
        load = self._loads[rank]
        value = WorkerLoad(
            version=WORKER_LOAD.version,
            model=model,
            worker_id=self._worker_id,
            dp_rank=rank,
            incarnation=self._incarnation,
            kv_used_blocks=load.kv_used_blocks,
            active_decode_blocks=load.active_decode_blocks,
            total_kv_blocks=load.total_kv_blocks,
            running=load.running,
            waiting=load.waiting,
            at_ms=self._clock.now_ms(),
        )
        return self._sink.offer(WORKER_LOAD, key_kv_events(model, self._worker_id, rank), value)


class WorkerMetricsPublisher:
    """One slot a rank: a change is published after 1 ms, and every rank again each 10 s.

    ``publish`` may be called from any thread, also before ``create_endpoint``; the newest value of each rank is kept.
    What the log did not take, and what came before the model was registered, is tried again four times a second.
    """

    def __init__(self) -> None:
        self._early: dict[int, MeasuredLoad] = {}
        self._slots: LoadSlots | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handover: LoopHandover[tuple[int, MeasuredLoad]] | None = None
        self._debounce: asyncio.TimerHandle | None = None
        self._resend: asyncio.TimerHandle | None = None
        self._debounce_s = DEBOUNCE_S
        self._resend_interval_s = RESEND_INTERVAL_S

    async def create_endpoint(
        self, endpoint: PublisherEndpoint, debounce_s: float = DEBOUNCE_S, resend_interval_s: float = RESEND_INTERVAL_S
    ) -> None:
        """Begin to publish for ``endpoint``. A second call replaces the first."""
        self._stop()
        scope: PublisherScope = endpoint.publisher_scope()
        self._debounce_s, self._resend_interval_s = debounce_s, resend_interval_s
        slots = LoadSlots(scope.sink, scope.clock, scope.model_name, scope.worker_id, scope.rng.getrandbits(64))
        self._loop = scope.loop
        self._handover = LoopHandover(scope.loop, MAX_WAITING_VALUES, self._on_handover)
        self._slots = slots
        scope.add_cleanup(self._close)
        for rank, load in self._early.items():
            slots.put(rank, load)
        self._schedule()
        self._resend = scope.loop.call_later(resend_interval_s, self._on_resend)

    def publish(
        self,
        dp_rank: int | None = None,
        active_decode_blocks: int | None = None,
        kv_used_blocks: int | None = None,
        *,
        total_kv_blocks: int | None = None,
        running: int | None = None,
        waiting: int | None = None,
    ) -> None:
        """The load of a rank (None: rank 0) as of now. The keyword-only values are not in Dynamo.

        Raises:
            Exception: Neither ``active_decode_blocks`` nor ``kv_used_blocks`` (exactly this class, as in Dynamo).
            OverflowError, TypeError: A value is out of range or no integer.
        """
        rank = 0 if dp_rank is None else read_u32("dp_rank", dp_rank)
        if active_decode_blocks is None and kv_used_blocks is None:
            raise Exception("worker metrics publish requires at least one load metric")
        load = MeasuredLoad(
            kv_used_blocks=_read("kv_used_blocks", kv_used_blocks),
            active_decode_blocks=_read("active_decode_blocks", active_decode_blocks),
            total_kv_blocks=_read("total_kv_blocks", total_kv_blocks),
            running=_read("running", running),
            waiting=_read("waiting", waiting),
        )
        handover = self._handover
        if handover is None:
            self._early[rank] = load
        elif handover.is_on_loop():
            self._on_handover()
            self._put(rank, load)
        else:
            handover.put((rank, load))

    def _put(self, rank: int, load: MeasuredLoad) -> None:
        assert self._slots is not None
        if self._slots.put(rank, load):
            self._schedule()

    def _schedule(self) -> None:
        if self._debounce is None and self._loop is not None:
            self._debounce = self._loop.call_later(self._debounce_s, self._on_debounce)

    def _on_handover(self) -> None:
        assert self._handover is not None
        values, dropped = self._handover.take()
        for rank, load in values:
            self._put(rank, load)
        if dropped:
            logger.warning("%d load values came faster than they could be published", dropped)

    def _on_debounce(self) -> None:
        self._debounce = None
        if self._slots is not None and self._loop is not None and not self._slots.tell():
            self._debounce = self._loop.call_later(RETRY_S, self._on_debounce)

    def _on_resend(self) -> None:
        assert self._slots is not None
        assert self._loop is not None
        self._slots.tell_all()
        self._resend = self._loop.call_later(self._resend_interval_s, self._on_resend)

    def _stop(self) -> None:
        for timer in (self._debounce, self._resend):
            if timer is not None:
                timer.cancel()
        self._debounce = self._resend = None

    async def _close(self) -> None:
        if self._slots is not None:
            self._slots.tell()
        self._stop()
        self._loop = None


def _read(argument: str, value: int | None) -> int | None:
    return None if value is None else read_u64(argument, value)
