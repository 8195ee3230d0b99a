"""The sockets on which the mock engine tells its KV events, like the engine that it mimics (spec/router-core C.1, C.7).

Each rank has a PUB socket, and if asked for a ROUTER socket that repeats what a subscriber missed. A subscriber that
falls behind by 100,000 messages loses further ones; the last 10,000 can be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from dynamo_es.clock import Clock
from dynamo_es.engines.mock.engine_events import EngineEvents, encode_batch
from dynamo_es.errors import ConfigError

logger = logging.getLogger(__name__)

TOPIC = b"kv"
SEQUENCE_BYTES = 8
KEPT_BATCHES = 10_000
_HIGH_WATER_MARK = 100_000
_END = b"\xff" * SEQUENCE_BYTES
# A question has an empty frame and a number; whatever is larger is none.
_MAX_QUESTION_BYTES = 1_024


class _Rank:
    def __init__(self, events: EngineEvents, publisher: zmq.Socket[bytes], replay: zmq.asyncio.Socket | None) -> None:
        self.events = events
        self.publisher = publisher
        self.replay = replay
        self.seq = 0
        self.kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT_BATCHES)


class EventSockets:
    """Sockets of all ranks of one engine. ``open`` once, ``close`` last; both on the engine's loop. Nothing blocks."""

    def __init__(self, ranks: Sequence[EngineEvents], host: str, clock: Clock) -> None:
        """``host``: address to listen on."""
        self._events = ranks
        self._host = f"[{host}]" if ":" in host else host
        self._clock = clock
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sockets: list[zmq.Socket[Any]] = []
        self._ranks: list[_Rank] = []
        self._tasks: list[asyncio.Task[None]] = []
        self.endpoints: list[str] = []
        self.replay_endpoints: list[str] = []

    def open(self, port: int, replay_port: int | None = None) -> None:
        """Listen: a rank on ``port`` + its number, its replay on ``replay_port`` + its number; port 0: free ones.

        Raises:
            ConfigError: A port is taken, or the host is no address of this machine; nothing stays open.
        """
        self._context = zmq.Context()
        replaying = zmq.asyncio.Context.shadow(self._context) if replay_port is not None else None
        try:
            for number, events in enumerate(self._events):
                publisher = self._context.socket(zmq.PUB)
                self._sockets.append(publisher)
                publisher.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
                self.endpoints.append(self._bind(publisher, port, number, "--zmq-kv-events-ports"))
                replay = None
                if replaying is not None and replay_port is not None:
                    replay = replaying.socket(zmq.ROUTER)
                    self._sockets.append(replay)
                    replay.setsockopt(zmq.MAXMSGSIZE, _MAX_QUESTION_BYTES)
                    self.replay_endpoints.append(self._bind(replay, replay_port, number, "--zmq-replay-ports"))
                self._ranks.append(_Rank(events, publisher, replay))
        except ConfigError:
            self._close_sockets()
            raise
        self._tasks = [
            asyncio.create_task(self._answer(rank, rank.replay), name="mock-engine-replay")
            for rank in self._ranks
            if rank.replay is not None
        ]

    def publish(self, number: int) -> None:
        """Tell what a rank cached and forgot since the last call, in one message."""
        if number >= len(self._ranks):
            return
        rank = self._ranks[number]
        if not rank.events:
            return
        payload = encode_batch(self._clock.now_ms() / 1000, rank.events.drain(), number)
        rank.kept.append((rank.seq, payload))
        rank.publisher.send_multipart([TOPIC, rank.seq.to_bytes(SEQUENCE_BYTES, "big"), payload], zmq.NOBLOCK)
        rank.seq += 1

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks, self._ranks = [], []
        self._close_sockets()

    def _close_sockets(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._sockets = []
        if self._context is not None:
            self._context.term()
            self._context = None

    def _bind(self, socket: zmq.Socket[Any], port: int, number: int, flag: str) -> str:
        where = f"tcp://{self._host}:{port + number if port else '*'}"
        try:
            socket.setsockopt(zmq.IPV6, int(self._host.startswith("[")))
            socket.bind(where)
        except zmq.ZMQError as error:
            raise ConfigError(f"{flag}: rank {number} cannot listen at {where}: {error}; choose other ports") from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return endpoint.decode()

    async def _answer(self, rank: _Rank, socket: zmq.asyncio.Socket) -> None:
        """Repeat everything from the number that a subscriber asks for, and an empty payload at the end."""
        while True:
            client, *question = await socket.recv_multipart()
            if len(question) != 2 or len(question[1]) != SEQUENCE_BYTES:
                logger.warning("a question for missed KV events has %d frames; it is not answered", len(question))
                continue
            first = int.from_bytes(question[1], "big")
            for seq, payload in list(rank.kept):
                if seq >= first:
                    await socket.send_multipart([client, b"", TOPIC, seq.to_bytes(SEQUENCE_BYTES, "big"), payload])
            await socket.send_multipart([client, b"", TOPIC, _END, b""])
