"""Receiving an engine's KV events over ZMQ, as vLLM and SGLang publish them (spec/router-core C.1, C.7).

The engine binds a PUB socket; a message is ``[topic, sequence u64 BE, msgpack batch]``. PUB drops what a subscriber
does not take in time, so the sequence is watched: a hole is asked for at the engine's replay socket if there is one,
and otherwise reported as a gap; a sequence that runs backwards is an engine that restarted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from enum import Enum, auto
from typing import Protocol

import zmq
import zmq.asyncio
from xxhash import xxh3_64_intdigest

from dynamo_es.publishers.zmq_socket import MAX_MESSAGE_BYTES, SEQUENCE_BYTES, connect_subscriber

logger = logging.getLogger(__name__)

REPLAY_TIMEOUT_S = 5.0
# Messages that are taken together into one record, at most.
DRAIN_MESSAGES = 256
MAX_REPLAYED_DIGESTS = 65_536


class RelayHandler(Protocol):
    """Takes what the relay receives, in order; nothing here may block."""

    def on_batch(self, seq: int, payload: bytes) -> None:
        """The next batch."""

    def on_restart(self) -> None:
        """The engine restarted; what follows comes from the new one."""

    def on_gap(self, first: int, end: int) -> None:
        """Batches ``first`` to ``end`` (exclusive) are lost; comes before the batch that follows them."""

    def on_idle(self) -> None:
        """Nothing more is waiting just now."""


class Arrival(Enum):
    """What a message's sequence says."""

    NEXT = auto()
    GAP = auto()
    STALE = auto()
    RESTART = auto()


class SequenceTracker:
    """Follows the sequence of one engine. Pure.

    ``next_seq`` is what comes next. ZMQ neither repeats nor reorders, so a live message that is not above the live one
    before it comes from an engine that restarted. Replay may move ``next_seq`` beyond what was received live; a live
    message from up to there is stale if it is the one that was replayed, and again a restart if it is another.
    """

    def __init__(self) -> None:
        self.next_seq = 0
        self._last_live = -1
        self._replayed: OrderedDict[int, int] = OrderedDict()

    def classify(self, seq: int, payload: bytes) -> Arrival:
        """Judge a live message. After ``RESTART`` the tracker expects 0 and the message must be judged again."""
        if seq <= self._last_live or (seq < self.next_seq and self._replayed.get(seq) != xxh3_64_intdigest(payload)):
            self.next_seq, self._last_live = 0, -1
            self._replayed.clear()
            return Arrival.RESTART
        self._last_live = seq
        if seq < self.next_seq:
            return Arrival.STALE
        self._replayed.clear()
        return Arrival.NEXT if seq == self.next_seq else Arrival.GAP

    def advance(self, seq: int) -> None:
        """``seq`` was handed on."""
        self.next_seq = seq + 1

    def advance_replayed(self, seq: int, payload: bytes) -> None:
        """``seq`` was handed on, from replay. The digests of the last 65,536 are kept."""
        self.next_seq = seq + 1
        self._replayed[seq] = xxh3_64_intdigest(payload)
        if len(self._replayed) > MAX_REPLAYED_DIGESTS:
            self._replayed.popitem(last=False)


class RelayCounters:
    """Since the start: messages taken, malformed ones, gaps, restarts, batches that replay brought back."""

    def __init__(self) -> None:
        self.messages = 0
        self.malformed = 0
        self.gaps = 0
        self.restarts = 0
        self.replayed = 0


class ZmqRelay:
    """One engine's feed. ``run`` until cancelled. ``connected``: the address is one, and is listened to."""

    def __init__(
        self,
        handler: RelayHandler,
        endpoint: str,
        *,
        topic: str = "",
        replay_endpoint: str | None = None,
        replay_timeout_s: float = REPLAY_TIMEOUT_S,
    ) -> None:
        self._handler = handler
        self._endpoint = endpoint
        self._topic = topic
        self._replay_endpoint = replay_endpoint
        self._replay_timeout_s = replay_timeout_s
        self._tracker = SequenceTracker()
        self.counters = RelayCounters()
        self.connected = False

    def begin_anew(self) -> None:
        """What comes next is from an engine that was started anew, whose first message has the sequence 0."""
        self._tracker = SequenceTracker()

    async def run(self) -> None:
        """Receive until cancelled. Returns early, with a log line, if the address is no address: the engine's worker
        goes on serving without KV events.
        """
        context = zmq.asyncio.Context()
        try:
            try:
                socket = connect_subscriber(context, self._endpoint, self._topic)
            except zmq.ZMQError as error:
                logger.error(
                    "no KV events from %s: %s; give the engine's publisher address, such as tcp://127.0.0.1:5557",
                    self._endpoint, error,
                )  # fmt: skip
                return
            self.connected = True
            if self._replay_endpoint is not None:
                await self._replay(context)
                self._handler.on_idle()
            while True:
                await self._receive(context, socket)
        finally:
            context.destroy(linger=0)

    async def _receive(self, context: zmq.asyncio.Context, socket: zmq.asyncio.Socket) -> None:
        """Wait for a message and take all that are there with it."""
        frames = await socket.recv_multipart()
        await self._take(context, frames)
        for _ in range(DRAIN_MESSAGES - 1):
            try:
                frames = await socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            await self._take(context, frames)
        self._handler.on_idle()
        # A socket that is never empty must not keep the loop from everyone else.
        await asyncio.sleep(0)

    async def _take(self, context: zmq.asyncio.Context, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self.counters.malformed += 1
            if self.counters.malformed == 1:
                logger.warning("%s sends messages that are no KV events (%d frames)", self._endpoint, len(frames))
            return
        self.counters.messages += 1
        seq, payload = int.from_bytes(frames[1], "big"), frames[2]
        arrival = self._tracker.classify(seq, payload)
        if arrival is Arrival.RESTART:
            self.counters.restarts += 1
            logger.warning("engine at %s restarted (sequence fell to %d)", self._endpoint, seq)
            self._handler.on_restart()
            arrival = self._tracker.classify(seq, payload)
        if arrival is Arrival.GAP:
            if self._replay_endpoint is not None:
                await self._replay(context, before=seq)
            if self._tracker.next_seq < seq:
                self._note_gap(seq)
        if seq >= self._tracker.next_seq:
            self._tracker.advance(seq)
            self._handler.on_batch(seq, payload)

    def _note_gap(self, seq: int) -> None:
        first = self._tracker.next_seq
        self.counters.gaps += 1
        logger.warning("KV events %d to %d of %s are lost", first, seq - 1, self._endpoint)
        self._tracker.advance(seq - 1)
        self._handler.on_gap(first, seq)

    async def _replay(self, context: zmq.asyncio.Context, before: int | None = None) -> None:
        """Ask for what is missing and hand it on; what the engine no longer has stays missing."""
        assert self._replay_endpoint is not None
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", self._tracker.next_seq.to_bytes(SEQUENCE_BYTES, "big")])
            async with asyncio.timeout(self._replay_timeout_s):
                while self._take_replayed(await socket.recv_multipart()):
                    pass
        except (zmq.ZMQError, TimeoutError) as error:
            logger.warning("replay of KV events from %s failed: %s", self._replay_endpoint, error or "no answer")
        finally:
            socket.close(linger=0)
        if before is not None and self._tracker.next_seq >= before:
            logger.info("replay filled the gap before %d", before)

    def _take_replayed(self, frames: list[bytes]) -> bool:
        """False at the end. Replies are ``[empty, topic, sequence, payload]``, without the topic from older vLLM."""
        if len(frames) not in (3, 4) or len(frames[-2]) != SEQUENCE_BYTES or not frames[-1]:
            return False
        seq = int.from_bytes(frames[-2], "big")
        if seq < self._tracker.next_seq:
            return True
        if seq > self._tracker.next_seq:
            self._note_gap(seq)
        self._tracker.advance_replayed(seq, frames[-1])
        self.counters.replayed += 1
        self._handler.on_batch(seq, frames[-1])
        return True
