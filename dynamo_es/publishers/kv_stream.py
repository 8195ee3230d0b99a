"""Numbering of one source's batches, and getting readers right again after a loss (design: the log).

``seq`` is dense within an incarnation and an incarnation begins with a ``reset`` batch, so a reader knows at once that
the cache is empty, even if the engine then stays silent. When the sink refuses a batch, nothing more is numbered. As
soon as the sink takes records again, a ``reset`` batch starts over and everything that is cached is announced again:
readers become exact without asking. The same happens when the model's name becomes known after the engine has begun.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dynamo_es.clock import Clock
from dynamo_es.publishers.sink import EventSink
from schemas.kv_events import KV_EVENTS, BlocksRemoved, BlocksStored, KvEvent, KvEvents, key_kv_events

logger = logging.getLogger(__name__)

# Estimated bytes of a record's events; half of what the topic takes, as tags and ints make it larger than estimated.
MAX_RECORD_BYTES = 400_000
_EVENT_BYTES = 40
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 5.0


@dataclass(slots=True)
class KvStreamCounters:
    """Since the start.

    Attributes:
        batches: Records that the sink took.
        events: Events in them.
        losses: Times that the sink refused a record.
        resyncs: Times that the whole state was announced again and taken.
        incarnations: Begun.
    """

    batches: int = 0
    events: int = 0
    losses: int = 0
    resyncs: int = 0
    incarnations: int = 0


class KvStream:
    """One (model, worker, rank). Belongs to one event loop.

    ``state`` must give what is cached after all events that were handed to ``publish``. It is called only to announce
    the whole state, and then walks all of it: 1 ms (long chains) to 4 ms for 1,000 blocks, on the loop.
    """

    def __init__(
        self,
        *,
        sink: EventSink,
        model_name: Callable[[], str | None],
        worker_id: int,
        dp_rank: int,
        block_size: int,
        new_incarnation: Callable[[], int],
        state: Callable[[], Iterable[KvEvent]],
        clock: Clock,
        max_record_bytes: int = MAX_RECORD_BYTES,
    ) -> None:
        self._sink = sink
        self._model_name = model_name
        self._model: str | None = None
        self._worker_id = worker_id
        self._dp_rank = dp_rank
        self._block_size = block_size
        self._new_incarnation = new_incarnation
        self._state = state
        self._clock = clock
        self._max_record_bytes = max_record_bytes
        self._incarnation = 0
        self._seq = 0
        self._behind = True
        self._retry_at = 0.0
        self._retry_delay_s = _RETRY_FIRST_S
        self.counters = KvStreamCounters()
        self._renew()

    @property
    def incarnation(self) -> int:
        """Number of the engine's present life."""
        return self._incarnation

    @property
    def next_seq(self) -> int:
        """Number of the next batch; 0: nothing of this incarnation was taken yet."""
        return self._seq

    @property
    def behind(self) -> bool:
        """Readers do not have what was published; ``catch_up`` must be called until this is False."""
        return self._behind

    def publish(self, events: Sequence[KvEvent]) -> bool:
        """Hand over a batch. Returns False if readers do not have it (and will, once the sink takes records)."""
        if self._behind:
            return self.catch_up()
        return not events or self._send(events, reset=False)

    def begin_incarnation(self) -> bool:
        """The engine's cache starts empty: announce ``state`` (by now what is known of it) under a new number."""
        self._renew()
        return self.catch_up(now=True)

    def resync(self) -> bool:
        """Announce everything again within the incarnation: for readers that lost records which the log had taken."""
        self._behind = True
        return self.catch_up(now=True)

    def catch_up(self, *, now: bool = False) -> bool:
        """Announce the whole state if readers are behind and it is time to try (or ``now``). True: not behind."""
        if not self._behind:
            return True
        if not now and self._clock.monotonic() < self._retry_at:
            return False
        if self._model is None:
            self._model = self._model_name()
        if self._model is not None and self._send(self._state(), reset=True):
            self._behind = False
            self._retry_delay_s = _RETRY_FIRST_S
            self.counters.resyncs += 1
            return True
        self._retry_at = self._clock.monotonic() + self._retry_delay_s
        if self._model is not None:
            self._retry_delay_s = min(2 * self._retry_delay_s, _RETRY_MAX_S)
        return False

    def _renew(self) -> None:
        self._incarnation = self._new_incarnation()
        self._seq = 0
        self._behind = True
        self._retry_at = 0.0
        self.counters.incarnations += 1

    def _send(self, events: Iterable[KvEvent], *, reset: bool) -> bool:
        assert self._model is not None
        for batch in split_records(events, self._max_record_bytes, even_empty=reset):
            record = KvEvents(
                KV_EVENTS.version,
                self._model,
                self._worker_id,
                self._dp_rank,
                self._incarnation,
                self._seq,
                self._block_size,
                reset,
                batch,
            )
            if not self._sink.offer(KV_EVENTS, key_kv_events(self._model, self._worker_id, self._dp_rank), record):
                self._note_loss()
                return False
            self._seq += 1
            self.counters.batches += 1
            self.counters.events += len(batch)
            reset = False
        return True

    def _note_loss(self) -> None:
        self.counters.losses += 1
        if not self._behind:
            logger.warning(
                "KV events of %s worker %d rank %d: the log takes no records; its whole state follows when it does",
                self._model, self._worker_id, self._dp_rank,
            )  # fmt: skip
            self._behind = True
            self._retry_at = self._clock.monotonic() + self._retry_delay_s


def split_records(events: Iterable[KvEvent], max_bytes: int, *, even_empty: bool = False) -> Iterator[list[KvEvent]]:
    """Events of a record each, in order; ``even_empty``: at least one record. An event that is too long is cut."""
    batch: list[KvEvent] = []
    room = max_bytes
    sent = False
    for event in events:
        for part in _cut(event, max_bytes):
            size = _size(part)
            if batch and size > room:
                yield batch
                sent, batch, room = True, [], max_bytes
            batch.append(part)
            room -= size
    if batch or (even_empty and not sent):
        yield batch


def _size(event: KvEvent) -> int:
    if isinstance(event, BlocksStored):
        return _EVENT_BYTES + 2 * len(event.sequence_hashes)
    return _EVENT_BYTES + (len(event.sequence_hashes) if isinstance(event, BlocksRemoved) else 0)


def _cut(event: KvEvent, max_bytes: int) -> Iterator[KvEvent]:
    if _size(event) <= max_bytes:
        yield event
        return
    step = max(8, (max_bytes - _EVENT_BYTES) // 16 * 8)
    if isinstance(event, BlocksStored):
        parent = event.parent
        for start in range(0, len(event.sequence_hashes), step):
            column = event.sequence_hashes[start : start + step]
            yield BlocksStored(event.tier, parent, column, event.tokens_hashes[start : start + step])
            parent = int.from_bytes(column[-8:], "little")
    elif isinstance(event, BlocksRemoved):
        for start in range(0, len(event.sequence_hashes), step):
            yield BlocksRemoved(event.tier, event.sequence_hashes[start : start + step])
