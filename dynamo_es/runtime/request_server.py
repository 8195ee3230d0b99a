"""The serving end of the request plane: one ROUTER socket a process, any number of streams and peers."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

from dynamo_es.background import BackgroundTasks
from dynamo_es.clock import Clock
from dynamo_es.runtime.context import Context
from dynamo_es.runtime.curve import CurveKeys, secure_server
from dynamo_es.runtime.errors import RequestPlaneError
from dynamo_es.runtime.faults import describe_exception
from dynamo_es.runtime.socket_pump import PeerUnreachable, SocketPump
from dynamo_es.runtime.trace_context import parse_trace
from dynamo_es.runtime.tracing import HandlerTracer
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
    Pong,
    Welcome,
    WireCodec,
    WireError,
)

logger = logging.getLogger(__name__)

Handler = Callable[..., Any]
# A handler that does not end after it was asked to stop is cancelled after this long.
STOP_GRACE_S = 5.0
_HIGH_WATER_MARK = 10_000
_MAX_BACKLOG_MESSAGES = 10_000
# Tokens of an engine's pass travel together, but not all of a large one: the caller works on the first meanwhile.
_FRAMES_A_MESSAGE = 64
_CUT = "the stream was cut"


class Batch(list[Any]):
    """Items that a handler yields in one go: they travel in one message and arrive as separate items."""


@dataclass(slots=True)
class ServedEndpoint:
    """A handler and what is running on it."""

    path: str
    handler: Handler
    takes_context: bool
    streams: int = 0
    total: int = 0
    errors: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Stream:
    number: int
    context: Context
    credit: int
    task: asyncio.Task[None] | None = None
    credit_ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class _Peer:
    identity: bytes
    last_seen: float
    streams: dict[int, _Stream] = field(default_factory=dict)
    outbox: list[msgspec.Struct] = field(default_factory=list)
    open_items: dict[int, Items] = field(default_factory=dict)
    backlog: list[bytes] = field(default_factory=list)


class RequestServer:
    """Takes streams from any peer and runs them on registered handlers. Belongs to one event loop.

    ``start`` binds; ``close`` cuts whatever still runs (drain first with ``wait_idle``). A peer that is silent for
    ``peer_timeout_s`` is gone: its streams are cancelled. A producer waits while its consumer has not taken what is
    under way (credit); a peer that does not read at all is dropped when 10,000 messages wait for it. With ``keys`` its
    context must have an authenticator (``start_authenticator``), one for all servers on it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        instance_id: int,
        host: str,
        port: int,
        max_streams: int,
        max_message_bytes: int,
        peer_timeout_s: float,
        clock: Clock,
        keys: CurveKeys | None = None,
        tracer: HandlerTracer | None = None,
        tasks: BackgroundTasks | None = None,
    ) -> None:
        """``tracer``: told of each stream; None: nobody is."""
        self._tasks = tasks or BackgroundTasks()
        self._context = context
        self._instance_id = instance_id
        self._host = host
        self._max_streams = max_streams
        self._max_message_bytes = max_message_bytes
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self._keys = keys
        self._tracer = tracer
        self._wire = WireCodec(max_message_bytes)
        self._payloads = PayloadCodec()
        self._endpoints: dict[str, ServedEndpoint] = {}
        self._peers: dict[bytes, _Peer] = {}
        self._pending: dict[_Peer, None] = {}
        self._flush_scheduled = False
        self._frames_waiting = 0
        self._streams = 0
        # What a caller is told of a stream that is cut: a worker that goes away is no caller's doing.
        self._cut_kind = "Cancelled"
        self._pump: SocketPump | None = None
        self._reaper: asyncio.Task[None] | None = None
        self.port = port

    @property
    def streams(self) -> int:
        """Open streams of all endpoints."""
        return self._streams

    async def start(self) -> None:
        """Bind. Raises ``RequestPlaneError`` if the address cannot be had."""
        loop = asyncio.get_running_loop()
        try:
            socket = self._context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            raise RequestPlaneError(
                f"request plane cannot open a socket: {error.strerror}; raise the limit of open files (ulimit -n)"
            ) from error
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, self._max_message_bytes)
        socket.setsockopt(zmq.IPV6, ":" in self._host)
        if self._keys is not None:
            secure_server(socket, self._keys)
        host = f"[{self._host}]" if ":" in self._host else self._host
        try:
            socket.bind(f"tcp://{host}:{self.port or '*'}")
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise RequestPlaneError(
                f"request plane cannot listen on {self._host}:{self.port}: {error.strerror}; "
                "choose another --request-plane-host or --request-plane-port"
            ) from error
        self.port = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._pump = SocketPump(socket, loop, self._on_message, self._on_writable)
        self._reaper = self._tasks.spawn(self._reap(), "request-server-reaper")

    def add_endpoint(self, path: str, handler: Handler) -> ServedEndpoint:
        """Serve ``path`` with ``handler(request, context)``, or ``handler(request)`` if it takes one argument."""
        served = ServedEndpoint(path, handler, _takes_context(handler))
        served.idle.set()
        self._endpoints[path] = served
        return served

    def serves(self, path: str) -> bool:
        """Whether ``path`` has a handler."""
        return path in self._endpoints

    def endpoints(self) -> Mapping[str, ServedEndpoint]:
        """What is served now, by path."""
        return self._endpoints

    def remove_endpoint(self, path: str) -> None:
        """New streams for ``path`` are refused; open ones go on."""
        self._endpoints.pop(path, None)

    async def close(self) -> None:
        """Cancel all streams and unbind; what is opened meanwhile is refused. Safe to call twice.

        Callers get ``EngineShutdown`` for their streams.
        """
        self._endpoints.clear()
        self._cut_kind = "EngineShutdown"
        if self._reaper is not None:
            self._reaper.cancel()
            await asyncio.gather(self._reaper, return_exceptions=True)
            self._reaper = None
        tasks = [stream.task for peer in self._peers.values() for stream in peer.streams.values() if stream.task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._flush()
        if self._pump is not None:
            self._pump.close()
            self._pump = None

    def _on_message(self, parts: list[bytes]) -> None:
        if len(parts) != 2:
            return
        identity, message = parts
        peer = self._peers.get(identity)
        try:
            frames = self._wire.decode_client(message)
        except WireError as error:
            logger.warning("request plane: dropped a message of %d bytes: %s", len(message), error)
            return
        if peer is None:
            peer = self._peers[identity] = _Peer(identity, 0.0)
        peer.last_seen = self._clock.monotonic()
        for frame in frames:
            if isinstance(frame, Open):
                self._open(peer, frame)
            elif isinstance(frame, Credit):
                self._credit(peer, frame)
            elif isinstance(frame, Cancel):
                self._cancel(peer, frame)
            elif isinstance(frame, Ping):
                self._queue(peer, Pong(frame.number))
            elif isinstance(frame, Hello):
                self._queue(peer, Welcome(PROTOCOL_VERSION, self._instance_id))

    def _open(self, peer: _Peer, frame: Open) -> None:
        if frame.stream in peer.streams:
            logger.warning("request plane: a peer opened its stream %d twice; ignored", frame.stream)
            return
        served = self._endpoints.get(frame.endpoint)
        if served is None:
            self._queue(
                peer, Fail(frame.stream, "CannotConnect", f"endpoint {frame.endpoint} is not served here", True)
            )
            return
        if self._streams >= self._max_streams:
            text = f"overloaded: {self._max_streams} streams are open (--max-streams)"
            logger.warning("request plane: refused a stream, %s", text)
            self._queue(peer, Fail(frame.stream, "Overloaded", text, True))
            return
        stream = _Stream(frame.stream, Context(frame.request_id, frame.metadata), frame.window)
        if frame.traceparent:
            stream.context.trace = parse_trace(frame.traceparent, frame.tracestate)
        peer.streams[frame.stream] = stream
        self._streams += 1
        served.streams += 1
        served.total += 1
        served.idle.clear()
        stream.task = asyncio.get_running_loop().create_task(self._serve(peer, stream, served, frame.payload))
        # Not in the task itself: one that is cancelled before its first step runs none of its own code.
        stream.task.add_done_callback(lambda task: self._account_end(peer, stream, served, task))

    def _credit(self, peer: _Peer, frame: Credit) -> None:
        stream = peer.streams.get(frame.stream)
        if stream is not None and frame.items > 0:
            stream.credit += frame.items
            stream.credit_ready.set()

    def _cancel(self, peer: _Peer, frame: Cancel) -> None:
        stream = peer.streams.get(frame.stream)
        if stream is None or stream.task is None:
            return
        if frame.kill:
            stream.context.kill()
            stream.task.cancel()
        elif not stream.context.is_stopped():
            stream.context.stop_generating()
            stream.credit_ready.set()
            asyncio.get_running_loop().call_later(STOP_GRACE_S, stream.task.cancel)

    async def _serve(self, peer: _Peer, stream: _Stream, served: ServedEndpoint, payload: msgspec.Raw) -> None:
        """Run one stream. A supervisor (engine adapter): whatever a handler raises becomes a ``Fail`` frame."""
        end: End | Fail = End(stream.number)
        started = False
        span = None
        if self._tracer is not None:
            context = stream.context
            span = self._tracer.handling(served.path, context.id(), context.trace)
            context.trace = span.context
        try:
            request = self._payloads.decode(payload)
            items = served.handler(request, stream.context) if served.takes_context else served.handler(request)
            if not isinstance(items, AsyncIterator):
                items = await _not_a_generator(items)
            started = True
            await self._pass_on(peer, stream, items)
        except asyncio.CancelledError:
            end = Fail(stream.number, self._cut_kind, _CUT, not started)
        except Exception as error:  # supervisor
            served.errors += 1
            kind, text = describe_exception(error)
            if kind == "Unknown":
                logger.exception("handler of request %s failed", stream.context.id())
            end = Fail(stream.number, kind, text, not started)
        finally:
            peer.open_items.pop(stream.number, None)
            self._queue(peer, end)
            if span is not None:
                span.ended(end.kind if isinstance(end, Fail) else None)

    def _account_end(self, peer: _Peer, stream: _Stream, served: ServedEndpoint, task: asyncio.Task[None]) -> None:
        self._streams -= 1
        served.streams -= 1
        if not served.streams:
            served.idle.set()
        del peer.streams[stream.number]
        if task.cancelled():
            self._queue(peer, Fail(stream.number, self._cut_kind, _CUT, True))

    async def _pass_on(self, peer: _Peer, stream: _Stream, items: AsyncIterator[Any]) -> None:
        encode = self._payloads.encode
        try:
            async for item in items:
                for part in item if isinstance(item, Batch) else (item,):
                    while stream.credit <= 0 and not stream.context.is_stopped():
                        stream.credit_ready.clear()
                        await stream.credit_ready.wait()
                    if stream.context.is_stopped():
                        break
                    stream.credit -= 1
                    self._queue_item(peer, stream.number, encode(part))
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    def _queue_item(self, peer: _Peer, number: int, item: msgspec.Raw) -> None:
        waiting = peer.open_items.get(number)
        if waiting is not None:
            waiting.items.append(item)
            return
        frame = Items(number, [item])
        peer.open_items[number] = frame
        self._queue(peer, frame)
        self._frames_waiting += 1
        if self._frames_waiting >= _FRAMES_A_MESSAGE:
            self._send_pending()

    def _queue(self, peer: _Peer, frame: msgspec.Struct) -> None:
        peer.outbox.append(frame)
        self._pending[peer] = None
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        self._send_pending()

    def _send_pending(self) -> None:
        pending, self._pending = self._pending, {}
        self._frames_waiting = 0
        for peer in pending:
            if peer.outbox:
                peer.backlog.append(self._wire.encode(peer.outbox))
                peer.outbox = []
                peer.open_items = {}
            self._send_backlog(peer)

    def _send_backlog(self, peer: _Peer) -> None:
        if self._pump is None:
            return
        try:
            while peer.backlog:
                if not self._pump.try_send((peer.identity, peer.backlog[0])):
                    break
                del peer.backlog[0]
        except PeerUnreachable:
            self._drop_peer(peer, "it is not connected any more")
            return
        if len(peer.backlog) > _MAX_BACKLOG_MESSAGES:
            self._drop_peer(peer, f"it left {_MAX_BACKLOG_MESSAGES} messages unread")

    def _on_writable(self) -> None:
        for peer in list(self._peers.values()):
            if peer.backlog:
                self._send_backlog(peer)

    def _drop_peer(self, peer: _Peer, why: str) -> None:
        self._peers.pop(peer.identity, None)
        peer.backlog = []
        if peer.streams:
            logger.warning("request plane: dropped a peer with %d streams: %s", len(peer.streams), why)
        for stream in list(peer.streams.values()):
            stream.context.kill()
            if stream.task is not None:
                stream.task.cancel()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._peer_timeout_s / 4)
            limit = self._clock.monotonic() - self._peer_timeout_s
            for peer in [peer for peer in self._peers.values() if peer.last_seen < limit]:
                self._drop_peer(peer, f"no sign of life for {self._peer_timeout_s:g} s")


def _takes_context(handler: Handler) -> bool:
    parameters = inspect.signature(handler).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)


async def _not_a_generator(result: Any) -> AsyncIterator[Any]:
    if isinstance(result, Awaitable):
        result = await result
    if not isinstance(result, AsyncIterator):
        raise TypeError("the handler must be an async generator")
    return result
