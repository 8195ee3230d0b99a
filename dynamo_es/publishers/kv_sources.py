"""The ranks of one worker: each with its normalizer and its numbered stream. No sockets, no timers.

Ranks (cases IDX-08 to IDX-10): a batch's own rank decides. A batch without a rank belongs to rank 0 if the worker has
one rank. If it has more, its events are refused, rank 0 stays as it is; but a clear without a rank clears all ranks,
because the wrong guess would leave blocks in the index that are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dynamo_es.clock import Clock
from dynamo_es.publishers.block_normalizer import DEFAULT_MAX_BLOCKS, BlockNormalizer
from dynamo_es.publishers.engine_events import Cleared, EngineBatch, EngineEvent, EngineEventDecoder, Rejected
from dynamo_es.publishers.event_builder import EventBuilder
from dynamo_es.publishers.kv_stream import KvStream
from dynamo_es.publishers.rejections import RejectionReporter
from dynamo_es.publishers.sink import EventSink

logger = logging.getLogger(__name__)

MAX_RANKS = 1024


@dataclass(frozen=True, slots=True)
class KvSourceSettings:
    """What all ranks of a publisher share. ``rank_count``: data-parallel ranks of the worker, as known now."""

    sink: EventSink
    clock: Clock
    model_name: Callable[[], str | None]
    worker_id: int
    block_size: int
    new_incarnation: Callable[[], int]
    rank_count: Callable[[], int]
    mm_token_ids: frozenset[int] = frozenset()
    max_blocks: int = DEFAULT_MAX_BLOCKS


class RankSource:
    """One rank: engine events in, records out."""

    def __init__(self, settings: KvSourceSettings, dp_rank: int) -> None:
        self.normalizer = BlockNormalizer(
            settings.block_size, max_blocks=settings.max_blocks, mm_token_ids=settings.mm_token_ids
        )
        self._pending = EventBuilder()
        self.stream = KvStream(
            sink=settings.sink,
            model_name=settings.model_name,
            worker_id=settings.worker_id,
            dp_rank=dp_rank,
            block_size=settings.block_size,
            new_incarnation=settings.new_incarnation,
            state=self.normalizer.state,
            clock=settings.clock,
        )

    @property
    def pending_blocks(self) -> int:
        """Block changes that wait for ``flush``."""
        return self._pending.blocks

    def apply(self, event: EngineEvent) -> None:
        """Take an event; its changes go out with the next ``flush``."""
        self.normalizer.apply(event, self._pending)

    def flush(self) -> None:
        """Publish what is pending as one batch."""
        if self.stream.behind:
            # The whole state follows, these changes are in it.
            self._pending.discard()
            self.stream.catch_up()
        elif self._pending:
            self.stream.publish(self._pending.drain())

    def restart(self) -> None:
        """The engine is a new one."""
        self._pending.discard()
        self.normalizer.forget()
        self.stream.begin_incarnation()

    def distrust(self) -> None:
        """Events of the engine were lost: readers start over from nothing, unless they have nothing anyway."""
        self._pending.discard()
        had_blocks = bool(self.normalizer.known_blocks or self.normalizer.waiting_blocks)
        self.normalizer.distrust()
        if had_blocks:
            self.stream.begin_incarnation()


class KvSources:
    """All ranks of one publisher. At most 1,024; events of further ones are refused."""

    def __init__(self, settings: KvSourceSettings, dp_rank: int, reporter: RejectionReporter) -> None:
        """``dp_rank`` is the rank of events that are published by hand; the first ``flush`` announces it."""
        self._settings = settings
        self._dp_rank = dp_rank
        self._reporter = reporter
        self._decoder = EngineEventDecoder()
        self._ranks: dict[int, RankSource] = {dp_rank: RankSource(settings, dp_rank)}
        self.filtered_events = 0
        self.lost_batches = 0

    @property
    def ranks(self) -> dict[int, RankSource]:
        """Sources by rank."""
        return self._ranks

    @property
    def behind(self) -> bool:
        """Some rank's readers do not have everything yet."""
        return any(source.stream.behind for source in self._ranks.values())

    @property
    def pending_blocks(self) -> int:
        """Block changes that wait for ``flush``, all ranks."""
        return sum(source.pending_blocks for source in self._ranks.values())

    def apply_events(self, events: Iterable[EngineEvent]) -> None:
        """Events that were published by hand."""
        source = self._ranks[self._dp_rank]
        for event in events:
            source.apply(event)

    def apply_payload(self, payload: bytes, engine_seq: int) -> None:
        """A batch as the engine sent it. Never raises for bad input; a batch that cannot be read counts as lost."""
        batch = self._decoder.decode(payload)
        self.filtered_events += batch.filtered.total()
        for rejected in batch.rejected:
            self._reporter.report(rejected, engine_seq)
        if batch.lost:
            self.lose(1)
            return
        for source, events in self._assign(batch, payload, engine_seq):
            for event in events:
                source.apply(event)

    def flush(self) -> None:
        """Publish what is pending, one batch a rank."""
        for source in self._ranks.values():
            source.flush()

    def lose(self, batches: int) -> None:
        """``batches`` batches of the engine are missing; which ranks were in them is not known."""
        self.lost_batches += batches
        for source in self._ranks.values():
            source.distrust()

    def restart(self) -> None:
        """The engine restarted: every rank begins a new incarnation."""
        for source in self._ranks.values():
            source.restart()

    def resync(self) -> None:
        """Announce everything again."""
        self.flush()
        for source in self._ranks.values():
            source.stream.resync()

    def _assign(
        self, batch: EngineBatch, payload: bytes, engine_seq: int
    ) -> Sequence[tuple[RankSource, Sequence[EngineEvent]]]:
        if not batch.events:
            return ()
        if batch.dp_rank is None and (self._settings.rank_count() > 1 or self._dp_rank > 0):
            clears = [event for event in batch.events if isinstance(event, Cleared)]
            if len(clears) < len(batch.events):
                detail = (
                    f"{len(batch.events) - len(clears)} events without a data-parallel rank, the worker has several"
                )
                self._reporter.report(Rejected("missing_rank", detail, payload), engine_seq)
            return [(source, clears[:1]) for source in self._ranks.values()] if clears else ()
        source = self._source(batch.dp_rank or 0)
        if source is None:
            detail = f"rank {batch.dp_rank}: {MAX_RANKS} other ranks sent events before"
            self._reporter.report(Rejected("too_many_ranks", detail, payload), engine_seq)
            return ()
        return [(source, batch.events)]

    def _source(self, rank: int) -> RankSource | None:
        source = self._ranks.get(rank)
        if source is None and len(self._ranks) < MAX_RANKS:
            source = self._ranks[rank] = RankSource(self._settings, rank)
        return source
