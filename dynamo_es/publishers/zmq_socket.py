"""The socket on which an engine's ZMQ publisher is heard, with its bounds."""

from __future__ import annotations

import zmq
import zmq.asyncio

RECEIVE_HIGH_WATER_MARK = 100_000
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SEQUENCE_BYTES = 8
_RECONNECT_MS = 100
_RECONNECT_MAX_MS = 5_000


def connect_subscriber(context: zmq.asyncio.Context, endpoint: str, topic: str = "") -> zmq.asyncio.Socket:
    """A SUB socket that connects, and connects again, to ``endpoint``; the engine need not be there yet.

    At most 100,000 messages wait in it, further ones are dropped by the engine's side; one above 64 MiB ends the
    connection, which is then made anew.

    Raises:
        zmq.ZMQError: ``endpoint`` is no address.
    """
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
    socket.connect(endpoint)
    return socket
