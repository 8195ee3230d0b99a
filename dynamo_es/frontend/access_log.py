"""The access log: one line of JSON a request, written when the request is over, streams included.

It stands before the whole application, so that what is refused (a missing API key, an unknown path, a frontend that is
still starting) has a line as well. Inference routes fill in what they know; a line never holds text of a prompt or an
answer, an API key, or a part of the URL that a client made up.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from prometheus_client import CollectorRegistry

from dynamo_es.clock import Clock
from dynamo_es.frontend.line_writer import LineWriter
from dynamo_es.frontend.metrics import error_type
from dynamo_es.frontend.reading import Receive
from dynamo_es.frontend.service import FrontendService
from dynamo_es.runtime.metrics import Collector, Samples, counter
from dynamo_es.runtime.placement import Placement

ENTRY = "dynamo_es.access"
"""Member of the scope: the request's ``AccessEntry``; not there without an access log."""
PLAIN_SEND = "dynamo_es.plain_send"
"""Member of the scope: ``send`` as the server gave it, for who notes the status in the entry by itself."""
_MAX_TEXT = 256
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class AccessEntry(msgspec.Struct):
    """One line. Members that are not known are null.

    Attributes:
        ts: When the request came, RFC 3339, UTC.
        pid: Of the process that answered.
        client: Address of who sent it.
        method: As it came; ``OTHER`` if it is none that HTTP has; null if it could not be read.
        route: Template of the path; null if no route has it.
        status: As it was sent; 499: the client left before there was one, 460: before its body was whole.
        duration_ms: To the end of the answer.
        request_id: Ours, the id of chats and completions and of the routing decision.
        x_request_id: The client's, at most 256 characters.
        model: Primary name of the model that was found.
        stream: Whether a stream was asked for.
        worker_id, dp_rank: Who answered, last.
        prefill_worker_id, prefill_dp_rank: Who computed the prompt.
        overlap_blocks: Leading blocks of the prompt that the router found there.
        prompt_tokens, cached_tokens, output_tokens: ``cached_tokens`` as the worker says.
        ttft_ms: To the first token.
        finish_reason: Of the choices, without repetition, joined by commas.
        disconnected: The client left before the end.
        error_type, error_code: As in metrics, and as in the answer's ``error.code``.
        trace_id: W3C.
        api_key: Id of the API key.
    """

    ts: str
    pid: int
    client: str | None
    method: str | None
    route: str | None
    status: int = 0
    duration_ms: float = 0.0
    request_id: str | None = None
    x_request_id: str | None = None
    model: str | None = None
    stream: bool | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    prefill_worker_id: int | None = None
    prefill_dp_rank: int | None = None
    overlap_blocks: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ttft_ms: float | None = None
    finish_reason: str | None = None
    disconnected: bool = False
    error_type: str | None = None
    error_code: str | None = None
    trace_id: str | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, scope: Mapping[str, Any]) -> AccessEntry:
        """One that goes to a trace, and to no file."""
        return cls("", 0, None, scope["method"], scope["path"])

    def note_status(self, status: int, *, sent: bool) -> None:
        """What became of the request; ``sent``: the client was told so."""
        if sent or not self.status:
            self.status = status

    def note_failure(self, status: int, code: str | None) -> None:
        """Why it failed, by the status that it ended with, and the code in its answer."""
        self.error_type = error_type(status) or None
        self.error_code = code

    def note_placement(self, placement: Placement) -> None:
        """Where it went."""
        self.worker_id, self.dp_rank = placement.decode_worker_id, placement.decode_dp_rank
        self.prefill_worker_id, self.prefill_dp_rank = placement.prefill_worker_id, placement.prefill_dp_rank
        self.overlap_blocks = placement.overlap_blocks

    def note_finish(self, reason: str) -> None:
        """A choice came to its end."""
        known = self.finish_reason
        if known is None:
            self.finish_reason = reason[:_MAX_TEXT]
        elif reason not in known.split(",") and len(known) < _MAX_TEXT:
            self.finish_reason = f"{known},{reason[:_MAX_TEXT]}"


class Logged(Protocol):
    """An ASGI application whose requests have lines; ``server.ServedApp`` is one."""

    @property
    def service(self) -> FrontendService | None:
        """As ``ServedApp``."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""


class AccessLog:
    """An ASGI application before another one, which writes the lines. Belongs to one event loop.

    Args:
        app: Gets all requests; ``scope[ENTRY]`` is what it may fill in.
        writer: Takes the lines.
        clock: Time.
        paths: All paths without parameters: they are templates of themselves.
    """

    def __init__(self, app: Logged, writer: LineWriter, clock: Clock, paths: Collection[str]) -> None:
        self._app = app
        self._writer = writer
        self._clock = clock
        self._paths = frozenset(paths)
        self._pid = os.getpid()
        self._encode = msgspec.json.Encoder().encode

    @property
    def service(self) -> FrontendService | None:
        """That of the application behind."""
        return self._app.service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = self._clock.monotonic()
        path, client = scope["path"], scope.get("client")
        entry = self._entry(client, scope["method"], path if path in self._paths else None)
        scope[ENTRY], scope[PLAIN_SEND] = entry, send

        async def noting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                entry.note_status(message["status"], sent=True)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            # Handles nothing: it is raised on, and this is what the server answers to it.
            entry.note_status(500, sent=False)
            raise
        finally:
            self._close(entry, start)

    def refused(self, status: int, client: Sequence[Any] | None) -> None:
        """A request of which only the beginning was read: it is no HTTP, or its head is too large."""
        entry = self._entry(client, None, None)
        entry.status = status
        entry.error_type = error_type(status)
        self._writer.offer(self._encode(entry))

    def _entry(self, client: Sequence[Any] | None, method: str | None, route: str | None) -> AccessEntry:
        stamp = datetime.fromtimestamp(self._clock.now_ms() / 1000, UTC).isoformat(timespec="milliseconds")
        known = method if method is None or method in _METHODS else "OTHER"
        return AccessEntry(f"{stamp[:-6]}Z", self._pid, None if client is None else str(client[0]), known, route)

    def _close(self, entry: AccessEntry, start: float) -> None:
        entry.duration_ms = round((self._clock.monotonic() - start) * 1000, 3)
        if entry.status >= 400 and entry.error_type is None:
            entry.error_type = error_type(entry.status)
        self._writer.offer(self._encode(entry))


class AccessLogCollector(Collector):
    """What became of the lines."""

    def __init__(self, writer: LineWriter, registry: CollectorRegistry, prefix: str) -> None:
        """Registers itself."""
        self._writer = writer
        self._written = counter(f"{prefix}_access_log_lines_total", "Lines of the access log that were written")
        self._dropped = counter(f"{prefix}_access_log_dropped_total", "Lines that were lost", "cause")
        self.families = (self._written, self._dropped)
        registry.register(self)

    def fill(self, samples: Samples) -> None:
        """As ``Collector.fill``."""
        samples.add(self._written, self._writer.written)
        samples.add(self._dropped, self._writer.dropped_full, "full")
        samples.add(self._dropped, self._writer.dropped_failed, "failed")


def entry_of(scope: Mapping[str, Any]) -> AccessEntry | None:
    """The request's line; None: there is no access log."""
    entry: AccessEntry | None = scope.get(ENTRY)
    return entry
