"""The calling end of the request plane: one DEALER socket for each instance, shared by all streams to it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.errors import CannotConnect, Disconnected
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.curve import CurveKeys, secure_client
from dynamo_es.runtime.errors import Overloaded, StreamSilent
from dynamo_es.runtime.faults import typed_error
from dynamo_es.runtime.lane import Lane
from dynamo_es.runtime.socket_pump import SocketPump
from dynamo_es.runtime.wire import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    End,
    Fail,
    Hello,
    Items,
    Open,
    PayloadCodec,
    Ping,
    Welcome,
    WireCodec,
    WireError,
)

logger = logging.getLogger(__name__)
_HIGH_WATER_MARK = 10_000
_PING_S = 1.0
# A lost connection is lost with its streams; reconnecting under them would only hide it. So "never", but not libzmq's
# own -1 for it: in 4.3.5 a session then takes itself off the socket when its handshake fails, and if a message waits
# in it while the socket is closed it is never freed, and ending the context waits for it for ever.
_RECONNECT_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Bounds of a connection: items under way in a stream, message size, and how long silence is taken for life: of the
    instance, and of one stream before its first item and later (None: for ever).
    """

    window: int
    max_message_bytes: int
    connect_timeout_s: float
    peer_timeout_s: float
    first_item_timeout_s: float | None = None
    item_timeout_s: float | None = None


class ClientStream:
    """One stream as its consumer sees it: iterate ``batches`` once, from one task.

    Ends normally, or raises what the handler raised (``typed_error``), ``Disconnected`` if the instance was lost,
    ``StreamSilent`` if nothing came for too long, or nothing more after the context was stopped. Leaving the iteration
    early cancels the stream at the worker. With a ``lane`` items may go by it in place of the iteration.
    """

    def __init__(self, connection: Connection, number: int, context: Context, lane: Lane | None = None) -> None:
        self._connection = connection
        self._number = number
        self._context = context
        self._lane = lane
        self._lane_open = False
        self._ready: deque[msgspec.Raw] = deque()
        self._wakeup: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False
        self._error: Exception | None = None
        self._taken = 0
        self._last_at = 0.0

    async def batches(self) -> AsyncGenerator[list[Any], None]:
        """All items that are there, each time, decoded; at least one."""
        connection = self._connection
        self._context.add_stop_callback(self._on_stop)
        first = True
        try:
            while True:
                if self._context.is_stopped():
                    return
                if self._ready:
                    raw, self._ready = self._ready, deque()
                    self._note_taken(len(raw))
                    first = False
                    yield [connection.payloads.decode(item) for item in raw]
                elif self._error is not None:
                    raise self._error
                elif self._over:
                    return
                else:
                    await self._wait(first)
        finally:
            self._context.remove_stop_callback(self._on_stop)
            self._leave()

    async def _wait(self, first: bool) -> None:
        loop, limits = self._connection.loop, self._connection.limits
        self._wakeup = loop.create_future()
        self._lane_open = self._lane is not None and not first
        limit_s = limits.first_item_timeout_s if first else limits.item_timeout_s
        if limit_s is not None:
            self._last_at = loop.time()
            self._timer = loop.call_later(limit_s, self._on_silence, limit_s)
        try:
            await self._wakeup
        finally:
            self._lane_open = False
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _on_silence(self, limit_s: float) -> None:
        if self._wakeup is None or self._wakeup.done():
            return  # a loop that stood still reads what has come meanwhile first, and has the timers after it
        loop = self._connection.loop
        end = self._last_at + limit_s
        if loop.time() < end and not self._over:
            self._timer = loop.call_at(end, self._on_silence, limit_s)
            return
        if not self._over:
            self._error = StreamSilent(self._connection.instance_id, limit_s)
            self._leave()
        self._wake()

    def deliver(self, items: list[msgspec.Raw]) -> None:
        """Called by the connection."""
        if self._lane_open and self._went_by_lane(items):
            return
        self._ready.extend(items)
        self._wake()

    def _went_by_lane(self, items: list[msgspec.Raw]) -> bool:
        assert self._lane is not None
        decode = self._connection.payloads.decode
        try:
            batch = [decode(item) for item in items]
        except WireError:
            return False  # it is raised in the iteration
        try:
            if not self._lane.offer(batch):
                return False
        except Exception as error:  # noqa: BLE001 - it is the reader's; no other stream of this message may miss items
            self._error = error
            self._leave()
            self._wake()
            return True
        self._note_taken(len(items))
        if self._timer is not None:
            self._last_at = self._connection.loop.time()
        return True

    def _note_taken(self, items: int) -> None:
        self._taken += items
        if self._taken * 2 >= self._connection.limits.window and not self._over:
            self._connection.queue(Credit(self._number, self._taken))
            self._taken = 0

    def finish(self, error: Exception | None) -> None:
        """Called by the connection: nothing more will come."""
        self._over = True
        self._error = error
        self._wake()

    def _on_stop(self) -> None:
        if not self._over:
            self._connection.queue(Cancel(self._number, self._context.is_killed()))
            self._over = True
            self._connection.forget(self._number)
        self._wake()

    def _leave(self) -> None:
        if not self._over:
            self._over = True
            self._connection.queue(Cancel(self._number, True))
            self._connection.forget(self._number)

    def _wake(self) -> None:
        self._lane_open = False
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)


class Connection:
    """A connection to one instance. ``closed`` once it is lost; it is not revived, a new one is made."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        instance_id: int,
        limits: ClientLimits,
        clock: Clock,
        client_name: str,
        keys: CurveKeys | None,
        tasks: BackgroundTasks,
    ) -> None:
        self.limits = limits
        self.payloads = PayloadCodec()
        self.closed = False
        self._address = address
        self.instance_id = instance_id
        self._clock = clock
        self.loop = asyncio.get_running_loop()
        self._wire = WireCodec(limits.max_message_bytes)
        self._streams: dict[int, ClientStream] = {}
        self._numbers = itertools.count(1)
        self._outbox: list[msgspec.Struct] = []
        self._backlog: deque[bytes] = deque()
        self._flush_scheduled = False
        self._last_seen = clock.monotonic()
        self._welcome: asyncio.Future[None] = self.loop.create_future()
        self._welcome.add_done_callback(_retrieve)
        socket, monitor = _open_sockets(context, limits, keys, ipv6="[" in address)
        self._monitor = SocketPump(monitor, self.loop, self._on_monitor, _nothing)
        self._socket = socket
        socket.connect(address)
        self._pump = SocketPump(socket, self.loop, self._on_message, self._on_writable)
        self.queue(Hello(PROTOCOL_VERSION, client_name))
        self._keeper = tasks.spawn(self._keep_alive(), f"connection-{instance_id:x}", "connection")

    @property
    def streams(self) -> int:
        """Open streams."""
        return len(self._streams)

    @property
    def is_ready(self) -> bool:
        """It answered, and was not lost since."""
        return not self.closed and self._welcome.done() and self._welcome.exception() is None

    async def ready(self) -> None:
        """Wait until the instance answered.

        Raises:
            CannotConnect: It did not, or somebody else did.
        """
        try:
            async with asyncio.timeout(self.limits.connect_timeout_s):
                await asyncio.shield(self._welcome)
        except TimeoutError as error:
            self._lose(f"no answer from {self._address} within {self.limits.connect_timeout_s:g} s")
            raise CannotConnect(f"instance {self.instance_id} at {self._address} does not answer") from error

    def open(self, endpoint: str, payload: msgspec.Raw, context: Context, lane: Lane | None = None) -> ClientStream:
        """Start a stream. The connection must be ready."""
        number = next(self._numbers)
        stream = ClientStream(self, number, context, lane)
        if self.closed:
            stream.finish(Disconnected(f"connection to {self._address} was lost"))
            return stream
        self._streams[number] = stream
        trace = context.hop_trace if context.hop_trace is not None else context.trace
        parent, state = ("", "") if trace is None else (trace.traceparent, trace.state)
        metadata, window = dict(context.metadata), self.limits.window
        self.queue(Open(number, endpoint, context.id(), metadata, window, payload, parent, state))
        return stream

    def queue(self, frame: msgspec.Struct) -> None:
        """Send with everything else of this loop iteration."""
        if self.closed:
            return
        self._outbox.append(frame)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self.loop.call_soon(self._flush)

    def forget(self, number: int) -> None:
        """The stream is over for its consumer."""
        self._streams.pop(number, None)

    def close(self) -> None:
        """Cut it. Open streams end with ``Disconnected``. Safe to call twice."""
        self._flush()
        self._lose("closed")

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.closed:
            return
        if self._outbox:
            self._backlog.append(self._wire.encode(self._outbox))
            self._outbox = []
        self._on_writable()

    def _on_writable(self) -> None:
        while self._backlog and not self.closed:
            if not self._pump.try_send((self._backlog[0],)):
                return
            self._backlog.popleft()

    def _on_message(self, parts: list[bytes]) -> None:
        self._last_seen = self._clock.monotonic()
        try:
            frames = self._wire.decode_server(parts[-1])
        except WireError as error:
            logger.warning("request plane: %s sent what is not understood: %s", self._address, error)
            self._lose(str(error))
            return
        for frame in frames:
            if isinstance(frame, Items):
                stream = self._streams.get(frame.stream)
                if stream is not None:
                    stream.deliver(frame.items)
            elif isinstance(frame, End):
                self._finish(frame.stream, None)
            elif isinstance(frame, Fail):
                self._finish(frame.stream, _failure(frame))
            elif isinstance(frame, Welcome):
                self._on_welcome(frame)

    def _on_welcome(self, frame: Welcome) -> None:
        if self._welcome.done():
            return
        if frame.version != PROTOCOL_VERSION:
            text = f"it speaks protocol {frame.version}, this process {PROTOCOL_VERSION}"
        elif frame.instance_id != self.instance_id:
            text = "another process has taken its address"
        else:
            self._welcome.set_result(None)
            return
        self._lose(f"instance {self.instance_id} at {self._address}: {text}")

    def _finish(self, number: int, error: Exception | None) -> None:
        stream = self._streams.pop(number, None)
        if stream is not None:
            stream.finish(error)

    def _on_monitor(self, parts: list[bytes]) -> None:
        event = zmq.Event(parse_monitor_message(parts)["event"])
        self._lose(f"connection to {self._address} was lost ({str(event.name).lower()})")

    def _lose(self, why: str) -> None:
        if self.closed:
            return
        self.closed = True
        if not self._welcome.done():
            self._welcome.set_exception(CannotConnect(f"instance {self.instance_id} at {self._address}: {why}"))
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.finish(Disconnected(why))
        self._keeper.cancel()
        self._socket.disable_monitor()
        self._monitor.close()
        self._pump.close()

    async def _keep_alive(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(min(_PING_S, self.limits.peer_timeout_s / 4))
            silent_s = self._clock.monotonic() - self._last_seen
            if self._welcome.done() and silent_s > self.limits.peer_timeout_s:
                self._lose(f"no sign of life from {self._address} for {silent_s:.1f} s")
                return
            number += 1
            self.queue(Ping(number))


def _open_sockets(
    context: zmq.Context[zmq.Socket[bytes]], limits: ClientLimits, keys: CurveKeys | None, *, ipv6: bool
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """A socket that is not connected yet, and its monitor. Raises ``ZMQError``; then nothing stays open."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, limits.max_message_bytes)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.IPV6, ipv6)
        if keys is not None:
            secure_client(socket, keys)
        monitor = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )  # fmt: skip
    except zmq.ZMQError:
        socket.close(linger=0)
        raise
    return socket, monitor


class ConnectionPool:
    """Connections by instance. Belongs to one event loop."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        limits: ClientLimits,
        clock: Clock,
        client_name: str,
        keys: CurveKeys | None = None,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        self._tasks = tasks or BackgroundTasks()
        self._context = context
        self._limits = limits
        self._clock = clock
        self._client_name = client_name
        self._keys = keys
        self._connections: dict[tuple[str, int], Connection] = {}
        self._closed = False

    async def connect(self, address: str, instance_id: int) -> Connection:
        """A connection that is ready.

        Raises:
            CannotConnect: The instance does not answer, or this process has no room for another socket.
        """
        key = (address, instance_id)
        connection = self._connections.get(key)
        if connection is not None and connection.is_ready:
            return connection
        if connection is None or connection.closed:
            if self._closed:
                raise CannotConnect("the runtime is shut down")
            try:
                connection = Connection(
                    self._context, address, instance_id, self._limits, self._clock, self._client_name, self._keys,
                    self._tasks,
                )  # fmt: skip
            except zmq.ZMQError as error:
                raise CannotConnect(
                    f"no socket to instance {instance_id} at {address}: {error.strerror}; with too many open files, "
                    "raise the limit (ulimit -n): a connection needs four"
                ) from error
            self._connections[key] = connection
        await connection.ready()
        return connection

    def keep_only(self, wanted: set[tuple[str, int]]) -> None:
        """Close idle connections to instances that are not in ``wanted``; busy ones go on to their end."""
        for key, connection in list(self._connections.items()):
            if connection.closed or (key not in wanted and not connection.streams):
                connection.close()
                del self._connections[key]

    def close(self) -> None:
        """Close all. Safe to call twice."""
        self._closed = True
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()


def _failure(frame: Fail) -> Exception:
    if frame.kind == "Overloaded":
        return Overloaded(frame.text)
    if frame.before_start:
        return CannotConnect(f"Worker generate() failed before response stream: Generate Error: {frame.text}")
    return typed_error(frame.kind, frame.text)


def _retrieve(future: asyncio.Future[None]) -> None:
    """Nobody may be waiting for a connection that fails; that is no error of its own."""
    if not future.cancelled():
        future.exception()


def _nothing() -> None:
    return None
