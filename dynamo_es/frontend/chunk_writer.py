"""Writes a chunk of a running response in the moment, where ASGI's ``send`` is a coroutine to be awaited."""

from __future__ import annotations

import asyncio
import weakref

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

CHUNK_WRITER = "dynamo_es.chunk_writer"
"""Member of the scope: the response's ``ChunkWriter``; not there under servers other than ours."""


class ChunkWriter:
    """Of one response, next to its ``send``; what is written by either comes in order. Belongs to one event loop."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle, flow: FlowControl, transport: asyncio.Transport) -> None:
        """``transport`` and ``flow`` are those of ``cycle``."""
        # The scope has this writer, and the cycle has the scope: they would wait for the garbage collector.
        self._cycle = weakref.ref(cycle)
        self._flow = flow
        self._transport = transport

    def is_ready(self) -> bool:
        """Whether a chunk can be written now: the response has begun, and its client reads what is sent."""
        cycle = self._cycle()
        return (
            cycle is not None
            and not self._flow.write_paused
            and not cycle.disconnected
            and cycle.response_started
            and not cycle.response_complete
            and cycle.chunked_encoding is True
        )

    def write(self, block: bytes) -> None:
        """Some bytes of the body, at least one. Only right after ``is_ready``."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(block), block))
