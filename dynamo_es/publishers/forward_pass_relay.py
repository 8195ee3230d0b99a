"""Taking an engine's forward passes off its ZMQ socket into the log (Dynamo's ``FpmEventRelay``; spec/services b.3)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import zmq
import zmq.asyncio

from dynamo_es.publishers.forward_pass_bytes import PassError, PassPayload, to_record, unpack_pass
from dynamo_es.publishers.loop_handover import LoopHandover
from dynamo_es.publishers.scope import PublisherEndpoint, PublisherScope
from dynamo_es.publishers.zmq_socket import connect_subscriber
from schemas.forward_pass import FORWARD_PASS
from schemas.kv_events import key_kv_events

logger = logging.getLogger(__name__)

# Messages that are taken before everyone else on the loop has a turn.
DRAIN_MESSAGES = 256
MAX_RANKS = 1024


@dataclass(slots=True)
class PassRelayCounters:
    """Since the start: passes told, dropped (no model yet, or no room in the log's buffer), and not understood."""

    forwarded: int = 0
    dropped: int = 0
    malformed: int = 0


class PassForwarder:
    """Turns payloads into records of ``forward-pass``. No socket, no timer.

    The engine's own counter goes along, so that a pass that was lost shows as a hole; where it runs backwards the
    engine restarted and a new incarnation begins. At most 1,024 ranks.
    """

    def __init__(self, scope: PublisherScope) -> None:
        self._scope = scope
        self._sources: dict[int, tuple[int, int]] = {}
        self._told_id = False
        self.counters = PassRelayCounters()

    def forward(self, data: bytes) -> None:
        """One payload; what is wrong with it costs it alone."""
        try:
            payload = unpack_pass(data)
        except PassError as error:
            self.note_malformed(str(error))
            return
        model = self._scope.model_name()
        if model is None:
            self.counters.dropped += 1
            return
        if payload.dp_rank not in self._sources and len(self._sources) >= MAX_RANKS:
            self.note_malformed(f"rank {payload.dp_rank}, {MAX_RANKS} others are known")
            return
        worker_id = self._worker_id(payload.worker_id)
        value = to_record(payload, model, worker_id, self._incarnation(payload))
        taken = self._scope.sink.offer(FORWARD_PASS, key_kv_events(model, worker_id, payload.dp_rank), value)
        self.counters.forwarded += taken
        self.counters.dropped += not taken

    def note_malformed(self, detail: str) -> None:
        """Count a message that is no forward pass; the first one is told."""
        self.counters.malformed += 1
        if self.counters.malformed == 1:
            logger.warning("forward pass refused, and others like it from now on in silence: %s", detail)

    def _worker_id(self, text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) <= 20 and (number := int(text)) < 2**64:
            return number
        if not self._told_id:
            self._told_id = True
            logger.warning("the engine's worker id is no instance id; its passes carry %d", self._scope.worker_id)
        return self._scope.worker_id

    def _incarnation(self, payload: PassPayload) -> int:
        last, incarnation = self._sources.get(payload.dp_rank, (-1, -1))
        if payload.counter_id <= last or incarnation < 0:
            incarnation = self._scope.rng.getrandbits(64)
        self._sources[payload.dp_rank] = (payload.counter_id, incarnation)
        return incarnation


class FpmEventRelay:
    """Relays the forward passes that an engine publishes on a local ZMQ socket, in frames ``[topic, seq, payload]``.

    The engine may come later, and come back. Unlike Dynamo's relay it reads each payload before it passes it on: what
    is no forward pass is counted and left out. Runs from its construction to ``shutdown``, on the endpoint's loop.
    """

    def __init__(self, endpoint: PublisherEndpoint, zmq_endpoint: str) -> None:
        """``zmq_endpoint``: address of the engine's PUB socket, such as ``tcp://127.0.0.1:20380``. One that is no
        address does not raise: it is logged, and the worker serves on without forward passes.

        Raises:
            TypeError: ``zmq_endpoint`` is no text.
        """
        if not isinstance(zmq_endpoint, str):
            raise TypeError(
                f"argument 'zmq_endpoint': '{type(zmq_endpoint).__name__}' object cannot be converted to 'PyString'"
            )
        scope = endpoint.publisher_scope()
        self._address = zmq_endpoint
        self._forwarder = PassForwarder(scope)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._handover: LoopHandover[None] = LoopHandover(scope.loop, 1, self._start)
        self._tasks = scope.tasks
        scope.add_cleanup(self._close)
        scope.add_counts(self._anomalies)
        self._handover.call(self._start)

    def shutdown(self) -> None:
        """Stop. Idempotent; from any thread."""
        if not self._closed:
            self._closed = True
            self._handover.call(self._stop)

    def counters(self) -> Mapping[str, int]:
        """Passes forwarded, dropped and malformed, by a name that is fit for a metric."""
        return {f"forward_pass_{name}": count for name, count in asdict(self._forwarder.counters).items()}

    def _anomalies(self) -> Mapping[str, int]:
        return {name: count for name, count in self.counters().items() if name != "forward_pass_forwarded"}

    def _start(self) -> None:
        if not self._closed:
            self._task = self._tasks.spawn(self._run(), "forward-pass-relay")

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        context = zmq.asyncio.Context()
        try:
            try:
                socket = connect_subscriber(context, self._address)
            except zmq.ZMQError as error:
                logger.error(
                    "no forward passes from %s: %s; give the engine's publisher address, such as tcp://127.0.0.1:20380",
                    self._address, error,
                )  # fmt: skip
                return
            while True:
                await self._receive(socket)
        finally:
            context.destroy(linger=0)

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        self._take(await socket.recv_multipart())
        for _ in range(DRAIN_MESSAGES - 1):
            try:
                self._take(await socket.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                break
        await asyncio.sleep(0)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) == 3:
            self._forwarder.forward(frames[2])
        else:
            self._forwarder.note_malformed(f"{len(frames)} frames instead of 3")

    async def _close(self) -> None:
        self.shutdown()
        if self._task is not None:
            await asyncio.wait([self._task])
