"""uvicorn's HTTP/1.1 connection with bounds that it lacks: size and time of a request's head, time of a slow reader.

Bytes that are not (yet) part of a body are counted from one sign of progress to the next: a head, a trailer or the
framing of a chunk that does not end is cut off at the bound. Larger heads get 431, heads that do not come in time a
closed connection. A client that does not take what is written to it is cut off: it would hold a worker's place for
good. A framing that can be read in two ways (a length and chunks, two lengths, bare line feeds) is refused
by httptools with 400, and the connection is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dynamo_es.frontend.chunk_writer import CHUNK_WRITER, ChunkWriter
from dynamo_es.frontend.errors import ApiError, reason_phrase
from dynamo_es.frontend.paced_transport import PacedTransport
from dynamo_es.frontend.upgrades import without_upgrade

OnRefused = Callable[[int, tuple[str, int] | None], None]
"""Takes a status and the client's address."""


class HeadTooLarge(Exception):
    """Raised to httptools only, which then stops parsing."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, made by uvicorn.

    Args:
        head_limit: Bytes of a head.
        head_timeout_s: Seconds in which it is to come.
        send_timeout_s: Seconds in which a full send buffer is to become a nearly empty one.
        on_refused: Told status and client of what is refused here, before the application hears of it.
    """

    def __init__(
        self,
        *arguments: Any,
        head_limit: int,
        head_timeout_s: float,
        send_timeout_s: float,
        on_refused: OnRefused | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._head_limit = head_limit
        self._head_timeout_s = head_timeout_s
        self._send_timeout_s = send_timeout_s
        self._on_refused = on_refused
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._since_progress = 0
        self._in_head = True
        self._too_large = False
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._paced = PacedTransport(transport, self.loop)
        super().connection_made(self._paced)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_send_timer()
        self._paced.drop()
        super().connection_lost(exc)
        # uvicorn tells the last request of the connection only, which may wait for this one (pipelining).
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._served = cycle
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._too_large:
            return
        self._since_progress += len(data)
        super().data_received(without_upgrade(data) if self._in_head else data)
        if self._since_progress > self._head_limit and not self._too_large:
            self._too_large = True
            self.send_400_response("")
        elif self._in_head and self._since_progress and self._head_timer is None:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        if self._on_refused is not None:
            self._on_refused(431 if self._too_large else 400, self.client)
        if not self._too_large:
            super().send_400_response(msg)
            return
        text = f"The head of the request exceeds the limit of {self._head_limit // 1024} KiB"
        error = ApiError(431, text, code="headers_too_large")
        body = error.body()
        head = f"HTTP/1.1 431 {reason_phrase(431)}\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._send_timer is None:
            self._send_timer = self.loop.call_later(self._send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    # -- httptools' callbacks --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._since_progress = 0
        self._stop_timer()
        self._paced.begin()
        super().on_headers_complete()
        if self.cycle is not None and self.cycle.scope is self.scope:
            self.scope[CHUNK_WRITER] = ChunkWriter(self.cycle, self.flow, self._paced)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        self._since_progress = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._since_progress = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._paced.flush()
        super().on_response_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._head_limit:
            self._too_large = True
            raise HeadTooLarge

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_timeout_s, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _out_of_time(self) -> None:
        self._head_timer = None
        if self._in_head and not self.transport.is_closing():
            self.transport.close()
