"""Publishing what an engine's KV cache holds (Dynamo's ``KvEventPublisher``; spec/services c.4).

An event comes by hand (``publish_stored`` and its sisters) or over ZMQ from the engine (``zmq_endpoint``). It goes
through ``BlockNormalizer`` (the engine's hashes become sequence hashes, copies are counted), is merged with its
neighbours, numbered by ``KvStream`` and offered to the log. Nothing in it blocks the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from dynamo_es.publishers import event_arguments
from dynamo_es.publishers.block_normalizer import DEFAULT_MAX_BLOCKS, NormalizerCounters
from dynamo_es.publishers.engine_events import Cleared, EngineEvent, Removed
from dynamo_es.publishers.kv_sources import KvSources, KvSourceSettings
from dynamo_es.publishers.loop_handover import LoopHandover
from dynamo_es.publishers.rejections import RejectionReporter
from dynamo_es.publishers.scope import PublisherEndpoint, PublisherScope
from dynamo_es.publishers.zmq_relay import ZmqRelay

logger = logging.getLogger(__name__)

MAX_BATCHING_TIMEOUT_MS = 15_000
# Changes that are published before the batching time is over, so that records stay small.
MAX_BATCHED_BLOCKS = 8_192
# Calls from other threads that may wait for the event loop.
MAX_HANDED_OVER_UNITS = 10_000
CATCH_UP_INTERVAL_S = 0.1


class KvEventPublisher:
    """Publishes the KV events of one worker.

    Every method may be called from any thread; what is called off the event loop is handed over to it in order. At
    most 10,000 calls wait there; what comes on top counts as lost, and the worker's blocks are announced anew.

    Signatures, argument errors and the errors after ``shutdown`` are Dynamo's. Hashes may also be bytes.
    ``enable_local_indexer`` and ``kv_state_endpoint`` are accepted and change nothing: the log is what a router
    recovers from.
    """

    def __init__(
        self,
        endpoint: PublisherEndpoint,
        worker_id: int | None = None,
        kv_block_size: int = 0,
        dp_rank: int = 0,
        enable_local_indexer: bool = False,
        zmq_endpoint: str | None = None,
        zmq_topic: str | None = None,
        batching_timeout_ms: int | None = None,
        image_token_id: int | None = None,
        kv_state_endpoint: str | None = None,
        video_token_id: int | None = None,
        zmq_replay_endpoint: str | None = None,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
    ) -> None:
        """Announces the empty cache at once, and what the engine does from then on.

        Args:
            endpoint: The worker's endpoint; its model may be registered later.
            worker_id: u64; None: the instance id of this process.
            kv_block_size: Tokens a block.
            dp_rank: Rank of events that are published by hand.
            zmq_endpoint: Address of the engine's PUB socket.
            zmq_topic: Prefix of its topics; None: all.
            batching_timeout_ms: Longest time that changes wait for more to go with them; None or 0: every call is
                published at once. At most 15,000.
            image_token_id, video_token_id: Placeholder tokens to be replaced by multimodal pad values.
            zmq_replay_endpoint: Address of the engine's replay socket; without it a hole in the engine's sequence
                makes the worker's blocks unknown until they are used again. Not in Dynamo.
            max_blocks: Blocks that are tracked a rank, over all tiers; further ones are not published. Not in Dynamo.

        Raises:
            Exception: ``kv_block_size`` is 0 (exactly this class, as in Dynamo).
            TypeError, OverflowError: An argument is of the wrong type or out of range.
        """
        self._block_size = event_arguments.read_block_size(kv_block_size)
        rank = event_arguments.read_u32("dp_rank", dp_rank)
        scope = endpoint.publisher_scope()
        worker = scope.worker_id if worker_id is None else event_arguments.read_u64("worker_id", worker_id)
        self._batching_s = _read_batching_s(batching_timeout_ms)
        self._loop = scope.loop
        self._tasks = scope.tasks
        self._reporter = RejectionReporter(scope.sink, scope.clock, f"kv-events of worker {worker}")
        mm_token_ids = frozenset(token for token in (image_token_id, video_token_id) if token is not None)
        settings = _source_settings(scope, worker, self._block_size, mm_token_ids, max_blocks)
        self._sources = KvSources(settings, rank, self._reporter)
        self._handover: LoopHandover[Sequence[EngineEvent]] = LoopHandover(
            scope.loop, MAX_HANDED_OVER_UNITS, self._on_handover
        )
        self._last_flush = float("-inf")
        self._flush_timer: asyncio.TimerHandle | None = None
        self._catch_up_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._relay_task: asyncio.Task[None] | None = None
        self._relay: ZmqRelay | None = None
        if zmq_endpoint is not None:
            self._relay = ZmqRelay(self, zmq_endpoint, topic=zmq_topic or "", replay_endpoint=zmq_replay_endpoint)
        scope.add_cleanup(self._close)
        scope.add_renewal(self._on_renewal)
        scope.add_counts(self.counters)
        self._handover.call(self._start)

    def publish_stored(
        self,
        token_ids: Sequence[int],
        num_block_tokens: Sequence[int],
        block_hashes: Sequence[int],
        parent_hash: int | None = None,
        block_mm_infos: Sequence[dict[str, Any] | None] | None = None,
        lora_name: str | None = None,
        is_eagle: bool | None = None,
        cache_salt: str | None = None,
    ) -> None:
        """Blocks of one chain are in device memory.

        The three lists are walked side by side, to the shortest: a count other than the block size, or missing
        tokens, end it; what is left over is ignored.

        Raises:
            TypeError, OverflowError: An item is of the wrong type or out of range.
            Exception: Malformed ``block_mm_infos``, or ``channel closed`` after ``shutdown`` (exactly this class).
        """
        stored = event_arguments.read_stored(
            self._block_size,
            token_ids,
            num_block_tokens,
            block_hashes,
            parent_hash,
            block_mm_infos,
            lora_name,
            is_eagle,
            cache_salt,
        )
        self._submit([stored])

    def publish_removed(self, block_hashes: Sequence[int]) -> None:
        """One copy of each of these blocks left device memory. Raises as ``publish_stored``."""
        self._submit([Removed("device", event_arguments.read_hashes(block_hashes))])

    def publish_batch(self, events: Sequence[dict[str, Any]]) -> None:
        """Several events as one unit; checked completely before any is taken.

        Args:
            events: Dicts with ``type`` ``stored`` or ``removed`` and the arguments of those methods.

        Raises:
            ValueError: ``invalid KV event batch: ...``; nothing was published.
            Exception: ``channel closed`` after ``shutdown``.
        """
        self._submit(event_arguments.read_batch(self._block_size, events))

    def publish_cleared(self) -> None:
        """The cache of this rank is empty, all tiers. Raises Exception ``channel closed`` after ``shutdown``."""
        self._submit([Cleared()])

    def resync(self) -> None:
        """Announce everything again, for readers that lost records. Not in Dynamo. From the event loop only."""
        if not self._closed:
            self._sources.resync()
            self._watch()

    def restarted(self) -> None:
        """The engine is another process than before, by whoever looks after it: its cache is empty, and the sequence of
        its messages begins anew. Not in Dynamo. From the event loop only.
        """
        if not self._closed:
            if self._relay is not None:
                self._relay.begin_anew()
            self.on_restart()

    def shutdown(self) -> None:
        """Publish what is pending and stop. Idempotent. The blocks stay known until the worker's lease ends."""
        if not self._closed:
            self._closed = True
            self._handover.call(self._stop)

    def counters(self) -> dict[str, int]:
        """Everything that is counted, all ranks together, by a name that is fit for a metric."""
        totals = {field.name: 0 for field in fields(NormalizerCounters)}
        totals.update(batches=0, events=0, losses=0, resyncs=0, incarnations=0, known_blocks=0, waiting_blocks=0)
        for source in self._sources.ranks.values():
            for counted in (asdict(source.normalizer.counters), asdict(source.stream.counters)):
                for name, count in counted.items():
                    totals[name] += count
            totals["known_blocks"] += source.normalizer.known_blocks
            totals["waiting_blocks"] += source.normalizer.waiting_blocks
        totals["filtered_events"] = self._sources.filtered_events
        totals["lost_batches"] = self._sources.lost_batches
        totals["rejected_events"] = self._reporter.counts.total()
        if self._relay is not None:
            totals.update({f"relay_{name}": count for name, count in vars(self._relay.counters).items()})
        return totals

    # What follows is called by the relay, on the event loop.

    def on_batch(self, seq: int, payload: bytes) -> None:
        """See ``RelayHandler``."""
        self._sources.apply_payload(payload, seq)

    def on_restart(self) -> None:
        """See ``RelayHandler``: the engine's cache is a new one, so the source begins a new incarnation."""
        self._flush()
        self._sources.restart()
        self._watch()

    def on_gap(self, first: int, end: int) -> None:
        """See ``RelayHandler``: a lost removal would leave a block that is not there, so all blocks become unknown."""
        self._sources.lose(end - first)
        self._watch()

    def on_idle(self) -> None:
        """See ``RelayHandler``."""
        self._settle()

    def _on_renewal(self) -> None:
        """Readers gave this worker up while it could not be heard: what it holds is news to them."""
        if not self._closed:
            for source in self._sources.ranks.values():
                source.stream.begin_incarnation()
            self._watch()

    def _start(self) -> None:
        if self._relay is not None and not self._closed:
            self._relay_task = self._tasks.spawn(self._relay.run(), "kv-event-relay")
            self._relay_task.add_done_callback(self._on_relay_done)
        self._sources.flush()
        self._watch()

    def _on_relay_done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is None:
            return
        logger.error("no KV events come from the engine any more: this worker's blocks are withdrawn")
        self._sources.lose(0)
        self._watch()

    def _submit(self, events: Sequence[EngineEvent]) -> None:
        if self._closed:
            raise Exception("channel closed")
        if not self._handover.is_on_loop():
            self._handover.put(events)
            return
        self._take_handover()
        self._sources.apply_events(events)
        self._settle()

    def _on_handover(self) -> None:
        self._take_handover()
        self._settle()

    def _take_handover(self) -> None:
        units, lost = self._handover.take()
        for events in units:
            self._sources.apply_events(events)
        if lost:
            logger.error("%d calls with KV events came faster than they could be published; blocks are unknown", lost)
            self._sources.lose(lost)

    def _settle(self) -> None:
        """Publish now, or when the batching time is over."""
        wait_s = self._last_flush + self._batching_s - self._loop.time() if self._batching_s else 0.0
        if wait_s <= 0 or self._sources.pending_blocks >= MAX_BATCHED_BLOCKS:
            self._flush()
        elif self._flush_timer is None and self._sources.pending_blocks:
            self._flush_timer = self._loop.call_later(wait_s, self._flush)

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        self._last_flush = self._loop.time()
        self._sources.flush()
        self._watch()

    def _watch(self) -> None:
        """While readers are behind, try again: the log may be back, or the model registered."""
        if self._sources.behind and self._catch_up_timer is None and not self._closed:
            self._catch_up_timer = self._loop.call_later(CATCH_UP_INTERVAL_S, self._on_catch_up)

    def _on_catch_up(self) -> None:
        self._catch_up_timer = None
        self._sources.flush()
        self._watch()

    def _stop(self) -> None:
        self._take_handover()
        self._flush()
        for timer in (self._flush_timer, self._catch_up_timer):
            if timer is not None:
                timer.cancel()
        if self._relay_task is not None:
            self._relay_task.cancel()

    async def _close(self) -> None:
        self.shutdown()
        if self._relay_task is not None:
            await asyncio.wait([self._relay_task])


def _source_settings(
    scope: PublisherScope, worker_id: int, block_size: int, mm_token_ids: frozenset[int], max_blocks: int
) -> KvSourceSettings:
    return KvSourceSettings(
        sink=scope.sink,
        clock=scope.clock,
        model_name=scope.model_name,
        worker_id=worker_id,
        block_size=block_size,
        new_incarnation=lambda: scope.rng.getrandbits(64),
        rank_count=scope.dp_size,
        mm_token_ids=mm_token_ids,
        max_blocks=max_blocks,
    )


def _read_batching_s(batching_timeout_ms: Any) -> float:
    if batching_timeout_ms is None:
        return 0.0
    timeout_ms = event_arguments.read_u64("batching_timeout_ms", batching_timeout_ms)
    if timeout_ms > MAX_BATCHING_TIMEOUT_MS:
        logger.warning("batching_timeout_ms %d is too long, %d is used", timeout_ms, MAX_BATCHING_TIMEOUT_MS)
        timeout_ms = MAX_BATCHING_TIMEOUT_MS
    return timeout_ms / 1000
