"""Following the forward passes of a component's workers (Dynamo's ``FpmEventSubscriber``; spec/services b.4)."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dynamo_es.errors import DynamoException
from dynamo_es.models.card_json import write_card
from dynamo_es.publishers.forward_pass_bytes import pack_pass
from dynamo_es.publishers.topic_tail import TopicTail
from dynamo_es.runtime.errors import RuntimeClosed
from schemas.forward_pass import FORWARD_PASS, ForwardPass
from schemas.registry import ModelCard

if TYPE_CHECKING:
    from dynamo_es.runtime.core import RuntimeCore
    from dynamo_es.runtime.endpoint import Endpoint

logger = logging.getLogger(__name__)

# Messages that wait for ``recv``; of more than these the oldest go first.
MAX_WAITING_MESSAGES = 10_000
# Ranks whose newest pass is kept.
MAX_TRACKED_RANKS = 100_000
PassKey = tuple[str, int]


class PassQueue:
    """Messages from the loop to threads that wait for them. At most 10,000; the oldest make room, and are counted."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.dropped = 0

    def put(self, message: bytes) -> None:
        """Never blocks."""
        with self._changed:
            if len(self._messages) >= MAX_WAITING_MESSAGES:
                self._messages.popleft()
                self.dropped += 1
                if self.dropped == 1:
                    logger.warning("a reader of forward passes is %d behind, the oldest are lost", MAX_WAITING_MESSAGES)
            self._messages.append(message)
            self._changed.notify()

    def get(self) -> bytes | None:
        """The next one; blocks until there is one. None after ``close``."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._messages))
            return None if self._closed else self._messages.popleft()

    def close(self) -> None:
        """Wakes up everyone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class PassBoard:
    """The newest pass of each rank, of workers that have a model card. Written on the loop, read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes: dict[PassKey, bytes] = {}
        self._cards: dict[str, str] = {}
        self._told_full = False

    def put(self, value: ForwardPass) -> None:
        """A pass of a worker that has no card yet is kept until there is one. At most 100,000 ranks."""
        key = (str(value.worker_id), value.dp_rank)
        with self._lock:
            if key not in self._passes and len(self._passes) >= MAX_TRACKED_RANKS:
                if not self._told_full:
                    self._told_full = True
                    logger.warning("passes of rank %s are not kept: %d ranks are", key, MAX_TRACKED_RANKS)
                return
            self._passes[key] = pack_pass(value)

    def set_cards(self, cards: Mapping[str, str]) -> None:
        """Card text by worker; the passes of workers that had one and have none any more are forgotten."""
        with self._lock:
            gone = self._cards.keys() - cards.keys()
            self._cards = dict(cards)
            if gone:
                self._passes = {key: data for key, data in self._passes.items() if key[0] not in gone}

    def passes(self) -> dict[PassKey, bytes]:
        """Of workers with a card."""
        with self._lock:
            return {key: data for key, data in self._passes.items() if key[0] in self._cards}

    def cards(self) -> dict[str, str]:
        """Card text by worker."""
        with self._lock:
            return dict(self._cards)


class FpmEventSubscriber:
    """Forward passes of the workers of an endpoint's component, as Dynamo's bytes.

    One of two uses: ``recv`` for message after message, or ``start_tracking`` once and then the newest pass of every
    rank from ``get_recent_stats``. Both see only what is published after their first call. The methods may be called
    from any thread; ``recv`` blocks, so not from the event loop's own.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Starts nothing yet."""
        self._core: RuntimeCore = endpoint.core
        self._component = (endpoint.namespace, endpoint.component)
        self._lock = threading.Lock()
        self._queue: PassQueue | None = None
        self._board: PassBoard | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    def recv(self) -> bytes | None:
        """The next message, as soon as there is one; None when the subscriber or the runtime is shut down.

        Workers that are known to belong to another component only are left out. A reader that is 10,000 messages
        behind misses the oldest.

        Raises:
            RuntimeError: After ``start_tracking``, or on the thread of the event loop, which it would block for ever.
            LogError: The log cannot be read.
        """
        if self._on_loop():
            raise RuntimeError("recv() blocks the event loop that it waits for; call it by asyncio.to_thread")
        with self._lock:
            if self._board is not None:
                raise RuntimeError("Cannot call recv() after start_tracking()")
            queue, first = self._queue, self._queue is None
            if queue is None:
                queue = self._queue = PassQueue()
                if self._closed:
                    queue.close()
        if first and not self._closed:
            asyncio.run_coroutine_threadsafe(self._start(), self._core.loop).result()
        return queue.get()

    def start_tracking(self) -> None:
        """Keep the newest pass of every rank from now on.

        On the thread of the event loop it returns before the log is followed, and what keeps it from that is logged;
        elsewhere it waits.

        Raises:
            RuntimeError: After ``recv``, or called before.
            LogError: The log cannot be read.
        """
        with self._lock:
            if self._queue is not None:
                raise RuntimeError("Cannot call start_tracking() after recv()")
            if self._board is not None:
                raise RuntimeError("Tracking already started")
            self._board = PassBoard()
        if self._closed:
            return
        if self._on_loop():
            self._tasks.append(self._core.loop.create_task(self._start_unwatched(), name="forward-pass-start"))
        else:
            asyncio.run_coroutine_threadsafe(self._start(), self._core.loop).result()

    def get_recent_stats(self) -> dict[PassKey, bytes]:
        """Newest pass by worker id (decimal) and rank, of workers that have a model card in this component.

        Raises:
            RuntimeError: ``start_tracking`` was not called.
        """
        return self._tracked().passes()

    def get_model_cards(self) -> dict[str, str]:
        """Model card as JSON text by worker id (decimal); the base model's where there are LoRAs as well.

        Raises:
            RuntimeError: ``start_tracking`` was not called.
        """
        return self._tracked().cards()

    def shutdown(self) -> None:
        """Stop; a ``recv`` that waits returns None, what was tracked stays readable. Idempotent."""
        with self._lock:
            self._closed = True
            queue = self._queue
        if queue is not None:
            queue.close()
        if not self._core.loop.is_closed():
            self._core.loop.call_soon_threadsafe(self._cancel)

    def _tracked(self) -> PassBoard:
        if self._board is None:
            raise RuntimeError("start_tracking() has not been called")
        return self._board

    def _on_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._core.loop
        except RuntimeError:
            return False

    async def _start(self) -> None:
        await self._core.start()
        tail = TopicTail(self._core.log, FORWARD_PASS, self._core.settings.log.namespace, self._on_pass)
        await tail.open()
        self._core.add_cleanup(self._close)
        self._read_cards()
        self._tasks.append(self._core.tasks.spawn(tail.run(), "forward-pass-tail"))
        if self._board is not None:
            self._tasks.append(self._core.tasks.spawn(self._watch_cards(), "forward-pass-cards"))
        if self._closed:
            self._cancel()

    async def _start_unwatched(self) -> None:
        try:
            await self._start()
        except DynamoException as error:
            logger.error("forward passes are not followed: %s", error)

    async def _watch_cards(self) -> None:
        try:
            while True:
                await self._core.registry_changed()
                self._read_cards()
        except RuntimeClosed:
            return

    def _read_cards(self) -> None:
        if self._board is None:
            return
        cards: dict[str, ModelCard] = {}
        for card in self._core.registry.state.models.values():
            if (card.namespace, card.component) == self._component:
                worker = str(card.instance_id)
                if not card.suffix or worker not in cards:
                    cards[worker] = card
        self._board.set_cards({worker: write_card(card) for worker, card in cards.items()})

    def _on_pass(self, value: ForwardPass) -> None:
        if self._board is not None:
            self._board.put(value)
        elif self._queue is not None and not self._is_foreign(value.worker_id):
            self._queue.put(pack_pass(value))

    def _is_foreign(self, worker_id: int) -> bool:
        places = [
            (row.namespace, row.component)
            for row in self._core.registry.state.models.values()
            if row.instance_id == worker_id
        ]
        return bool(places) and self._component not in places

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _close(self) -> None:
        self.shutdown()
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
