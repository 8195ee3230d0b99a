"""Where a decode worker meets the prefill worker that computes its prompt (spec/services h.7: the bootstrap port).

Both get the same room from the router and start at once. The decode worker connects, names the room in one line of
JSON, and gets one line back when the prompt is computed: what the prefill worker would have answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, NamedTuple

from dynamo_es.errors import CannotConnect, ConfigError, ConnectionTimeout, InvalidArgument, StreamIncomplete

logger = logging.getLogger(__name__)

MAX_ROOMS = 65_536
_MAX_LINE_BYTES = 4_096
_QUESTION_TIMEOUT_S = 10.0


class _Room(NamedTuple):
    result: asyncio.Future[dict[str, Any] | None]
    expiry: asyncio.TimerHandle


class HandoverServer:
    """The prefill worker's side. Belongs to one event loop; ``open`` first, ``close`` last.

    A room lives until it is asked for, and no longer than ``timeout_s`` after its first mention, from either side. At
    most 65,536 are open, and as many connections; further ones are refused to who asks, and not kept for who might.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._rooms: dict[int, _Room] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    @property
    def rooms(self) -> int:
        """How many are open."""
        return len(self._rooms)

    async def open(self, host: str, port: int) -> None:
        """Listen; port 0 takes a free one, see ``port``. Raises ``ConfigError``."""
        try:
            self._server = await asyncio.start_server(self._on_connection, host, port, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise ConfigError(
                f"--bootstrap-ports: cannot listen at {host}:{port}: {error.strerror or error}"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    def answer(self, room: int, result: dict[str, Any] | None) -> None:
        """The prompt of ``room`` is computed; None: it never will be."""
        future = self._room(room)
        if future is not None and not future.done():
            future.set_result(result)

    async def close(self) -> None:
        """Stop; who waits gets no answer. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for room in list(self._rooms):
            self._leave(room)

    def _room(self, number: int) -> asyncio.Future[dict[str, Any] | None] | None:
        room = self._rooms.get(number)
        if room is None and len(self._rooms) < MAX_ROOMS:
            loop = asyncio.get_running_loop()
            room = _Room(loop.create_future(), loop.call_later(self._timeout_s, self._leave, number))
            self._rooms[number] = room
        return None if room is None else room.result

    def _leave(self, number: int) -> None:
        room = self._rooms.pop(number, None)
        if room is not None:
            room.expiry.cancel()

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_ROOMS:
            writer.close()
            return
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            writer.write(json.dumps(await self._reply(reader)).encode() + b"\n")
            await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            logger.warning("a hand-over failed: %s", error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # Only ``close`` does that, and it waits for the end of this.
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader) -> dict[str, Any]:
        async with asyncio.timeout(_QUESTION_TIMEOUT_S):
            question = json.loads(await reader.readline())
        room = question.get("room") if isinstance(question, dict) else None
        if type(room) is not int:
            raise ValueError("the other side names no room")
        future = self._room(room)
        if future is None:
            return {"error": "the prefill worker has too many hand-overs open"}
        async with asyncio.timeout(self._timeout_s):
            result = await asyncio.shield(future)
        self._leave(room)
        return {"error": "the prefill worker gave the request up"} if result is None else result


async def fetch_handover(info: Any, timeout_s: float) -> dict[str, Any]:
    """The decode worker's side: wait until the prompt is computed; its ``prefill_result``.

    Args:
        info: ``bootstrap_info`` of the request.
        timeout_s: How long all of it may take.

    Raises:
        InvalidArgument: ``info`` is no address with a room.
        CannotConnect, ConnectionTimeout, StreamIncomplete: There is nobody, no answer in time, or a refusal.
    """
    host, port, room = _address(info)
    where = f"the prefill worker at {host}:{port}"
    try:
        async with asyncio.timeout(timeout_s):
            try:
                reader, writer = await asyncio.open_connection(host, port, limit=_MAX_LINE_BYTES)
            except OSError as error:
                raise CannotConnect(f"{where}: {error.strerror or error}") from error
            try:
                writer.write(json.dumps({"room": room}).encode() + b"\n")
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
    except TimeoutError as error:
        raise ConnectionTimeout(f"{where} did not hand over within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise StreamIncomplete(f"{where} handed nothing over") from error
    if not isinstance(answer, dict) or "error" in answer:
        raise StreamIncomplete(f"{where} handed nothing over")
    return answer


def _address(info: Any) -> tuple[str, int, int]:
    given = info if isinstance(info, dict) else {}
    host, port, room = (given.get(f"bootstrap_{name}") for name in ("host", "port", "room"))
    if not isinstance(host, str) or type(port) is not int or type(room) is not int:
        raise InvalidArgument("bootstrap_info must have bootstrap_host, bootstrap_port and bootstrap_room")
    return host, port, room
