"""Replica sync over ZMQ: one PUB socket for what this process books, one SUB socket for its peers (spec D.15).

PUB/SUB loses messages to a peer that is away or slow; what it misses it learns no more. Bookings that nobody frees
expire in the end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq
import zmq.asyncio

from dynamo_es.background import BackgroundTasks
from dynamo_es.errors import ConfigError
from dynamo_es.router.replica_events import TOPIC, ReplicaEvent, decode_event, encode_event
from dynamo_es.router.selection_catalog import zmq_endpoint_problem

logger = logging.getLogger(__name__)
_HIGH_WATER_MARK = 100_000
_MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class ReplicaLink:
    """Sends from the moment it is made; receives once ``start`` was called. Belongs to one event loop."""

    def __init__(
        self,
        port: int,
        peers: Sequence[str],
        router_id: int,
        handler: Callable[[ReplicaEvent], None],
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """``handler`` gets the events of others, in order for each of them; it must not block and not raise.
        ``tasks``: who is told if receiving dies.

        Raises:
            ValueError: The port is 0, or a peer is no endpoint.
            ConfigError: The port cannot be bound.
        """
        if port == 0:
            raise ValueError("replica sync port must be greater than zero")
        for peer in peers:
            if zmq_endpoint_problem(peer) is not None:
                raise ValueError(f"invalid replica peer endpoint `{peer}`")
        self._router_id = router_id
        self._handler = handler
        self.tasks = tasks or BackgroundTasks()
        self._peers = set(peers)
        self._receiver: zmq.asyncio.Context | None = None
        self._sub: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._malformed = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._pub = self._context.socket(zmq.PUB)
            self._pub.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
            self._pub.setsockopt(zmq.LINGER, 0)
            self._pub.bind(f"tcp://*:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"replica sync port {port} cannot be used: {error}") from error

    def peers(self) -> list[str]:
        """Endpoints that are listened to, sorted."""
        return sorted(self._peers)

    def add_peer(self, endpoint: str) -> bool:
        """Listen to one more; False if that was so. Call ``start`` before. Raises ValueError if it is no endpoint."""
        _check_endpoint(endpoint)
        if endpoint in self._peers:
            return False
        assert self._sub is not None
        try:
            self._sub.connect(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"failed to register replica peer `{endpoint}`") from error
        self._peers.add(endpoint)
        return True

    def remove_peer(self, endpoint: str) -> bool:
        """Listen to it no longer; False if it was not. Call ``start`` before. Raises ValueError as ``add_peer``."""
        _check_endpoint(endpoint)
        if endpoint not in self._peers:
            return False
        self._peers.discard(endpoint)
        assert self._sub is not None
        with suppress(zmq.ZMQError):
            # One that could not be connected at the start.
            self._sub.disconnect(endpoint)
        return True

    def start(self) -> None:
        """Receive from now on. Needs a running event loop; idempotent."""
        if self._task is not None:
            return
        self._receiver = zmq.asyncio.Context()
        self._sub = self._receiver.socket(zmq.SUB)
        self._sub.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        self._sub.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
        self._sub.setsockopt(zmq.SUBSCRIBE, TOPIC)
        for peer in self.peers():
            try:
                self._sub.connect(peer)
            except zmq.ZMQError as error:
                logger.error("replica peer %s cannot be listened to: %s", peer, error)
        self._task = self.tasks.spawn(self._receive(self._sub), "replica-sync")

    def publish(self, event: ReplicaEvent) -> None:
        """Tell the peers; dropped for one that does not keep up."""
        if not self._pub.closed:
            self._pub.send_multipart(encode_event(event), zmq.NOBLOCK)

    async def close(self) -> None:
        """Stop. Safe to call twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._receiver is not None:
            self._receiver.destroy(linger=0)
        self._context.destroy(linger=0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            self._take(await socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        try:
            event = decode_event(frames)
        except ValueError as error:
            self._malformed += 1
            if self._malformed == 1:
                logger.warning("a replica peer sends what cannot be read: %s (told once)", error)
            return
        if event.router_id != self._router_id:
            self._handler(event)


def _check_endpoint(endpoint: str) -> None:
    problem = zmq_endpoint_problem(endpoint)
    if problem is not None:
        raise ValueError(problem)
